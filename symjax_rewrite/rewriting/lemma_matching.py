"""Matching of lemmas: the left side is matched modulo the index normal form, the right is built.

Both sides of a lemma are traced like any program. A lemma is therefore ordinary JAX code, and it
matches every spelling with the same index terms: transposed operands, einsum or matmul, more axes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations, product, repeat
from typing import Any, NamedTuple

import jax
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import EGraph, Justification
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.products import flattest
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, LEAF, MAP, REDUCE, Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import Lemma, RuleContext, line_of, too_large
from symjax_rewrite.rewriting.scales import scaled_inside

SUMMED = 1000  # indices from this number on are summed over; smaller indices are outputs
PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)  # one size per letter of a lemma
MAX_MATCHES = 8  # matches of one lemma at one class


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled lemma: one graph with both sides, references over the same output indices."""

    lemma: Lemma
    terms: TermGraph
    left: Ref
    right: Ref
    shape: tuple


def shape(g: EGraph, cls: int) -> tuple:
    """Return a key that must agree before a match: the factors of a product, the terms of a sum.

    Scalar factors are left out, because a coefficient may match a scalar.
    """
    first = node_of(g, cls)
    if first.op == ADD and len(first.args) > 1:
        return (ADD, len(first.args))
    if first.op not in (CONTRACT, ADD):
        return (first.op,)
    factors = [f for f in flattest(g, cls).factors if f.axes]
    sums = [len(node_of(g, f.cls).args) for f in factors if node_of(g, f.cls).op == ADD]
    return (CONTRACT, len(factors), tuple(sorted(sums)))


def _numbers(t: TermGraph) -> list[str]:
    """Return the numbers in a graph: constants, and coefficients of sums that are not all 1."""
    nodes = (node_of(t.graph, c) for c in t.graph.live())
    kinds = [n for n in nodes if n.op == CONST or (n.op == ADD and {*n.attr} != {1})]
    return sorted(repr(n.attr) for n in kinds)


def distinct_sizes(what: str, shapes: Sequence[str], skip: int = 0) -> dict[str, int]:
    """Return a distinct prime for every letter of some shapes, from the skip-th prime on.

    Raises:
        RuleError: `what` has more letters than there are primes.
    """
    letters = sorted({c for word in shapes for c in word})
    if len(letters) + skip > len(PRIMES):
        raise RuleError(f"{what} has too many named sizes", expected=f"<= {len(PRIMES)}")
    return dict(zip(letters, PRIMES[skip:], strict=False))


def specs_of(
    shapes: Sequence[str], dtypes: Iterable[str], sizes: Mapping[str, Any]
) -> list[jax.ShapeDtypeStruct]:
    """Return arguments of some shapes at a size for every letter."""
    words = zip(shapes, dtypes, strict=False)
    return [jax.ShapeDtypeStruct(tuple(sizes[c] for c in w), np.dtype(d)) for w, d in words]


def traced(
    fun: Callable[..., Any], specs: Sequence[Any], what: str, shapes: Sequence[str], where: str = ""
) -> ClosedJaxpr:
    """Trace a function of the user's.

    Raises:
        RuleError: `what` does not trace.
    """
    try:
        return jax_internals.make_jaxpr(fun, *specs)[0]
    except Exception as error:  # code of users, which may raise anything
        raise RuleError(
            f"{what} does not trace",
            where=where or None,
            expected=f"a function of arrays of shapes {', '.join(shapes)}",
            got=(str(error).splitlines() or [type(error).__name__])[0],
        ) from error


@functools.cache
def compile_lemma(lemma: Lemma) -> Pattern:
    """Trace a lemma.

    Raises:
        RuleError: the lemma does not trace, or its sides differ in shape or dtype.
    """
    shapes = lemma.shapes
    sizes = (distinct_sizes("a lemma", shapes, skip) for skip in (0, 1))
    usual, other = (specs_of(shapes, repeat("float32"), each) for each in sizes)
    where = line_of(lemma)
    closed = traced(lambda *a: lemma.sides(*a), usual, f"lemma {lemma.name!r}", shapes, where)
    outs = closed.out_avals
    if len(outs) != 2 or outs[0].shape != outs[1].shape or outs[0].dtype != outs[1].dtype:
        raise RuleError(
            f"the sides of lemma {lemma.name!r} differ",
            where=where,
            expected="two arrays of one shape and dtype",
            got=", ".join(str(o) for o in outs),
        )
    t = build(flatten(closed))
    numbers = _numbers(t)
    if numbers and numbers != _numbers(build(flatten(jax.make_jaxpr(lemma.sides)(*other)))):
        raise RuleError(
            f"a number in lemma {lemma.name!r} depends on sizes",
            where=where,
            remedy="state it as an axiom: a pattern's numbers are the same at every size",
        )
    left, right = (t.view(v) for v in t.program.outputs)
    return Pattern(lemma, t, left, right, shape(t.graph, left.cls))


