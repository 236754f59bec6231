"""Selection of the kernel of a loop: an affine scan, a scan of matrix states, or a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.kernel_selection.scans.affine_scan import remade_scan, scan_of
from symjax_rewrite.kernel_selection.scans.carry_partition import Partition
from symjax_rewrite.kernel_selection.scans.loop_parts import LoopParts
from symjax_rewrite.kernel_selection.scans.matrix_scan import matrices_of
from symjax_rewrite.kernel_selection.scans.scan_builder import BY_ENTRY, ScanKernel, is_equated
from symjax_rewrite.kernel_selection.scans.totals import with_totals
from symjax_rewrite.loops.carry_dependence import MAX_PLUS, NAMES, Group, describe, groups_of
from symjax_rewrite.loops.loop import Loop, Source
from symjax_rewrite.obstacles import Obstacle, obstacle_of
from symjax_rewrite.options import Options

MAX_PARTS = 8

Kernel = tuple[LoopParts | None, str]  # a loop in parts, or the reason that it stays


def loop_kernel(loop: Loop, options: Options, device: Device, gradient: bool = False) -> Kernel:
    """Return a kernel for a loop in normal form that counts its steps or None, and the reason.

    gradient: True for a loop that is differentiated in reverse mode.
    """
    kernels = options.kernels if options.numerics.permits("reassoc") else "off"
    if kernels == "auto" and device.runs_pallas and jax_internals.may_be_partitioned():
        return None, Obstacle.SHARDING("several devices: XLA might gather a scan's operands")
    groups = [*groups_of(loop)]
    matrices, why = matrices_of(loop, groups, kernels, device, gradient)
    if gradient:
        remakes = device.scans.remakes_states
        if matrices is not None or not remakes or kernels not in ("auto", "always", "xla"):
            return matrices, why
        kernel, reason = remade_scan(loop, kernels, device)
        return kernel and kernel.route(), reason
    moves = describe(loop, groups)
    if matrices is not None:
        return matrices, f"{moves}; {why}"
    if kernels == "off":
        return None, moves
    if all(g.degree.kind in NAMES for g in groups):
        kernel, reason = scan_of(loop, kernels, device, options.assume)
        if kernel is not None:
            return kernel.route(), f"{moves}; {reason}"
        also = f" ({why})" if why else ""
        moves = obstacle_of(reason)(f"{moves}; {reason}{also}")
    return _in_parts(loop, groups, kernels, device, moves, options.assume)


def _in_parts(
    loop: Loop, groups: list[Group], kernels: str, device: Device, why: str, assume: Sequence[str]
) -> Kernel:
    """Partition a loop of several carries, of which some run as scans.

    why: the reason that the whole loop is no kernel. assume: facts about named sizes.
    """
    alone = [g for g in groups if len(g.carries) == 1 and _runs_apart(loop, g)]
    if len(groups) < 2 or any(e.eqn.effects for e in loop.body.equations):
        return None, why
    scans = dict.fromkeys(g.carries for g in alone)
    while scans:
        route = Partition(loop, groups, scans, device.loops.growth).parts()
        if route is None or len(route.parts) > MAX_PARTS:
            return None, why
        is_loop_left = any(p.carries not in scans for p in route.parts)
        if device.loops.steps_are_launches and is_loop_left and len(route.parts) > 2:
            return None, Obstacle.COST(f"{why} (two loops cost more launches than one)")
        reasons = []
        for n, part in enumerate(route.parts):
            if part.carries in scans:
                part.kernel, reason = _scan(route, n, kernels, device, assume)
                reasons.append(reason)
        refused = {p.carries for p in route.parts if p.kernel is None}
        if refused.isdisjoint(scans):
            if device.runs_on_gpu and kernels in ("auto", "always", "triton"):
                route = with_totals(route)
            apart = f"its carries run in separate loops: {'; '.join(dict.fromkeys(reasons))}"
            return route, f"{describe(loop, groups)}; {apart}"
        scans = {carries: None for carries in scans if carries not in refused}
    return None, why


def _runs_apart(loop: Loop, g: Group) -> bool:
    """Return True if a scan may compute a carry whose readers are in other parts."""
    is_extremum = g.degree.kind == MAX_PLUS
    equated = is_extremum and is_equated(loop, loop.carries[g.carries[0]].inner)
    return g.degree.kind in BY_ENTRY and not equated


def _scan(
    route: LoopParts, n: int, kernels: str, device: Device, assume: Sequence[str]
) -> tuple[ScanKernel | None, str]:
    """Return a part as a kernel if its memory traffic is worth it, and the reason."""
    loop, part = route.loop, route.parts[n]
    written = {v for p in route.parts for v in p.ys}.difference(numbers(loop.ys))
    moved = 2 * loop.steps * sum(aval_bytes(loop.body.avals[v]) for v in written)
    level = loop.levels()
    early = [v for e in route.parts[0].before for v in e.outvals]
    sources = {v: Source(v) for p in route.parts[:n] for v in p.ys}
    sources |= {v: Source(v) for v in early if level[v]}
    inner = replace(
        loop,
        body=replace(loop.body, equations=part.equations),
        carries=[loop.carries[part.carries[0]]],
        consts=loop.consts | {v: v for v in early if not level[v]},
        sources=loop.sources | sources,
        ys=list(part.ys),
        results=[],
    )
    return scan_of(inner, kernels, device, assume, moved)
