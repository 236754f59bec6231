"""Folds: reductions over columns for each row, over monoids; attention is one.

`spec` describes a fold as data. `reference` is the definition; `xla`, `triton` and `cudnn` are
backends.

    fold(spec, q, k, v)  # softmax(q @ k.T) @ v, tile by tile
"""
