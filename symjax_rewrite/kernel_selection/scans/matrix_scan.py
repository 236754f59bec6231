"""Loops with matrix states as chunked matmuls.

The loop is partitioned at its matrix states. Their factors are computed for all steps at once, and
`matrix_scan` runs the states. Values that depend on their queries are computed for all steps
afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.scans.carry_partition import Partition
from symjax_rewrite.kernel_selection.scans.loop_parts import LoopParts, LoopValues
from symjax_rewrite.kernel_selection.scans.matrix_state import (
    MatrixState,
    NotAMatrixError,
    Query,
    StateReader,
    StateTerm,
    terms_of,
)
from symjax_rewrite.loops.carry_dependence import FREE, Group, is_zero
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.pallas_kernels.scan.matrix_scan import (
    MatrixScan,
    chunk_seconds,
    loop_seconds,
    matrix_scan,
)
from symjax_rewrite.text_tables import too_slow

TIME = -1  # the axis of steps, beside the axes of a state
STATES_WRITTEN = 2  # arrays of the states of all steps that a loop's gradient writes
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(slots=True)
class MatrixKernel:
    """Carry that is a matrix. reads: its factors, as body values. makes: values of its queries."""

    t: TermGraph
    state: MatrixState
    reads: list[int]
    makes: set[int]

    def advance(self, values: LoopValues) -> Any:
        """Add the values read by queries to the steps; return the last state."""
        return _MatrixRun(self.t, self.state, values).last_state()


@dataclass(slots=True)
class _MatrixRun:
    """States of one matrix, run by `matrix_scan` on the values of a loop."""

    t: TermGraph
    state: MatrixState
    values: LoopValues

    @property
    def inner(self) -> Any:
        loop = self.values.loop
        return loop.body.avals[loop.carries[self.state.carry].inner]

    def last_state(self) -> Any:
        """Add the values read by queries to the steps; return the last state."""
        s, loop = self.state, self.values.loop
        wide = jax_internals.joint_dtype(self.inner.dtype, jnp.float32)
        k = self._rows(s.key, s.keys, wide)
        v = s.added * self._rows(s.value, s.values, wide)
        given = [] if s.kind == "none" else [self._decay(wide)]
        if not is_zero(start := loop.carries[s.carry].start):
            given.append(self._laid_out(self.values.read(start), wide))
        is_last = any(r == ("final", s.carry) for r in loop.results)
        last = None
        for n, query in enumerate(s.queries):
            factors = [f for f in query.term.factors if {*f.axes} & {*s.keys}]
            q = query.term.coefficient * self._rows(factors, s.keys, wide)
            spec = spec_of(loop, s, query, is_last and not n)
            kernel = jax_internals.sealed(lambda *xs, spec=spec: matrix_scan(spec, *xs))
            y, *more = kernel(q, k, v, *given)
            last = more[0] if more else last
            self._give(query, y)
        return None if last is None else self._as_carried(last).astype(self.inner.dtype)

    def _array(self, ref: Ref) -> tuple[Any, tuple[int, ...]]:
        """Return a factor over the state's axes and time, and the axes it has, in order."""
        t, steps = self.t, self.values.steps
        v = value_of(t, ref.cls)
        assert v is not None
        view = t.view(v)
        moves = v in steps
        array = jnp.asarray(steps[v] if moves else self.values.known[v])
        lead = array.shape[:1] if moves else ()
        array = lax.reshape(array, (*lead, *map(int, t.sizes[v])))  # pyright: ignore[reportArgumentType]
        slots = {p: ref.axes[s] for s, p in enumerate(view.axes)}
        axes: list[int] = [TIME] if moves else []
        for p in range(len(t.sizes[v])):
            if p in slots:
                axes.append(slots[p])
            else:  # constant along this axis
                array = lax.index_in_dim(array, 0, len(axes), keepdims=False)
        return array, tuple(axes)

    def _product(self, factors: Iterable[Ref], order: Sequence[int], dtype: Any) -> Any:
        """Return a product of factors over some axes, of size 1 where no factor has the axis."""
        total = jnp.ones((1,) * len(order), dtype)
        for ref in factors:
            array, axes = self._array(ref)
            place = sorted(range(len(axes)), key=lambda n: order.index(axes[n]))
            array = lax.transpose(array, place).astype(dtype)
            gone = [n for n, a in enumerate(order) if a not in axes]
            total = total * lax.expand_dims(array, gone)
        return total

    def _rows(self, factors: Iterable[Ref], columns: tuple[int, ...], dtype: Any) -> Any:
        """Return the product of factors that have no other axes, as (*batch, time, columns)."""
        s = self.state
        array = self._product(factors, (*s.batch, TIME, *columns), dtype)
        lead = array.shape[: len(s.batch) + 1]
        wide = tuple(s.sizes[i] for i in columns)
        array = jnp.broadcast_to(array, (*lead, *wide))
        return lax.reshape(array, (*lead, math.prod(wide)))

    def _decay(self, dtype: Any) -> Any:
        s = self.state
        if s.kind == "diagonal":
            return s.decay.coefficient * self._rows(s.decay.factors, s.keys, dtype)
        array = self._product(s.decay.factors, (*s.batch, TIME), dtype)
        return (s.decay.coefficient * array)[..., None]

    def _order(self) -> tuple[int, ...]:
        s = self.state
        return (*s.batch, *s.keys, *s.values)

    def _laid_out(self, start: Any, dtype: Any) -> Any:
        s = self.state
        array = jnp.broadcast_to(start, self.inner.shape)
        array = lax.transpose(lax.reshape(array, s.sizes), self._order()).astype(dtype)
        lead = [s.sizes[i] for i in s.batch]
        return lax.reshape(array, (*lead, s.size(s.keys), s.size(s.values)))

    def _as_carried(self, last: Any) -> Any:
        s, order = self.state, self._order()
        array = lax.reshape(last, tuple(s.sizes[i] for i in order))
        array = lax.transpose(array, np.argsort(order))
        return lax.reshape(array, self.inner.shape)

    def _give(self, query: Query, y: Any) -> None:
        """Add a query's values to the steps, from (*batch, time, values)."""
        s, loop, t = self.state, self.values.loop, self.t
        order = (*s.batch, TIME, *s.values)
        size = dict(enumerate(s.sizes)) | {TIME: loop.length}
        y = lax.reshape(y, tuple(size[a] for a in order))
        after = [f for f in query.term.factors if not set(f.axes) & {*s.keys}]
        y = y * self._product(after, order, y.dtype)
        for term in query.others:
            y = y + self._summed(term, order, y.dtype)
        for v in query.values:
            aval = loop.body.avals[v]
            view = t.view(v)
            left = {p: query.left[k] for k, p in enumerate(view.axes)}
            wanted = (TIME, *[left[p] for p in range(len(left))])
            transposed = lax.transpose(y, [order.index(a) for a in wanted])
            transposed = lax.reshape(transposed, (loop.length, *aval.shape))
            self.values.steps[v] = transposed.astype(aval.dtype)

    def _summed(self, term: StateTerm, order: tuple[int, ...], dtype: Any) -> Any:
        """Return a product without the state, summed over the keys."""
        s = self.state
        letters = {TIME: "t"} | {i: chr(ord("A") + i) for i in range(len(s.sizes))}
        arrays = [self._array(f) for f in term.factors]
        had = {a for _, axes in arrays for a in axes}
        spread = s.size(tuple(i for i in s.keys if i not in had))
        out = [a for a in order if a in had]
        spelled = ",".join("".join(letters[a] for a in axes) for _, axes in arrays)
        spelled += "->" + "".join(letters[a] for a in out)
        total = jnp.einsum(spelled, *[x.astype(dtype) for x, _ in arrays])
        total = term.coefficient * spread * total
        return lax.expand_dims(total, [n for n, a in enumerate(order) if a not in had])


