"""Loops that only fold a stream: their last states are computed from all steps at once.

A carry c ← top_k(concat(c, x_t)) ends as the top k of its start and all x. A stable selection keeps
the order of equal values. Values that a step takes at the selected places, such as indices, are
taken with them. `monoid_carries` reads carries that follow a monoid: sums, extrema with values at
their places, log-sum-exp, moments.

A loop is such a fold if no result of a step is read and all of its carries are folds. Selections
and maxima are exact; sums are rounded in another order. With folds, memory is O(stream) in place of
O(state), so the bytes that are written are bounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import (
    aval_bytes,
    aval_size,
    equation_seconds,
    selection_seconds,
    shape_of,
)
from symjax_rewrite.ir.dataflow import makers_of, numbers
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.replacement import Read
from symjax_rewrite.loops.hoisting import STACKABLE, accumulations, is_steppable
from symjax_rewrite.loops.loop import Loop, get, run_equations
from symjax_rewrite.loops.monoid_carries import MonoidFold, monoid_fold
from symjax_rewrite.loops.motion import Accumulation, all_steps, seconds_at_once

_SELECTIONS = ("top_k", "sort")
KERNELS = 5  # of the total of a monoid: the states, its reductions, and their combination


class Join(NamedTuple):
    """The concatenation of a carry with the values of a step.

    carry: its number. values: of a step. axis: of the concatenation. is_first: True if the carry
    stands before the values.
    """

    equation: Equation
    carry: int
    values: int
    axis: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class RunningSelection:
    """The update of carries to the best of them and of the values of a step.

    joins: the concatenations. equation: the top-k or the sort. rest: the equations after it, in
    order: slices of a sort, and values taken at the places of a top-k. outs: the next carries.
    """

    joins: tuple[Join, ...]
    equation: Equation
    rest: tuple[Equation, ...]
    outs: tuple[int, ...]

    def totals(
        self, steps: dict[int, Any], starts: Sequence[Any], is_reversed: bool
    ) -> dict[int, Any]:
        """Return the last states by number of the carry: one selection of all values."""
        env: dict[int, Any] = {}
        for j in self.joins:
            late_first = is_reversed == j.is_first
            values = lax.rev(steps[j.values], (0,)) if late_first else steps[j.values]
            values = jnp.moveaxis(values, 0, j.axis)
            shape = values.shape
            joined = (*shape[: j.axis], -1, *shape[j.axis + 2 :])
            parts = [starts[j.carry], values.reshape(joined)]
            env[j.equation.outvals[0]] = lax.concatenate(parts[:: 1 if j.is_first else -1], j.axis)
        run_equations([self.equation], env)
        for e in self.rest:
            if e.name == "slice":
                env[e.outvals[0]] = self._end(e, env[e.reads[0]])
            else:
                run_equations([e], env)
        return {j.carry: env[v] for j, v in zip(self.joins, self.outs, strict=True)}

    def _end(self, e: Equation, whole: Any) -> Any:
        """Return the end of a step's sorted array that a slice reads."""
        axis, count = self.joins[0].axis, shape_of(e.eqn.outvars[0])[self.joins[0].axis]
        start = 0 if e.eqn.params["start_indices"][axis] == 0 else whole.shape[axis] - count
        return lax.slice_in_dim(whole, start, start + count, axis=axis)


@dataclass(slots=True)
class StreamFold:
    """A loop as a fold, with the results of all its steps.

    once, before: the equations that compute what the folds read, and the results. seconds:
    predicted, of the loop and of the fold.
    """

    loop: Loop
    selections: list[RunningSelection]
    sums: list[Accumulation]
    monoids: MonoidFold | None
    once: list[Equation] = field(default_factory=list)
    before: list[Equation] = field(default_factory=list)
    seconds: tuple[float, float] | None = None

    def run(self, read: Read) -> list[Any]:
        """Return the results of the loop."""
        loop = self.loop
        known, steps, starts = loop.constants(read), loop.stacks(read), loop.starts(read)
        finals: dict[int, Any] = {}
        with jax_internals.equation_scope(loop.eqn):
            run_equations(self.once, known)
            steps.update(all_steps(self.before, known, steps))
            for selection in self.selections:
                finals |= selection.totals(steps, starts, loop.reverse)
            finals |= {s.carry: s.total(steps, starts[s.carry]) for s in self.sums}
            if self.monoids is not None:
                finals |= self.monoids.totals(known, steps, starts)
        ys = [self._result(v, known, steps) for v in loop.ys]
        return loop.finish([finals[k] for k in range(len(loop.carries))], ys, read)

    def _result(self, v: Value, known: dict[int, Any], steps: dict[int, Any]) -> Any:
        """Return a result of all steps; it may be the same in all."""
        if isinstance(v, int) and v in steps:
            return steps[v]
        x = jnp.asarray(get(known, v))
        return jnp.broadcast_to(x, (self.loop.length, *x.shape))


