"""One decision for all sizes: plans of programs whose sizes are named by the user.

A function with `dims` is traced once with symbolic sizes and optimised once. A call with new shapes
is traced by JAX as always. If the symbolic program with numbers in place of names equals that
trace, equation for equation, the emitted program gets the same numbers and runs. Otherwise the
trace is optimised by itself. So no condition is taken over from another shape.

Where the decision depends on the sizes, it is made once more for sizes near those of the call, from
half to twice of each. It holds in this range if the same forms pay at its ends, and if they are
those that the trace alone would get. Otherwise every trace in the range is optimised by itself.

JAX cannot trace some programs at all sizes: with a table of 512 positions, `table[:T]` has
`min(512, T)` rows. Such a program is traced for the sizes near those of the call alone.
"""

from __future__ import annotations

import inspect
import re
import typing
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from jax import export

from symjax_rewrite import jax_internals
from symjax_rewrite.api.decision_cache import DecisionCache
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.program_key import program_key
from symjax_rewrite.ir.sizes import Assumptions
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.jax_sizes import NotInstantiableError, at_sizes
from symjax_rewrite.options import logger

ANNOTATIONS = "annotations"
MOST_RANGES = 8  # of one program: each takes two searches
Shape = tuple[str, ...]  # a name or a number for each axis


class Decider(Protocol):
    """The interface that a plan needs of the optimiser of a function.

    under: the same with more facts about sizes.
    """

    def decide(self, closed: ClosedJaxpr) -> Any: ...
    def emitted(self, result: Any) -> ClosedJaxpr | None: ...
    def under(self, facts: Sequence[str]) -> Decider: ...


def parse_dims(dims: Any, fun: Callable[..., Any]) -> tuple[Shape | None, ...]:
    """Return the names of the axes of every array argument; None where an argument has no names.

    dims: text such as `"b T 64, 64 d"`, a sequence with a text for every array, or `"annotations"`
    for jaxtyping's annotations.

    Raises:
        UsageError: an axis is neither a name nor a number, or an argument is not annotated.
    """
    if isinstance(dims, str) and dims == ANNOTATIONS:
        return _annotated(fun)
    texts = dims.split(",") if isinstance(dims, str) else dims
    if not isinstance(texts, Sequence) or not all(isinstance(t, str | None) for t in texts):
        expected = 'text such as "b T 64, 64 d", or "annotations"'
        raise UsageError("not names of sizes", expected=expected, got=repr(dims))
    return tuple(None if text is None else _shape(text) for text in texts)


def _shape(text: str) -> Shape:
    words = tuple(text.split())
    for word in words:
        if not (word.isidentifier() or word.isdigit()):
            expected = "names and numbers, such as 'b T 64'"
            raise UsageError("not the sizes of an array", expected=expected, got=repr(text))
    return words


def _annotated(fun: Callable[..., Any]) -> tuple[Shape | None, ...]:
    try:
        hints = typing.get_type_hints(fun, include_extras=True)
    except NameError as error:
        raise UsageError("annotations that cannot be read", got=str(error)) from error
    texts = [
        getattr(hints.get(name), "dim_str", None) for name in inspect.signature(fun).parameters
    ]
    if not any(texts):
        expected = 'such as x: Float[Array, "b T d"]'
        raise UsageError("no argument has named sizes", expected=expected, got=fun.__name__)
    return tuple(None if text is None else _shape(text) for text in texts)


def _dims_text(shape: Sequence[Any] | None) -> str:
    return "any" if shape is None else " ".join(map(str, shape))


def sizes_of(
    shapes: Sequence[Shape | None], actual: Sequence[tuple[Any, ...]]
) -> dict[str, int] | None:
    """Return the number of every name at arrays of some shapes, or None if it does not fit them."""
    found: dict[str, int] = {}
    if len(shapes) != len(actual):
        return None
    for shape, mine in zip(shapes, actual, strict=True):
        if shape is None:
            continue
        if len(shape) != len(mine) or not all(isinstance(n, int) and n > 0 for n in mine):
            return None
        for word, size in zip(shape, mine, strict=True):
            known = int(word) if word.isdigit() else found.setdefault(word, size)
            if known != size:
                return None
    return found


