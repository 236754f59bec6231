"""Fusion of equations into a loop, so that arrays over all steps are not stored.

`exp(Δ·A)` for all steps, computed before a scan and read step by step, is computed inside the scan
from Δ and A. States that are only read as `C·h` are read inside the scan. An equation is fused if
it works on every step separately and fewer bytes are read or written after fusion.

    a = exp(Δ * A); for a_t in a: h ← a_t * h; results h; y = sum(h * C, 1)
    → for Δ_t, C_t in Δ, C: h ← exp(Δ_t * A) * h; results y_t = sum(h * C_t)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, shape_of
from symjax_rewrite.ir.dataflow import dependents, live, makers_of, numbers, postorder, users_of
from symjax_rewrite.ir.flat_program import Equation, Program, Value
from symjax_rewrite.loops.loop import Carry, Loop, Source
from symjax_rewrite.loops.normalization import clean
from symjax_rewrite.loops.stepwise_equations import Axes, resized, stepped_operands, stepped_result

MAX_DEPTH = 40  # equations followed in a row
EXACT_ENOUGH = ("float32", "float64", "complex64", "complex128")  # enough to accumulate a sum


class Surroundings:
    """The makers and users of every live value of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.outputs = set(numbers(program.outputs))

    @functools.cached_property
    def makers(self) -> dict[int, Equation]:
        """Return, for each value, the equation that makes it."""
        return self.program.once(makers_of)

    @functools.cached_property
    def users(self) -> dict[int, list[Equation]]:
        """Return, for each live value, the equations that read it."""
        equations = self.program.equations
        needed = live(equations, self.program.outputs, self.makers)
        return users_of([e for e in equations if e.eqn.effects or not needed.isdisjoint(e.outvals)])

    def bytes(self, v: int) -> float:
        """Return the bytes of a value."""
        return aval_bytes(self.program.avals[v])

    def below(self, values: Iterable[int]) -> set[int]:
        """Return these values and all values that depend on them."""
        values = set(values)
        later = dependents(self.program.equations, values)
        return values.union(*[e.outvals for e in later])


