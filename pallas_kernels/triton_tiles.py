"""Tiles of arrays in Pallas-Triton kernels: masked loads and stores, products, program numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

Array = Any


class Extent(NamedTuple):
    """The part of one axis that a tile holds.

    size: elements in the tile, a power of two.
    start: the index of the first one in the reference.
    number: the index of the first one in the whole array.
    limit: elements of the whole array along the axis.
    """

    size: int
    start: Any
    number: Any
    limit: int


def inside(extents: Sequence[Extent]) -> Array | None:
    """Return a mask of the elements of a tile inside the array; None if all of them are."""
    shape = tuple(e.size for e in extents)
    masks = [
        lax.broadcast_in_dim(e.number + jnp.arange(e.size, dtype=jnp.int32) < e.limit, shape, (k,))
        for k, e in enumerate(extents)
        if e.limit % e.size
    ]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def load(ref: Any, where: Sequence[Any]) -> Array:
    """Load a tile, with 0 past the ends of the array.

    where: for each axis an `Extent`, or an index of an axis that the tile lacks.
    """
    mask = inside([e for e in where if isinstance(e, Extent)])
    return plgpu.load(_part(ref, where), mask=mask, other=None if mask is None else 0)


def store(ref: Any, where: Sequence[Any], value: Array, active: Array | None = None) -> None:
    """Store a tile inside the array, where `active` holds; `where` as in `load`."""
    mask = inside([e for e in where if isinstance(e, Extent)])
    if active is not None:
        active = jnp.broadcast_to(active, value.shape)
        mask = active if mask is None else mask & active
    plgpu.store(_part(ref, where), value.astype(ref.dtype), mask=mask)


def _part(ref: Any, where: Sequence[Any]) -> Any:
    index = tuple(pl.ds(e.start, e.size) if isinstance(e, Extent) else e for e in where)
    return ref.at[index] if index else ref


def indices(program: Array, counts: Mapping[Any, int]) -> dict[Any, Array]:
    """Return the index along each axis of a program; the last axis of `counts` varies fastest."""
    found = {}
    for axis in reversed(counts):
        count = jnp.int32(counts[axis])
        found[axis] = lax.rem(program, count)
        program = lax.div(program, count)
    return found


def dot(a: Array, b: Array, precision: Any = None, transposed: bool = False) -> Array:
    """Return `a @ b` in f32, or `a @ b.T` if `transposed`."""
    contracted = ((1,), (1 if transposed else 0,))
    return lax.dot_general(
        a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
