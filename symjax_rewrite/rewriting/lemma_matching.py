"""Matching of lemmas: the left side is matched modulo the index normal form, the right is built.

Both sides of a lemma are traced like any program. A lemma is therefore ordinary JAX code, and it
matches every spelling with the same index terms: transposed operands, einsum or matmul, more axes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice, permutations
from typing import Any, NamedTuple

import jax
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir.egraph import EGraph, Justification
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.products import Product, flattest
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, LEAF, MAP, REDUCE, SLICE, Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph, build
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
    out: int
    shape: tuple


def shape(g: EGraph, cls: int) -> tuple:
    """Return a key that must agree before a match: the factors of a product, the terms of a sum.

    Scalar factors are left out, because a coefficient may match a scalar.
    """
    first = node(g, cls)
    if first.op == ADD and len(first.args) > 1:
        return (ADD, len(first.args))
    if first.op not in (CONTRACT, ADD):
        return (first.op,)
    factors = [f for f in flattest(g, cls).factors if f.axes]
    sums = [len(node(g, f.cls).args) for f in factors if node(g, f.cls).op == ADD]
    return (CONTRACT, len(factors), tuple(sorted(sums)))


def node(g: EGraph, cls: int) -> Node:
    """Return the first node of a class."""
    return g.classes[cls].first


def _numbers(t: TermGraph) -> list[str]:
    """Return the numbers in a graph: coefficients and constants."""
    nodes = (node(t.graph, c) for c in t.graph.live())
    return sorted(repr(n.attr) for n in nodes if n.op in (ADD, CONST))


def lemma_avals(lemma: Lemma, skip: int = 0) -> list[jax.ShapeDtypeStruct]:
    """Return example arguments, with one distinct prime size per letter, from the skip-th on."""
    letters = sorted({c for word in lemma.shapes for c in word})
    if len(letters) + skip > len(PRIMES):
        raise RuleError("a lemma has too many named sizes", expected=f"<= {len(PRIMES)}")
    size = dict(zip(letters, PRIMES[skip:], strict=False))
    return [jax.ShapeDtypeStruct(tuple(size[c] for c in w), np.float32) for w in lemma.shapes]


@functools.cache
def compile_lemma(lemma: Lemma) -> Pattern:
    """Trace a lemma.

    Raises:
        RuleError: the lemma does not trace, or its sides differ in shape or dtype.
    """
    avals = lemma_avals(lemma)
    try:
        closed, _ = jax_internals.make_jaxpr(lambda *a: lemma.sides(*a), *avals)
    except Exception as error:
        raise RuleError(
            f"lemma {lemma.name!r} does not trace",
            where=line_of(lemma),
            expected=f"a function of arrays of shapes {', '.join(lemma.shapes)}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
        ) from error
    outs = closed.out_avals
    if len(outs) != 2 or outs[0].shape != outs[1].shape or outs[0].dtype != outs[1].dtype:
        raise RuleError(
            f"the sides of lemma {lemma.name!r} differ",
            where=line_of(lemma),
            expected="two arrays of one shape and dtype",
            got=", ".join(str(o) for o in outs),
        )
    t = build(flatten(closed))
    if _numbers(t) != _numbers(build(flatten(jax.make_jaxpr(lemma.sides)(*lemma_avals(lemma, 1))))):
        raise RuleError(
            f"a number in lemma {lemma.name!r} depends on sizes",
            where=line_of(lemma),
            remedy="state it as an axiom: a pattern's numbers are the same at every size",
        )
    left, right = (t.view(v) for v in t.program.outputs)
    first = t.program.outputs[0]
    assert isinstance(first, int)
    rank = len(t.sizes[first])
    return Pattern(lemma, t, left, right, rank, shape(t.graph, left.cls))


Groups = dict[int, tuple[int, ...]]  # pattern index: the target's indices that match it
Binding = dict[int, Any]  # leaf of the pattern: a `Bound`, or a coefficient
State = tuple[Groups, Binding]


class Bound(NamedTuple):
    """The match of a pattern's leaf: a class, and (leaf slot, place in group) for its slots."""

    cls: int
    slots: tuple[tuple[int, int], ...]


