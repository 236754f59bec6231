"""Folds: reductions over columns for each row, over monoids; attention is one.

`reference` is the definition; `xla`, `triton` and `cudnn` are backends; `spec` says what a fold is.

    fold(spec, q, k, v)  # softmax(q @ k.T) @ v, tile by tile
"""
