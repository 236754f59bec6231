"""A normalisation and the linear layer that reads it, as one kernel.

May import the same as `kernel_selection`. Before: a product whose operand is scaled by statistics
of its own rows. After: one `NormSpec`: the product loop also computes the statistics, and the scale
is applied last.

(x * rsqrt(mean(x²)) * γ) @ W  →  rsqrt(mean(x²)) * (x @ (γ[:, None] * W))
"""
