"""Parts of a program that a kernel can compute: folds, scans, norms, bands, partial sorts.

May import `loops`, `codegen`, `rewriting`, `cost`, `ir`, the kernels and what lies below. Before:
the terms and loops of a program. After: calls of kernels in `pallas_kernels`, with what they read.

    softmax(Q @ K.T) @ V  →  fold over the rows of K and V: no scores in memory
"""