def stream_fold(loop: Loop, device: Device) -> StreamFold | None:
    """Return a normalised loop as a fold where it is one and is faster so, or None.

    The caller permits sums to be rounded in another order.
    """
    if loop.ys or not loop.carries:
        return None
    if not _may_gain(loop, device) and not any(e.name in _SELECTIONS for e in loop.body.equations):
        return None
    found = all_at_once(loop)
    if found is None or found.sums or not (found.selections or _may_gain(loop, device)):
        return None
    adds = found.monoids is not None and found.monoids.adds
    if adds and any(e.name in STACKABLE for e in found.before):
        return None  # a sum of products is one product: see `hoisting`
    found.seconds = _seconds(found, loop.levels(), device)
    if found.seconds is None or not margins.pays(*found.seconds, "hoist", device):
        return None
    return found


def all_at_once(loop: Loop) -> StreamFold | None:
    """Return a normalised loop as work of all steps where its carries are folds, or None."""
    counted = isinstance(loop.length, int) and loop.length > 1 and loop.condition is None
    if not counted or any(e.eqn.effects or not e.outvals for e in loop.body.equations):
        return None
    reader = _FoldReader(loop)
    level, selections = reader.level, list(reader.selections())
    own = {e for f in selections for e in (*[j.equation for j in f.joins], f.equation, *f.rest)}
    sums = [s for s in accumulations(loop, level) if all(level[v] == 1 for v in s.product.reads)]
    own.update(e for s in sums for e in s.equations)
    rest = [e for e in loop.body.equations if e not in own]
    if not all(is_steppable(e) for e in rest if level[e.outvals[0]] > 0):
        return None
    others = {*range(len(loop.carries))} - {j.carry for f in selections for j in f.joins}
    others -= {s.carry for s in sums}
    monoids = monoid_fold(loop, others, level) if others else None
    if others and monoids is None:
        return None
    own.update(monoids.equations if monoids is not None else ())
    rest = [e for e in rest if e not in own]
    once = [e for e in rest if level[e.outvals[0]] == 0]
    before = [e for e in rest if level[e.outvals[0]] == 1]
    if not reader.are_apart(own) or len(once) + len(before) < len(rest):
        return None
    return StreamFold(loop, selections, sums, monoids, once, before)


