"""A loop of one carry, read as a scan: its coefficients, its results, and the kernel that runs it.

The body is read as index terms, without axes of size one, transpositions and broadcasts. One carry
is updated as h ← a·h + b, or as h ← max(h + a, b) or min(h + a, b), over its own indices. The
kernel runs the body itself on pairs (a, b) in place of the values that depend on h, so that
coefficients in any spelling are computed inside it.
Results of a step are the states, or a sum of products with them over some of their axes. Other
readers of the results (skips, gates, projections) run for all steps after the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.dataflow import cone, dependents, makers_of, node_of, postorder
from symjax_rewrite.ir.flat_program import Equation, value_key
from symjax_rewrite.ir.primitives import dtype_kind, quantizes
from symjax_rewrite.ir.sizes import from_jax, product
from symjax_rewrite.ir.step_program import (
    StepProgram,
    key_of,
    place_in,
)
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, LEAF, MAP, REDUCE, Ref, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.scans.affine_steps import (
    coefficients_of,
    drops_state,
    extremum_of,
    reading_of,
)
from symjax_rewrite.kernel_selection.scans.loop_parts import CarryPart, LoopParts, LoopValues
from symjax_rewrite.kernel_selection.scans.matrix_state import terms_of
from symjax_rewrite.loops.carry_dependence import DIAGONAL, MAX_PLUS, SUM, groups_of, is_zero
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.loop_reading import line_of
from symjax_rewrite.pallas_kernels.fold.spec import Operand
from symjax_rewrite.pallas_kernels.scan.scan import scan
from symjax_rewrite.pallas_kernels.scan.spec import Readout, ScanProgram, ScanSpec, result_axes

TIME = "t"
BY_ENTRY = (SUM, DIAGONAL, MAX_PLUS)  # dependence of a carry on itself that a scan computes


class NotAScanError(Exception):
    """Loop that is no scan, with the reason (internal)."""


def scan_as_is(spec: ScanSpec, backend: str, *operands: Any) -> tuple[Any, ...]:
    """Return a scan, differentiated through its own steps."""
    return scan(spec, *operands, backend=backend)


@dataclass(slots=True)
class ScanKernel:
    """Loop as a scan.

    operands: body value and its axes by name, in the order of the kernel's operand. read_out: the
    body values that the kernel returns for all steps. tail: the equations after the kernel.
    run_scan: runs the scan of a spec, a backend and operands. seconds: predicted, of the loop and
    of the scan.
    """

    loop: Loop
    spec: ScanSpec
    backend: str
    operands: list[tuple[int, tuple[str, ...]]]
    read_out: list[int]
    tail: list[Equation]
    run_scan: Callable[..., tuple[Any, ...]] = scan_as_is
    seconds: tuple[float, float] | None = None

    def route(self) -> LoopParts:
        """Return the loop that the kernel runs whole."""
        part = CarryPart((0,), kernel=self)
        return LoopParts(self.loop, [part], seconds=self.seconds)

    def advance(self, values: LoopValues) -> Any:
        """Add to `values` the results of all steps; return the last state."""
        loop, avals = self.loop, self.loop.body.avals
        known, steps, read = values.known, values.steps, values.read
        (carry,) = loop.carries
        size = self.spec.size
        arrays = []
        for (v, axes), spec in zip(self.operands, self.spec.operands, strict=True):
            shape = tuple(size[a] for a in axes)
            if v == carry.inner:
                array = jnp.asarray(read(carry.start))
                if array.size != math.prod(shape):
                    array = jnp.broadcast_to(array, avals[v].shape)
            elif v in values.loop.sources:
                source = values.loop.sources[v]
                array = source.entries(jnp.asarray(read(source.value)), loop.length)
            else:
                array = jnp.asarray(steps[v] if v in steps else known[v])
            arrays.append(lax.reshape(array, shape).astype(spec.dtype))
        kernel = jax_internals.sealed(lambda *xs: self.run_scan(self.spec, self.backend, *xs))
        *ys, last = kernel(*arrays)
        known.pop(carry.inner, None)  # `steps` holds the state of every step
        axes = result_axes(self.spec)
        for v, y, names in zip(self.read_out, ys, axes[: len(ys)], strict=True):
            if TIME not in names:
                known[v] = lax.reshape(y, avals[v].shape)
            else:
                y = jnp.moveaxis(y, names.index(TIME), 0)
                steps[v] = lax.reshape(y, (loop.length, *avals[v].shape))
        values.run_all(self.tail)
        return lax.reshape(last, avals[carry.inner].shape)


def is_equated(loop: Loop, state: int) -> bool:
    """Return True if a step tests a value that depends on a state for equality.

    The gradient of an extremum tests its operands for a tie, and which is greater: this decides no
    more than the latter does.
    """
    extrema = [e for e in loop.body.equations if e.name in ("max", "min")]
    ties = {frozenset(map(value_key, e.invals)) for e in extrema}
    tests = [e for e in dependents(loop.body.equations, [state]) if e.name in ("eq", "ne")]
    return any(frozenset(map(value_key, e.invals)) not in ties for e in tests)


@dataclass(slots=True)
class ScanBuilder:
    """Reader of one loop as a scan.

    growth: limit on the bytes that the kernel writes, as a multiple of the loop's results.
    """

    loop: Loop
    growth: float
    t: TermGraph = field(init=False)
    carry: int = field(init=False)
    indices: tuple[int, ...] = field(init=False)
    operands: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    readouts: dict[int, Readout] = field(default_factory=dict)
    tail: list[Equation] = field(default_factory=list)

    def kernel(
        self, spec: ScanSpec, backend: str, run_scan: Callable[..., tuple[Any, ...]] = scan_as_is
    ) -> ScanKernel:
        return ScanKernel(
            self.loop, spec, backend, self.operands, list(self.readouts), self.tail, run_scan
        )

    def built(self) -> ScanSpec | str:
        """Return the scan, or the reason why the loop is no scan."""
        try:
            return self.build()
        except NotAScanError as error:
            return str(error)
        except UsageError as error:
            return error.what

    def build(self) -> ScanSpec:
        """Return the scan; record its operands, its readouts and the equations after it."""
        loop = self.loop
        if len(loop.carries) != 1 or any(e.eqn.effects for e in loop.body.equations):
            raise NotAScanError("several carries or effects")
        if next(groups_of(loop)).degree.kind not in BY_ENTRY:
            raise NotAScanError("its steps are not affine entry by entry")
        carry, body = loop.carries[0], loop.body
        dtype = str(body.avals[carry.inner].dtype)
        if not isinstance(carry.out, int) or dtype_kind(dtype) != "f" or quantizes(dtype):
            raise NotAScanError(f"states are {dtype}")
        self.t = terms_of(loop)
        start, out = self.t.view(carry.inner), self.t.view(carry.out)
        sizes = self.t.sizes[carry.inner]
        if self.t.sizes[carry.out] != sizes or sorted(start.axes) != list(range(len(sizes))):
            raise NotAScanError("an axis of the states is a broadcast, or two axes are one")
        numbers = map(self.t.jax_size, sizes)
        self.carry = start.cls
        self.indices = start.axes
        names = tuple(f"s{i}" for i in range(len(sizes)))
        steps = self._steps([out], None)
        extremum = self._extremum(steps)
        number = None if is_zero(carry.start) and extremum is None else self.operand(start)
        coefficients = steps.coefficients(extremum)
        self._read_results(out)
        every = ((TIME, loop.length), *zip(names, numbers, strict=True))
        return ScanSpec(
            sizes=every,
            time=TIME,
            state=names,
            operands=tuple(Operand(axes, str(body.avals[v].dtype)) for v, axes in self.operands),
            coefficients=coefficients,
            readouts=tuple(self.readouts.values()),
            last=True,
            start=number,
            kind=self._kind(steps, extremum),
            reverse=loop.reverse,
            dtype=dtype,
            named=tuple([a for a, n in every if not isinstance(n, int)]),
        )

    def _extremum(self, steps: _ScanSteps) -> str | None:
        """Return the extremum that a step takes; None if it is affine."""
        if next(groups_of(self.loop)).degree.kind != MAX_PLUS:
            return None
        if (extremum := extremum_of(steps.steps)) is None:
            raise NotAScanError("its steps take no extremum of sums")
        if is_equated(self.loop, self.loop.carries[0].inner):
            raise NotAScanError("its states are tested for equality, which their rounding decides")
        return extremum

    @staticmethod
    def _kind(steps: _ScanSteps, extremum: str | None) -> str:
        if extremum is not None:
            return f"{extremum}-plus"
        return "resetting" if drops_state(steps.steps) else "affine"

    def _read_results(self, out: Ref) -> None:
        """Find the body values the kernel returns for all steps, and the equations after it."""
        body = self.loop.body
        makers = makers_of(body.equations)
        level = self.loop.levels()
        tail: set[int] = set()
        why = None
        stack: list[Any] = list(self.loop.ys)
        done: set[int] = set()
        while stack:
            y = stack.pop()
            if not isinstance(y, int) or y in done:
                continue
            done.add(y)
            if level.get(y) == 2 or (y in makers and self._is_sum_of_states(makers[y])):
                count = len(self.operands)
                try:
                    self.readouts[y] = self._readout(y, out)
                    continue
                except NotAScanError as error:
                    del self.operands[count:]
                    why = why or (error if level.get(y) == 2 else None)
                    if y not in makers:  # the state before a step, which is not recomputed
                        raise
            if y in makers:
                tail.add(id(makers[y]))
                stack += makers[y].invals
        self.tail = [e for e in body.equations if id(e) in tail]
        given = sum(aval_bytes(body.avals[v]) for v in self.loop.ys if isinstance(v, int))
        written = sum(aval_bytes(body.avals[v]) for v in self.readouts)
        written = max([written, *[aval_bytes(body.avals[v]) for e in self.tail for v in e.outvals]])
        if why is not None and written > self.growth * given:
            raise why

    def _is_sum_of_states(self, e: Equation) -> bool:
        """Return True if an equation sums computed values that are as large as the states."""
        body, made = self.loop.body, {v for x in self.loop.body.equations for v in x.outvals}
        size = aval_bytes(body.avals[self.loop.carries[0].inner])
        summed = (v for v in e.reads if v in made and aval_bytes(body.avals[v]) >= size)
        return e.name in ("dot_general", "reduce_sum") and any(summed)

    def operand(self, ref: Ref) -> int:
        """Return the number of a leaf's operand, read over the indices of the state."""
        v = self.t.leaf_value[ref.cls]
        view = self.t.view(v)
        slot_index = dict(enumerate(ref.axes))
        order = [slot_index[s] for s in view.axes]
        if len(set(order)) != len(order) or len(view.axes) != len(self.t.sizes[v]):
            raise NotAScanError("an operand is read along a diagonal")
        if any(i >= len(self.indices) for i in order):
            raise NotAScanError("an operand has an axis that the states have not")
        axes = [f"s{i}" for i in order]
        if v in self.loop.sources or v in self.loop.counters:
            source = self.loop.sources.get(v)
            axes.insert(self._place_of_time(v, source.axis if source else 0), TIME)
        return place_in(self.operands, (v, tuple(axes)))

    def _place_of_time(self, v: int, axis: int) -> int:
        """Return the place of the steps among the indices of all steps of a value.

        axis: the same in the array of all steps.
        """
        sizes = self.t.sizes[v]
        before = product(map(from_jax, self.loop.body.avals[v].shape[:axis]))
        return next(k for k in range(len(sizes) + 1) if product(sizes[:k]) == before)

    def _axis_written(self, y: int) -> int:
        """Return the axis of the steps in the results of the loop that hold a value, or are of it.

        It is that of all results if no result holds the value itself, and 0 if they differ.
        """
        loop, axes = self.loop, []
        for kind, what in loop.results:
            if kind == "ys":
                axes.append((loop.ys[what], 0))
            elif kind in ("moved", "kept", "stored"):
                axes.append((loop.ys[what[0]], what[1].axis if kind == "stored" else what[1]))
        found = {axis for v, axis in axes if v == y} or {axis for _, axis in axes}
        axis = found.pop() if len(found) == 1 else 0
        return axis if axis <= len(loop.body.avals[y].shape) else 0

    def counted(self, ref: Ref) -> tuple[int, int] | int | None:
        """Return a counter as its start and step, or as the only step where it is true."""
        numbers = self.loop.counters.get(self.t.leaf_value[ref.cls])
        if numbers is None or numbers.size != self.loop.length or numbers.dtype.kind not in "iub":
            return None
        numbers = numbers.reshape(-1)
        if numbers.dtype.kind == "b":
            return int(np.argmax(numbers)) if numbers.sum() == 1 else None
        return line_of(numbers) if max(map(abs, numbers[[0, -1]].tolist())) < 1 << 31 else None

    def _steps(self, refs: list[Ref], after: Ref | None) -> _ScanSteps:
        """Return the steps that compute some terms; `after` is the state they may read."""
        made = _ScanSteps(self, after)
        made.roots = tuple([made.build(ref) for ref in refs])
        return made

    def _readout(self, y: int, out: Ref) -> Readout:
        """Return a result of every step as a sum over axes of the state."""
        view, g = self.t.view(y), self.t.graph
        dtype = g.classes[view.cls].dtype
        node = node_of(g, view.cls)
        bound = node.bound if view.cls not in (out.cls, self.carry) else ()
        if bound and not (node.op == CONTRACT or (node.op == REDUCE and node.attr == "sum")):
            raise NotAScanError(f"{node.op} in a result")
        width = len(self.t.sizes[y])
        axes = (*view.axes, *range(width, width + len(bound)))
        tops = [view]
        if bound:
            tops = [a.over(axes) for a in node.args]
        place = self._place(tops, out)
        if not place.keys() >= set(range(width + len(bound))):
            raise NotAScanError("a result, or a summed operand, is constant along an axis")
        placed = [a.over(place) for a in tops]
        program = self._steps(placed, out).product(dtype).reading()
        factor = self._factor(self._factors(placed, out), out) if bound else None
        over = tuple(f"s{place[width + k]}" for k in range(len(bound)))
        axes = [f"s{place[i]}" for i in range(width)]
        axes.insert(self._place_of_time(y, self._axis_written(y)), TIME)
        return Readout(program, over, axes=tuple(axes), dtype=dtype, factor=factor)

    def _place(self, tops: list[Ref], out: Ref) -> dict[int, int]:
        """Return the map from indices of a result, or of its sum, to indices of the state."""
        found: dict[int, int] = {}
        targets = self._shaped_as_states(out)
        reached = cone(tops, lambda r: [] if r.cls in targets else self.computed_from(r))
        for ref in [r for r in reached if r.cls in targets]:
            for index, state in zip(ref.axes, targets[ref.cls], strict=True):
                if found.setdefault(index, state) != state:
                    raise NotAScanError("states are read with their axes in another order")
        wanted = {i for ref in tops for i in ref.axes}
        if not wanted <= set(found) or len(set(found.values())) != len(found):
            raise NotAScanError("a result has an axis that the states have not")
        return found

    def computed_from(self, ref: Ref) -> list[Ref]:
        """Return the operands of an elementwise term; none of other terms."""
        node = node_of(self.t.graph, ref.cls)
        opens = node.op in (MAP, ADD, CONTRACT) and not node.bound
        return [over(ref, a) for a in node.args] if opens else []

    def _shaped_as_states(self, out: Ref) -> dict[int, tuple[int, ...]]:
        """Return the terms of a step that have all axes of the state, and these axes."""
        found = {}
        for ref in sorted(cone([out], self.computed_from), key=lambda r: (r.cls, r.axes)):
            if sorted(ref.axes) == sorted(out.axes):
                found.setdefault(ref.cls, ref.axes)
        return found | {out.cls: out.axes, self.carry: self.indices}

    def _factors(self, refs: list[Ref], after: Ref) -> list[Ref]:
        """Return the factors of a product whose operands may be products themselves."""
        found, classes = [], self.t.graph.classes
        for ref in refs:
            node = node_of(self.t.graph, ref.cls)
            dtypes = {classes[a.cls].dtype for a in (ref, *node.args)}
            if node.op == CONTRACT and not node.bound and ref != after and len(dtypes) == 1:
                inner = [over(ref, a) for a in node.args]
                found += self._factors(inner, after)
            else:
                found.append(ref)
        return found

    def _factor(self, refs: list[Ref], after: Ref) -> ScanProgram | None:
        """Return the factor of the state after a step, where a product has one such operand."""
        rest = [r for r in refs if r != after]
        dtypes = {self.t.graph.classes[r.cls].dtype for r in refs}
        if len(rest) != len(refs) - 1 or not rest or len(dtypes) > 1:
            return None
        steps = self._steps(rest, after)
        if any(step.kind in ("before", "after") for step in steps.steps):
            return None
        return steps.product(dtypes.pop()).factor()


