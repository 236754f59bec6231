"""Work that leaves a loop: run once, before all steps or after all steps, and its price.

`hoisting` decides which operations leave. A carry that only accumulates products of every step,
such as the gradient of a weight, is one product with the steps among its summed indices. The
accumulator is then not read and written step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import equation_seconds
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.replacement import Read
from symjax_rewrite.loops.loop import Loop, get, run_equations, stage


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The update carry ← carry + views(product).

    carry: its number. product: a `dot_general` of two values of the step. views: the layout
    equations after the product, in order; they commute with sums.
    """

    carry: int
    product: Equation
    views: tuple[Equation, ...]
    add: Equation

    @property
    def equations(self) -> tuple[Equation, ...]:
        """Return the equations of a step that it replaces, in order."""
        return self.product, *self.views, self.add

    def total(self, steps: dict[int, Any], start: Any) -> Any:
        """Return the carry after the last step, from the stacked operands of the product."""
        e = self.product
        params = dict(e.eqn.params)
        (left, right), (left_batch, right_batch) = params["dimension_numbers"]
        up = lambda axes: tuple(i + 1 for i in axes)  # noqa: E731
        operands = [get(steps, v) for v in e.invals]
        contract = ((0, *up(left)), (0, *up(right)))
        if not left_batch and left == right == tuple(range(len(left))):
            operands = [_rows_joined(x, len(left) + 1) for x in operands]
            contract = ((0,), (0,))
        params["dimension_numbers"] = (contract, (up(left_batch), up(right_batch)))
        (value,) = jax_internals.eval_equation(e.eqn, operands, params)
        for view in self.views:
            (value,) = jax_internals.eval_equation(view.eqn, [value, *view.invals[1:]])
        return lax.add(start, value)


def _rows_joined(x: Any, count: int) -> Any:
    """Return an array with its first `count` axes as one.

    XLA's CPU backend copies the operands of a product that sums over several axes if a
    transposition follows it: the product then takes twice as long.
    """
    return lax.reshape(x, (math.prod(x.shape[:count]), *x.shape[count:]))


@dataclass(slots=True)
class Motion:
    """The equations that leave a loop: run once, before it for all steps, and after it.

    sums: carries that only accumulate products. refused: reasons why an expensive equation stays.
    """

    once: list[Equation] = field(default_factory=list)
    before: list[Equation] = field(default_factory=list)
    after: list[Equation] = field(default_factory=list)
    sums: list[Accumulation] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Return True if any equation leaves the loop."""
        return bool(self.once or self.before or self.after or self.sums)

    def rest(self, loop: Loop) -> list[Equation]:
        """Return the equations of a loop that stay in it."""
        gone = {*self.once, *self.before, *self.after}
        gone.update(e for s in self.sums for e in s.equations)
        return [e for e in loop.body.equations if e not in gone]


def run_moved(loop: Loop, motion: Motion, read: Read) -> list[Any]:
    """Stage out the equations before a loop, the rest of the loop, and the equations after it."""
    known, steps = loop.constants(read), loop.stacks(read)
    with jax_internals.equation_scope(loop.eqn):
        run_equations(motion.once, known)
        steps.update(all_steps(motion.before, known, steps))
    late = {v for e in motion.after for v in e.outvals}
    outside = (*motion.after, *[s.product for s in motion.sums])
    reads = {v for e in outside for v in e.reads} - late
    wanted = [v for v in dict.fromkeys([*numbers(loop.ys), *sorted(reads)]) if v not in late]
    made = [v for v in wanted if v not in steps and (v not in known or v in loop.ys)]
    literals = [v for v in loop.ys if not isinstance(v, int)]
    summed = {s.carry for s in motion.sums}
    carries = [c for k, c in enumerate(loop.carries) if k not in summed]
    body = replace(loop.body, equations=motion.rest(loop))
    inner = replace(loop, body=body, ys=[*made, *literals], carries=carries)
    uses = inner.uses()
    finals, ys = stage(inner, known, {v: x for v, x in steps.items() if v in uses}, read)
    steps.update(zip(made, ys, strict=False))
    constants = iter(ys[len(made) :])
    with jax_internals.equation_scope(loop.eqn):
        steps.update(all_steps(motion.after, known, steps))
        for s in motion.sums:  # in the order of their carries, so that each gets its position
            finals.insert(s.carry, s.total(steps, read(loop.carries[s.carry].start)))
    stacked = [steps[v] if isinstance(v, int) else next(constants) for v in loop.ys]
    return loop.finish(finals, stacked, read)


def all_steps(
    equations: list[Equation], known: dict[int, Any], steps: dict[int, Any]
) -> dict[int, Any]:
    """Return the stacked results of equations for all steps at once."""
    if not equations:
        return {}
    reads = {v for e in equations for v in e.invals if isinstance(v, int)}
    given = [v for v in steps if v in reads]
    made = [v for e in equations for v in e.outvals]

    def one(*values: Any) -> list[Any]:
        env = {**known, **dict(zip(given, values, strict=True))}
        for e in equations:
            if e.name == "dot_general" and e.invals[0] in known:
                env[e.outvals[0]] = _weights_last(e, *[get(env, v) for v in e.invals])
            else:
                run_equations([e], env)
        return [get(env, v) for v in made]

    stacked = jax.vmap(one)(*[steps[v] for v in given])
    return dict(zip(made, stacked, strict=True))


def _weights_last(e: Equation, weights: Any, moving: Any) -> Any:
    """Return a product with exchanged operands, so that the steps are its first axis unmoved."""
    params = dict(e.eqn.params)
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    params["dimension_numbers"] = ((right, left), (right_batch, left_batch))
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    (out,) = jax_internals.eval_equation(e.eqn, [moving, weights], params)
    batch, free = len(left_batch), moving.ndim - len(right_batch) - len(right)
    with jax_internals.equation_scope(e.eqn):
        order = (*range(batch), *range(batch + free, out.ndim), *range(batch, batch + free))
        return lax.transpose(out, order)


def moved_seconds(loop: Loop, motion: Motion, device: Device, steps: int | None = None) -> float:
    """Return predicted seconds of a loop and of the equations that leave it.

    steps: their number; default: the loop's own.
    """
    steps = loop.steps if steps is None else steps
    level = loop.levels()
    total = sum(equation_seconds(e.eqn, device) for e in motion.once)
    for e in (*motion.before, *motion.after):
        total += seconds_at_once(e, steps, level, device)
    for s in motion.sums:
        total += equation_seconds(s.product.eqn, device, steps, (0, 1), summed=True)
    for e in motion.rest(loop):
        if device.loops.hoists_invariants and is_hoisted(e, level):
            total += equation_seconds(e.eqn, device)
        else:
            total += steps * equation_seconds(e.eqn, device, in_step=True)
    return total


def is_hoisted(e: Equation, level: dict[int, int]) -> bool:
    """Return True for a loop-invariant equation that XLA moves before the loop itself."""
    return all(level[v] == 0 for v in e.outvals) and not jax_internals.bodies(e.eqn)


def seconds_at_once(e: Equation, steps: int, level: dict[int, int], device: Device) -> float:
    """Return the seconds of an equation for all steps at once."""
    moving = [k for k, v in enumerate(e.invals) if isinstance(v, int) and level[v] > 0]
    return equation_seconds(e.eqn, device, steps, tuple(moving))
