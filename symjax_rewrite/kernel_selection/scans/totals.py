"""Running sums of a scan kernel's values, as results of that kernel.

The gradient of a parameter that all steps share, such as the `A` of a selective scan, is a carry
that adds a value of every step. A kernel that computes this value adds it up in registers, so that
it is not written for all steps, and no second loop reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from symjax_rewrite.ir.dataflow import makers_of, numbers
from symjax_rewrite.kernel_selection.scans.loop_parts import CarryPart, LoopParts, LoopValues
from symjax_rewrite.kernel_selection.scans.scan_builder import ScanKernel
from symjax_rewrite.loops.loop import Carry
from symjax_rewrite.pallas_kernels.scan.scan import BACKENDS
from symjax_rewrite.pallas_kernels.scan.spec import readout_axes

ADDITIONS = ("add", "add_any")


@dataclass(frozen=True, slots=True)
class AddedTotal:
    """The end of a running sum: its start, and the total of a value over the steps."""

    carry: Carry
    value: int

    def advance(self, values: LoopValues) -> Any:
        """Return the sum after the last step."""
        alone = replace(values.loop, carries=[self.carry])
        return lax.add(alone.starts(values.read)[0], values.known[self.value])


def with_totals(route: LoopParts) -> LoopParts:
    """Return a loop in parts, with the running sums of values of its kernels in these kernels."""
    parts = list(route.parts)
    for n, part in enumerate(parts):
        value = _summed(route, part)
        for k, other in enumerate(parts[:n]):
            kernel = other.kernel
            if value is None or not isinstance(kernel, ScanKernel) or value not in kernel.read_out:
                continue
            changed, carry = _with_total(kernel, value), route.loop.carries[part.carries[0]]
            if BACKENDS["triton"].supports(changed.spec):
                parts[k] = replace(other, kernel=changed)
                parts[n] = replace(part, before=[], kernel=AddedTotal(carry, value))
    return replace(route, parts=parts)


def _summed(route: LoopParts, part: CarryPart) -> int | None:
    """Return the value that a part adds up, if nothing else reads it or the sums before the end."""
    loop = route.loop
    if len(part.carries) != 1 or part.ys:
        return None
    carry = loop.carries[part.carries[0]]
    e = makers_of(loop.body.equations).get(carry.out) if isinstance(carry.out, int) else None
    if e is None or e.name not in ADDITIONS or carry.inner not in e.reads:
        return None
    rest = [v for v in e.reads if v != carry.inner]
    users = [x for x in loop.body.equations if rest and rest[0] in x.reads]
    is_private = len(rest) == 1 and users == [e] and rest[0] not in numbers(loop.ends)
    return rest[0] if is_private else None


def _with_total(kernel: ScanKernel, value: int) -> ScanKernel:
    """Return a kernel that returns the sum of a value over the steps in place of the value."""
    spec, number = kernel.spec, kernel.read_out.index(value)
    readout = spec.readouts[number]
    axes = tuple(a for a in readout_axes(spec, readout) if a != spec.time)
    readouts = list(spec.readouts)
    readouts[number] = replace(readout, total=True, axes=axes)
    return replace(kernel, spec=replace(spec, readouts=tuple(readouts)))
