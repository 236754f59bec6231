"""Optimisation of the bodies of loops, branches and remat, each as a program of its own.

A body is optimised with all passes, and the equation that holds it gets the new body.

    cond(p, lambda: x @ (W + A @ B), …)  →  cond(p, lambda: x @ W + (x @ A) @ B, …)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Found, Refusal, Replacement
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import equation_seconds
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import VIEWS
from symjax_rewrite.loops.loop_reading import LOOPS
from symjax_rewrite.loops.motion import Motion, is_hoisted, moved_seconds
from symjax_rewrite.loops.normalization import normal_loop
from symjax_rewrite.loops.sunk_operands import Sinkable, with_sunk_operands
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.rule import FUSION


class Bodies:
    """Optimises the bodies of equations."""

    name = "bodies"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the equations that have a body with a cheaper form."""
        context.loops.update((id(e.eqn), e.eqn) for e in program.equations)
        sinkable = Sinkable(program, context.device.loops.least_unwritten_bytes)
        fuses = context.has(FUSION)
        for e in program.equations:
            spots = jax_internals.optimisable_bodies(e.eqn)
            if not spots:
                continue
            inside = _with_kernels(e, sinkable, context) if fuses else None
            if inside is not None:
                yield inside
                continue
            if id(e.eqn) in context.light_loops and not context.rules.added:
                continue
            eqn, bodies = e.eqn, []
            for spot in spots:
                body = context.optimise(spot.body)
                if not body.taken:
                    continue
                replaced = spot.replace(eqn, body.staged())
                if replaced is not None and _slows_steps(e, replaced, context.device):
                    reason = "XLA takes work out of the loop as written, and not out of this form"
                    yield Refusal(self.name, Obstacle.COST(reason), e.where())
                elif replaced is not None:
                    eqn = replaced
                    bodies.append((body, spot.times))
            if bodies:
                yield _candidate(Equation(eqn, e.invals, e.outvals), bodies)


def _candidate(e: Equation, bodies: Sequence[tuple[Any, int]]) -> Candidate:
    """Return an equation with optimised bodies in place of the equation as written."""
    run = lambda *values: jax_internals.eval_equation(e.eqn, values)  # noqa: E731
    return Candidate(
        "body", (Replacement(e.outvals, e.invals, run, source=e.eqn),), bodies=tuple(bodies)
    )


def _with_kernels(e: Equation, sinkable: Sinkable, context: Context) -> Candidate | None:
    """Return an equation that computes some operands itself, where its body then has a fold.

    The fold then evaluates masks and biases in its kernel, and reads no array of all pairs.
    """
    changed = with_sunk_operands(e, sinkable)
    if changed is None:
        return None
    (spot,) = jax_internals.optimisable_bodies(changed.eqn)
    body = context.optimise(spot.body)
    if not any(use.taken and use.name == "fold" for use in body.routes):
        return None
    eqn = spot.replace(changed.eqn, body.staged())
    return None if eqn is None else _candidate(replace(changed, eqn=eqn), [(body, spot.times)])


def _slows_steps(e: Equation, replaced: jax_internals.JaxprEqn, device: Device) -> bool:
    """Return True for a loop that is slower with another body.

    XLA computes invariants of the loop once, before it, where the body counts them in every step.
    It reads views where they are.
    """
    before = normal_loop(e) if e.name in LOOPS and device.loops.hoists_invariants else None
    if before is None:
        return False
    level = before.levels()
    still = [e for e in before.body.equations if is_hoisted(e, level) and e.name not in VIEWS]
    before_s = moved_seconds(before, Motion(), device)
    in_steps = before.steps * sum(equation_seconds(e.eqn, device, in_step=True) for e in still)
    if not margins.gains_share(in_steps, before_s, "loop", device):
        return False
    after = normal_loop(Equation(replaced, e.invals, e.outvals))
    if after is None or any(jax_internals.bodies(e.eqn) for e in after.body.equations):
        return False  # kernels are priced by their own models
    return not margins.pays(before_s, moved_seconds(after, Motion(), device), "rewrite", device)
