"""The construction of a `Report` from a decision: both programs, priced by one model."""

from __future__ import annotations

from symjax_rewrite import jax_internals
from symjax_rewrite.api.program_cost import (
    UNKNOWN,
    Traffic,
    memory,
    program_flops,
    program_traffic,
    temporary_bytes,
)
from symjax_rewrite.api.report import Report, Side
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.ir.flat_program import Program, flatten
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.kernel_selection.folds.fold_price import with_temporaries
from symjax_rewrite.optimizer import Optimiser, Result


def make_report(
    result: Result, optimiser: Optimiser, sides: tuple[ClosedJaxpr, ...] = ()
) -> Report:
    """Return the report of one decision, with both programs priced on the optimiser's device.

    sides: the programs to report; default: the traced and the emitted program.
    """
    before, after = _programs(result, sides)
    device = optimiser.device
    if any(use.taken and use.name == "fold" for use in result.routes):  # as folds are compared
        fresh = temporary_bytes(before[1], device, result.sample)
        device = with_temporaries(device, fresh)
    shown = [_side(*side, result, device) for side in (before, after)]
    if shown[0].seconds is not None:
        shown[0].seconds += result.repeated_s
    return Report(
        before=shown[0],
        after=shown[1],
        rules=sorted(result.rules.values(), key=lambda r: r.name),
        routes=result.routes,
        stop=result.stop,
        time_s=result.time_s,
        plan=result.plan_record(),
        crossovers=result.crossovers,
        sample=result.sample,
    )


def _programs(
    result: Result, sides: tuple[ClosedJaxpr, ...]
) -> tuple[tuple[ClosedJaxpr, Program], tuple[ClosedJaxpr, Program]]:
    """Return the jaxprs to print and the programs to price; in the latter kernels are opaque."""
    if sides:
        first, second = ((side, flatten(side)) for side in sides)
        return first, second
    written = (result.closed, flatten(result.closed))
    if result.program is None:
        return written, written
    emitted = jax_internals.make_avals_jaxpr(result.emit(), result.closed.in_avals)
    return written, (emitted, result.program)


def _side(closed: ClosedJaxpr, program: Program, result: Result, device: Device) -> Side:
    moved: Traffic = UNKNOWN
    if result.finished or not program.equations:
        moved = program_traffic(program, device, result.sample)
    peak, largest = memory(program, device) or (None, None)
    flops = program_flops(program, device)
    return Side(closed, flops, moved.bytes, moved.seconds, peak, largest)
