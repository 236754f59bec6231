"""Matching of routes: values of a program that are computed like a pattern become kernel calls.

A pattern's numbers may depend on sizes: a mean divides by one. So a pattern is matched twice: at
sizes of its own with any numbers, which binds its arguments, and then at the sizes of the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, count, islice, product
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.errors import InconclusiveDimensionOperation

from symjax_rewrite.candidates import Candidate, Context, Found, Refusal, Terms
from symjax_rewrite.codegen.emission import TermPart, TermReader
from symjax_rewrite.codegen.term_lowering import jax_sizes
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir.dataflow import class_operands, cone, node_of
from symjax_rewrite.ir.flat_program import Program, flatten
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.sizes import product as size_of
from symjax_rewrite.ir.term import LEAF, Ref
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.lemma_matching import (
    MAX_MATCHES,
    SUMMED,
    Bound,
    Matcher,
    State,
    distinct_sizes,
    shape,
    specs_of,
    traced,
)
from symjax_rewrite.spec_texts import spec_text
from symjax_rewrite.text_tables import too_slow

Sizes = tuple[tuple[str, Any], ...]  # a size for every letter
MOST_SINGLE = 2  # letters of a pattern that may be axes of size 1 at one place


@dataclass(frozen=True, slots=True, eq=False)
class PatternRoute:
    """A pass that sends parts of a program that match a pattern to a kernel; made by `route`."""

    name: str
    shapes: tuple[str, ...]
    pattern: Callable[..., Any]
    kernel: Callable[..., Any]
    when: Callable[..., bool | str] | None = None
    seconds: Callable[..., float] | float | None = None
    dtypes: tuple[str, ...] = ()
    numerics: str = "reassoc"
    uses: tuple[str, ...] = ()
    source: str = ""

    def refusal(self, specs: Sequence[Any]) -> str:
        """Return the reason why the kernel must not run at some arguments; empty if it may.

        Args:
            specs: shape and dtype of every argument, as `jax.ShapeDtypeStruct`s.
        """
        answer = True if self.when is None else self.when(*specs)
        if isinstance(answer, str):
            return answer
        return "" if answer else "its condition `when` does not hold"

    def predicted_s(self, specs: Sequence[Any]) -> float | None:
        """Return the seconds that the user predicts for the kernel; None without a prediction."""
        return float(self.seconds(*specs)) if callable(self.seconds) else self.seconds

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield a candidate or a refusal for every class that is computed like the pattern."""
        terms = context.terms(program)
        g, inside = terms.t.graph, set()
        for cls in reversed(terms.need.order):
            if cls in inside or node_of(g, cls).op == LEAF or not terms.t.values_of(cls):
                continue
            place = _matched(self, terms.t, cls)
            if place is None:
                continue
            found = _decided(self, terms, place, context)
            if isinstance(found, Candidate):
                inside |= _inside(terms, place)
            yield found


@dataclass(frozen=True, slots=True)
class RoutePattern:
    """A traced pattern: its terms, the result over its own axes, and a key that is quick to test.

    leaves: the class of every argument. aval: of the result.
    """

    terms: TermGraph
    result: Ref
    leaves: tuple[int, ...]
    shape: tuple
    aval: Any


class Argument(NamedTuple):
    """An argument of a kernel: a class whose slots, in this order, make up the axes `sizes`.

    cls: None for a number, which is `value`.
    """

    cls: int | None
    order: tuple[int, ...]
    sizes: tuple[Dim, ...]
    dtype: str
    value: Any = None


class KernelPlace(NamedTuple):
    """A class that a kernel computes: its arguments, and the slots that its result's axes hold.

    shape: of the kernel's result; None until the pattern is traced at the sizes of the program.
    """

    cls: int
    args: tuple[Argument, ...]
    order: tuple[int, ...]
    shape: tuple[Any, ...] | None = None


# ---------------------------------------------------------------- matching


def _matched(route: PatternRoute, t: TermGraph, cls: int) -> KernelPlace | None:
    own = distinct_sizes("a route", route.shapes).items()
    for dtypes, ones in product(_dtypes(route, t, cls), _single_axes(route, t)):
        usual = compile_route(route, dtypes, tuple((q, 1 if q in ones else n) for q, n in own))
        if usual is None:
            continue
        for place, sizes in _places(route, usual, t, cls, ones, any_number=True):
            exact = compile_route(route, dtypes, tuple(sorted(sizes.items())))
            assert exact is not None
            again = _places(route, exact, t, cls, ones, any_number=False)
            if any(place == found for found, _ in again):
                return place._replace(shape=exact.aval.shape)
    return None


