"""How operands and results lie for the Triton kernel: features merged into one axis.

May import the spec. An operand is moved only where its feature axes are not adjacent.
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
    """Whether a dtype is floating ("f") or not ("i")."""
    return "f" if jnp.issubdtype(jnp.dtype(dtype), jnp.floating) else "i"


def loadable(dtype: Any) -> Any:
    """The dtype in memory: Triton loads no booleans."""
    return jnp.int8 if jnp.dtype(dtype) == jnp.bool_ else dtype


FEATURE = ""  # the name of an operand's one merged feature axis


def feature_order(spec: FoldSpec, number: int) -> tuple[str, ...]:
    """The order both sides of a contraction use, or that of the results."""
    for c in spec.contractions:
        if number in (c.row, c.col):
            return c.over
    return spec.features(number)


def merge_features(spec: FoldSpec, number: int, x: Array) -> tuple[tuple[str, ...], Array]:
    """An operand with its feature axes merged into one; only moved where they are not adjacent."""
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
    """One result: its axes as wanted and as the kernel stores it (features merged into one)."""

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
