"""The kernels that XLA's CPU compiler makes of a step of a loop.

Up to a number of kernels (`LoopFacts.sequential_kernels`) XLA runs a step one kernel after another;
steps of more kernels are scheduled, which takes longer than a small kernel
(experiments/performance_fuzz/laws.py). May import `loop`.
"""

from __future__ import annotations

import math

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, runs_apart, shape_of
from symjax_rewrite.cost.library_calls import REDUCED, WHOLE_ROW
from symjax_rewrite.ir.dataflow import makers_of, numbers
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.loops.loop import Loop

READ_IN_PLACE = ELEMENTWISE | VIEWS | REDUCED | {"slice", "concatenate", "iota", "pad", "rev"}


def step_kernels(loop: Loop) -> int:
    """Return about the number of kernels of a step, beside the two of its counter.

    They are those of its products, results and carries. A reduction of long rows is cut in pieces,
    so that its operand is stored. XLA moves loop-invariant values out.
    """
    makers, level = makers_of(loop.body.equations), loop.levels()

    def stored(v: Value) -> list[int]:
        """Return the value that is stored where `v` is read, if a step computes it."""
        while isinstance(v, int) and v in makers and makers[v].name in VIEWS and makers[v].reads:
            v = makers[v].reads[0]
        is_made = isinstance(v, int) and (v in loop.sources or (v in makers and level[v] > 0))
        return numbers([v]) if is_made else []

    written: set[int] = set()
    for e in loop.body.equations:
        if any(level[v] > 0 for v in e.outvals) and _is_alone(e):
            written.update(e.outvals[:1], *map(stored, e.reads))
    for c in loop.carries:
        written.update(v for v in stored(c.out) if v in makers)
    return len(written) + len(loop.ys)


def _is_alone(e: Equation) -> bool:
    """Return True for an equation that is not computed in the kernel of its reader."""
    if e.name not in REDUCED:
        return e.name not in READ_IN_PLACE
    rows = [shape_of(e.eqn.invars[0])[k] for k in e.eqn.params["axes"]]
    return not all(isinstance(n, int) for n in rows) or math.prod(rows) > WHOLE_ROW


def fixed_seconds(loop: Loop, device: Device) -> float:
    """Return the seconds of all steps beside the arithmetic of their equations.

    A result that is also the next state is written by the kernel of the state.
    """
    facts, avals = device.loops, loop.body.avals
    states, results = [c.out for c in loop.carries], numbers(loop.ys)
    kernels = step_kernels(loop) - sum(v in states for v in results)
    stacked = sum(aval_bytes(avals[v]) for v in (*loop.sources, *results))
    each = kernels * facts.step_s + stacked / device.bytes_per_s
    if not any(runs_apart(e.eqn) for e in loop.body.equations):
        # XLA counts a stored result twice: what is written, and the place for it.
        moved = [*loop.consts, *results, *states, *[c.inner for c in loop.carries]]
        step_bytes = stacked + sum(aval_bytes(avals[v]) for v in numbers(moved))
        each -= device.inlined_seconds(kernels, step_bytes)
    fresh_s = device.page_seconds(loop.steps * sum(aval_bytes(avals[v]) for v in results))
    return (
        loop.steps * (each + facts.kernel_operation_s) + fresh_s + scheduling_seconds(loop, device)
    )


def scheduling_seconds(loop: Loop, device: Device) -> float:
    """Return the seconds in which the steps of a loop are scheduled, beside their kernels."""
    facts = device.loops
    many = facts.scheduled_s and step_kernels(loop) > facts.sequential_kernels
    return loop.steps * facts.scheduled_s if many else 0.0
