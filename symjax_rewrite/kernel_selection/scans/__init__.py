"""Loops whose steps compose: affine recurrences and matrix states as parallel scans.

May import the same as `kernel_selection`. Before: a loop in normal form. After: one `ScanSpec`.

scan(h ← a_t * h + b_t)  →  scan over the monoid of affine maps (a, b)
"""
