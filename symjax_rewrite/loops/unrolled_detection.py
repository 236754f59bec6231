"""Detection of loops that Python unrolled: equal steps written one after another.

A trace has the steps in order, so the kinds of its equations repeat at a distance. Kinds are
numbers, and the runs of one distance are found in one traversal. A run is a loop if each operand of
each equation has one of these forms over the steps: the same value, a value of the same step, a
value of the previous step, the next entry of one array, or a linear sequence of numbers. Equations
that prepare the inputs of every step, and equations that are applied to the results of every step,
become part of the steps.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.flat_program import Equation, Program, Value, value_key
from symjax_rewrite.ir.primitives import params_key
from symjax_rewrite.jax_internals import Literal
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import Source

MIN_STEPS = 8
MAX_DISTANCES = 8  # distances that are tried, the most frequent first
MULTIPLES = (1, 2, 3, 4)  # of a distance: a step may contain repetitions
MAX_DEPTH = 16  # consecutive equations that prepare the inputs of a step

_ENTRIES = {"unstack": False, "split": True}  # True if the axis stays, with size one


class NotEqualError(Exception):
    """Raised if a step differs from the steps before it; 0 means that there are no steps."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Input(NamedTuple):
    """A value that every step receives.

    kind: "same" for one outer value, "source" for the next entry of an array, "carry" for a value
    of the previous step, "count" for a linear sequence of numbers. key: equal for equal inputs of a
    kind; the family and result first for a carry. outer: the outer value, `Source`, start, or
    numbers.
    """

    kind: str
    key: Any
    aval: Any
    outer: Any

    @property
    def name(self) -> tuple[str, Any]:
        """Return a key that is equal for equal inputs."""
        return self.kind, self.key


@dataclass(eq=False, slots=True)
class Family:
    """One equation in all steps.

    operands: inputs, literals, and results of other families as (family, result). entry: of a slice
    that moves from step to step: the entry that it reads.
    """

    equations: tuple[Equation, ...]
    operands: list[Input | Literal | tuple[Family, int]] = field(default_factory=list)
    entry: Input | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    """Results of all steps in one stack or concatenation: `count` operands from number `first`.

    tree: the equations that write it; `root` is the last equation. is_new: True if the axis is an
    axis of no operand.
    """

    root: Equation
    tree: tuple[Equation, ...]
    operands: tuple[Value, ...]
    axis: int
    is_new: bool
    first: int
    is_reversed: bool
    result: tuple[Family, int]


def may_repeat(program: Program) -> bool:
    """Return True if some array is read in enough parts to be the input of steps."""
    read: Counter[Value] = Counter()
    for e in program.equations:
        if e.name in ("slice", "dynamic_slice", "gather"):
            read[e.invals[0]] += 1
        elif e.name in _ENTRIES and len(e.outvals) >= MIN_STEPS:
            return True
    return max(read.values(), default=0) >= MIN_STEPS


def kinds_of(program: Program) -> list[int]:
    """Return a number per equation, equal for equations equal up to positions and constants."""
    numbers: dict[Any, int] = {}
    kinds = []
    for k, e in enumerate(program.equations):
        key = _kind(program, e)
        kinds.append(-1 - k if key is None else numbers.setdefault(key, len(numbers)))
    return kinds


def _kind(program: Program, e: Equation) -> tuple | None:
    if e.eqn.effects or not e.outvals:
        return None
    params = e.eqn.params
    key = (params["strides"],) if e.name == "slice" else params_key(params)
    if key is None:
        return None
    reads = [_type(program.avals[v]) if isinstance(v, int) else _type(v.aval) for v in e.invals]
    literals = tuple(not isinstance(v, int) for v in e.invals)
    return (e.name, key, literals, *reads, *[_type(v.aval) for v in e.eqn.outvars])


def _type(aval: Any) -> tuple:
    return (*jax_internals.kind_of(aval), getattr(aval, "weak_type", False))


