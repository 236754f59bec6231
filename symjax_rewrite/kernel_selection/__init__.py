"""Selection of kernels for parts of a program: folds, scans, norms, bands, partial sorts.

May import `loops`, `codegen`, `rewriting`, `cost`, `ir`, the kernels and the packages below these.
Before: the terms and loops of a program. After: calls of kernels in `pallas_kernels`, with their
operands.

softmax(Q @ K.T) @ V  →  fold over the rows of K and V: no scores in memory
"""
