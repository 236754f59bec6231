"""Loops whose steps do not depend on each other, run for all steps at once.

A loop that only stacks results of its steps (`lax.map`), or only combines them in its carries
(sums, extrema), is the same operations with one more axis. All passes then run on these: a step's
distances to some points become a fold over pairs, its outer products one matrix product. That form
is taken if it is cheaper than the loop, and holds no more at once than the loop reads and returns:
the loop may have been written to save memory.

    for a in x: y ← exp(-Σ_k (a_k - z_jk)²) @ w   →   exp(-Σ_k (x_ik - z_jk)²) @ w, as one fold
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import (
    aval_bytes,
    aval_size,
    equation_seconds,
    runs_apart,
    shape_of,
)
from symjax_rewrite.cost.library_calls import LEAST_ELEMENTS, REDUCED
from symjax_rewrite.cost.placed_products import layout_seconds
from symjax_rewrite.cost.temporaries import fresh_seconds, temporaries_of
from symjax_rewrite.cost.term_cost import Cost, CostModel
from symjax_rewrite.ir.dataflow import dependents, node_of, numbers
from symjax_rewrite.ir.flat_program import Equation, Program, flatten
from symjax_rewrite.ir.term import NATIVE
from symjax_rewrite.loops.changes import candidate, part_of, refused
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.loop_reading import LOOPS, read_loop, step_of
from symjax_rewrite.loops.monoid_carries import MOST_EQUATIONS
from symjax_rewrite.loops.normalization import clean
from symjax_rewrite.loops.stream_folds import StreamFold, all_at_once
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.rule import BATCHING


class BatchedLoops:
    """Runs the steps of a loop at once, where they are cheaper as operations on arrays."""

    name = "batched_loops"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the loops that are cheaper with all steps at once."""
        if not (context.has(BATCHING) and context.reorders()):
            return
        forced = context.options.kernels not in ("auto", "off")  # scans run as kernels
        for e in program.equations:
            is_new = e.name in LOOPS and id(e.eqn) not in context.loops
            loop = read_loop(e) if is_new else None
            if loop is None or loop.condition is not None or not _may_fold(loop):
                continue
            whole = all_at_once(clean(loop)) if _is_plain(loop) else None
            if whole is None or whole.selections:  # those have prices of their own
                continue
            if not (forced and loop.carries):
                yield _found(e, whole, program, context)


def _may_fold(loop: Loop) -> bool:
    """Return False for a loop whose steps work on its carries, beside counters, too long."""
    moving = [c.inner for c in loop.carries if step_of(loop.body, c.inner, c.out) is None]
    return len(dependents(loop.body.equations, moving)) <= MOST_EQUATIONS


def _is_plain(loop: Loop) -> bool:
    """Return True if the sizes of a loop are numbers, and no value is a random key."""
    avals = [loop.body.avals[v] for v in (*loop.sources, *numbers(loop.ends))]
    avals += [v.aval for e in loop.body.equations for v in (*e.eqn.invars, *e.eqn.outvars)]
    sizes = (n for a in avals for n in getattr(a, "shape", ()))
    return all(isinstance(n, int) for n in sizes) and not any(map(jax_internals.is_key, avals))


def _found(e: Equation, whole: StreamFold, program: Program, context: Context) -> Found:
    """Return a loop with all steps at once, as all passes leave them, or why it stays a loop."""
    loop, device = whole.loop, context.device
    loop_s = _loop_seconds(loop, context)
    reason = Obstacle.COST("its steps at once are predicted no faster")
    if not margins.pays(loop_s, device.loops.batched_s, "batched", device):
        return refused(reason, e.eqn, name="loop")
    part = part_of(e.eqn, loop.outer_values(), loop.makes, whole.run)
    avals = [program.avals[v] for v in numbers(part.reads)]
    closed = jax_internals.make_avals_jaxpr(part.fun, avals)
    body = context.optimise(jax_internals.without_dead(closed))
    made = flatten(body.closed) if body.program is None else body.program
    seconds = loop_s, _batched_seconds(made, context)
    if not margins.pays(*seconds, "batched", device):
        return refused(reason, e.eqn, seconds, name="loop")
    terms = context.terms(made)
    held = temporaries_of(terms.t, terms.need, terms.model).bytes()
    if held > max(loop.outside_bytes, device.loops.least_remade_bytes):
        reason = "its steps stay a loop: arrays of all steps would be too large"
        return refused(Obstacle.MEMORY(reason), e.eqn, seconds, name="loop")
    run = lambda *arrays: jax_internals.eval_jaxpr(body.staged(), *arrays)  # noqa: E731
    reason = f"{loop.length} steps that do not depend on each other run at once"
    part, bodies = replace(part, fun=run), ((body, 1),)
    return candidate(part, names=[BATCHING], reason=reason, seconds=seconds, bodies=bodies)


