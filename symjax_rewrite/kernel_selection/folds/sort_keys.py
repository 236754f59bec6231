"""Integers in the order in which `lax.sort` orders values.

The first k entries of a sorted row are a top-k of these integers: NaNs last, ties in order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals


def ranks(x: Any) -> Any:
    """Return an integer for each value, larger where it sorts earlier.

    Example:
        >>> r = ranks(jnp.array([1.0, -2.0, jnp.nan, 0.0, -0.0]))
        >>> jax.lax.top_k(r, 5)[1], unranked(r, np.dtype("float32"))
        (Array([1, 3, 4, 0, 2], dtype=int32), Array([ 1., -2., nan,  0.,  0.], dtype=float32))
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return ~x
    x = x.astype(jax_internals.joint_dtype(x.dtype, jnp.float32))
    integer = np.dtype(f"int{8 * x.dtype.itemsize}")
    x = jnp.where(x == 0, jnp.zeros_like(x), x)  # +0 and -0 are equal
    order = _in_order(jax.lax.bitcast_convert_type(x, integer))
    return ~jnp.where(x != x, jnp.full_like(order, np.iinfo(integer).max), order)


def unranked(r: Any, dtype: np.dtype) -> Any:
    """Return the values whose ranks are given (inverse of `ranks`)."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return (~r).astype(dtype)
    wide = jax_internals.joint_dtype(dtype, jnp.float32)
    return jax.lax.bitcast_convert_type(_in_order(~r), wide).astype(dtype)


def _in_order(bits: Any) -> Any:
    """Map a float's bits to an integer of the same order; the map is its own inverse."""
    greatest = np.iinfo(bits.dtype).max
    negative = jax.lax.shift_right_arithmetic(bits, jnp.full_like(bits, 8 * bits.itemsize - 1))
    return bits ^ (negative & greatest)