def apply_lemma(ctx: RuleContext, pattern: Pattern, cls: int) -> Iterator[Ref]:
    """Yield the right sides of the lemma at a class, over the class's slots.

    A letter of the lemma stands for any number of axes: `n` of `x[n, d]` for batch and time, `o` of
    a projection for heads and features. A product of matrices matches from either end, since its
    factors have no order: one of the two right sides may be the written form.
    """
    target = ctx.g.ref(cls)
    if len(pattern.left.axes) > len(target.axes):
        return
    found = _match(ctx, pattern, pattern.left, target, {}, {})
    for groups, binding in list(islice(found, MAX_MATCHES)):  # a list, because building adds nodes
        if all(_dtype(ctx, b) in (None, ctx.g.classes[cls].dtype) for b in binding.values()):
            ref = _build(ctx, pattern, binding, cls, groups)
            if ref is not None:
                yield ref


def _dtype(ctx: RuleContext, bound: Any) -> str | None:
    return ctx.g.classes[bound.cls].dtype if isinstance(bound, Bound) else None


def _match(
    ctx: RuleContext, p: Pattern, pref: Ref, tref: Ref, groups: Groups, binding: Binding
) -> Iterator[State]:
    pg = p.terms.graph
    pnode = node(pg, pref.cls)
    tref = ctx.g.find(tref)
    if pnode.op == LEAF:
        yield from _bind(ctx, pref, tref, groups, binding)
    elif pnode.op == CONTRACT or (pnode.op == ADD and len(pnode.args) == 1):
        yield from _match_product(ctx, p, pref, tref, groups, binding)
    elif pnode.op == CONST:
        tnode = node(ctx.g, tref.cls)
        if tnode.op == CONST and tnode.attr[0] == pnode.attr[0]:
            yield groups, binding
    else:
        for tnode in list(ctx.g.classes[tref.cls].nodes):
            if tnode.op == pnode.op and len(tnode.args) == len(pnode.args):
                yield from _match_node(ctx, p, pref, pnode, tref, tnode, groups, binding)


def _bind(
    ctx: RuleContext, pref: Ref, tref: Ref, groups: Groups, binding: Binding
) -> Iterator[State]:
    """Bind a leaf of the pattern to a class; unknown letters share the remaining axes."""
    if len(set(tref.axes)) != len(tref.axes):
        return
    fixed = {i for q in pref.axes if q in groups for i in groups[q]}
    if not fixed <= set(tref.axes):
        return
    taken = {i for g in groups.values() for i in g}
    left = [i for i in tref.axes if i not in fixed]
    if any(i in taken for i in left):
        return
    unknown = [q for q in dict.fromkeys(pref.axes) if q not in groups]
    for shared in _share_out(ctx, unknown, left):
        new = {**groups, **shared}
        place = {i: (s, k) for s, q in enumerate(pref.axes) for k, i in enumerate(new[q])}
        bound = Bound(tref.cls, tuple(place[i] for i in tref.axes))
        if binding.get(pref.cls, bound) == bound:
            yield new, {**binding, pref.cls: bound}


def _share_out(ctx: RuleContext, unknown: list[int], left: list[int]) -> Iterator[Groups]:
    """Yield every way to give the remaining axes to unknown letters.

    Output axes go to output letters, summed axes to summed letters. Fresh names of summed indices
    start at `SUMMED`.
    """
    for kind in (True, False):
        letters = [q for q in unknown if (q < SUMMED) == kind]
        axes = [i for i in left if (i < SUMMED) == kind]
        if (not letters) != (not axes) or len(letters) > len(axes):
            return
    outs = [q for q in unknown if q < SUMMED]
    sums = [q for q in unknown if q >= SUMMED]
    for a in _partitions(outs, [i for i in left if i < SUMMED]):
        for b in _partitions(sums, [i for i in left if i >= SUMMED]):
            yield {**a, **b}


def _partitions(letters: list[int], axes: list[int]) -> Iterator[Groups]:
    if not letters:
        if not axes:
            yield {}
    elif len(letters) == 1:
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