def _loop_seconds(loop: Loop, context: Context) -> float:
    """Return predicted seconds of a loop as written, by the terms of a step.

    XLA computes a product of a few numbers beside the other operations of a step: it costs nothing.
    """
    device, facts, level = context.device, context.device.loops, loop.levels()
    own = [e for e in loop.body.equations if any(level[v] > 0 for v in e.outvals)]
    own = [e for e in own if not (e.name == "dot_general" and _bytes(e) <= facts.few_bytes)]
    outputs = numbers(loop.ends)
    reads = {v for e in own for v in e.reads}.union(outputs).difference(*[e.outvals for e in own])
    step = replace(loop.body, equations=own, inputs=sorted(reads), outputs=outputs)
    cost = _cost(step, context, _of_steps(own, device))
    each = cost.seconds + facts.serial_s * sum(_serial_size(e, facts.serial_row) for e in own)
    if not any(runs_apart(e.eqn) for e in own):
        each -= device.inlined_seconds(cost.launches, cost.bytes)
    results = [v.aval for v in loop.eqn.outvars]
    return loop.steps * each + sum(device.page_seconds(aval_bytes(a)) for a in results)


def _batched_seconds(program: Program, context: Context) -> float:
    """Return predicted seconds of a program without loops, with its temporaries and kernels."""
    device, terms = context.device, context.terms(program)
    fresh_s = fresh_seconds(terms.t, terms.need, terms.model, device)
    kernels_s = _cost(program, context, device).seconds + layout_seconds(program, device)
    return device.loops.batched_s + kernels_s + fresh_s


def _serial_size(e: Equation, least_row: int) -> float:
    """Return the elements that an equation of a step reduces one after another, in long rows.

    The library computes no reduction of few elements (`library_calls`). XLA's loop does, over short
    rows for many of them at once.
    """
    if e.name not in REDUCED:
        return 0.0
    shape, axes = shape_of(e.eqn.invars[0]), e.eqn.params["axes"]
    row, size = math.prod(shape[k] for k in axes), math.prod(shape)
    is_serial = len(shape) - 1 in axes and row >= least_row and size < LEAST_ELEMENTS
    return size if is_serial else 0.0


def _bytes(e: Equation) -> float:
    """Return the bytes of the operands and results of an equation."""
    return sum(aval_bytes(v.aval) for v in (*e.eqn.invars, *e.eqn.outvars))


def _of_steps(equations: Iterable[Equation], device: Device) -> Device:
    """Return the profile of steps of some equations.

    The library computes no reduction of few elements: a fused loop does, whose rows may be short.
    """
    sizes = [aval_size(e.eqn.invars[0].aval) for e in equations if e.name in REDUCED]
    if max(sizes, default=LEAST_ELEMENTS) >= LEAST_ELEMENTS:
        return device.in_step()
    rate = device.loops.small_sums * device.folds.fused_steps_per_s
    folds = replace(device.folds, fused_steps_per_s=rate)
    return replace(device.in_step(), fusions=None, folds=folds)


def _cost(program: Program, context: Context, device: Device) -> Cost:
    """Return the cost of a program with the equations that no term describes."""
    terms = context.terms(program)
    g, need = terms.t.graph, terms.need
    choice = {c: node_of(g, c) for c in need.order}
    natives = [c for c in need.order if choice[c].op == NATIVE]
    roots = need.outside.union(a.cls for c in natives for a in choice[c].args)
    memory = replace(device.memory, kept_bytes=math.inf)  # fresh memory is priced as a whole
    model = CostModel(replace(device, memory=memory), terms.model.at, terms=terms.t, is_whole=True)
    cost = model.evaluate(g, choice, tuple(sorted(roots)))
    makers = {e for c in natives if (e := terms.t.maker_of(c)) is not None}
    others_s = sum(equation_seconds(e.eqn, device) for e in makers)
    return replace(cost, seconds=cost.seconds + others_s)
