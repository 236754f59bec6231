"""A norm and the linear layer after it in one pass over the rows.

`spec` describes a normed product as data. `layer` builds specs of whole layers; `xla` is the
definition; `triton` is the kernel.

    norm_linear(x, W, gain=γ)  # (x * rsqrt(mean(x²)) * γ) @ W
"""
