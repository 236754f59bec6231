"""Kernels of folds and scans over monoids: definitions in plain JAX, and backends.

This folder is the package `symjax_rewrite.pallas_kernels`. It cannot be imported as
`pallas_kernels`, because every module would then exist twice.
"""

if __name__ != "symjax_rewrite.pallas_kernels":
    raise ImportError(
        "this folder is the package 'symjax_rewrite.pallas_kernels', imported here as "
        f"{__name__!r}. Install it (pip install -e .) and write: "
        "from symjax_rewrite import pallas_kernels"
    )
