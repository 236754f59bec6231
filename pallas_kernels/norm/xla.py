"""The definition of a matmul with sums, and the backend of any device (may import spec.py)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec, RowSums


def group_xla(group: NormGroup, *operands: Any) -> tuple[Any, ...]:
    """Run each member alone; XLA shares their common subexpressions."""
    given = group.given(operands)
    return tuple(norm_xla(s, *xs) for s, xs in zip(group.members, given, strict=True))


def norm_xla(spec: NormSpec, *operands: Any) -> Any:
    """Compute the sums over all of k at once, then `finish`; the result is [m, n]."""
    pairs, columns, weights, rows, ends, fulls = spec.split(operands)
    total = spec.accumulator
    pairs = tuple((x.T if spec.pairs_swapped else x).astype(total) for x in pairs)
    weights = tuple(w.T if spec.weights_swapped else w for w in weights)
    across = tuple(c[None, :].astype(total) for c in columns)
    centre = jnp.zeros((spec.rows, 1), total)
    if spec.centred:
        centre = jnp.sum(pairs[0], axis=1, keepdims=True) / spec.width
    left, sides = spec.left.fun(pairs, across, centre)
    scaled = [scale_weight(spec, w, columns) for w in weights]
    products = tuple(_dot(spec, left, w) for w in scaled)
    sums = []
    for number in spec.column_sums:
        if number is None:
            sums.append(tuple(jnp.sum(w, axis=0, dtype=total) for w in scaled))
        else:
            row, exact = columns[number].astype(total), lax.Precision.HIGHEST
            sums.append(tuple(jnp.dot(row, w.astype(total), precision=exact) for w in weights))
    sides = tuple(jnp.sum(s, axis=1) for s in sides)
    return finished(spec, (products, sides, tuple(sums), centre[:, 0]), (rows, ends, fulls))


def finished(spec: NormSpec, sums: tuple[Any, ...], operands: tuple[Any, ...]) -> Any:
    """Return the result [m, n] of whole sums.

    Args:
        spec: the matmul.
        sums: products [m, n], sides [m], column sums [n], and the mean of x [m].
        operands: the rows [m], ends [n] and fulls [m, n] of the spec.
    """
    (products, sides, columns, centre), (rows, ends, fulls) = sums, operands
    down, across = (lambda x: x[:, None]), (lambda x: x[None, :])
    result = spec.finish.fun(
        RowSums(
            products,
            tuple(map(down, sides)),
            tuple(tuple(map(across, each)) for each in columns),
            down(centre),
            tuple(map(down, rows)),
            tuple(map(across, ends)),
            fulls,
        )
    )
    return jnp.broadcast_to(result, products[0].shape).astype(spec.dtype)


def scale_weight(spec: NormSpec, weight: Any, columns: tuple[Any, ...]) -> Any:
    """Return γ·W for a block of k, in the dtype of the products."""
    if spec.gain is not None:
        gain = columns[spec.gain].astype(spec.accumulator)
        weight = weight.astype(spec.accumulator) * gain[:, None]
    return weight.astype(spec.factor)


def _dot(spec: NormSpec, left: Any, weight: Any) -> Any:
    def product(x: Any) -> Any:
        x = x.astype(spec.factor)
        return jnp.dot(x, weight, precision=spec.precision, preferred_element_type=spec.accumulator)

    if not spec.in_parts:
        return product(left)
    high = lax.reduce_precision(left, exponent_bits=8, mantissa_bits=7)  # XLA may elide casts
    return product(high) + product(left - high)
