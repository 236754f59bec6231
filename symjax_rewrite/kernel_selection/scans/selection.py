"""Selection of the kernel of a loop: an affine scan, a scan of matrix states, or a partition."""

from __future__ import annotations

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.kernel_selection.scans.affine_scan import route_differentiated, route_loop
from symjax_rewrite.kernel_selection.scans.carry_partition import split_loop
from symjax_rewrite.kernel_selection.scans.loop_parts import LoopParts
from symjax_rewrite.loops.carry_dependence import groups_of
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.options import Options


def loop_kernel(
    loop: Loop, options: Options, device: Device, gradient: bool = False
) -> tuple[LoopParts | None, str]:
    """Return a kernel for a loop in normal form or None, and the reason."""
    kernels = options.kernels if options.numerics.permits("reassoc") else "off"
    if kernels == "auto" and device.runs_pallas and jax_internals.may_be_partitioned():
        return None, Obstacle.SHARDING("several devices: XLA might gather a scan's operands")
    if gradient:
        return route_differentiated(loop, kernels, device)
    groups = groups_of(loop)
    route, why = route_loop(loop, groups, kernels, device, options.assume)
    if route is not None:
        return route, why
    return split_loop(loop, groups, kernels, device, why, options.assume)