class Fusion:
    """Fusion of equations into a normalised loop of a known number of steps, in place.

    own: equations that the loop replaces, and other loops that can compute its operands. taken:
    equations that such loops compute inside. reorders: True if sums over all steps may be
    accumulated step by step.
    """

    def __init__(
        self,
        loop: Loop,
        around: Surroundings,
        own: list[Equation],
        taken: Iterable[Equation] = (),
        reorders: bool = False,
    ) -> None:
        self.loop, self.around, self.reorders = loop, around, reorders
        self.written = tuple(loop.makes)
        self.own = set(own)
        self.taken = set(taken)  # equations that read the loop's results inside the loop
        self.costs: dict[tuple[int, int], float] = {}
        self.stepped: dict[tuple[int, int], Value] = {}
        self.fixed: dict[int, int] = {}
        self.result_costs: dict[tuple[int, int], float] = {}
        self.saved = 0.0

    @functools.cached_property
    def below(self) -> set[int]:
        """Return the values that depend on the loop as written."""
        return self.around.below(self.written)

    def run(self) -> float:
        """Fuse, and return the bytes that are no longer written."""
        self._results()
        self._sources()
        return self.saved

    def _is_private(self, v: int, depth: int = 0) -> bool:
        """Return True if only the loop reads a value, directly or through equations it can fuse."""
        if v in self.around.outputs or depth > MAX_DEPTH:
            return False
        inside = self.own | self.taken
        users = [e for e in self.around.users.get(v, ()) if e not in inside]
        return all(
            len(e.outvals) == 1 and not e.eqn.effects and self._is_private(e.outvals[0], depth + 1)
            for e in users
        )

    def _steps_of(self, v: int, axis: int) -> tuple[Equation, Axes] | None:
        """Return the equation that computes a value, if it can be fused, and its operands' axes."""
        e = self.around.makers.get(v)
        if e is None or e in self.own or v in self.below or not self._is_private(v):
            return None
        axes = stepped_operands(e.eqn, axis)
        return None if axes is None else (e, axes)

    def _cost(self, v: int, axis: int) -> float:
        """Return the bytes that must be stored for all steps to compute one step of v."""
        key = (v, axis)
        if key not in self.costs:
            whole = self.costs[key] = self.around.bytes(v)
            made = self._steps_of(v, axis)
            if made is not None:
                self.costs[key] = min(whole, self._operand_cost(*made))
        return self.costs[key]

    def _operand_cost(self, e: Equation, axes: Axes) -> float:
        total = 0.0
        for u, a in {(u, a) for u, a in zip(e.invals, axes, strict=True) if isinstance(u, int)}:
            total += self._cost(u, a) if a is not None else 0.0
        return total

    def _sources(self) -> None:
        """Compute the sources of the loop inside the loop."""
        loop = self.loop
        for v, source in list(loop.sources.items()):
            whole, axis = source.start == 0 and source.step == 1, source.axis
            if not (whole and isinstance(source.value, int)):
                continue
            size = self.around.bytes(source.value)
            if self._cost(source.value, axis) >= size:
                continue
            new = self._step(source.value, axis)
            if new == v:
                continue
            self.saved += size
            del loop.sources[v]
            if not source.kept:
                new = loop.graft(lambda x, k=axis: lax.squeeze(x, (k,)), [new])
            loop.substitute({v: new})
            loop.body.equations = in_order(loop.body.equations)

    def _step(self, v: Value, axis: int) -> Value:
        """Return the body value of one step of an outer value; the stepped axis keeps size one."""
        if not isinstance(v, int):
            return v
        found = self.stepped.get((v, axis))
        if found is not None:
            return found
        made = self._steps_of(v, axis)
        if made is not None and self._operand_cost(*made) < self.around.bytes(v):
            new = self._grafted(*made, axis)
        else:
            aval = self.around.program.avals[v]
            shape = (*aval.shape[:axis], 1, *aval.shape[axis + 1 :])
            new = self.loop.body.new_value(aval.update(shape=shape))
            self.loop.sources[new] = Source(v, axis, kept=True)
        self.stepped[v, axis] = new
        return new

    def _grafted(self, e: Equation, axes: Axes, axis: int) -> Value:
        """Add one step of an equation to the body; return the value of the step."""
        reads = [self._operand(u, a) for u, a in zip(e.invals, axes, strict=True)]
        return self.loop.graft(resized(e.eqn, axis), reads)

    def _operand(self, v: Value, axis: int | None) -> Value:
        if not isinstance(v, int):
            return v
        if axis is not None:
            return self._step(v, axis)
        if v not in self.fixed:
            self.fixed[v] = self.loop.body.new_value(self.around.program.avals[v])
            self.loop.consts[self.fixed[v]] = v
        return self.fixed[v]

    def _results(self) -> None:
        """Fuse the equations that only read results step by step."""
        loop = self.loop
        found = [
            (k, loop.makes[k], 0 if kind == "ys" else what[1])
            for k, (kind, what) in enumerate(loop.results)
            if kind == "ys" or (kind == "kept" and not what[2])
        ]
        for _, v, axis in found:  # in a first loop, so that each knows which values are private
            if self._goes_on(v, axis):
                self._mark(v, axis)
        self.result_costs.clear()
        for k, v, axis in found:  # one by one: a later user may need an earlier one inside
            if not self._goes_on(v, axis):
                continue
            self._mark(v, axis)
            kind, what = loop.results[k]
            y = loop.ys[what if kind == "ys" else what[0]]
            if kind == "ys":
                y = loop.graft(lambda x: lax.expand_dims(x, (0,)), [y])
            self.saved += self.around.bytes(v)
            self.stepped[v, axis] = y
            loop.results[k] = ("dropped", None)
            self._read_inside(v, axis)
        drop_results(loop)

    def _user_axis(self, e: Equation, v: int, axis: int) -> int | None:
        """Return the axis of a user's result that corresponds to a stacked result's axis."""
        if e in self.own or e.eqn.effects:
            return None
        place = [k for k, u in enumerate(e.invals) if u == v]
        found = {stepped_result(e.eqn, k, axis) for k in place}
        out = found.pop()
        if found or out is None:
            return None
        others = [u for u in e.invals if isinstance(u, int) and u != v]
        if any(u in self.below and not self._is_taken(u, e, out) for u in others):
            return None
        return out

    def _is_taken(self, u: int, e: Equation, out: int) -> bool:
        """Return True if the loop computes another operand and its entry is in the body."""
        axes = stepped_operands(e.eqn, out)
        k = e.invals.index(u)
        return axes is not None and axes[k] is not None and (u, axes[k]) in self.stepped

    def _result_cost(self, v: int, axis: int, depth: int = 0) -> float:
        """Return the bytes written for all steps if the users of v are fused."""
        found = self.result_costs.get((v, axis))
        if found is not None:
            return found
        whole = total = self.around.bytes(v)
        if v not in self.around.outputs and depth < MAX_DEPTH:
            users = self.around.users.get(v, ())
            sums = [e for e in users if self._is_total(e, axis)]
            outs = [(e, self._user_axis(e, v, axis)) for e in users if e not in sums]
            if all(out is not None for _, out in outs):
                costs = [self._result_cost(e.outvals[0], out or 0, depth + 1) for e, out in outs]
                total = min(whole, sum(costs) + sum(self.around.bytes(e.outvals[0]) for e in sums))
        self.result_costs[v, axis] = total
        return total

    def _mark(self, v: int, axis: int) -> None:
        """Mark the users of a result as fused, and their users in turn."""
        for e in self.around.users[v]:
            self.taken.add(e)
            out = None if self._is_total(e, axis) else self._user_axis(e, v, axis)
            if out is not None and self._goes_on(e.outvals[0], out):
                self._mark(e.outvals[0], out)

    def _goes_on(self, v: int, axis: int) -> bool:
        """Return True if the users of a value are fused too."""
        return v in self.around.users and self._result_cost(v, axis) < self.around.bytes(v)

    def _is_total(self, e: Equation, axis: int) -> bool:
        """Return True if an equation sums over all steps and may be accumulated in order."""
        if not self.reorders or e.name != "reduce_sum" or e in self.own:
            return False
        dtype = self.around.program.avals[e.outvals[0]].dtype
        return axis in e.eqn.params["axes"] and str(dtype) in EXACT_ENOUGH

    def _add_up(self, e: Equation, v: int, axis: int) -> None:
        """Replace a sum over all steps by a carry."""
        total, loop = e.outvals[0], self.loop
        reduce = lambda x: jax_internals.eval_equation(e.eqn, [x])  # noqa: E731
        part = loop.graft(reduce, [self.stepped[v, axis]])
        aval = self.around.program.avals[total]
        inner = loop.body.new_value(aval)
        zero = jax_internals.Literal(np.zeros((), aval.dtype), aval.update(shape=()))
        loop.carries.append(Carry(inner, zero, loop.graft(lax.add, [inner, part])))
        loop.makes.append(total)
        loop.results.append(("final", len(loop.carries) - 1))

    def _read_inside(self, v: int, axis: int) -> None:
        for e in self.around.users[v]:
            if self._is_total(e, axis):
                self._add_up(e, v, axis)
                continue
            out = self._user_axis(e, v, axis)
            axes = None if out is None else stepped_operands(e.eqn, out)
            assert out is not None and axes is not None
            w = e.outvals[0]
            if (w, out) in self.stepped:
                continue
            made = self.stepped[w, out] = self._grafted(e, axes, out)
            if self._goes_on(w, out):
                self._read_inside(w, out)
            else:
                self.loop.makes.append(w)
                self.loop.results.append(("kept", (len(self.loop.ys), out, False)))
                self.loop.ys.append(made)


