"""The kernels: folds and scans over monoids, each with its plain-JAX definition and its backends.

This top-level folder is the package `symjax_rewrite.pallas_kernels` and goes by no other name:
imported as `pallas_kernels`, every module in it would exist twice.
"""

if __name__ != "symjax_rewrite.pallas_kernels":
    raise ImportError(
        "this folder is the package 'symjax_rewrite.pallas_kernels', imported here as "
        f"{__name__!r}. Install it (pip install -e .) and write: "
        "from symjax_rewrite import pallas_kernels"
    )