def spec_of(loop: Loop, s: MatrixState, query: Query, is_last: bool) -> MatrixScan:
    """Return the kernel's specification for one query."""
    carry = loop.carries[s.carry]
    dtype = jax_internals.joint_dtype(loop.body.avals[carry.inner].dtype, jnp.float32)
    return MatrixScan(
        batch=tuple(s.sizes[i] for i in s.batch),
        length=loop.length,
        keys=s.size(s.keys),
        values=s.size(s.values),
        decay=s.kind,
        dtype=str(dtype),
        inclusive=query.term.state == "after",
        reverse=loop.reverse,
        start=not is_zero(carry.start),
        last=is_last,
    )


def value_of(t: TermGraph, cls: int) -> int | None:
    """Return a body value whose entries are those of a class, or None."""
    found = (v for v, view in enumerate(t.views) if view is not None and view.cls == cls)
    return next(found, None)


def matrices_of(
    loop: Loop, groups: list[Group], kernels: str, device: Device, gradient: bool = False
) -> tuple[LoopParts | None, str]:
    """Find a route of chunked matmuls for a loop with matrix states, where it is faster.

    Returns:
        The route or None, and the reason; an empty reason where no state is a matrix.
    """
    if kernels not in ("auto", "always", "xla"):
        return None, ""
    found = _matrices(loop, groups)
    route = Partition(loop, groups, found, device.loops.growth).parts() if found else None
    if route is None:
        return None, ""
    if kernels != "auto":
        return route, "chunked matmuls of its matrix states"
    specs = [spec_of(loop, k.state, q, False) for k in found.values() for q in k.state.queries]
    rates = device.scans.chunks
    if rates is None:
        # values that the gradient as written needs; kernels need less
        states = sum(math.prod(k.state.sizes) for k in found.values())
        written = 4.0 * STATES_WRITTEN * loop.length * states
        short = gradient and written > device.memory_bytes
        return (route, "chunked matmuls of its matrix states") if short else (None, "")
    if any(s.dtype not in rates.dtypes for s in specs):
        return None, ""
    before = sum(loop_seconds(s, rates, gradient) for s in specs)
    after = sum(chunk_seconds(s, rates, gradient) for s in specs)
    if not margins.pays(before, after, "scan", device):
        least = margins.margin("scan", device)
        return None, f"chunked matmuls of its matrix states: {too_slow(before / after, least)}"
    return replace(route, seconds=(before, after)), "chunked matmuls of its matrix states"