def drop_results(loop: Loop) -> None:
    """Remove dropped results; stack only the values that the other results read."""
    kept = [(v, r) for v, r in zip(loop.makes, loop.results, strict=True) if r[0] != "dropped"]
    used: dict[int, int] = {}
    loop.makes, loop.results = [v for v, _ in kept], []
    for _, (kind, what) in kept:
        if kind == "ys":
            what = used.setdefault(what, len(used))
        elif kind in ("stored", "moved", "kept", "at"):
            what = (used.setdefault(what[0], len(used)), *what[1:])
        loop.results.append((kind, what))
    loop.ys = [loop.ys[k] for k in used]


def in_order(equations: list[Equation]) -> list[Equation]:
    """Return equations in dependence order; effects keep their order."""
    makers = makers_of(equations)
    return postorder(equations, lambda e: [makers[v] for v in e.reads if v in makers])


def fused(
    loop: Loop, around: Surroundings, own: list[Equation], device: Device
) -> tuple[Loop, float]:
    """Return a loop with equations fused into a copy of it, and the bytes no longer written.

    The loop itself is returned if fusion saves little. own: equations that it replaces.
    """
    if any(not all(isinstance(d, int) for d in shape_of(v)) for v in loop.eqn.outvars):
        return loop, 0.0
    other = loop.copy()
    saved = Fusion(other, around, own).run()
    return (clean(other), saved) if saved >= device.loops.least_unwritten_bytes else (loop, 0.0)