class _FoldReader:
    """Reader of the carries of a loop as folds."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.level, self.uses = loop, loop.levels(), loop.uses()
        self.makers = makers_of(loop.body.equations)
        self.number = {c.inner: k for k, c in enumerate(loop.carries)}

    def maker(self, v: Value) -> Equation | None:
        """Return the equation of a step that makes a value, or None."""
        return self.makers.get(v) if isinstance(v, int) else None

    def are_apart(self, own: set[Equation]) -> bool:
        """Return True if nothing else reads the carries, or results of the folds' equations."""
        inside = Counter(v for e in own for v in e.reads)
        inside.update(numbers([c.out for c in self.loop.carries]))
        made = [*self.number, *[v for e in own for v in e.outvals]]
        return all(inside[v] == self.uses[v] for v in made)

    def selections(self) -> Iterator[RunningSelection]:
        """Yield the selections among the carries; some of the others may be read elsewhere."""
        for e in self.loop.body.equations:
            found = self._selection(e) if e.name in _SELECTIONS else None
            if found is not None:
                yield found

    def _varies(self, v: Value) -> bool:
        """Return True if a value differs by step and depends on no carry."""
        return isinstance(v, int) and self.level[v] == 1

    def _join(self, v: Value, axis: int) -> Join | None:
        """Return the maker of a value if it joins a carry and the values of a step."""
        e = self.maker(v)
        if e is None or e.name != "concatenate" or e.eqn.params["dimension"] != axis:
            return None
        carries = [u for u in e.reads if u in self.number]
        values = [u for u in e.reads if self._varies(u)]
        if len(e.invals) != 2 or len(carries) != 1 or len(values) != 1:
            return None
        if not all(isinstance(n, int) for n in shape_of(e.eqn.outvars[0])):
            return None
        return Join(e, self.number[carries[0]], values[0], axis, e.invals[0] == carries[0])

    def _selection(self, e: Equation) -> RunningSelection | None:
        p, rank = e.eqn.params, len(shape_of(e.eqn.invars[0]))
        axis = p["dimension"] if e.name == "sort" else p.get("axis", rank - 1)
        joins = [self._join(v, axis) for v in e.invals]
        if any(j is None or j.is_first != joins[0].is_first for j in joins):  # pyright: ignore
            return None
        found = [j for j in joins if j is not None]
        if e.name == "sort":
            return self._sorted(e, found) if p["is_stable"] or len(found) == 1 else None
        if e.outvals[0] != self.loop.carries[found[0].carry].out:
            return None
        return self._taken(e, found[0])

    def _sorted(self, e: Equation, joins: list[Join]) -> RunningSelection | None:
        """Return a sort of which each carry is the same end."""
        slices, starts, axis = [], set(), joins[0].axis
        for j in joins:
            s = self.maker(self.loop.carries[j.carry].out)
            if s is None or s.name != "slice":
                return None
            shape, p = shape_of(s.eqn.invars[0]), s.eqn.params
            count = shape_of(s.eqn.outvars[0])[axis]
            whole = [*shape[:axis], count, *shape[axis + 1 :]]
            starts.add(p["start_indices"][axis])
            if list(shape_of(s.eqn.outvars[0])) != whole or any(n != 1 for n in p["strides"] or ()):
                return None
            slices.append((s, shape[axis] - count))
        made = [s.invals[0] for s, _ in slices]
        if made != [*e.outvals] or len(starts) > 1 or not starts <= {0, slices[0][1]}:
            return None
        rest = tuple(s for s, _ in slices)
        return RunningSelection(tuple(joins), e, rest, tuple(s.outvals[0] for s in rest))

    def _taken(self, e: Equation, first: Join) -> RunningSelection:
        """Return a top-k with the carries that are taken at its places."""
        joins, rest, outs = [first], [], [e.outvals[0]]
        for carry in self.loop.carries:
            gather = self.maker(carry.out)
            if gather is None or gather.name != "gather":
                continue
            join, chain = self._join(gather.invals[0], first.axis), self._places(e, gather)
            if join is None or chain is None or join.is_first != first.is_first:
                continue
            if self.loop.carries[join.carry] is carry and _takes(gather, first.axis):
                joins.append(join)
                rest += [*chain, gather]
                outs.append(gather.outvals[0])
        order = [x for x in self.loop.body.equations if x in rest]
        return RunningSelection(tuple(joins), e, tuple(order), tuple(outs))

    def _places(self, e: Equation, gather: Equation) -> list[Equation] | None:
        """Return the equations that make a gather's indices of the places of a top-k, or None."""
        last = self.maker(gather.invals[1])
        if last is None or last.name not in ("reshape", "broadcast_in_dim"):
            return None
        shape = shape_of(last.eqn.invars[0])
        if shape_of(last.eqn.outvars[0]) != (*shape, 1):
            return None
        kept = last.eqn.params.get("broadcast_dimensions", range(len(shape)))
        chain, v, select = [last], last.invals[0], self.maker(last.invals[0])
        if select is not None and select.name == "select_n" and len(select.invals) == 3:
            # Places are never negative: the case of indices from the end is not read.
            test, v, end = self.maker(select.invals[0]), select.invals[1], select.invals[2]
            made = self.maker(end)
            if test is None or test.name != "lt" or test.reads != (v,) or not _is_zero(test):
                return None
            if made is None or made.name != "add" or made.reads != (v,):
                return None
            chain += [select, test, made]
        return chain if v == e.outvals[1] and [*kept] == [*range(len(shape))] else None