Groups = dict[int, tuple[int, ...]]  # pattern index: the target's indices that match it
Terms = tuple[Any, list[Ref], list[int]]  # a product: coefficient, factors, fresh bound indices


class Bound(NamedTuple):
    """The match of a pattern's leaf: a class, and (leaf slot, place in group) for its slots."""

    cls: int
    slots: tuple[tuple[int, int], ...]


class State(NamedTuple):
    """State of a match; binding: leaf of the pattern to a `Bound` or a coefficient."""

    groups: Groups
    binding: dict[int, Any]

    def bind(self, leaf: int, bound: Any, groups: Groups | None = None) -> Iterator[State]:
        """Yield the state with a leaf bound, unless it is bound to something else."""
        if self.binding.get(leaf, bound) == bound:
            yield State(self.groups | (groups or {}), {**self.binding, leaf: bound})


def apply_lemma(ctx: RuleContext, pattern: Pattern, cls: int) -> Iterator[Ref]:
    """Yield the right sides of the lemma at a class, over the class's slots.

    A letter of the lemma stands for any number of axes: `n` of `x[n, d]` for batch and time, `o` of
    a projection for heads and features. A product of matrices matches from either end, since its
    factors have no order: one of the two right sides may be the written form.
    """
    target, dtype = ctx.g.ref(cls), ctx.g.classes[cls].dtype
    if len(pattern.left.axes) > len(target.axes):
        return
    matcher = Matcher(pattern.terms.graph, ctx.g, itertools.count(SUMMED))
    found = matcher.match(pattern.left, target, State({}, {}))
    for state in list(islice(found, MAX_MATCHES)):  # a list, because building adds nodes
        bound = [b for b in state.binding.values() if isinstance(b, Bound)]
        if all(ctx.g.classes[b.cls].dtype == dtype for b in bound):
            ref = _build(ctx, pattern, state, cls)
            if ref is not None:
                yield ref


