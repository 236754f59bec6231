"""The construction of a `Report` from a decision: both programs, priced by one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.kernel_selection.folds.fold_price import with_temporaries
from symjax_rewrite.optimizer import Optimiser, Result
from symjax_rewrite.reports.details import Details
from symjax_rewrite.reports.program_cost import (
    UNKNOWN,
    ProgramTerms,
    Sample,
    Traffic,
    at_sample,
    memory,
    program_flops,
    temporary_bytes,
    terms_traffic,
)
from symjax_rewrite.reports.record import Side
from symjax_rewrite.reports.report import Report

Makers = tuple[Callable[[], ClosedJaxpr], Callable[[], ClosedJaxpr]]


def make_report(
    result: Result, optimiser: Optimiser, sides: tuple[ClosedJaxpr, ...] = ()
) -> Report:
    """Return the report of one decision, with both programs priced on the optimiser's device.

    sides: the programs to report; default: the traced and the emitted program.
    """
    makers, (before, after) = _programs(result, sides)
    device = optimiser.device
    if any(use.taken and use.name == "fold" for use in result.routes):  # as folds are compared
        device = with_temporaries(device, temporary_bytes(before, device, result.sample))
    first = _side(makers[0], before, result, device)
    second = first if after is before else _side(makers[1], after, result, device)
    if first.seconds is not None and second.seconds is not None and second is not first:
        first.seconds, second.seconds = _as_decided(first.seconds, second.seconds, result)
    kernels = any(jax_internals.is_replacement(e.eqn) for e in after.t.program.equations)
    if kernels and result.sample:  # a kernel is priced at numbers: both sides are
        for side in (first, second):
            side.flops, side.bytes = (_at(x, result.sample) for x in (side.flops, side.bytes))
    details = Details(result, optimiser, (before, after), device)
    return Report(
        before=first,
        after=second,
        rules=sorted(result.rules.values(), key=lambda r: r.name),
        routes=result.routes,
        stop=result.stop,
        time_s=result.time_s,
        function=details.title(),
        device=optimiser.device.name,
        changes=result.changes,
        passes=result.passes,
        sample=result.sample,
        details=details,
    )


def _programs(
    result: Result, sides: tuple[ClosedJaxpr, ...]
) -> tuple[Makers, tuple[ProgramTerms, ProgramTerms]]:
    """Return the makers of both jaxprs, and both programs to price; in these kernels are opaque."""
    if sides:
        first, second = sides
        terms = ProgramTerms.of(flatten(first)), ProgramTerms.of(flatten(second))
        return (lambda: first, lambda: second), terms
    written = ProgramTerms.of(flatten(result.closed))
    program = result.program
    if program is None:
        return (lambda: result.closed, lambda: result.closed), (written, written)
    return (lambda: result.closed, _emitter(result)), (written, ProgramTerms.of(program))


def _emitter(result: Result) -> Callable[[], ClosedJaxpr]:
    """Return a function that emits the optimised program, with the dtypes of now."""
    precision = jax_internals.precision_now()

    def emitted() -> ClosedJaxpr:
        with precision():
            return result.staged()

    return emitted


def _as_decided(before_s: float, after_s: float, result: Result) -> tuple[float, float]:
    """Return the seconds of both programs, which differ at least as the changes were decided.

    A pass may compare its forms with more than terms count: the time to begin a sum over the
    features of each pair, lookups, fresh memory for all pairwise values at once, layouts, steps of
    loops. Equations that no change computes take the same time in both programs.
    """
    prices = [c.seconds for c in result.changes if c.seconds is not None]
    written_s, changed_s = (sum(side) for side in zip(*prices, strict=True)) if prices else (0, 0)
    if written_s > before_s:
        after_s = max(after_s, changed_s)
        before_s = after_s - changed_s + written_s
    saved_s = written_s - changed_s
    return before_s, min(after_s, before_s - saved_s) if saved_s > 0 else after_s


def _at(amount: Any, sample: Sample) -> float | None:
    return None if amount is None else at_sample(amount, sample)


def _side(
    make: Callable[[], ClosedJaxpr], terms: ProgramTerms, result: Result, device: Device
) -> Side:
    program = terms.t.program
    moved: Traffic = UNKNOWN
    if result.finished or not program.equations:
        moved = terms_traffic(terms, device, result.sample)
    peak, largest = memory(program, device, result.sample)
    flops = program_flops(program, device)
    return Side(flops, moved.bytes, moved.seconds, peak, largest, moved.launches, make)
