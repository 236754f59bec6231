"""Blocks of arrays that loops read and write (imports jax only)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any
MOST_PLACES = 2**31 - 1  # which an int32 numbers


def _gather(x: Array) -> Array:
    """Move the last axis to the front, as a gather of the elements."""
    count, rest = x.shape[-1], x.shape[:-1]
    places = count * jnp.arange(math.prod(rest), dtype=jnp.int32)
    places = places + jnp.arange(count, dtype=jnp.int32)[:, None]
    return x.reshape(-1).at[places].get(mode="promise_in_bounds").reshape(count, *rest)


_gather_floats = jax.custom_jvp(_gather)


@_gather_floats.defjvp
def _gather_floats_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _gather(*primals), jnp.moveaxis(tangents[0], -1, 0)  # no sum by place in reverse mode


def with_last_first(x: Array) -> Array:
    """Move the last axis to the front.

    XLA on a CPU compiles a transposed copy in 11 to 103 ms, and a gather in 8 to 13. Without a loop
    it fuses the copy into the tile, which then reads vectors at a stride, at half the speed.
    """
    if not all(isinstance(n, int) for n in x.shape) or x.size > MOST_PLACES:
        return jnp.moveaxis(x, -1, 0)
    return _gather_floats(x) if jnp.issubdtype(x.dtype, jnp.inexact) else _gather(x)


@dataclass(frozen=True, slots=True)
class ArrayBlocks:
    """The shape of an array, and of its blocks; sizes are ints or symbolic dimensions.

    XLA on a CPU compiles the copy of one run of elements in 7 to 9 ms, and by rows of 64 in 23.
    """

    shape: tuple[Any, ...]
    block: tuple[Any, ...]

    @property
    def is_run(self) -> bool:
        """Return True if a block is one run of the array's elements."""
        known = all(isinstance(n, int) for n in (*self.shape, *self.block))
        if not known or len(self.shape) < 2 or math.prod(self.shape) > MOST_PLACES:
            return False
        first = next((k for k, n in enumerate(self.block) if n != 1), len(self.block))
        return self.shape[first + 1 :] == self.block[first + 1 :]

    @property
    def stored(self) -> tuple[Any, ...]:
        """Return the shape in which the array is carried: flat if its blocks are runs."""
        return (math.prod(self.shape),) if self.is_run else self.shape

    def read(self, array: Array, starts: Sequence[Array]) -> Array:
        """Return the block of an array, of its own shape or as carried, at its first element."""
        if self.shape == self.block:
            return array.reshape(self.shape)
        at, size = self._in_stored(starts)
        made = lax.dynamic_slice(array.reshape(self.stored), at, size, allow_negative_indices=False)
        return made.reshape(self.block)

    def written(self, array: Array, block: Array, starts: Sequence[Array]) -> Array:
        """Return an array as carried, with a block replaced."""
        at, size = self._in_stored(starts)
        new = block.reshape(size)
        return lax.dynamic_update_slice(array, new, at, allow_negative_indices=False)

    def _in_stored(self, starts: Sequence[Array]) -> tuple[list[Array], tuple[Any, ...]]:
        if not self.is_run:
            return [*starts], self.block
        place = jnp.int32(0)
        for k, start in enumerate(starts):
            place = place + start * jnp.int32(math.prod(self.shape[k + 1 :]))
        return [place], (math.prod(self.block),)