@dataclass(frozen=True, slots=True)
class RangePlan:
    """Program that is emitted where every named size is in a range.

    closed: the program as traced with symbolic sizes; None if it cannot be traced in the ranges.
    emitted: with symbolic sizes; None if other sizes in the ranges might ask for another decision.
    """

    ranges: dict[str, tuple[int, int]]
    closed: ClosedJaxpr | None
    emitted: ClosedJaxpr | None

    def holds(self, sizes: dict[str, int]) -> bool:
        """Return True if some sizes are in the ranges."""
        return all(low <= sizes[n] <= high for n, (low, high) in self.ranges.items())


@dataclass(frozen=True, slots=True)
class SizePlan:
    """The trace of a program for all sizes, if there is one, and emitted programs by ranges."""

    closed: ClosedJaxpr | None
    by_range: list[RangePlan]


class SizePlans:
    """The plans of one function, by the dtypes and constants of its arguments."""

    def __init__(self, shapes: tuple[Shape | None, ...], worker: Decider, assume: Sequence[str]):
        self.shapes, self.worker, self.assume = shapes, worker, Assumptions(assume)
        self._plans = DecisionCache()

    def at(
        self, flat: Callable[..., Any], values: Sequence[Any], closed: ClosedJaxpr, key: Hashable
    ) -> ClosedJaxpr | None:
        """Return the program to run in place of a traced one, or None if no plan covers it.

        flat: the function of arrays that was traced. values: the arrays. key: identifies
        the rest of `flat`.
        """
        sizes = self._sizes([jax.typeof(v).shape for v in values])
        if not sizes or not self.assume.holds(sizes):
            return None
        plan = self._plan(flat, values, key)
        if plan.closed is not None and not _is_same(plan.closed, sizes, closed):
            return None
        found = next((p for p in plan.by_range if p.holds(sizes)), None)
        if found is None and len(plan.by_range) < MOST_RANGES:
            found = self._near(plan.closed, sizes, closed, (flat, values))
            plan.by_range.append(found)
        if found is None or found.closed is None or found.emitted is None:
            return None
        if found.closed is not plan.closed and not _is_same(found.closed, sizes, closed):
            return None
        return _at_sizes(found.emitted, sizes)

    def _sizes(self, actual: Sequence[tuple[Any, ...]]) -> dict[str, int] | None:
        """Return `sizes_of` arrays; warn if the names do not fit their number, ranks or sizes."""
        found = sizes_of(self.shapes, actual)
        if found is None and all(isinstance(n, int) and n > 0 for s in actual for n in s):
            names, given = (", ".join(map(_dims_text, s)) for s in (self.shapes, actual))
            text = f"optimised for these shapes alone: dims={names!r} does not fit {given!r}"
            warnings.warn(text, stacklevel=2)
        return found

    def _near(
        self, named: ClosedJaxpr | None, sizes: dict[str, int], closed: ClosedJaxpr, traced: tuple
    ) -> RangePlan:
        """Return the plan for sizes near those of a traced program.

        named: the program traced for all sizes. traced: the function and the values it was traced
        at.
        """
        ranges = ranges_near(sizes)
        facts = facts_of(ranges)
        if named is None:
            flat, values = traced
            named = _traced(flat, self.specs([jax.typeof(v) for v in values], facts))
            if named is None or not _is_same(named, sizes, closed):
                return RangePlan(ranges, None, None)
        worker = self.worker.under(facts)
        near, alone = worker.decide(named), self.worker.decide(closed)
        if not near.settled or _changes(near) != _changes(alone):
            return RangePlan(ranges, named, None)
        return RangePlan(ranges, named, worker.emitted(near) if near.taken else named)

    def _plan(self, flat: Callable[..., Any], values: Sequence[Any], key: Hashable) -> SizePlan:
        avals = tuple(jax.typeof(v) for v in values)
        key = (key, tuple([(a.dtype, a.weak_type) for a in avals]), jax_internals.trace_settings())
        plan: SizePlan | None = self._plans.get(key)
        if plan is None:
            plan = self._made(_traced(flat, self.specs(avals)))
            self._plans.put(key, plan)
        return plan

    def explained(self, plain: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the decision for a `jax.jit` object at some arguments; None if no plan covers it.

        It is priced at the sizes of the arguments. Its crossovers are those of all sizes.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [k for k, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]
        avals = [jax_internals.array_aval(leaves[k].shape, leaves[k].dtype) for k in places]
        sizes = self._sizes([a.shape for a in avals])
        if sizes is None:
            return None
        for k, spec in zip(places, self.specs(avals), strict=True):
            leaves[k] = spec
        named_args, named_kwargs = jax.tree.unflatten(tree, leaves)
        try:
            named = plain.trace(*named_args, **named_kwargs).jaxpr
        except Exception as error:  # the user's function may need numbers for its sizes
            logger.warning("explained at these sizes alone: not traced for all (%s)", error)
            return None
        closed = plain.trace(*args, **kwargs).jaxpr
        if not self.assume.holds(sizes) or not _is_same(named, sizes, closed):
            return None
        result = self.worker.decide(named)
        near = self.worker.under(facts_of(ranges_near(sizes))).decide(named)
        if not (result.taken and result.settled):
            alone = self.worker.decide(closed)
            runs = near if near.settled and _changes(near) == _changes(alone) else alone
        else:
            runs = near if _changes(near) == _changes(result) else result
        return replace(runs, crossovers=result.crossovers, time_s=result.time_s, near=True)

    def specs(self, avals: Sequence[Any], facts: Sequence[str] = ()) -> list[Any]:
        """Return arrays as specs with symbolic sizes, under some facts and those assumed."""
        known = [c for fact in (*self.assume.facts, *facts) for c in _constraint(fact)]
        scope = export.SymbolicScope(known)
        return [
            a
            if shape is None
            else jax.ShapeDtypeStruct(
                export.symbolic_shape(",".join(shape), scope=scope), a.dtype, weak_type=a.weak_type
            )
            for a, shape in zip(avals, self.shapes, strict=True)
        ]

    def _made(self, closed: ClosedJaxpr | None) -> SizePlan:
        """Return the plan of a program that was traced for all sizes, or cannot be."""
        if closed is None:
            return SizePlan(None, [])
        result = self.worker.decide(closed)
        usable = result.taken and result.settled
        whole = [RangePlan({}, closed, self.worker.emitted(result))] if usable else []
        return SizePlan(closed, whole)


def ranges_near(sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return the range from half of every size to twice."""
    return {n: (-(-size // 2), 2 * size) for n, size in sizes.items()}


def facts_of(ranges: dict[str, tuple[int, int]]) -> list[str]:
    """Return the facts that every size is in its range."""
    lows = [f"{n} >= {low}" for n, (low, _) in ranges.items()]
    return lows + [f"{n} <= {high}" for n, (_, high) in ranges.items()]


def _traced(flat: Callable[..., Any], specs: Sequence[Any]) -> ClosedJaxpr | None:
    """Return a function traced with symbolic sizes; None if it cannot be, or must not be kept."""
    try:
        closed = jax_internals.make_jaxpr(flat, *specs)[0]
    except Exception as error:  # the user's function may need numbers for its sizes
        logger.debug("not traced with symbolic sizes: %s", error)
        return None
    return None if program_key(closed) is None else closed


def _is_same(named: ClosedJaxpr, sizes: dict[str, int], closed: ClosedJaxpr) -> bool:
    """Return True if a program of named sizes is at some sizes the one that was traced there."""
    mine, theirs = _at_sizes(named, sizes), _at_sizes(closed, {})
    if mine is None or theirs is None:
        return False
    wanted = program_key(theirs)
    return wanted is not None and program_key(mine) == wanted


def _at_sizes(named: ClosedJaxpr, sizes: dict[str, int]) -> ClosedJaxpr | None:
    """Return a program with numbers for names; None if its equations may hide names."""
    try:
        return at_sizes(named, sizes)
    except NotInstantiableError as error:
        logger.debug("no plan for other sizes: %s", error)
        return None


def _constraint(fact: str) -> list[str]:
    """Return a fact about sizes as JAX takes it for a constraint; none if JAX takes no such one.

    JAX replaces one side of an equation by the other, so that a name would be lost.
    """
    text = re.sub(r"(.+?)<(?!=)(.+)", r"\1 + 1 <= \2", fact)
    text = re.sub(r"(.+?)>(?!=)(.+)", r"\1 >= \2 + 1", text)
    if "==" in text:
        return []
    try:
        export.SymbolicScope([text])
    except ValueError as error:
        logger.debug("JAX takes no constraint %r: %s", text, error)
        return []
    return [text]


def _changes(result: Any) -> list[tuple[str, list[str]]]:
    """Return the names of the changes that were taken, with their lines."""
    return sorted((c.name, sorted(c.places)) for c in result.changes)
