"""Operands over named axes, the common part of the specs of folds and scans (imports errors.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from symjax_rewrite.errors import UsageError


@dataclass(frozen=True, slots=True)
class Operand:
    """One input array: the names of its axes, in order, and its dtype."""

    axes: tuple[str, ...]
    dtype: str = "float32"


class NamedAxes:
    """A spec whose `operands` have named axes; `sizes` holds every axis with its size."""

    __slots__ = ()
    sizes: tuple[tuple[str, int], ...]
    operands: tuple[Operand, ...]

    @property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    def shape(self, operand: int) -> tuple[int, ...]:
        return tuple(self.size[a] for a in self.operands[operand].axes)

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the operands."""
        return [
            jax.ShapeDtypeStruct(self.shape(k), jnp.dtype(o.dtype))
            for k, o in enumerate(self.operands)
        ]


def checked_axes(
    what: str, spec: NamedAxes, axes: tuple[str, ...], read: Collection[str]
) -> Callable[[bool, str, object], None]:
    """Check the axes of a spec, and return `check(holds, complaint, got)` for further checks.

    axes: those that the spec itself names. read: those that operands may have.
    """

    def check(holds: bool, complaint: str, got: object) -> None:
        if not holds:
            raise UsageError(f"not a {what}: {complaint}", got=got)

    size = spec.size
    check(len(size) == len(spec.sizes) and len({*axes}) == len(axes), "axes repeat", size)
    check({*axes} <= set(size), "an axis has no size", {*axes} - set(size))
    for operand in spec.operands:
        own = operand.axes
        check(len(set(own)) == len(own), "an operand reads an axis twice", own)
        check(set(own) <= set(read), f"an operand's axis is none of the {what}'s", own)
    return check
