"""Loops with matrix states as chunked matmuls.

Values that do not depend on the states are computed for all steps at once. Carries that are no
matrices stay separate loops. `matrix_scan` runs the states. Values that depend on their queries are
computed for all steps afterwards. Each part consists of the body's own equations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.dataflow import cone, makers_of, value_operands
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.scans.loop_parts import CarryPart, LoopParts, LoopValues
from symjax_rewrite.kernel_selection.scans.matrix_state import (
    MatrixState,
    NotAMatrixError,
    Query,
    StateReader,
    StateTerm,
    terms_of,
)
from symjax_rewrite.loops.carry_dependence import Group, groups_of, is_zero
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.pallas_kernels.scan.matrix_scan import (
    MatrixScan,
    chunk_seconds,
    loop_seconds,
    matrix_scan,
)

TIME = -1  # the axis of steps, beside the axes of a state
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(slots=True)
class MatrixKernel:
    """Carry that is a matrix; `equations` compute its factors for all steps."""

    t: TermGraph
    state: MatrixState
    equations: list[Equation]

    def advance(self, values: LoopValues) -> Any:
        """Add the values read by queries to the steps; return the last state."""
        values.run_all(self.equations)
        start = values.loop.carries[self.state.carry].start
        run = _MatrixRun(self.t, self.state, values)
        return run.last_state(None if is_zero(start) else values.read(start))


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

    def last_state(self, start: Any) -> Any:
        """Add the values read by queries to the steps; return the last state."""
        s, loop = self.state, self.values.loop
        wide = jnp.promote_types(self.inner.dtype, jnp.float32)
        k = self._rows(s.key, s.keys, wide)
        v = s.added * self._rows(s.value, s.values, wide)
        given = [] if s.kind == "none" else [self._decay(wide)]
        if start is not None:
            given.append(self._laid_out(start, wide))
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
            turned = lax.transpose(y, [order.index(a) for a in wanted])
            turned = lax.reshape(turned, (loop.length, *aval.shape))
            self.values.steps[v] = turned.astype(aval.dtype)

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
    dtype = jnp.promote_types(loop.body.avals[carry.inner].dtype, jnp.float32)
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
    try:
        route = matrix_route(loop, groups, device.loops.growth)
    except NotAMatrixError:
        return None, ""
    if kernels != "auto":
        return route, "chunked matmuls of its matrix states"
    found = [p.kernel for p in route.parts if isinstance(p.kernel, MatrixKernel)]
    specs = [spec_of(loop, k.state, q, False) for k in found for q in k.state.queries]
    rates = device.scans.chunks
    if rates is None:  # a loop's gradient writes the states of all steps
        return (route, "chunked matmuls of its matrix states") if gradient else (None, "")
    if any(s.dtype not in rates.dtypes for s in specs):
        return None, ""
    before = sum(loop_seconds(s, rates, gradient) for s in specs)
    after = sum(chunk_seconds(s, rates, gradient) for s in specs)
    predicted = f"chunked matmuls of its matrix states, predicted {after:.1e} s for {before:.1e} s"
    if not margins.pays(before, after, "scan", device):
        return None, predicted
    return replace(route, seconds=(before, after)), predicted


def matrix_route(loop: Loop, groups: list[Group], growth: float) -> LoopParts:
    """Partition a loop into parts of which some are matrix states.

    groups: of the loop's carries. growth: limit on the bytes written for all steps, as a multiple
    of the loop's operands and results.

    Raises:
        NotAMatrixError: no state is a matrix, or the matrices cannot run apart from the others.
    """
    body = loop.body
    if not isinstance(loop.length, int):
        raise NotAMatrixError("its number of steps is a name")
    if any(e.eqn.effects for e in body.equations):
        raise NotAMatrixError("it has effects")
    candidates = [g.carries[0] for g in groups if _may_be_matrix(loop, g)]
    if not candidates:
        raise NotAMatrixError("no states are matrices")
    t = terms_of(loop)
    states: dict[int, MatrixState] = {}
    reasons = []
    for k in candidates:
        carry = loop.carries[k]
        others = [*loop.ys, *[c.out for c in loop.carries if c is not carry]]
        try:
            states[k] = StateReader(loop, t, k).read([v for v in others if isinstance(v, int)])
        except NotAMatrixError as error:
            reasons.append(str(error))
    if not states:
        raise NotAMatrixError("; ".join(dict.fromkeys(reasons)))
    return _Planner(loop, t, states, growth).plan()


def _may_be_matrix(loop: Loop, group: Group) -> bool:
    """Return True if a carry has axes for keys and values and is in no cycle with others."""
    carry = loop.carries[group.carries[0]]
    aval = loop.body.avals[carry.inner]
    alone = len(group.carries) == 1 and isinstance(carry.out, int)
    return alone and len(aval.shape) > 1 and str(aval.dtype) in DTYPES


@dataclass(slots=True)
class _Planner:
    """Ordering of the parts of a loop."""

    loop: Loop
    t: TermGraph
    states: dict[int, MatrixState]
    growth: float
    ready: set[int] = field(init=False)
    parts: list[CarryPart] = field(default_factory=list)

    def plan(self) -> LoopParts:
        """Return the parts in topological order, unless some parts wait for each other."""
        loop = self.loop
        self.ready = {*loop.consts, *loop.body.consts, *loop.sources, *loop.counters}
        waiting = [g.carries for g in groups_of(loop)]
        while waiting:
            done = next((c for c in waiting if self._take(c)), None)
            if done is None:
                raise NotAMatrixError("what its states read depends on what reads them")
            waiting.remove(done)
        tail = self._needed(loop.ys, ())
        if tail is None:
            raise NotAMatrixError("states are read whole")
        self._stack(tail)
        route = LoopParts(loop, self.parts, tail=tail)
        _check_written(route, self.growth)
        return route

    def _take(self, carries: tuple[int, ...]) -> bool:
        """Make a part of some carries, if their inputs are computed."""
        loop = self.loop
        state = self.states.get(carries[0]) if len(carries) == 1 else None
        factors: list[int | None] = []
        if state is None:
            made = {loop.carries[k].inner for k in carries}
            needed = self._needed((loop.carries[k].out for k in carries), made)
        else:
            factors = [value_of(self.t, f.cls) for f in state.factors()]
            if None in factors:
                raise NotAMatrixError("a factor has no value of its own")
            made = {v for q in state.queries for v in q.values}
            needed = self._needed(factors, ())
        if needed is None:
            return False
        self._stack(needed, factors)
        kernel = None if state is None else MatrixKernel(self.t, state, needed)
        self.parts.append(CarryPart(carries, needed, kernel=kernel))
        self.ready |= made | {v for e in needed for v in e.outvals}
        return True

    def _needed(self, values: Iterable[Any], inner: Iterable[int]) -> list[Equation] | None:
        """Return the equations that compute some values from known ones, or None."""
        makers = makers_of(self.loop.body.equations)
        values = [v for v in values if isinstance(v, int)]
        found = cone(values, value_operands(makers), {*self.ready, *inner})
        if not found <= makers.keys():
            return None
        return [e for e in self.loop.body.equations if not found.isdisjoint(e.outvals)]

    def _stack(self, equations: list[Equation], values: Sequence[Any] = ()) -> None:
        """Make earlier loops return for all steps the values that equations read, and `values`."""
        operands = (v for e in equations for v in e.invals)
        reads = {v for v in (*operands, *values, *self.loop.ys) if isinstance(v, int)}
        for part in self.parts:
            if part.kernel is None:
                made = {v for e in part.equations for v in e.outvals}
                made |= {self.loop.carries[k].inner for k in part.carries}
                part.ys += sorted((reads & made) - {*part.ys})


def _check_written(route: LoopParts, growth: float) -> None:
    """Check that all steps write little more than the loop's operands and results."""
    loop = route.loop
    limit = growth * loop.outside_bytes
    made = [e for p in route.parts if p.kernel is not None for e in p.equations] + route.tail
    values = [v for e in made for v in e.outvals]
    values += [v for p in route.parts for v in p.ys]
    if any(loop.length * aval_bytes(loop.body.avals[v]) > limit for v in values):
        raise NotAMatrixError("what every step makes is too large to keep")
