"""Comparison of two results of one model: structure, dtypes, weak types, values."""

from typing import Any

import jax
import numpy as np

from symjax_rewrite.testing.assertions import tolerance


def difference(got: Any, wanted: Any) -> float:
    """The largest difference of any leaf, in units of what its dtype allows.

    Raises:
        AssertionError: the trees, shapes, dtypes, weak types or places of NaN and inf differ.
    """
    assert jax.tree.structure(got) == jax.tree.structure(wanted), "another pytree"
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max((_leaf(x, y) for x, y in pairs), default=0.0)


def _leaf(got: jax.Array, wanted: jax.Array) -> float:
    kinds = [(x.shape, str(x.dtype), x.weak_type) for x in (got, wanted)]
    assert kinds[0] == kinds[1], f"{kinds[0]} instead of {kinds[1]}"
    allowed = tolerance(wanted.dtype)
    x, y = (np.asarray(z) for z in (got, wanted))
    if not allowed:
        return 0.0 if np.array_equal(x, y) else float("inf")
    wide = np.complex128 if y.dtype.kind == "c" else np.float64
    x, y = x.astype(wide), y.astype(wide)
    finite = np.isfinite(y)
    assert np.array_equal(finite, np.isfinite(x)), "NaN or inf on one side"
    assert np.array_equal(x[~finite], y[~finite], equal_nan=True), "NaN, inf or their signs differ"
    if not finite.any():
        return 0.0
    scale = np.abs(y[finite]).max() or 1.0
    return float(np.abs(x - y)[finite].max() / scale / allowed)
