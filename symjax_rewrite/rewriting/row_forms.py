"""Reductions of computed arrays with short rows, and their forms with long ones.

A *call* is a reduction with the operations from which its operand is computed, of arrays without
axes of one element:

    Σ_ik f(x_ik, y_ik) = Σ_l f(x_l, y_l)            joined: l = (i, k)
    Σ_i f(x_ik, b_k)   = Σ_p Σ_q f(x_q(pk), b_k)    split: i = (q, p), and p is joined with k
    Σ_k f(x_ik, b_k)   = f(x_i0, b_0) + …           written out

XLA moves a reshape through elementwise operations and into a reduction. So arrays in memory are
joined behind a barrier, and so is what is written out: its columns have rows of one element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.pallas_kernels.fold.tile import stored_apart
from symjax_rewrite.rewriting.fused_chains import REDUCTIONS

COMPUTED = ELEMENTWISE - VIEWS
WHOLE = {
    "reduce_sum": jnp.sum, "dot_general": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min,
}  # fmt: skip
COMBINED = {
    "reduce_sum": lax.add, "dot_general": lax.add, "reduce_max": lax.max, "reduce_min": lax.min,
}  # fmt: skip


def kept_axes(shape: tuple[Any, ...]) -> list[int]:
    """Return the axes of more than one element."""
    return [k for k, n in enumerate(shape) if n != 1]


def long_shape(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a shape without its axes of one element."""
    return tuple([n for n in shape if n != 1])


def reduces(e: Equation) -> bool:
    """Return True for a reduction, and for a sum of the products of two arrays' elements."""
    if e.name != "dot_general":
        return e.name in REDUCTIONS
    (left, right), (batch, others) = e.eqn.params["dimension_numbers"]
    shapes = [shape_of(v) for v in e.eqn.invars]
    both = _order_of((*batch, *left), shapes[0]), _order_of((*others, *right), shapes[1])
    avals: list[Any] = [v.aval for v in (*e.eqn.invars, *e.eqn.outvars)]
    known = all(isinstance(v, int) for v in e.invals) and len({a.dtype for a in avals}) == 1
    return known and both[0] == both[1] is not None and [*batch] == sorted(batch)


def _order_of(axes: tuple[int, ...], shape: tuple[Any, ...]) -> list[int] | None:
    """Return the places of axes among those of more than one element; None unless all are there."""
    kept = kept_axes(shape)
    found = [kept.index(k) for k in axes if k in kept]
    return found if len(found) == len(kept) else None


def reduced_axes(e: Equation) -> set[int]:
    """Return the axes that an equation reduces, among those of more than one element."""
    kept, axes = kept_axes(shape_of(e.eqn.invars[0])), e.eqn.params.get("axes", ())
    if e.name == "dot_general":
        axes, _ = e.eqn.params["dimension_numbers"][0]
    return {kept.index(k) for k in axes if k in kept} if reduces(e) else set()


