"""The seconds of a choice of nodes, and after a move, without pricing the whole region again.

`CostModel.evaluate` prices a whole region. A move of the search changes few classes, so here only
the kernels that compute or read these classes are priced again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heapify, heappop, heappush

from symjax_rewrite.cost.term_cost import CostModel, reachable
from symjax_rewrite.ir.dataflow import CycleError, postorder
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import CONST, Node

Choice = Mapping[int, Node]


class ChoiceCost:
    """A choice of nodes for the classes that some roots need, priced kernel by kernel.

    seconds: of the choice; infinite if it has a cycle or lacks a class. order: the classes that the
    roots need, operands first. given: those that are free. written: those that are written to
    memory. readers, groups: of each class. kernels: the seconds of each kernel, by the class it
    writes.
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
        self.seconds, self.order = math.inf, list[int]()
        try:
            self._sort()
        except (CycleError, KeyError):
            return
        self._fill()

    def _sort(self) -> None:
        self.order = reachable(self.choice, self.roots, self.free)
        self.place = {c: n for n, c in enumerate(self.order)}

    def _fill(self) -> None:
        """Fill the tables from the choice."""
        choice, model, roots = self.choice, self.model, self.roots
        self.facts = {c: model.facts_of(self.g, c, choice[c]) for c in self.order}
        self.given = set(filter(self.free, self.order))
        self.written = model.written(self.facts, roots, self.given)
        self.readers: dict[int, set[int]] = {}
        for c in self.order:
            for arg in self.args(c):
                self.readers.setdefault(arg, set()).add(c)
        self.groups: dict[int, int] = {}
        for c in reversed(self.order):
            self.groups[c] = self._group(c)
        self._price({c: self.seconds_of(c) for c in self.order})

    def _price(self, kernels: Mapping[int, float | None]) -> None:
        """Add the seconds of the kernels, by class, in the order of the classes."""
        priced = ((c, kernels.get(c)) for c in self.order)
        self.kernels = {c: seconds for c, seconds in priced if seconds is not None}
        self.seconds = sum(self.kernels.values())

    def args(self, cls: int) -> tuple[int, ...]:
        """Return the classes that a class is computed from; none if it is free."""
        return () if cls in self.given else self.facts[cls].args

    def readers_of(self, cls: int) -> set[int]:
        """Return the classes that are computed from a class."""
        return self.readers.get(cls, set())

    def seconds_of(self, cls: int) -> float | None:
        """Return the seconds of the kernel that writes a class; None if no kernel does."""
        f = self.facts.get(cls)
        if f is None or f.is_free or cls not in self.written or cls in self.given:
            return None
        return self.model.kernel_seconds(self.facts, cls, self.written, self.given)

    def kernel_of(self, cls: int) -> int:
        """Return the class whose kernel computes a class; -1 if the roots do not need it."""
        while cls not in self.written:
            reader = next(iter(self.readers_of(cls)), None)
            if reader is None:
                return -1
            cls = reader
        return cls

    def group_of(self, cls: int) -> int:
        """Return the class for which the operands of a class are computed: see `Facts.is_group`."""
        return self.groups.get(cls, -1)

    def _group(self, cls: int) -> int:
        """Return the same, from the groups of the readers."""
        if cls in self.written:
            return cls
        readers = self.readers_of(cls)
        group = self.group_of(next(iter(readers), -1))
        f, facts = self.facts[cls], self.facts
        is_ended = not all(facts[r].in_calls for r in readers)
        return group if self.model.is_with(f, facts.get(group, f), is_ended) else cls

    def moved(self, move: Choice) -> ChoiceCost:
        """Return the choice in which some classes are computed by other nodes."""
        choice = {**self.choice, **move}
        if self.seconds == math.inf:
            return ChoiceCost(self.g, self.roots, self.model, self.free, choice)
        try:
            other, again = self._with(move)
        except (CycleError, KeyError):
            return ChoiceCost(self.g, self.roots, self.model, self.free, choice)
        made = copy.copy(self)
        made.choice, made.facts = choice, other.facts
        made.written, made.given = other.written, other.given
        made.readers = {**self.readers, **other.readers}
        made.groups = {**self.groups, **other.groups}
        made._sort()
        made._price({**self.kernels, **{c: other.seconds_of(c) for c in again}})
        return made

    def after(self, move: Choice) -> float:
        """Return the seconds of the choice in which some classes are computed by other nodes."""
        if self.seconds == math.inf:
            return self.moved(move).seconds
        try:
            other, kernels = self._with(move)
        except (CycleError, KeyError):
            return math.inf
        gone = sum([self.kernels.get(k, 0.0) for k in kernels])
        return self.seconds - gone + sum([other.seconds_of(k) or 0.0 for k in kernels])

    def _with(self, move: Choice) -> tuple[_Moved, set[int]]:
        """Return the choice after a move as differences, and the kernels that differ.

        Raises:
            CycleError, KeyError: the moved choice has a cycle, or lacks a class.
        """
        other = _Moved(self, move)
        touched = other.touched()
        return other, {x.kernel_of(c) for c in touched for x in (self, other)}