def _is_zero(test: Equation) -> bool:
    right = test.invals[1]
    return not isinstance(right, int) and not np.any(right.val)


def _takes(gather: Equation, axis: int) -> bool:
    """Return True if a gather takes along an axis: rows of an array, or one place per other index.

    Its indices have an axis of size one in the end.
    """
    d, shape = gather.eqn.params["dimension_numbers"], shape_of(gather.eqn.invars[0])
    places = shape_of(gather.eqn.invars[1])[:-1]
    others = tuple(k for k in range(len(shape)) if k != axis)
    if (d.collapsed_slice_dims, d.start_index_map) != ((axis,), (axis,)):
        return False
    batch = d.operand_batching_dims, d.start_indices_batching_dims
    if len(places) == 1 and axis == 0:
        sizes = (1, *shape[1:])
        return batch == ((), ()) and (d.offset_dims, gather.eqn.params["slice_sizes"]) == (
            others,
            sizes,
        )
    return batch == (others, others) and d.offset_dims == () and len(places) == len(shape)


def _may_gain(loop: Loop, device: Device) -> bool:
    """Return False for a loop that takes no longer than a launch, as one kernel."""
    operation_s = device.loops.kernel_operation_s
    longest = loop.steps * len(loop.body.equations) * operation_s
    return device.loops.steps_are_launches or longest > device.launch_s


def _seconds(fold: StreamFold, level: dict[int, int], device: Device) -> tuple[float, float] | None:
    """Return the seconds of the loop and of the fold; None if the fold writes too much."""
    loop, facts, steps = fold.loop, device.loops, fold.loop.steps
    avals, joins = loop.body.avals, [j for f in fold.selections for j in f.joins]
    own, states = (fold.monoids.equations, fold.monoids.carries) if fold.monoids else ((), [])
    made = [*[v for e in fold.before for v in e.outvals], *[j.values for j in joins]]
    made += [loop.carries[k].inner for k in states]
    written = steps * sum(aval_bytes(avals[v]) for v in made)
    if written > facts.growth * loop.outside_bytes:
        return None
    together = device.launch_s * (KERNELS * len(states) + len(fold.selections))
    together += 2 * written / device.bytes_per_s
    together += sum(seconds_at_once(e, steps, level, device) for e in own)
    if not (facts.steps_are_launches or fold.selections):
        # A kernel runs all steps; work that reads no carry takes as long in it as before it.
        return steps * len(own) * facts.kernel_operation_s, together
    launch = device.launch_s if facts.steps_are_launches else 0.0
    alone = steps * launch * (len(states) + len(fold.selections))
    alone += steps * sum(equation_seconds(e.eqn, device, in_step=True) for e in fold.before)
    together += sum(seconds_at_once(e, steps, level, device) for e in fold.before)
    if facts.steps_are_launches:
        alone += steps * sum(equation_seconds(e.eqn, device, in_step=True) for e in own)
    for f in fold.selections:
        each, whole = _selected(f, loop, device)
        alone, together = alone + steps * (facts.step_s + each), together + whole
    return alone, together


def _selected(f: RunningSelection, loop: Loop, device: Device) -> tuple[float, float]:
    """Return the seconds of a selection in one step, and of one from all steps.

    A selection in a step replaces few of the best values that it already has.
    """
    eqn, first, avals = f.equation.eqn, f.joins[0], loop.body.avals
    shape = shape_of(eqn.invars[0])
    axis, places = (eqn.params.get("dimension", -1), eqn.params.get("k"))
    rows = math.prod(shape) // shape[axis]
    whole = aval_size(avals[loop.carries[first.carry].inner])
    whole += loop.steps * aval_size(avals[first.values])
    alone = selection_seconds(shape, axis, None if places is None else 0, device)
    return alone, selection_seconds((rows, int(whole) // rows), 1, places, device)