@dataclass(frozen=True, slots=True)
class RowSource:
    """An array that a call reads.

    read: its value in memory. axes: of the call's array, those along which it is not repeated.
    """

    read: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowCall:
    """A reduction, or an equation that drops axes, with the operations of its operands.

    order: the values that it computes, operands first. sources: what it reads, by the value that it
    stands for. makers: of the program's values.
    """

    e: Equation
    order: list[int]
    sources: Mapping[int, RowSource]
    makers: Mapping[int, Equation]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of its arrays, without axes of one element."""
        return long_shape(shape_of(self.e.eqn.invars[0]))

    @property
    def has_whole(self) -> bool:
        """Return True if it reads an array of its shape."""
        return any(len(s.axes) == len(self.shape) for s in self.sources.values())

    @property
    def read(self) -> tuple[int, ...]:
        """Return the values that it reads, in the order of `sources`."""
        return tuple([s.read for s in self.sources.values()])

    def operands(self, made: dict[int, Any]) -> list[Any]:
        """Return the operands of the reduction, from arrays for the sources."""
        for v in self.order:
            m = self.makers[v]
            xs = [made[u] if isinstance(u, int) else u.val for u in m.invals]
            is_moved = m.name not in COMPUTED
            made[v] = xs[0] if is_moved else jax_internals.eval_equation(m.eqn, xs)[0]
        return [made[v] for v in self.e.reads]

    def reduced(self, made: dict[int, Any], axes: tuple[int, ...]) -> Any:
        """Return the reduction over some axes of arrays for the sources."""
        e, xs = self.e, self.operands(made)
        params = {**e.eqn.params, "axes": axes}
        if e.name == "dot_general":
            others = tuple([k for k in range(xs[0].ndim) if k not in axes])
            params = {**e.eqn.params, "dimension_numbers": ((axes, axes), (others, others))}
            xs = [xs[0], xs[-1]]  # a product of an array with itself reads one
        return jax_internals.eval_equation(e.eqn, xs, params)[0] if reduces(e) else xs[0]

    def result(self, x: Any) -> Any:
        """Return the result in its shape as written."""
        return lax.reshape(x, shape_of(self.e.eqn.outvars[0]))


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """A call whose last axes, from one on, are one axis."""

    call: RowCall
    first: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of its arrays."""
        long = self.call.shape
        return (*long[: self.first], math.prod(long[self.first :]))

    def run(self, *arrays: Any) -> Any:
        """Return the result, of the values that the sources read."""
        pairs = zip(self.call.sources.items(), arrays, strict=True)
        made = {v: self._joined(x, s.axes) for (v, s), x in pairs}
        axes = sorted({min(k, self.first) for k in reduced_axes(self.call.e)})
        return self.call.result(self.call.reduced(made, tuple(axes)))

    def _joined(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Return an array of joined axes, repeated along those that it has not."""
        return _repeated(x, sorted({min(k, self.first) for k in axes}), self.shape)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """A call that reduces its last axis but one, of which parts are joined with the last one.

    part: elements of a part; the axis has a whole number of them.
    """

    call: RowCall
    part: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of its arrays."""
        *outer, n, row = self.call.shape
        return (*outer, n // self.part, self.part * row)

    def run(self, *arrays: Any) -> Any:
        """Return the result, of the values that the sources read."""
        call, last = self.call, len(self.shape) - 1
        pairs = zip(call.sources.items(), arrays, strict=True)
        made = {v: self._split(x, s.axes) for (v, s), x in pairs}
        parts = call.reduced(made, (last - 1,))
        parts = lax.reshape(parts, (*self.shape[:-2], self.part, call.shape[-1]))
        return call.result(WHOLE[call.e.name](parts, axis=last - 1))

    def _split(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Return an array of the shape of parts, repeated along the axes that it has not."""
        last = len(self.shape) - 1
        if last in axes and last - 1 not in axes:
            x = lax.reshape(x, tuple([self.call.shape[k] for k in axes]))
            rows = (*x.shape[:-1], self.part, x.shape[-1])
            x = lax.broadcast_in_dim(x, rows, (*range(len(rows) - 2), len(rows) - 1))
        return _repeated(x, axes, self.shape)


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """A call that reduces its last axis, as operations on the columns of its arrays.

    stored: True if the result is written to memory before others read it.
    """

    call: RowCall
    stored: bool

    def run(self, *arrays: Any) -> Any:
        """Return the result, of the values that the sources read."""
        call = self.call
        read = [self._read(s, x) for s, x in zip(call.sources.values(), arrays, strict=True)]
        terms = [self._term(read, k) for k in range(call.shape[-1])]
        made = functools.reduce(COMBINED[call.e.name], terms)
        if self.stored:
            made = lax.optimization_barrier(stored_apart(made))
        return call.result(made)

    def _read(self, source: RowSource, x: Any) -> Any:
        """Return an array that the call reads, without axes of one element.

        One that is computed of fewer elements is stored, or a loop computes it for every column.
        """
        call, axes = self.call, source.axes
        x = lax.reshape(x, tuple([call.shape[a] for a in axes]))
        maker = call.makers.get(source.read)
        is_computed = maker is not None and maker.name in COMPUTED and len(axes) < len(call.shape)
        return lax.optimization_barrier(x) if is_computed else x

    def _term(self, read: list[Any], k: int) -> Any:
        """Return the operand of the reduction at one element of its rows."""
        call, shape = self.call, self.call.shape
        made: dict[int, Any] = {}
        for (v, s), x in zip(call.sources.items(), read, strict=True):
            axes = s.axes
            if axes[-1:] == (len(shape) - 1,):
                x, axes = lax.index_in_dim(x, k, x.ndim - 1, keepdims=False), axes[:-1]
            whole = len(axes) == len(shape) - 1
            made[v] = x if whole else lax.broadcast_in_dim(x, shape[:-1], axes)
        xs = call.operands(made)
        return lax.mul(xs[0], xs[-1]) if call.e.name == "dot_general" else xs[0]


def _repeated(x: Any, axes: tuple[int, ...] | list[int], shape: tuple[int, ...]) -> Any:
    """Return an array with some axes of a shape, repeated along the others."""
    if x.shape == shape:
        return x
    x = lax.reshape(x, tuple([shape[k] for k in axes]))
    return lax.optimization_barrier(x) if x.shape == shape else lax.broadcast_in_dim(x, shape, axes)