def _single_axes(route: PatternRoute, t: TermGraph) -> list[tuple[str, ...]]:
    """Return the sets of letters to try as axes of size 1, of which index terms have no index."""
    if not any(1 in getattr(aval, "shape", ()) for aval in t.program.avals):
        return [()]
    letters = distinct_sizes("a route", route.shapes)
    return [q for n in range(MOST_SINGLE + 1) for q in combinations(letters, n)]


def _dtypes(route: PatternRoute, t: TermGraph, cls: int) -> list[tuple[str, ...]]:
    """Return the dtypes of arguments at which a pattern may match a class."""
    if route.dtypes:
        return [route.dtypes]
    own = t.graph.classes[cls].dtype
    leaves = {t.graph.classes[c].dtype for c in t.leaf_value}
    usual = [own, *sorted(d for d in leaves - {own} if jax.numpy.issubdtype(d, np.inexact))]
    return [(d,) * len(route.shapes) for d in usual]


@functools.lru_cache(maxsize=512)
def compile_route(
    route: PatternRoute, dtypes: tuple[str, ...], sizes: Sizes
) -> RoutePattern | None:
    """Trace the pattern of a route at some dtypes and sizes; None if axes of size 1 are all it has.

    Raises:
        RuleError: the pattern does not trace, or does not return one array of all its arguments.
    """
    what = f"the pattern of route {route.name!r}"
    specs = specs_of(route.shapes, dtypes, dict(sizes))
    closed = traced(lambda *a: route.pattern(*a), specs, what, route.shapes)
    t = build(flatten(closed))
    leaves = tuple(t.view(v).cls for v in t.program.inputs)
    result = t.program.outputs[0] if len(t.program.outputs) == 1 else None
    view = t.view(result) if isinstance(result, int) else None
    read = () if view is None else cone([view.cls], class_operands(t.graph))
    wrong = view is None or view.cls in leaves or not set(leaves) <= set(read)
    if wrong and any(size == 1 for _, size in sizes):
        return None
    if view is None or wrong:
        got = ", ".join(map(spec_text, closed.out_avals))
        raise RuleError(f"{what} must compute one array from all its arguments", got=got)
    return RoutePattern(t, view, leaves, shape(t.graph, view.cls), closed.out_avals[0])


def _places(
    route: PatternRoute,
    pattern: RoutePattern,
    t: TermGraph,
    cls: int,
    ones: tuple[str, ...],
    any_number: bool,
) -> Iterator[tuple[KernelPlace, dict[str, Any]]]:
    """Yield the matches of a pattern at a class, with the size of every letter."""
    g, axes = t.graph, pattern.result.axes
    if shape(g, cls) != pattern.shape or g.classes[cls].dtype != str(pattern.aval.dtype):
        return
    if sorted(axes) != [*range(len(axes))]:
        return  # the pattern's result is broadcast over an axis that it does not depend on
    matcher = Matcher(pattern.terms.graph, g, count(SUMMED), any_number)
    states = matcher.match(pattern.result, g.ref(cls), State({}, {}))
    for state in islice(states, MAX_MATCHES):
        read = _arguments(route, pattern, t, state, ones)
        order = tuple(i for q in sorted(axes) for i in state.groups.get(q, ()))
        if read is not None and sorted(order) == [*range(len(g.classes[cls].sizes))]:
            yield KernelPlace(cls, read[0], order), read[1]


def _arguments(
    route: PatternRoute, pattern: RoutePattern, t: TermGraph, state: State, ones: tuple[str, ...]
) -> tuple[tuple[Argument, ...], dict[str, Any]] | None:
    """Return the arguments of a match and the size of every letter; None if they do not fit."""
    args: list[Argument] = []
    sizes: dict[str, Any] = {}
    for word, leaf in zip(route.shapes, pattern.leaves, strict=True):
        dtype = pattern.terms.graph.classes[leaf].dtype
        bound = state.binding.get(leaf)
        if not isinstance(bound, Bound):
            if bound is None or word:
                return None
            args.append(Argument(None, (), (), dtype, bound))
            continue
        c = t.graph.classes[bound.cls]
        order = tuple(sorted(range(len(bound.slots)), key=bound.slots.__getitem__))
        slot = {q: k for k, q in enumerate(q for q in word if q not in ones)}
        mine = [
            size_of(c.sizes[s] for s in order if bound.slots[s][0] == slot.get(q, -1)) for q in word
        ]
        shown = jax_sizes(mine, t.dim_env)
        if c.dtype != dtype or any(d == 0 for d in shown):
            return None
        if any(sizes.setdefault(q, d) != d for q, d in zip(word, shown, strict=True)):
            return None
        args.append(Argument(bound.cls, order, tuple(mine), dtype))
    return tuple(args), sizes


# ---------------------------------------------------------------- decision