def runs_of(program: Program, kinds: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first, one after the last, distance) of long enough runs that repeat at a distance."""
    last: dict[int, int] = {}
    count: Counter[int] = Counter()
    for k, kind in enumerate(kinds):
        if kind in last:
            count[k - last[kind]] += 1
        last[kind] = k
    often = [d for d, n in count.most_common(MAX_DISTANCES) if n >= MIN_STEPS - 1]
    given = {*program.inputs, *program.consts}
    equations, numbers = program.equations, np.array(kinds)

    def alike(k: int, distance: int) -> bool:
        pairs = zip(equations[k].invals, equations[k - distance].invals, strict=True)
        both = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]
        return all(a == b or a not in given or b not in given for a, b in both)

    for distance in dict.fromkeys(m * d for m in MULTIPLES for d in often):
        least = (MIN_STEPS - 1) * distance
        for low, high in _stretches(numbers[distance:] == numbers[:-distance]):
            if high - low < least:
                continue
            others = [k for k in range(low, high) if not alike(k + distance, distance)]
            for before, after in itertools.pairwise([low - 1, *others, high]):
                if after - before > least:
                    yield before + 1, after + distance, distance


def _stretches(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, one after the last) of every stretch of true flags."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0)).tolist()
    return zip(edges[::2], edges[1::2], strict=True)


def natural_start(
    around: Surroundings, position: dict[Equation, int], low: int, high: int, distance: int
) -> int:
    """Return the best first equation of a step: the cut with the fewest values across it.

    Of equal cuts, the first cut whose values are read elsewhere is chosen, because these are the
    results of a step.
    """
    steps = (high - low) // distance
    equations = around.program.equations
    crossing, inner = [0] * distance, [0] * distance
    middle, last = (low + t * distance for t in (steps // 2 - 1, steps - 1))
    for a in range(distance):
        for o, v in enumerate(equations[middle + a].outvals):
            final = equations[last + a].outvals[o]
            readers = [position[e] for e in around.users.get(v, ())]
            until = max((k for k in readers if k < high), default=0)
            is_read = final in around.outputs or any(k >= high for k in readers)
            is_read |= any(position[e] >= high for e in around.users.get(final, ()))
            for k in range(a + 1, min(until - middle, a + distance) + 1):
                crossing[k % distance] += 1
                inner[k % distance] += not is_read
    steps_of = [(high - low - a) // distance for a in range(distance)]
    whole = [a for a in range(distance) if steps_of[a] >= MIN_STEPS]
    return low + min(whole, key=lambda a: (crossing[a], inner[a], a), default=0)


class StepReader:
    """Reads a run as a loop of `steps` steps of `distance` equations from the one at `start`."""

    def __init__(
        self,
        around: Surroundings,
        kinds: list[int],
        position: dict[Equation, int],
        start: int,
        distance: int,
        steps: int,
    ) -> None:
        self.around, self.steps, self.avals = around, steps, around.program.avals
        equations = around.program.equations
        self.kind_of = lambda e: kinds[position[e]]
        self.region = [
            Family(tuple(equations[start + a : start + a + steps * distance : distance]))
            for a in range(distance)
        ]
        self.below = around.below(v for f in self.region for e in f.equations for v in e.outvals)
        self.where: dict[Value, tuple[int, Family, int]] = {}
        self.order: list[Family] = []
        self.prepared: set[Family] = set()  # families before the steps

    def read(self) -> list[Joined]:
        """Read all steps; return the concatenations of their results.

        Raises:
            NotEqualError: some step differs from the others.
        """
        for f in self.region:
            self._place(f)
        for f in self.region:
            self._classify(f, 0)
            self.order.append(f)
        return self._absorb()

    def _place(self, f: Family) -> None:
        for t, e in enumerate(f.equations):
            self.where.update((v, (t, f, o)) for o, v in enumerate(e.outvals))

    def _classify(self, f: Family, depth: int) -> None:
        columns = list(zip(*[e.invals for e in f.equations], strict=True))
        if f.equations[0].name == "slice":
            f.entry = self._moving_slice(f, columns[0])
        if f.entry is None:
            f.operands = [self._operand(column, depth) for column in columns]

    def _moving_slice(self, f: Family, arrays: Sequence[Value]) -> Input | None:
        """Return the entries that are sliced one after another; None if all slices are the same."""
        params = [e.eqn.params for e in f.equations]
        if not all(isinstance(n, int | np.integer) for p in params for n in p["start_indices"]):
            raise NotEqualError(0)
        starts = np.array([p["start_indices"] for p in params])
        moving = np.flatnonzero((starts != starts[0]).any(0))
        if not len(moving):
            return None
        axis = int(moving[0])
        changed = _first(arrays, lambda v: v == arrays[0])
        step, uneven = _line(starts[:, axis])
        width = params[0]["limit_indices"][axis] - params[0]["start_indices"][axis]
        if changed is not None or len(moving) > 1 or width != 1 or not step or uneven is not None:
            raise NotEqualError(min(changed or self.steps, (step and uneven) or 1))
        self._check_outside(arrays[0])
        return self._source(Source(arrays[0], axis, int(starts[0, axis]), step, kept=True))

    def _source(self, source: Source) -> Input:
        aval, k = self.avals[source.value], source.axis  # pyright: ignore
        aval = aval.update(shape=(*aval.shape[:k], *(1,) * source.kept, *aval.shape[k + 1 :]))
        return Input("source", source, aval, source)

    def _operand(self, values: Sequence[Value], depth: int) -> Any:
        first, second = values[:2]
        if not isinstance(second, int):
            return self._numbers(values)
        if second in self.where:
            return self._made(values)
        changed = _first(values, lambda v: v == first)
        if changed is None:
            self._check_outside(first)
            return Input("same", first, self.avals[second], first)
        return self._prepared(values, changed, depth)

    def _made(self, values: Sequence[Value]) -> Any:
        """Return the form of results of the same step or of the previous step."""
        t, f, o = self.where[values[1]]
        lag = 1 - t
        if lag not in (0, 1):
            raise NotEqualError(1)
        places = [self.where.get(v) if isinstance(v, int) else None for v in values[lag:]]
        odd = _first(enumerate(places), lambda x: x[1] == (x[0], f, o))
        if odd is not None:
            raise NotEqualError(odd + lag)
        if not lag:
            return f, o
        self._check_outside(values[0])
        aval = self.avals[f.equations[0].outvals[o]]
        return Input("carry", (f, o, value_key(values[0])), aval, values[0])

    def _numbers(self, values: Sequence[Value]) -> Any:
        """Return the form of a constant, or of whole numbers that are linear in the step."""
        odd = _first(values, lambda v: not isinstance(v, int))
        if odd is not None:
            raise NotEqualError(max(odd, 1))
        literals: Any = values
        arrays = [np.asarray(v.val) for v in literals]
        changed = _first(arrays, lambda x: x.tobytes() == arrays[0].tobytes())
        if changed is None:
            return values[0]
        counted = np.array(arrays)
        if counted.ndim != 1 or counted.dtype.kind not in "iu" or changed > 1:
            raise NotEqualError(changed)
        _, uneven = _line(counted)
        if uneven is not None:
            raise NotEqualError(uneven)
        aval = literals[0].aval
        return Input("count", (counted.tobytes(), str(aval)), aval, counted)

    def _prepared(self, values: Sequence[Value], changed: int, depth: int) -> Any:
        """Return the form of entries of one array, or of results of equations of one kind."""
        makers = [self.around.makers.get(v) if isinstance(v, int) else None for v in values]
        odd = _first(makers, lambda e: e is not None and not self._is_late(e))
        equations = [e for e in makers if e is not None]
        if odd is not None or depth > MAX_DEPTH:
            raise NotEqualError(max(changed if odd is None else odd, 1))
        places = [e.outvals.index(v) for e, v in zip(equations, values, strict=True)]
        if len(set(equations)) == 1:
            return self._entries(equations[0], places)
        kinds = [(self.kind_of(e), o) for e, o in zip(equations, places, strict=True)]
        odd = _first(kinds, lambda kind: kind == kinds[0])
        if odd is not None or len(set(equations)) < self.steps:
            raise NotEqualError(max(odd or 1, 1))
        f = Family(tuple(equations))
        self._classify(f, depth + 1)
        self._place(f)
        self.order.append(f)
        self.prepared.add(f)
        return f, places[0]

    def _entries(self, e: Equation, places: list[int]) -> Input:
        """Return the form of the parts of an array that one equation splits."""
        step, uneven = _line(np.array(places))
        if e.name not in _ENTRIES or not step:
            raise NotEqualError(1)
        if uneven is not None:
            raise NotEqualError(uneven)
        if any(size != 1 for size in e.eqn.params.get("sizes", ())):
            raise NotEqualError(1)
        axis, kept = e.eqn.params["axis"], _ENTRIES[e.name]
        return self._source(Source(e.invals[0], axis, places[0], step, kept))

    def _check_outside(self, v: Value) -> None:
        """Check that a value from outside is available before the first step."""
        e = self.around.makers.get(v) if isinstance(v, int) else None
        if e is not None and self._is_late(e):
            raise NotEqualError(1)

    def _is_late(self, e: Equation) -> bool:
        return not self.below.isdisjoint(e.outvals)

    def _absorb(self) -> list[Joined]:
        """Absorb the equations applied to the results of every step; return the concatenations."""
        own = {e for f in self.order for e in f.equations}
        joined: dict[Equation, Joined] = {}
        for f in (queue := list(self.region)):
            for o in range(len(f.equations[0].outvals)):
                users = [self.around.users.get(e.outvals[o], ()) for e in f.equations]
                late = [[u for u in each if u not in own] for each in users]
                for row in zip(*late, strict=False):
                    found = self._joined(f, o, row[0])
                    if found is not None:
                        joined.setdefault(found.root, found)
                    elif self._joins(g := Family(row)):
                        queue.append(g)
                        own |= {*row}
        return [*joined.values()]

    def _joins(self, f: Family) -> bool:
        """Return True if equations after the steps are one more equation of every step."""
        if len(set(f.equations)) < self.steps or len({*map(self.kind_of, f.equations)}) > 1:
            return False
        try:
            self._classify(f, 0)
        except NotEqualError:
            return False
        self._place(f)
        self.order.append(f)
        return True

    def _joined(self, f: Family, o: int, e: Equation) -> Joined | None:
        """Return the stack or concatenation through `e` of a result of all steps."""
        if e.name not in ("stack", "concatenate"):
            return None
        is_new = e.name == "stack"
        axis = e.eqn.params["axis" if is_new else "dimension"]
        while not is_new and self._is_only(e.outvals[0]):
            (user,) = self.around.users[e.outvals[0]]
            if not _continues(user, axis):
                break
            e = user
        tree, operands = self._operands_of_tree(e, axis)
        place = {v: k for k, v in enumerate(operands)}
        at = [place.get(e.outvals[o], -1) for e in f.equations]
        step, uneven = _line(np.array(at))
        if len(place) < len(operands) or min(at) < 0 or abs(step) != 1 or uneven is not None:
            return None
        if not is_new and shape_of(f.equations[0].eqn.outvars[o])[axis] != 1:
            return None
        return Joined(e, tuple(tree), tuple(operands), axis, is_new, min(at), step < 0, (f, o))

    def _operands_of_tree(self, root: Equation, axis: int) -> tuple[list[Equation], list[Value]]:
        """Return the equations of a tree of concatenations, and its operands."""
        tree, operands = [root], []
        stack = list(reversed(root.invals))
        while stack:
            v = stack.pop()
            e = self.around.makers.get(v) if isinstance(v, int) else None
            if e is None or root.name == "stack" or not _continues(e, axis) or not self._is_only(v):
                operands.append(v)
                continue
            tree.append(e)
            stack += reversed(e.invals)
        return tree, operands

    def _is_only(self, v: Value) -> bool:
        """Return True if one equation reads a value, and nothing else does."""
        return v not in self.around.outputs and len(self.around.users.get(v, ())) == 1  # pyright: ignore


def _continues(e: Equation, axis: int) -> bool:
    return e.name == "concatenate" and e.eqn.params["dimension"] == axis


def _first(values: Iterable[Any], holds: Callable[[Any], bool]) -> int | None:
    """Return the number of the first value for which a predicate is false."""
    return next((k for k, v in enumerate(values) if not holds(v)), None)


def _line(values: np.ndarray) -> tuple[int, int | None]:
    """Return the step between numbers, and the place of the first that is not linear."""
    step = int(values[1]) - int(values[0])
    return step, _first(enumerate(values), lambda x: int(x[1]) == int(values[0]) + step * x[0])