def _match_product(
    ctx: RuleContext, p: Pattern, pref: Ref, tref: Ref, groups: Groups, binding: Binding
) -> Iterator[State]:
    mine = _over(ctx, flattest(p.terms.graph, pref.cls), pref)
    theirs = _over(ctx, flattest(ctx.g, tref.cls), tref)
    scalars = [f for f in mine[1] if not f.axes and node(p.terms.graph, f.cls).op == LEAF]
    factors = [f for f in mine[1] if f not in scalars]
    loose = sum(not f.axes for f in theirs[1]) if scalars else 0
    if loose > 1 or (loose and theirs[0] != 1):
        return
    if len(factors) != len(theirs[1]) - loose or len(mine[2]) > len(theirs[2]) or len(scalars) > 1:
        return
    if scalars:
        value = _scalar_of(theirs)
        if binding.get(scalars[0].cls, value) != value:
            return
        binding = {**binding, scalars[0].cls: value}
        theirs = (1, [f for f in theirs[1] if f.axes], theirs[2])
    elif mine[0] != theirs[0]:
        return
    for groups2, binding2 in _assign(ctx, p, factors, list(theirs[1]), groups, binding):
        summed = {i for q in mine[2] for i in groups2.get(q, ())}
        if summed == set(theirs[2]):
            yield groups2, binding2


def _scalar_of(theirs: tuple[Any, list[Ref], list[int]]) -> Any:
    """Return the match of a lemma's scalar argument: a scalar factor, or the coefficient."""
    return next((Bound(f.cls, ()) for f in theirs[1] if not f.axes), theirs[0])


def _over(ctx: RuleContext, product: Product, ref: Ref) -> tuple[Any, list[Ref], list[int]]:
    """Return coefficient, factors over the reference's indices, and fresh bound indices."""
    bound = [next(ctx.fresh) for _ in product.bound]
    axes = [*ref.axes, *bound]
    factors = [f.over(axes) for f in product.factors]
    return product.coefficient, factors, bound


def _assign(
    ctx: RuleContext,
    p: Pattern,
    mine: list[Ref],
    theirs: list[Ref],
    groups: Groups,
    binding: Binding,
) -> Iterator[State]:
    if not mine:
        yield groups, binding
        return
    first, rest = mine[0], mine[1:]
    for k, other in enumerate(theirs):
        for i2, b2 in _match(ctx, p, first, other, groups, binding):
            yield from _assign(ctx, p, rest, theirs[:k] + theirs[k + 1 :], i2, b2)


def _match_node(
    ctx: RuleContext,
    p: Pattern,
    pref: Ref,
    pnode: Node,
    tref: Ref,
    tnode: Node,
    groups: Groups,
    binding: Binding,
) -> Iterator[State]:
    if len(pnode.bound) != len(tnode.bound):
        return
    if pnode.op in (MAP, REDUCE, SLICE) and pnode.attr != tnode.attr:
        return
    fresh = [next(ctx.fresh) for _ in pnode.bound]
    paxes, taxes = [*pref.axes, *fresh], [*tref.axes, *fresh]
    groups = {**groups, **{i: (i,) for i in fresh}}
    mine = [a.over(paxes) for a in pnode.args]
    theirs = [a.over(taxes) for a in tnode.args]
    if pnode.op != ADD:
        states: list[State] = [(groups, binding)]
        for a, b in zip(mine, theirs, strict=True):
            states = [s2 for s in states for s2 in _match(ctx, p, a, b, *s)]
        yield from states
        return
    for order in permutations(range(len(theirs))):
        states = [(groups, binding)]
        for k, a in zip(order, mine, strict=True):
            coefficient = tnode.attr[k]
            wanted = pnode.attr[mine.index(a)]
            states = [
                s2
                for s in states
                for s2 in _match_scaled(ctx, p, a, theirs[k], wanted, coefficient, *s)
            ]
        yield from states


