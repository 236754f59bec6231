"""Loops of a program, each in the cheapest form found (a pass over passes).

The result is another jaxpr of the same inputs and outputs, so that what has left a loop is an
ordinary part of the program to everything after. What is worth moving depends on the order of
products in the body (`(a·b)·h` with a small h): the body as written and the optimised body are
both tried, and priced whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from symjax_rewrite import compat
from symjax_rewrite.compat import ClosedJaxpr, JaxprEqn
from symjax_rewrite.device import Device
from symjax_rewrite.equation_cost import SYMBOLIC, equation_seconds
from symjax_rewrite.loop_cleaning import clean
from symjax_rewrite.loop_motion import Motion, find_motion, run_moved
from symjax_rewrite.loops import Loop, Read, read_loop
from symjax_rewrite.trace import Equation, Program, Value


@dataclass(slots=True)
class Change:
    """A loop that is written differently.

    reads: program values it needs. makes: program values it gives, in order. run: how.
    """

    eqn: JaxprEqn
    reads: list[int]
    makes: list[int]
    run: Callable[[Read], Sequence[Any]]
    name: str = "loop_invariant"


@dataclass(slots=True)
class Loops:
    """What was decided about the loops of one program."""

    changes: list[Change] = field(default_factory=list)
    refused: list[tuple[str, JaxprEqn]] = field(default_factory=list)


def has_loops(closed: ClosedJaxpr) -> bool:
    """Whether a program has loops of its own, calls looked into."""
    return any(compat.has_primitive(closed, name) for name in ("scan", "while"))


OptimiseBody = Callable[[ClosedJaxpr], ClosedJaxpr | None]


def improve_loops(
    program: Program, device: Device, reorders: bool, optimise: OptimiseBody
) -> Loops:
    """Find the loops of a program that have a cheaper form.

    Args:
        program: the program.
        device: where it runs.
        reorders: whether sums may be rounded in another order.
        optimise: gives the optimised form of a body, or None where it stays.
    """
    found = Loops()
    for e in program.equations:
        loop = read_loop(e)
        if loop is None:
            continue
        if loop.condition is None:
            loop = clean(loop)
        motion = find_motion(loop, device, reorders)
        found.refused += [(reason, e.eqn) for reason in dict.fromkeys(motion.refused)]
        if not motion.any:
            continue
        loop, motion = _best_order(e, loop, motion, device, reorders, optimise)
        if motion.any:
            found.changes.append(_change(e, loop, motion))
    return found


def _best_order(
    e: Equation,
    loop: Loop,
    motion: Motion,
    device: Device,
    reorders: bool,
    optimise: OptimiseBody,
) -> tuple[Loop, Motion]:
    """The body as written, or optimised before anything leaves it: whichever is cheaper whole."""
    spots = compat.optimisable_bodies(e.eqn)
    if not reorders or len(spots) != 1:
        return loop, motion
    body = optimise(spots[0].body)
    eqn = None if body is None else spots[0].replace(e.eqn, body)
    other = None if eqn is None else read_loop(Equation(eqn, e.invals, e.outvals))
    if other is None:
        return loop, motion
    if other.condition is None:
        other = clean(other)
    moved = find_motion(other, device, reorders)
    if _seconds(other, moved, device) < _seconds(loop, motion, device):
        return other, moved
    return loop, motion


def _seconds(loop: Loop, motion: Motion, device: Device) -> float:
    steps = loop.length if isinstance(loop.length, int) else SYMBOLIC
    level = loop.levels()
    total = sum(equation_seconds(e.eqn, device) for e in motion.once)
    for e in (*motion.before, *motion.after):
        moving = [k for k, v in enumerate(e.invals) if isinstance(v, int) and level[v] > 0]
        total += equation_seconds(e.eqn, device, steps, tuple(moving))
    gone = {id(e) for e in (*motion.once, *motion.before, *motion.after)}
    rest = [e for e in loop.body.equations if id(e) not in gone]
    return total + steps * sum(equation_seconds(e.eqn, device) for e in rest)


def _change(e: Equation, loop: Loop, motion: Motion) -> Change:
    reads = [v for v in loop.outer_values() if isinstance(v, int)]
    name = "loop_invariant" if motion.once else "loop_batching"
    return Change(e.eqn, reads, list(e.outvals), lambda read: run_moved(loop, motion, read), name)


def rewritten(program: Program, changes: list[Change]) -> ClosedJaxpr:
    """The program with its loops changed, as a jaxpr of the same inputs and outputs."""

    def run(*args: Any) -> list[Any]:
        return _Replay(program, changes).run(args)

    return compat.make_avals_jaxpr(run, program.closed.in_avals)


class _Replay:
    """Stages a program out again, with some values made otherwise; what nothing needs is left."""

    def __init__(self, program: Program, changes: list[Change]) -> None:
        self.program = program
        self.env: dict[int, Any] = dict(program.consts)
        self.makers: dict[int, Equation | Change] = {}
        for e in program.equations:
            self.makers.update(dict.fromkeys(e.outvals, e))
        for change in changes:
            self.makers.update(dict.fromkeys(change.makes, change))

    def run(self, args: Sequence[Any]) -> list[Any]:
        self.env.update(zip(self.program.inputs, args, strict=True))
        for e in self.program.equations:
            if e.eqn.effects and not (e.outvals and e.outvals[0] in self.env):
                self._make(self.makers[e.outvals[0]] if e.outvals else e)
        outs = []
        for v in self.program.outputs:
            value = self.value(v)
            aval = self.program.avals[v] if isinstance(v, int) else v.aval
            outs.append(compat.with_aval(value, aval))
        return outs

    def value(self, v: Value) -> Any:
        """A program value; what it needs is made first."""
        if not isinstance(v, int):
            return v.val
        if v not in self.env:
            self._make(self.makers[v])
        return self.env[v]

    def _make(self, last: Equation | Change) -> None:
        stack = [last]
        while stack:
            maker = stack[-1]
            reads = maker.reads if isinstance(maker, Change) else maker.invals
            missing = [v for v in reads if isinstance(v, int) and v not in self.env]
            if missing:
                stack.extend(self.makers[v] for v in missing)
                continue
            stack.pop()
            makes = maker.makes if isinstance(maker, Change) else maker.outvals
            if makes and makes[0] in self.env:
                continue
            if isinstance(maker, Change):
                outs = maker.run(self.value)
            else:
                outs = compat.eval_equation(maker.eqn, [self.value(v) for v in maker.invals])
            self.env.update(zip(makes, outs, strict=True))
