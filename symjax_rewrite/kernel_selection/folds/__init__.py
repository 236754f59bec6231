"""Reductions over pairs of rows and columns without the pairs: attention, distances, losses.

May import the same as `kernel_selection`. Before: a term over pairs and the reductions that read
it. After: one `FoldSpec` with a tile, its reductions, and an epilogue over rows.

    jnp.exp(-((x[:, None] - y) ** 2).sum(-1)) @ w  →  fold(tile=exp(-|x_i - y_j|²), Σ_j tile·w_j)
"""
