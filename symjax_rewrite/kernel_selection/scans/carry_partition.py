"""Partition of loops at carries that run as kernels; the parts run one after the other.

Carries that depend on each other stay together. Parts are in topological order: kernels, and
between them loops of all carries that are ready by then. Earlier parts return the values that a
part reads for all steps, or the operands of the equations that compute them where these are
smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.dataflow import cone, makers_of, making, numbers, value_operands
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.kernel_selection.scans.loop_parts import CarryKernel, CarryPart, LoopParts
from symjax_rewrite.loops.carry_dependence import Group, dependencies
from symjax_rewrite.loops.hoisting import is_heavy
from symjax_rewrite.loops.loop import Loop

EARLY = -1  # the part of values that depend on no carry
SHAPES = frozenset("broadcast_in_dim convert_element_type reshape squeeze transpose".split())


class OpenKernel(CarryKernel, Protocol):
    """Kernel that computes values of all steps from values of all steps, never the states."""

    @property
    def reads(self) -> list[int]: ...
    @property
    def makes(self) -> set[int]: ...


class Partition:
    """Partition of a loop at some groups of carries.

    kernels: by group that runs apart, its kernel; None for a kernel that will run the equations of
    its part. growth: limit on the bytes written for all steps, as a multiple of the loop's operands
    and results: of each array where kernels are known, of all arrays for others.
    """

    def __init__(
        self,
        loop: Loop,
        groups: list[Group],
        kernels: Mapping[tuple[int, ...], OpenKernel | None],
        growth: float,
    ) -> None:
        self.loop, self.groups, self.kernels, self.growth = loop, groups, kernels, growth
        self.makers = makers_of(loop.body.equations)
        self.level = loop.levels()

    def parts(self) -> LoopParts | None:
        """Return the parts, or None where too much is written or a kernel's states are read."""
        loop, early = self.loop, self._early()
        made_early = {v for e in early for v in e.outvals}
        found = [CarryPart(c, kernel=self.kernels.get(c)) for c in self._order()]
        part_of = self._part_of_values(found)
        ready = {*loop.consts, *loop.body.consts, *loop.sources, *loop.counters, *made_early}
        wanted: list[set[int]] = [set() for _ in found]
        tops = set(numbers(loop.ys))
        for v in tops:
            if part_of.get(v, EARLY) != EARLY:
                wanted[part_of[v]].add(v)
        for n in reversed(range(len(found))):
            for v in self._fill(found[n], wanted[n], ready, part_of, n):
                if part_of[v] >= n:
                    return None
                wanted[part_of[v]].add(v)
        written = {*made_early, *[v for p in found for v in p.ys]} - tops
        if not self._fits({*written, *[v for p in found for e in p.before for v in e.outvals]}):
            return None
        rest = [v for v in tops if part_of.get(v, EARLY) == EARLY and v not in ready]
        known = [e for e in self._cone(rest, ready, part_of, EARLY)[0] if e not in early]
        found[0].before = [*early, *known, *found[0].before]
        return LoopParts(loop, found)

    def _fill(
        self, part: CarryPart, wanted: set[int], ready: set[int], part_of: dict[int, int], n: int
    ) -> set[int]:
        """Write the equations of a part; return the values that it reads from earlier parts."""
        kernel = self.kernels.get(part.carries)
        part.ys = sorted(wanted)
        if kernel is None:
            carries = [self.loop.carries[k] for k in part.carries]
            roots = {*wanted, *numbers([c.out for c in carries])}
            inside = {c.inner for c in carries}
            part.equations, crossing = self._cone(roots, ready | inside, part_of, n)
            return crossing
        part.before, crossing = self._cone(kernel.reads, ready, part_of, n)
        part.after, late = self._cone(wanted, ready | kernel.makes, part_of, n)
        return crossing | late

    def _fits(self, written: Iterable[int]) -> bool:
        """Return True if the loop may write some values for all steps."""
        total = max if any(self.kernels.values()) else sum
        sizes = [aval_bytes(self.loop.body.avals[v]) for v in written]
        return self.loop.steps * total([0, *sizes]) <= self.growth * self.loop.outside_bytes

    def _early(self) -> list[Equation]:
        """Return the heavy equations that depend on no carry, and the equations they read.

        A product that sums nothing is larger than its operands: the part that reads it makes it.
        """
        equations = self.loop.body.equations
        early = [e for e in equations if e.outvals and self.level[e.outvals[0]] < 2]
        heavy = [e for e in early if is_heavy(e.eqn) and not _sums_nothing(e.eqn)]
        apart = self._beside_states()
        return making(equations, [v for e in heavy for v in e.outvals if v not in apart])

    def _beside_states(self) -> set[int]:
        """Return results of steps that sum computed values as large as a state that runs apart.

        Such values stay in registers where the kernel of the state computes the sum.
        """
        avals = self.loop.body.avals
        large = [
            aval_bytes(avals[self.loop.carries[k].inner])
            for carries, kernel in self.kernels.items()
            for k in carries
            if kernel is None
        ]
        tops = [e for v in numbers(self.loop.ys) if (e := self._unrounded(v)) is not None]
        sums = [e for e in tops if len(e.outvals) == 1 and self.level[e.outvals[0]] == 1]
        return {
            e.outvals[0]
            for e in sums
            if e.name in ("dot_general", "reduce_sum") and large
            if any(v in self.makers and aval_bytes(avals[v]) >= max(large) for v in e.reads)
        }

    def _unrounded(self, v: int) -> Equation | None:
        """Return the equation that computes a value before it is rounded and shaped."""
        e = self.makers.get(v)
        while e is not None and e.name in SHAPES and isinstance(e.invals[0], int):
            e = self.makers.get(e.invals[0])
        return e

    def _order(self) -> list[tuple[int, ...]]:
        """Return the parts: kernels, and loops of the carries ready before and after them."""
        reads = dependencies(self.loop)
        done: set[int] = set()
        waiting = [g.carries for g in self.groups]
        found: list[tuple[int, ...]] = []

        def ready(carries: tuple[int, ...]) -> bool:
            return all(reads[k] <= done | {*carries} for k in carries)

        while waiting:
            together: tuple[int, ...] = ()
            # The order matters: an earlier group may make a later group ready.
            for carries in [c for c in waiting if c not in self.kernels]:
                if ready(carries):
                    together += carries
                    done |= {*carries}
                    waiting.remove(carries)
            if together:
                found.append(tuple(sorted(together)))
            for carries in [c for c in waiting if c in self.kernels and ready(c)]:
                found.append(carries)
                done |= {*carries}
                waiting.remove(carries)
        return found

    def _part_of_values(self, parts: list[CarryPart]) -> dict[int, int]:
        """Return the part that computes every value: the last one that it depends on."""
        part_of: dict[int, int] = {}
        for n, part in enumerate(parts):
            part_of.update((self.loop.carries[k].inner, n) for k in part.carries)
        scans = [n for n, p in enumerate(parts) if self.kernels.get(p.carries, p) is None]
        beside = self._beside_states() if scans else set()
        for e in self.loop.body.equations:
            found = [part_of.get(v, EARLY) for v in e.reads]
            found += scans[:1] * (not beside.isdisjoint(e.outvals))
            part_of.update(dict.fromkeys(e.outvals, max(found, default=EARLY)))
        return part_of

    def _cone(
        self, roots: Iterable[int], ready: set[int], part_of: dict[int, int], n: int
    ) -> tuple[list[Equation], set[int]]:
        """Return a part's equations that compute some values, and its reads of earlier parts."""
        operands = value_operands(self.makers)

        def crosses(v: int) -> bool:
            e = self.makers.get(v)
            mine = part_of.get(v, EARLY) in (n, EARLY)
            return e is None or not (mine or self._is_smaller_before(e, part_of))

        found = cone(roots, lambda v: () if crosses(v) else operands(v), ready)
        crossing = {v for v in found if crosses(v)}
        made = found - crossing
        return [e for e in self.loop.body.equations if not made.isdisjoint(e.outvals)], crossing

    def _is_smaller_before(self, e: Equation, part_of: dict[int, int]) -> bool:
        """Return True if an equation is cheap and its operands are smaller than its results."""
        avals = self.loop.body.avals
        operands = {v for v in e.reads if part_of.get(v, EARLY) != EARLY}
        given = sum(aval_bytes(avals[v]) for v in operands)
        return not is_heavy(e.eqn) and given < sum(aval_bytes(avals[v]) for v in e.outvals)


def _sums_nothing(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][0][0]
