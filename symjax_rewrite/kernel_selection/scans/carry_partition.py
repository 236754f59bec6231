"""Partition of loops in which some carries are affine; the parts run one after the other.

Carries that depend on each other stay together. Parts are in topological order: scan kernels, and
between them loops of all carries that are ready by then. Earlier parts return the values that a
part reads for all steps, or the operands of the equations that compute them where these are
smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.dataflow import cone, makers_of, making, value_operands
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.kernel_selection.scans.affine_scan import ScanKernel, scan_of
from symjax_rewrite.kernel_selection.scans.loop_parts import CarryPart, LoopParts
from symjax_rewrite.loops.carry_dependence import (
    DIAGONAL,
    SUM,
    Group,
    dependencies,
    describe,
)
from symjax_rewrite.loops.hoisting import is_heavy
from symjax_rewrite.loops.loop import Loop, Source
from symjax_rewrite.obstacles import Obstacle

MAX_PARTS = 8
EARLY = -1  # the part of values that depend on no carry


def split_loop(
    loop: Loop,
    groups: list[Group],
    kernels: str,
    device: Device,
    why: str,
    assume: Sequence[str] = (),
) -> tuple[LoopParts | None, str]:
    """Partition a loop of several carries, of which some run as kernels.

    loop, groups, kernels, assume: as for `route_loop`. why: the reason the whole loop is no kernel.
    """
    affine = [g for g in groups if len(g.carries) == 1 and g.degree.kind in (SUM, DIAGONAL)]
    if kernels == "off" or len(groups) < 2 or not affine:
        return None, why
    if any(e.eqn.effects for e in loop.body.equations):
        return None, why
    scans = {g.carries for g in affine}
    while scans:
        route = _Splitter(loop, groups, scans, device.loops.growth).split()
        if route is None:
            return None, why
        refused, reasons = set(), []
        for n, part in enumerate(route.parts):
            if part.carries in scans:
                part.kernel, reason = _scan(route, n, kernels, device, assume)
                if part.kernel is None:
                    refused.add(part.carries)
                else:
                    reasons.append(reason)
        if not refused:
            return (
                route,
                f"{describe(loop, groups)}; affine carries run apart: {'; '.join(reasons)}",
            )
        scans -= refused
    return None, why


def _scan(
    route: LoopParts, n: int, kernels: str, device: Device, assume: Sequence[str]
) -> tuple[ScanKernel | None, str]:
    """Return a part as a kernel if its memory traffic is worth it, and the reason."""
    loop, part = route.loop, route.parts[n]
    if device.loops.steps_are_launches and len(route.parts) > 2:
        return None, Obstacle.COST("two loops cost more launches than one")
    avals = loop.body.avals
    written = {v for p in route.parts for v in p.ys} - {v for v in loop.ys if isinstance(v, int)}
    moved = 2 * loop.steps * sum(aval_bytes(avals[v]) for v in written)
    level = loop.levels()
    early = [v for e in route.head for v in e.outvals]
    sources = {v: Source(v) for p in route.parts[:n] for v in p.ys}
    sources |= {v: Source(v) for v in early if level[v]}
    inner = replace(
        loop,
        body=replace(loop.body, equations=part.equations),
        carries=[loop.carries[part.carries[0]]],
        consts=loop.consts | {v: v for v in early if not level[v]},
        sources=loop.sources | sources,
        ys=list(part.ys),
    )
    return scan_of(inner, kernels, device, assume, moved)


class _Splitter:
    """Partition of a loop at some groups of carries."""

    def __init__(
        self, loop: Loop, groups: list[Group], scans: set[tuple[int, ...]], growth: float
    ) -> None:
        self.growth = growth
        self.loop, self.groups, self.scans = loop, groups, scans
        self.makers = makers_of(loop.body.equations)
        self.level = loop.levels()

    def split(self) -> LoopParts | None:
        """Return the parts, or None where too much would be written."""
        loop, avals = self.loop, self.loop.body.avals
        early = self._early()
        made_early = {v for e in early for v in e.outvals}
        pieces = [CarryPart(carries) for carries in self._order()]
        if len(pieces) > MAX_PARTS:
            return None
        part = self._parts(pieces)
        ready = {*loop.consts, *loop.body.consts, *loop.sources, *loop.counters, *made_early}
        wanted: dict[int, set[int]] = {n: set() for n in range(len(pieces))}
        tops = {v for v in loop.ys if isinstance(v, int)}
        for v in tops:
            if part.get(v, EARLY) != EARLY:
                wanted[part[v]].add(v)
        for n in reversed(range(len(pieces))):
            piece = pieces[n]
            outs = [loop.carries[k].out for k in piece.carries]
            roots = {*wanted[n], *[v for v in outs if isinstance(v, int)]}
            inside = {loop.carries[k].inner for k in piece.carries}
            piece.equations, crossing = self._cone(roots, ready | inside, part, n)
            piece.ys = sorted(wanted[n])
            for v in crossing:
                wanted[part[v]].add(v)
        written = {*made_early, *[v for p in pieces for v in p.ys]} - tops
        all_bytes = loop.steps * sum(aval_bytes(avals[v]) for v in written)
        if all_bytes > self.growth * loop.outside_bytes:
            return None
        rest = [v for v in tops if part.get(v, EARLY) == EARLY and v not in ready]
        known = [e for e in self._cone(rest, ready, part, EARLY)[0] if e not in early]
        return LoopParts(loop, pieces, head=[*early, *known])

    def _early(self) -> list[Equation]:
        """Return the heavy equations that depend on no carry, and the equations they read."""
        equations = self.loop.body.equations
        heavy = [e for e in equations if e.outvals and self.level[e.outvals[0]] < 2]
        return making(equations, [v for e in heavy if is_heavy(e.eqn) for v in e.outvals])

    def _order(self) -> list[tuple[int, ...]]:
        """Return the parts: scans, and loops of the carries ready before and after them."""
        reads = dependencies(self.loop)
        done: set[int] = set()
        waiting = [g.carries for g in self.groups]
        found: list[tuple[int, ...]] = []

        def ready(carries: tuple[int, ...]) -> bool:
            return all(reads[k] <= done | {*carries} for k in carries)

        while waiting:
            together: tuple[int, ...] = ()
            # The order matters: an earlier group may make a later group ready.
            for carries in [c for c in waiting if c not in self.scans]:
                if ready(carries):
                    together += carries
                    done |= {*carries}
                    waiting.remove(carries)
            if together:
                found.append(tuple(sorted(together)))
            for carries in [c for c in waiting if c in self.scans and ready(c)]:
                found.append(carries)
                done |= {*carries}
                waiting.remove(carries)
        return found

    def _parts(self, pieces: list[CarryPart]) -> dict[int, int]:
        """Return the part that computes every value: the last one that it depends on."""
        part: dict[int, int] = {}
        for n, piece in enumerate(pieces):
            part.update((self.loop.carries[k].inner, n) for k in piece.carries)
        for e in self.loop.body.equations:
            found = [part.get(v, EARLY) for v in e.invals if isinstance(v, int)]
            part.update(dict.fromkeys(e.outvals, max(found, default=EARLY)))
        return part

    def _cone(
        self, roots: Iterable[int], ready: set[int], part: dict[int, int], n: int
    ) -> tuple[list[Equation], set[int]]:
        """Return a part's equations that compute some values, and its reads of earlier parts."""
        operands = value_operands(self.makers)

        def crosses(v: int) -> bool:
            e = self.makers.get(v)
            mine = part.get(v, EARLY) in (n, EARLY)
            return e is None or not (mine or self._is_smaller_before(e, part))

        found = cone(roots, lambda v: () if crosses(v) else operands(v), ready)
        crossing = {v for v in found if crosses(v)}
        made = found - crossing
        return [e for e in self.loop.body.equations if not made.isdisjoint(e.outvals)], crossing

    def _is_smaller_before(self, e: Equation, part: dict[int, int]) -> bool:
        """Return True if an equation is cheap and its operands are smaller than its results."""
        avals = self.loop.body.avals
        operands = {v for v in e.invals if isinstance(v, int) and part.get(v, EARLY) != EARLY}
        given = sum(aval_bytes(avals[v]) for v in operands)
        return not is_heavy(e.eqn) and given < sum(aval_bytes(avals[v]) for v in e.outvals)
