"""A norm and the linear layer after it in one pass over the rows.

`layer` and `xla` give the definition; `triton` is the kernel; `spec` says what a normed product is.

    norm_linear(x, W, gain=γ)  # (x * rsqrt(mean(x²)) * γ) @ W
"""
