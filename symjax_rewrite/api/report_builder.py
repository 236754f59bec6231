"""From what the optimiser decided to a `Report` (a face)."""

from __future__ import annotations

from symjax_rewrite import jax_internals
from symjax_rewrite.api.program_cost import UNKNOWN, Traffic, flops, memory, traffic
from symjax_rewrite.api.report import Report, Side
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.optimizer import Optimiser, Result

KERNELS = frozenset({"fold", "norm_linear", "scan", "selection", "sparse"})


def make_report(
    result: Result, optimiser: Optimiser, sides: tuple[ClosedJaxpr, ...] = ()
) -> Report:
    """The report of one decision, with both programs priced.

    `sides` are the programs to show, where they are not the traced and the emitted one.
    """
    if not sides:
        emitted = result.closed
        if result.taken:
            emitted = jax_internals.make_avals_jaxpr(result.emit(), result.closed.in_avals)
        sides = (result.closed, emitted)
    before = _side(sides[0], result, optimiser)
    after = _side(sides[1], result, optimiser)
    if before.seconds is not None:
        before.seconds += result.repeated_s
    if any(use.taken and use.name in KERNELS for use in result.routes):
        after.seconds = None  # the kernels' own models price what they route, not the program
    return Report(
        before=before,
        after=after,
        rules=sorted(result.rules.values(), key=lambda r: r.name),
        routes=result.routes,
        stop=result.stop,
        time_s=result.time_s,
        plan=result.plan_record(),
        crossovers=result.crossovers,
        sample=result.sample,
    )


def _side(closed: ClosedJaxpr, result: Result, optimiser: Optimiser) -> Side:
    """One program and its price; a program that was too large to look at has none."""
    device = optimiser.device
    moved: Traffic = UNKNOWN
    if result.finished or not closed.jaxpr.eqns:
        moved = traffic(closed, device, result.sample)
    peak, largest = memory(closed, device) or (None, None)
    return Side(closed, flops(closed, device), moved.bytes, moved.seconds, peak, largest)