class _Moved(ChoiceCost):
    """A choice with some nodes replaced: the tables of another choice, with differences.

    readers, groups: of the classes whose readers or group differ. changed: the classes that are
    computed by another node. added, removed: the classes that the roots need only afterwards, and
    only before.

    Raises:
        CycleError, KeyError: the moved choice has a cycle, or lacks a class.
    """

    def __init__(self, base: ChoiceCost, move: Choice) -> None:
        self.base, self.move, self.model = base, move, base.model
        self.facts, self.written, self.given = {**base.facts}, {*base.written}, base.given
        self.readers: dict[int, set[int]] = {}
        self.groups: dict[int, int] = {}
        self.added: set[int] = set()
        self.removed: set[int] = set()
        for c, node in move.items():
            if c in self.facts:
                self.facts[c] = self.model.facts_of(base.g, c, node)
        self.changed = [c for c in move if self.facts.get(c) is not base.facts.get(c)]
        self._check_order()
        for c in self.changed:
            self._add(c, self.args(c))
        for c in self.changed:
            self._remove(c, set(base.args(c)).difference(self.args(c)))

    def args(self, cls: int) -> tuple[int, ...]:
        if cls not in self.facts:
            self._need(cls)
        return super().args(cls)

    def readers_of(self, cls: int) -> set[int]:
        found = self.readers.get(cls)
        return self.base.readers_of(cls) if found is None else found

    def group_of(self, cls: int) -> int:
        found = self.groups.get(cls)
        return self.base.group_of(cls) if found is None else found

    def touched(self) -> set[int]:
        """Find the classes written to memory; return the classes whose kernels may differ."""
        base = self.base
        self.written -= self.removed
        self.added -= self.removed  # what only a class reads that the move leaves unread
        for c in self.removed:
            del self.facts[c]
        near = {*self.changed, *self.added, *self.readers}.union(
            *[x.args(c) for c in self.changed if c in self.facts for x in (base, self)]
        )
        other = self._rewritten(near - self.removed)
        other += [c for c in self.changed if c in self.facts and self._is_read_otherwise(c)]
        readers = [x.readers_of(c) for c in (*other, *self.removed) for x in (base, self)]
        return {*self.changed, *self.added, *self.removed, *other}.union(*readers)

    def _rewritten(self, near: Collection[int]) -> list[int]:
        """Find which classes are written; return those that were not, or are no longer.

        The operands of a class with another group follow it, each once for all of its readers.
        """
        written, before = self.base.written, self._places()
        found, waiting = {*near}, {*near}
        queue = [(before(c), c) for c in near]
        heapify(queue)
        while queue:
            _, c = heappop(queue)
            waiting.remove(c)
            if turns := self._is_written(c) is not (c in self.written):
                self.written.symmetric_difference_update((c,))
            group = self._group(c)
            if not turns and group == self.group_of(c):
                continue
            self.groups[c] = group
            for a in {*self.args(c)} - self.removed - waiting:
                heappush(queue, (before(a), a))
                waiting.add(a)
                found.add(a)
        return [c for c in found if (c in self.written) is not (c in written)]

    def _places(self) -> Callable[[int], tuple[int, int]]:
        """Return keys that sort readers first, as far as the order before the move holds."""
        added: dict[int, tuple[int, int]] = {}
        at = lambda c: added.get(c) or (-self.base.place.get(c, -1), 0)  # noqa: E731
        args = lambda c: [a for a in self.args(c) if a in self.added]  # noqa: E731
        for n, c in enumerate(postorder(self.added, args)):
            added[c] = min([at(a)[0] for a in self.args(c)], default=0), -n - 1
        return at

    def _is_written(self, cls: int) -> bool:
        readers = self.readers_of(cls)
        if cls in self.base.roots or self._is_kernel(cls) or any(map(self._is_kernel, readers)):
            return True
        return len(readers) > 1 and len({*map(self.group_of, readers)}) > 1

    def _is_kernel(self, cls: int) -> bool:
        return self.facts[cls].is_kernel and cls not in self.given

    def _is_read_otherwise(self, cls: int) -> bool:
        """Return True if the readers of a changed class are priced in another way."""
        old, new = self.base.facts[cls], self.facts[cls]
        return old.is_free is not new.is_free or (old.node.op == CONST) is not (
            new.node.op == CONST
        )

    def _need(self, cls: int) -> None:
        """Enter a class that the choice before the move does not need."""
        base = self.base
        node = self.move.get(cls)
        self.facts[cls] = base.model.facts_of(
            base.g, cls, base.choice[cls] if node is None else node
        )
        if base.free(cls):
            self.given = self.given | {cls}

    def _check_order(self) -> None:
        """Raise `CycleError` if a changed class is now computed from itself.

        The classes before all changed ones are computed from none of these.
        """
        place, changed = self.base.place, self.changed
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
            self.readers[cls] = {*self.base.readers_of(cls)}
        return self.readers[cls]
