"""Elementwise programs on arrays without their axes of size 1 (may import the ground layer alone).

Mosaic GPU has layouts for vectors and for matrices of whole tiles, and none for a matrix of one
column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from symjax_rewrite import jax_internals

Array = Any


def without_unit_axes(fun: Callable[..., Any], *avals: Any) -> Callable[..., Any]:
    """Return an elementwise program for arguments and results that lack their axes of size 1.

    An argument may be a function that makes it, which is called only if the program reads it.
    Mosaic GPU finds no layout of a value that nothing reads.

    avals: the arguments of `fun` as it takes them.

    Example:
        >>> import jax.numpy as jnp
        >>> column, row = (jax.ShapeDtypeStruct(s, "int32") for s in ((2, 1), (1, 3)))
        >>> without_unit_axes(jnp.add, column, row)(jnp.arange(2), jnp.arange(3))
        Array([[0, 1, 2],
               [1, 2, 3]], dtype=int32)
    """
    traced, tree = jax_internals.make_jaxpr(fun, *avals)
    closed, reads = jax_internals.live_part(traced, [True] * len(traced.out_avals))

    def squeezed(*args: Any) -> Any:
        leaves = zip(jax.tree.leaves(args), reads, strict=True)
        given = [x() if callable(x) else x for x, is_read in leaves if is_read]
        return jax.tree.unflatten(tree, _evaluate(closed, given))

    return squeezed


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        if name in ("reshape", "squeeze"):
            return operands
        if name == "broadcast_in_dim":
            dims = eqn.params["broadcast_dimensions"]
            return [_broadcast(operands[0], eqn.invars[0].aval.shape, dims, shape)]
        given = [v.aval.shape for v in eqn.invars]
        pairs = zip(operands, given, strict=True)
        alike = [_broadcast(x, s, range(len(s)), shape) if s else x for x, s in pairs]
        return jax_internals.eval_equation(eqn, alike)

    return jax_internals.eval_inlined(closed, args, run)


def _broadcast(x: Array, given: Sequence[int], dims: Sequence[int], shape: Sequence[int]) -> Array:
    """Return `x`, of shape `given` with its axes at `dims` of `shape`, repeated over `shape`."""
    kept = [k for k, n in enumerate(shape) if n != 1]
    at = [kept.index(k) for n, k in zip(given, dims, strict=True) if n != 1]
    return x if len(at) == len(kept) else lax.broadcast_in_dim(x, [shape[k] for k in kept], at)