@dataclass(slots=True)
class _ScanSteps(StepProgram):
    """Steps over the indices of a state.

    after: the state after the step, where it may be read. number: step of a reference. reads:
    operands, by number. roots: steps of the requested terms.
    """

    scan: ScanBuilder
    after: Ref | None
    number: dict[Ref, int] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    roots: tuple[int, ...] = ()

    def build(self, ref: Ref) -> int:
        """Return the number of the step that computes a reference."""
        for each in postorder([ref], self._operands):
            if each not in self.number:
                dtype = self.scan.t.graph.classes[each.cls].dtype
                self.number[each] = self.add(*self._step(each), dtype)
        return self.number[ref]

    def _operands(self, ref: Ref) -> list[Ref]:
        """Return the terms that a step computes before a term."""
        if ref in self.number or ref == self.after or ref.cls == self.scan.carry:
            return []
        return self.scan.computed_from(ref)[::-1]  # the last is entered first

    def _step(self, ref: Ref) -> tuple[str, Any, tuple[int, ...]]:
        scan, node = self.scan, node_of(self.scan.t.graph, ref.cls)
        if self.after is not None and ref == self.after:
            return "after", None, ()
        if ref.cls == scan.carry:
            if ref.axes != scan.indices:
                raise NotAScanError("states are read with their axes in another order")
            return "before", None, ()
        if node.op == CONST:
            return "const", node.attr[0], ()
        if node.op == LEAF and (counted := scan.counted(ref)) is not None:
            return "count", counted, ()
        if node.op == LEAF:
            return "value", place_in(self.reads, scan.operand(ref)), ()
        if node.op in (MAP, ADD) or (node.op == CONTRACT and not node.bound):
            args = tuple([self.number[over(ref, a)] for a in node.args])
            return "apply", (node.op, node.attr), args
        raise NotAScanError(f"{node.op} inside a step")

    def product(self, dtype: str) -> _ScanSteps:
        """Add the product of the requested terms as the last step; it is not rounded to 8 bits."""
        wide = "float32" if quantizes(dtype) else dtype
        self.add("apply", (CONTRACT, None), self.roots, wide)
        return self

    def coefficients(self, extremum: str | None) -> ScanProgram:
        """Return the last step as `fun(values, t) -> (a, b)`."""
        fun = coefficients_of(self.steps, self.scan.t.primitives, extremum)
        return self._as(fun, ("scan", True, extremum))

    def reading(self) -> ScanProgram:
        """Return the last step as `fun((before, after), values, t)`."""
        return self._as(reading_of(self.steps, self.scan.t.primitives), ("scan", False))

    def factor(self) -> ScanProgram:
        """Return the last step, which reads no state, as `fun(values, t)`."""
        fun = reading_of(self.steps, self.scan.t.primitives)
        return self._as(lambda values, t: fun((None, None), values, t), ("factor",))

    def _as(self, fun: Callable[..., Any], kind: tuple) -> ScanProgram:
        return ScanProgram(fun, tuple(self.reads), key=(*kind, key_of(self.steps)))
