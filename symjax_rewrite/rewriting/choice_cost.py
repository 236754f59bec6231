"""The seconds of a choice of nodes, and after a move, without pricing the whole region again.

`CostModel.evaluate` prices a whole region. A move of the search changes few classes, so here only
the kernels that compute or read these classes are priced again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from symjax_rewrite.cost.term_cost import CostModel, Facts, reachable
from symjax_rewrite.ir.dataflow import CycleError, postorder
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import Node

Choice = Mapping[int, Node]


class ChoiceCost:
    """A choice of nodes for the classes that some roots need, priced kernel by kernel.

    seconds: of the choice; infinite if it has a cycle or lacks a class. order: the classes that the
    roots need, operands first. readers: of each class. kernels: seconds of each class that is
    written to memory.
    """

    def __init__(
        self,
        g: EGraph,
        roots: tuple[int, ...],
        model: CostModel,
        free: Callable[[int], bool],
        choice: Choice,
    ) -> None:
        self.g, self.roots, self.model, self.free, self.choice = g, roots, model, free, choice
        self.readers: dict[int, set[int]] = {}
        self.facts: dict[int, Facts] = {}
        self.kernels: dict[int, float] = {}
        self.seconds = math.inf
        try:
            self.order = reachable(choice, roots, free)
        except (CycleError, KeyError):
            self.order = []
            return
        self.place = {c: n for n, c in enumerate(self.order)}
        self.facts = {c: model.facts_of(g, c, choice[c]) for c in self.order}
        self.whole = _Moved(self, {})
        for c in self.order:
            for arg in self.whole.args(c):
                self.readers.setdefault(arg, set()).add(c)
        priced = ((c, self.whole.seconds_of(c)) for c in self.order)
        self.kernels = {c: seconds for c, seconds in priced if seconds is not None}
        self.seconds = sum(self.kernels.values())

    def moved(self, move: Choice) -> ChoiceCost:
        """Return the choice in which some classes are computed by other nodes."""
        return ChoiceCost(self.g, self.roots, self.model, self.free, {**self.choice, **move})

    def after(self, move: Choice) -> float:
        """Return the seconds of the choice in which some classes are computed by other nodes."""
        if self.seconds == math.inf:
            return self.moved(move).seconds
        layer = _Moved(self, move)
        try:
            touched = layer.apply()
        except (CycleError, KeyError):
            return math.inf
        kernels = {layer.kernel_of(c) for c in touched}
        kernels |= {self.whole.kernel_of(c) for c in touched - layer.added}
        gone = sum([self.kernels.get(k, 0.0) for k in kernels])
        return self.seconds - gone + sum([layer.seconds_of(k) or 0.0 for k in kernels])


class _Moved:
    """A choice with some nodes replaced, as differences from the choice in `base`.

    readers: of the classes whose readers differ. added, removed: classes that the roots need only
    afterwards, and only before.
    """

    def __init__(self, base: ChoiceCost, move: Choice) -> None:
        self.base, self.move = base, move
        self.readers: dict[int, set[int]] = {}
        self.added: set[int] = set()
        self.removed: set[int] = set()
        self.known: dict[int, bool] = {}  # the classes written to memory

    def __getitem__(self, cls: int) -> Facts:
        node = self.move.get(cls)
        if node is None and (facts := self.base.facts.get(cls)) is not None:
            return facts
        base = self.base
        return base.model.facts_of(base.g, cls, base.choice[cls] if node is None else node)

    def __contains__(self, cls: int) -> bool:
        """Return True for a class that is written to memory."""
        found = self.known.get(cls)
        if found is None:
            readers = self.readers_of(cls)
            found = cls in self.base.roots or len(readers) > 1 or self._is_kernel(cls)
            found = self.known[cls] = found or any(map(self._is_kernel, readers))
        return found

    def args(self, cls: int) -> tuple[int, ...]:
        """Return the classes that a class is computed from; none if it is free."""
        return () if self.base.free(cls) else self[cls].args

    def readers_of(self, cls: int) -> set[int]:
        """Return the classes that are computed from a class."""
        found = self.readers.get(cls)
        return self.base.readers.get(cls, set()) if found is None else found

    def kernel_of(self, cls: int) -> int:
        """Return the class whose kernel computes a class; -1 if the roots do not need it."""
        while cls not in self:
            readers = self.readers_of(cls)
            if not readers:
                return -1
            (cls,) = readers
        return cls

    def seconds_of(self, cls: int) -> float | None:
        """Return the seconds of the kernel that writes a class; None if there is none."""
        base = self.base
        is_needed = (cls in base.facts or cls in self.added) and cls not in self.removed
        if not is_needed or cls not in self or self[cls].is_free or base.free(cls):
            return None
        return base.model.kernel_seconds(self, cls, self, base.free)

    def apply(self) -> set[int]:
        """Find what the move changes; return the classes whose kernels may differ.

        Raises:
            CycleError, KeyError: the moved choice has a cycle, or lacks a class.
        """
        base = self.base
        changed = [c for c in self.move if c in base.facts and self[c] is not base.facts[c]]
        self._check_order(changed)
        for c in changed:
            self._add(c, self.args(c))
        for c in changed:
            self._remove(c, set(base.whole.args(c)).difference(self.args(c)))
        touched = {*changed, *self.added, *self.removed}
        near = {*touched, *self.readers}
        near.update(*[base.whole.args(c) for c in changed], *[self.args(c) for c in changed])
        other = [c for c in near - self.added if (c in self) is not (c in base.whole)]
        touched.update(other)
        return touched.union(
            *[each.readers_of(c) for c in (*changed, *other) for each in (base.whole, self)]
        )

    def _is_kernel(self, cls: int) -> bool:
        return self[cls].is_kernel and not self.base.free(cls)

    def _check_order(self, changed: list[int]) -> None:
        """Raise `CycleError` if a changed class is now computed from itself.

        The classes before all changed ones are computed from none of these.
        """
        place = self.base.place
        never = len(place)
        if all(place.get(a, never) < place[c] for c in changed for a in self.args(c)):
            return
        least = min(place[c] for c in changed)
        postorder(changed, lambda c: self.args(c) if place.get(c, never) >= least else ())

    def _add(self, cls: int, args: Iterable[int]) -> None:
        """Add a reader to some classes, and to their operands where these were not needed."""
        stack = [(cls, arg) for arg in args]
        for reader, arg in stack:
            self._readers(arg).add(reader)
            if arg not in self.base.facts and arg not in self.added:
                self.added.add(arg)
                stack += [(arg, below) for below in self.args(arg)]

    def _remove(self, cls: int, args: Iterable[int]) -> None:
        """Remove a reader of some classes, and the classes that nothing reads then."""
        stack = [(cls, arg) for arg in args]
        for reader, arg in stack:
            readers = self._readers(arg)
            readers.discard(reader)
            if not readers and arg not in self.base.roots and arg not in self.removed:
                self.removed.add(arg)
                stack += [(arg, below) for below in self.args(arg)]

    def _readers(self, cls: int) -> set[int]:
        """Return the readers of a class as a set that may be changed."""
        if cls not in self.readers:
            self.readers[cls] = set(self.base.readers.get(cls, ()))
        return self.readers[cls]
