"""Programs read as normal forms: entries of arrays, windows, orders, loops by induction.

Imports `algebra` and nothing else of `proofs`. Before: a program. After: the normal form of each
output, with the conditions under which it is defined.
"""
