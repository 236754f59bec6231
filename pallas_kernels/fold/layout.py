"""Layout of operands and results of the Triton kernel: feature axes merged into one.

May import spec.py. An operand is transposed only where its feature axes are not adjacent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec

Array = Any


def kind(dtype: Any) -> str:
    """Return "f" for a floating dtype, else "i"."""
    return "f" if jnp.issubdtype(jnp.dtype(dtype), jnp.floating) else "i"


def loadable(dtype: Any) -> Any:
    """Return the dtype in memory; booleans become int8, because Triton loads no booleans."""
    return jnp.int8 if jnp.dtype(dtype) == jnp.bool_ else dtype


FEATURE = ""  # the name of the merged feature axis of an operand


def feature_order(spec: FoldSpec, number: int) -> tuple[str, ...]:
    """Return the feature axes in the order of the operand's contraction, else in its own order."""
    for c in spec.contractions:
        if number in (c.row, c.col):
            return c.over
    return spec.features(number)


def merge_features(spec: FoldSpec, number: int, x: Array) -> tuple[tuple[str, ...], Array]:
    """Merge the feature axes of an operand; transpose only where they are not adjacent."""
    axes, order = spec.operands[number].axes, feature_order(spec, number)
    if not order:
        return axes, x
    rest = [a for a in axes if a not in order]
    first = axes.index(order[0])
    adjacent = axes[first : first + len(order)] == order
    target = list(axes) if adjacent else [*rest, *order]
    x = lax.transpose(x, [axes.index(a) for a in target])
    at = target.index(order[0])
    merged = (*target[:at], FEATURE, *target[at + len(order) :])
    shape = [spec.width(number) if a == FEATURE else spec.size[a] for a in merged]
    return merged, x.reshape(shape)


@dataclass(frozen=True, slots=True)
class FoldResult:
    """One result: its axes as requested, and as the kernel stores them (features merged)."""

    wanted: tuple[str, ...]
    axes: tuple[str, ...]
    order: tuple[str, ...]
    dtype: Any

    @classmethod
    def of(cls, spec: FoldSpec, wanted: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> FoldResult:
        features = tuple(a for a in wanted if a not in (*spec.batch, spec.row))
        if not features:
            return cls(wanted, wanted, wanted, shape.dtype)
        at = wanted.index(features[0])
        if wanted[at : at + len(features)] == features:
            axes = (*wanted[:at], FEATURE, *wanted[at + len(features) :])
            return cls(wanted, axes, wanted, shape.dtype)
        lead = tuple(a for a in wanted if a not in features)
        return cls(wanted, (*lead, FEATURE), (*lead, *features), shape.dtype)

    def width(self, spec: FoldSpec) -> int:
        return math.prod(spec.size[a] for a in self.wanted if a not in (*spec.batch, spec.row))

    def stored(self, spec: FoldSpec, splits: int) -> jax.ShapeDtypeStruct:
        sizes = [self.width(spec) if a == FEATURE else spec.size[a] for a in self.axes]
        return jax.ShapeDtypeStruct((splits, *sizes), loadable(self.dtype))

    def restored(self, spec: FoldSpec, x: Array) -> Array:
        x = x.reshape([spec.size[a] for a in self.order]).astype(self.dtype)
        return lax.transpose(x, [self.order.index(a) for a in self.wanted])