class Matcher(NamedTuple):
    """Matches references of a pattern's graph with references of the e-graph `g`.

    fresh: names of summed indices. any_number: True if a number of the pattern matches every
    number, for patterns whose numbers depend on sizes.
    """

    graph: EGraph
    g: EGraph
    fresh: Iterator[int]
    any_number: bool = False

    def match(self, pref: Ref, tref: Ref, state: State) -> Iterator[State]:
        """Yield the states in which a reference of the pattern stands for a reference."""
        pnode, tref = node_of(self.graph, pref.cls), self.g.find(tref)
        if pnode.op == LEAF:
            yield from self._bind(pref, tref, state)
        elif pnode.op == CONTRACT or (pnode.op == ADD and len(pnode.args) == 1):
            yield from self._product(pref, tref, state)
        elif pnode.op == CONST:
            tnode = node_of(self.g, tref.cls)
            if tnode.op == CONST and self._same(pnode.attr[0], tnode.attr[0]):
                yield state
        else:
            for tnode in list(self.g.classes[tref.cls].nodes):
                if tnode.op == pnode.op and len(tnode.args) == len(pnode.args):
                    yield from self._node(pref, pnode, tref, tnode, state)

    def _same(self, wanted: Any, got: Any) -> bool:
        return self.any_number or wanted == got

    def _bind(self, pref: Ref, tref: Ref, state: State) -> Iterator[State]:
        """Bind a leaf of the pattern to a class; unknown letters share the remaining axes."""
        groups = state.groups
        fixed = {i for q in pref.axes for i in groups.get(q, ())}
        left = [i for i in tref.axes if i not in fixed]
        if len(set(tref.axes)) != len(tref.axes) or not fixed <= set(tref.axes):
            return
        if any(i in group for i in left for group in groups.values()):
            return
        unknown = [q for q in dict.fromkeys(pref.axes) if q not in groups]
        for shared in _share_out(unknown, left):
            new = groups | shared
            place = {i: (s, k) for s, q in enumerate(pref.axes) for k, i in enumerate(new[q])}
            bound = Bound(tref.cls, tuple(place[i] for i in tref.axes))
            yield from state.bind(pref.cls, bound, shared)

    def _product(self, pref: Ref, tref: Ref, state: State) -> Iterator[State]:
        coefficient, mine, bound = self._terms(self.graph, pref)
        theirs = self._terms(self.g, tref)
        scalars = self._scalars(mine)
        factors = [f for f in mine if f not in scalars]
        wide = [f for f in theirs[1] if f.axes] if scalars else theirs[1]
        loose = len(theirs[1]) - len(wide)
        if len(factors) != len(wide) or len(bound) > len(theirs[2]) or len(scalars) > 1:
            return
        if loose > 1 or (loose and theirs[0] != 1):
            return
        if not scalars and not self._same(coefficient, theirs[0]):
            return
        states: Iterable[State] = (state,)
        if scalars:  # a scalar of the lemma stands for a scalar factor, or for the coefficient
            scalar = next((Bound(f.cls, ()) for f in theirs[1] if not f.axes), theirs[0])
            states = state.bind(scalars[0].cls, scalar)
        for start in states:
            for found in self._assign(factors, wide, start):
                if {i for q in bound for i in found.groups.get(q, ())} == set(theirs[2]):
                    yield found

    def _scalars(self, factors: list[Ref]) -> list[Ref]:
        return [f for f in factors if not f.axes and node_of(self.graph, f.cls).op == LEAF]

    def _terms(self, g: EGraph, ref: Ref) -> Terms:
        """Return a product over the indices of a reference and fresh bound indices."""
        p = flattest(g, ref.cls)
        bound = [next(self.fresh) for _ in p.bound]
        return p.coefficient, [f.over([*ref.axes, *bound]) for f in p.factors], bound

    def _assign(self, mine: list[Ref], theirs: list[Ref], state: State) -> Iterator[State]:
        """Match factors with factors in any order."""
        if not mine:
            yield state
        for k, other in enumerate(theirs if mine else ()):
            for found in self.match(mine[0], other, state):
                yield from self._assign(mine[1:], theirs[:k] + theirs[k + 1 :], found)

    def _node(
        self, pref: Ref, pnode: Node, tref: Ref, tnode: Node, state: State
    ) -> Iterator[State]:
        if len(pnode.bound) != len(tnode.bound):
            return
        if pnode.op != ADD and pnode.attr != tnode.attr:
            return
        if pnode.op not in (ADD, MAP, REDUCE):  # the order of the axes has a meaning
            if len(pref.axes) != len(tref.axes):
                return
            same = {q: (i,) for q, i in zip(pref.axes, tref.axes, strict=True)}
            if any(state.groups.get(q, i) != i for q, i in same.items()):
                return
            state = state._replace(groups={**state.groups, **same})
        fresh = [next(self.fresh) for _ in pnode.bound]
        state = state._replace(groups={**state.groups, **{i: (i,) for i in fresh}})
        mine = [a.over([*pref.axes, *fresh]) for a in pnode.args]
        theirs = [a.over([*tref.axes, *fresh]) for a in tnode.args]
        every = range(len(theirs))
        for order in permutations(every) if pnode.op == ADD else (every,):
            states = [state]
            for n, k in enumerate(order):
                pair = (mine[n], theirs[k])
                numbers = (pnode.attr[n], tnode.attr[k]) if pnode.op == ADD else (1, 1)
                states = [x for s in states for x in self._scaled(*pair, *numbers, s)]
            yield from states

    def _scaled(self, a: Ref, b: Ref, wanted: Any, got: Any, state: State) -> Iterator[State]:
        """Match a term of a sum; its coefficient may match a scalar argument of the lemma."""
        if self._same(wanted, got):
            yield from self.match(a, b, state)
        if wanted == 1 != got and node_of(self.graph, a.cls).op == CONTRACT:
            _, mine, _ = self._terms(self.graph, a)
            coefficient, theirs, _ = self._terms(self.g, b)
            scalars = self._scalars(mine)
            if len(scalars) == 1 and len(mine) == len(theirs) + 1:
                rest = [f for f in mine if f != scalars[0]]
                for bound in state.bind(scalars[0].cls, coefficient * got):
                    yield from self._assign(rest, theirs, bound)


