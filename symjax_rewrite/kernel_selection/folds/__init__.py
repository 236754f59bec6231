"""Reductions over pairs of rows and columns without the pairs: attention, distances, losses.

May import the same as `kernel_selection`. Before: a term over pairs and the reductions that read
it. After: one `FoldSpec` with a tile, its reductions, and an epilogue over rows.

    find      terms of pairs (`pairwise_terms`) and their reductions (`reductions`), also of gathers
              (`gather_patterns`), slices (`slices`) and concatenated columns
              (`concatenated_reductions`); gradients that vanish (`vanishing_gradients`),
              and terms that may be rounded (`rounded_products`)
    group     reductions over the same pairs (`clustering`, `cluster_keys`)
    build     tiles (`tile_program`, `feature_loops`, `gathered_columns`, `sort_keys`), row algebra
              (`epilogue`, `widening`), the call (`builder`); every pair once (`mirrored_pairs`,
              `tile_symmetry`); attention by cuDNN (`attention_gradients`, `score_folds`,
              `row_symbols`)
    price     folds (`fold_price`), XLA's form (`written_terms`, `written_price`), at named sizes
              (`named_sizes`)
    passes    `selection`, `sparse_reductions`

Σ_j exp(q_i·k_j) v_j  →  a fold over j with the tile exp(q·k) and the weights v
"""
