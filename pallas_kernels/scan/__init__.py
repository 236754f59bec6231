"""Scans: prefixes of an associative monoid, computed in chunks.

`reference` is the definition; `xla`, `triton` and `sequential` are backends; `spec` says what a
scan is; `matrix_scan` is for states that are matrices.

    scan(spec, a, b)  # h_t = a_t * h_{t-1} + b_t for all t
"""
