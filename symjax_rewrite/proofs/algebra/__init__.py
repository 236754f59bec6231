"""Normal forms, polynomials over atoms that read indices, and the laws of arithmetic on them.

Imports nothing else of `proofs`. Before: two ways to write one value, such as a·(b + c) and
a·b + a·c. After: one polynomial.
"""