def _matrices(loop: Loop, groups: list[Group]) -> dict[tuple[int, ...], MatrixKernel]:
    """Return the matrix states among the carries of a loop of a known number of steps."""
    effects = any(e.eqn.effects for e in loop.body.equations)
    candidates = [g.carries for g in groups if _may_be_matrix(loop, g)]
    if not isinstance(loop.length, int) or effects or not candidates:
        return {}
    t = terms_of(loop)
    found: dict[tuple[int, ...], MatrixKernel] = {}
    for carries in candidates:
        (k,) = carries
        others = [*loop.ys, *[c.out for c in loop.carries if c is not loop.carries[k]]]
        try:
            state = StateReader(loop, t, k).read([v for v in others if isinstance(v, int)])
        except NotAMatrixError:
            continue
        reads = [value_of(t, f.cls) for f in state.factors()]
        if None in reads:  # a factor has no value of its own
            return {}
        makes = {v for q in state.queries for v in q.values}
        found[carries] = MatrixKernel(t, state, [v for v in reads if v is not None], makes)
    return found


def _may_be_matrix(loop: Loop, group: Group) -> bool:
    """Return True if a carry has axes for keys and values and is in no cycle with others."""
    carry = loop.carries[group.carries[0]]
    aval = loop.body.avals[carry.inner]
    alone = len(group.carries) == 1 and isinstance(carry.out, int)
    reads_itself = group.degree.kind != FREE
    return alone and reads_itself and len(aval.shape) > 1 and str(aval.dtype) in DTYPES