def _match_scaled(
    ctx: RuleContext,
    p: Pattern,
    a: Ref,
    b: Ref,
    wanted: Any,
    got: Any,
    groups: Groups,
    binding: Binding,
) -> Iterator[State]:
    """Match a term of a sum; the target's coefficient may match a scalar argument of the lemma."""
    if wanted == got:
        yield from _match(ctx, p, a, b, groups, binding)
    pnode = node(p.terms.graph, a.cls)
    if wanted == 1 and pnode.op == CONTRACT:
        inner = _over(ctx, flattest(p.terms.graph, a.cls), a)
        scalars = [f for f in inner[1] if not f.axes and node(p.terms.graph, f.cls).op == LEAF]
        theirs = _over(ctx, flattest(ctx.g, b.cls), b)
        value = theirs[0] * got
        if len(scalars) == 1 and binding.get(scalars[0].cls, value) == value and got != 1:
            rest = [f for f in inner[1] if f != scalars[0]]
            if len(rest) == len(theirs[1]):
                bound = {**binding, scalars[0].cls: value}
                yield from _assign(ctx, p, rest, theirs[1], groups, bound)


def _build(ctx: RuleContext, p: Pattern, binding: Binding, cls: int, groups: Groups) -> Ref | None:
    """Return the right side with the pattern's leaves replaced, over the slots of `cls`."""
    builder = _RightSide(
        ctx, p, dict(binding), ctx.g.classes[cls].dtype, Justification(p.lemma.name, cls)
    )
    made = builder.make(p.right.cls)
    if not isinstance(made, Bound):
        return None
    # The right side has the outputs of the left side: both references are over the lemma's result.
    axes = []
    for slot, place in made.slots:
        group = groups.get(p.right.axes[slot], ())
        if place >= len(group):
            return None
        axes.append(group[place])
    return Ref(made.cls, tuple(axes))


class _RightSide:
    def __init__(
        self, ctx: RuleContext, p: Pattern, made: Binding, dtype: str, why: Justification
    ) -> None:
        self.ctx, self.p, self.made, self.dtype, self.why = ctx, p, made, dtype, why

    def make(self, pcls: int) -> Any:
        """Return the target's value of a pattern class; None if the lemma does not determine it."""
        if pcls not in self.made:
            self.made[pcls] = self._make(pcls)
        return self.made[pcls]

    def _make(self, pcls: int) -> Any:
        pnode = node(self.p.terms.graph, pcls)
        g = self.ctx.g
        coefficient: Any = 1
        sizes: dict[tuple[int, int], Dim] = {}  # (pattern index, place in its group): size
        refs: list[tuple[Bound, list[tuple[int, int]]]] = []
        coefficients: list[Any] = []
        for k, a in enumerate(pnode.args):
            made = self.make(a.cls)
            if made is None:
                return None
            if not isinstance(made, Bound):
                coefficient = coefficient * made
                continue
            axes = [(a.axes[slot], place) for slot, place in made.slots]
            sizes.update(zip(axes, g.classes[made.cls].sizes, strict=True))
            refs.append((made, axes))
            if pnode.op == ADD:
                coefficients.append(pnode.attr[k])
        if not refs or (pnode.op == ADD and coefficient != 1):
            return None
        outs = sorted(i for i in sizes if i[0] < pnode.out)
        sums = sorted(i for i in sizes if i[0] >= pnode.out)
        if len({i[0] for i in (*outs, *sums)}) != pnode.out + len(pnode.bound):
            return None
        number = {i: n for n, i in enumerate([*outs, *sums])}
        args = tuple(Ref(m.cls, tuple(number[i] for i in axes)) for m, axes in refs)
        out_sizes = tuple(sizes[i] for i in outs)
        if pnode.op == CONTRACT and len(args) == 1 and not sums:
            ref = args[0]
        else:
            attr = tuple(coefficients) if pnode.op == ADD else pnode.attr
            bound = tuple(sizes[i] for i in sums)
            ref = g.add(pnode.op, attr, args, out_sizes, bound, self.dtype, self.why)
            inner = pnode.op == CONTRACT and pcls != self.p.right.cls
            if inner and self.ctx.may_overflow(ref.cls):
                self.ctx.refuse(self.p.lemma.name, too_large(self.dtype), self.why.source)
                return None
        ref = scaled_inside(self.ctx, ref, coefficient, out_sizes, self.why)
        return Bound(ref.cls, tuple(outs[i] for i in ref.axes))