def _decided(
    route: PatternRoute, terms: Terms, place: KernelPlace, context: Context
) -> Candidate | Refusal:
    """Return the kernel call at a place, or the reason why the program stays as written there."""
    t = terms.t
    specs = [
        jax.ShapeDtypeStruct(jax_sizes(a.sizes, t.dim_env), np.dtype(a.dtype)) for a in place.args
    ]
    where = t.where(place.cls)
    try:
        reason = _reason_against(route, specs, context)
        after_s = None if reason else route.predicted_s(specs)
    except InconclusiveDimensionOperation as error:
        what = str(error).splitlines()[0]
        reason, after_s = Obstacle.SIZES(f"undecided for these named sizes: {what}"), None
    if reason:
        return Refusal(route.name, reason, where)
    before_s = _written_s(terms, place)
    if after_s is not None and not margins.pays(before_s, after_s, "rewrite", context.device):
        gain = before_s / after_s
        reason = Obstacle.COST(too_slow(gain, margins.margin("rewrite", context.device)))
        return Refusal(route.name, reason, where, ratio=gain)
    maker, made = KernelCall(t, place, route.kernel, after_s), t.maker_of(place.cls)
    part = TermPart(t, {place.cls: maker}, opens=False, source=made and made.eqn)
    return Candidate(
        route.name,
        (part,),
        where,
        f"the pattern at {', '.join(map(spec_text, specs))}",
        before=None if after_s is None else Cost(seconds=before_s),
        after=None if after_s is None else Cost(seconds=after_s),
    )


def _reason_against(route: PatternRoute, specs: list[Any], context: Context) -> str:
    if context.options.kernels == "off":
        return "kernels='off'"
    if not context.options.numerics.permits(route.numerics):
        return Obstacle.NUMERICS(f"needs numerics={route.numerics!r}")
    reason = route.refusal(specs)
    return f"{reason} at {', '.join(map(spec_text, specs))}" if reason else ""


def _inside(terms: Terms, place: KernelPlace) -> set[int]:
    """Return the classes that a kernel computes or makes superfluous, its arguments excluded."""
    ends = {a.cls for a in place.args if a.cls is not None}
    return cone([place.cls], class_operands(terms.t.graph), ends)


def _written_s(terms: Terms, place: KernelPlace) -> float:
    """Return the seconds that a kernel saves: of the written operations that nothing else needs."""
    g, need = terms.t.graph, terms.need
    inside = _inside(terms, place)
    ends = {a.cls for a in place.args}
    kept = [
        c
        for c in sorted(inside - {place.cls})
        if c in need.outside or any(u not in inside for u in need.users.get(c, ()))
    ]
    choice = {c: node_of(g, c) for c in need.order}

    def seconds(roots: Iterable[int]) -> float:
        return terms.model.evaluate(g, choice, tuple(roots), ends.__contains__).seconds

    return seconds([place.cls, *kept]) - (seconds(kept) if kept else 0.0)


# ---------------------------------------------------------------- emission


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """The call of a user's kernel that computes one class."""

    t: TermGraph
    place: KernelPlace
    kernel: Callable[..., Any]
    seconds: float | None

    def gives(self) -> set[int]:
        """Return the class that it computes."""
        return {self.place.cls}

    def needs(self, cls: int) -> list[int]:
        """Return the classes that it reads."""
        del cls
        return [a.cls for a in self.place.args if a.cls is not None]

    def price(self, device: Device) -> Cost | None:
        """Return the seconds that the user predicts; None without a prediction."""
        del device
        return None if self.seconds is None else Cost(seconds=self.seconds)

    def array(self, reader: TermReader, cls: int) -> tuple[Any, tuple[int, ...]]:
        """Return the class's array, and the slot of each of its axes."""
        made = self.kernel(*(self._argument(reader, a) for a in self.place.args))
        c, order = self.t.graph.classes[cls], self.place.order
        got = jax.typeof(made)
        if str(got.dtype) != c.dtype or got.shape != self.place.shape:
            wanted = jax.ShapeDtypeStruct(self.place.shape or (), np.dtype(c.dtype))
            raise TypeError(f"the kernel returns {spec_text(got)} for {spec_text(wanted)}")
        return lax.reshape(made, jax_sizes([c.sizes[s] for s in order], reader.env)), order

    @staticmethod
    def _argument(reader: TermReader, a: Argument) -> Any:
        if a.cls is None:
            return jax.numpy.asarray(a.value, a.dtype)
        data, slots = reader.array(a.cls)
        wanted = [slots.index(s) for s in a.order]
        if wanted != [*range(len(wanted))]:
            data = lax.transpose(data, wanted)
        sizes = jax_sizes(a.sizes, reader.env)
        return data if data.shape == tuple(sizes) else lax.reshape(data, sizes)