def _share_out(unknown: list[int], left: list[int]) -> Iterator[Groups]:
    """Yield every way to give the remaining axes to unknown letters.

    Output axes go to output letters, summed axes to summed letters. Fresh names of summed indices
    start at `SUMMED`.
    """
    shares = []
    for summed in (False, True):
        letters = [q for q in unknown if (q >= SUMMED) == summed]
        axes = [i for i in left if (i >= SUMMED) == summed]
        shares.append(list(_partitions(letters, axes)))
    for a, b in product(*shares):
        yield {**a, **b}


def _partitions(letters: list[int], axes: list[int]) -> Iterator[Groups]:
    """Yield every way to give each letter some of the axes, at least one."""
    if not letters:
        if not axes:
            yield {}
    elif len(letters) == 1:
        if axes:
            yield {letters[0]: tuple(axes)}
    elif len(letters) == len(axes):
        for order in permutations(axes):
            yield {q: (i,) for q, i in zip(letters, order, strict=True)}
    else:
        for count in range(1, len(axes) - len(letters) + 2):
            for first in combinations(axes, count):
                rest = [i for i in axes if i not in first]
                for more in _partitions(letters[1:], rest):
                    yield {letters[0]: first, **more}


def _build(ctx: RuleContext, p: Pattern, state: State, cls: int) -> Ref | None:
    """Return the right side with the pattern's leaves replaced, over the slots of `cls`."""
    r = RightSide.of(ctx, Justification(p.lemma.name, cls), cls)
    made = _Builder(r, p, dict(state.binding)).make(p.right.cls)
    if not isinstance(made, Bound):
        return None
    # The right side has the outputs of the left side: both references are over the lemma's result.
    groups = [(state.groups.get(p.right.axes[slot], ()), place) for slot, place in made.slots]
    if any(place >= len(group) for group, place in groups):
        return None
    return Ref(made.cls, tuple([group[place] for group, place in groups]))


class _Builder(NamedTuple):
    """Builds the right side of a lemma; made: the values of the pattern's classes so far."""

    r: RightSide
    p: Pattern
    made: dict[int, Any]

    def make(self, pcls: int) -> Any:
        """Return the target's value of a pattern class; None if the lemma does not determine it."""
        if pcls not in self.made:
            self.made[pcls] = self.built(pcls)
        return self.made[pcls]

    def built(self, pcls: int) -> Any:
        pnode, g = node_of(self.p.terms.graph, pcls), self.r.g
        values = [self.make(a.cls) for a in pnode.args]
        coefficient = math.prod([x for x in values if x is not None and not isinstance(x, Bound)])
        bound = [(x, a, k) for k, (x, a) in enumerate(zip(values, pnode.args, strict=True))
                 if isinstance(x, Bound)]  # fmt: skip
        if None in values or not bound or (pnode.op == ADD and coefficient != 1):
            return None
        # Indices are (pattern index, place in its group) until they are numbered.
        axes = [[(a.axes[slot], place) for slot, place in x.slots] for x, a, _ in bound]
        sizes = {}
        for (x, _, _), mine in zip(bound, axes, strict=True):
            sizes.update(zip(mine, g.classes[x.cls].sizes, strict=True))
        outs, sums = (
            sorted(i for i in sizes if (i[0] >= pnode.out) == own) for own in (False, True)
        )
        if len({i[0] for i in sizes}) != pnode.out + len(pnode.bound):
            return None
        number = {i: n for n, i in enumerate([*outs, *sums])}
        args = [Ref(x.cls, tuple([number[i] for i in mine]))
                for (x, _, _), mine in zip(bound, axes, strict=True)]  # fmt: skip
        r = replace(self.r, sizes={n: sizes[i] for i, n in number.items()})
        out = range(len(outs))
        ref = args[0]
        if pnode.op != CONTRACT or len(args) > 1 or sums:
            attr = tuple([pnode.attr[k] for *_, k in bound]) if pnode.op == ADD else pnode.attr
            ref = r.term(pnode.op, args, attr, out=out, summed=range(len(outs), len(number)))
            inner = pnode.op == CONTRACT and pcls != self.p.right.cls
            if inner and r.ctx.may_overflow(ref.cls):
                r.ctx.refuse(r.why.rule, too_large(r.dtype), r.why.source)
                return None
        ref = scaled_inside(r.ctx, ref, coefficient, tuple([r.sizes[n] for n in out]), r.why)
        return Bound(ref.cls, tuple([outs[i] for i in ref.axes]))
