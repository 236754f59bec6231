"""Scans: prefixes of an associative monoid, computed in chunks.

`spec` describes a scan as data. `reference` is the definition; `xla`, `triton` and `sequential` are
backends. `matrix_scan` computes recurrences whose states are matrices.

    scan(spec, a, b)  # h_t = a_t * h_{t-1} + b_t for all t
"""
