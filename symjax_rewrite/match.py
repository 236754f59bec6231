"""Lemmas as patterns: match the left side modulo the index normal form, build the right (engine).

Both sides are traced like any program, so a lemma is written as ordinary JAX code and matches
every spelling with the same index terms: transposed operands, einsum or matmul, more axes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import jax
import numpy as np

from symjax_rewrite import compat
from symjax_rewrite.canonical import TermGraph, build
from symjax_rewrite.egraph import EGraph, Reason
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir import ADD, CONST, CONTRACT, LEAF, MAP, REDUCE, SLICE, Node, Ref
from symjax_rewrite.product import Product, expand, scaled
from symjax_rewrite.rule import Context, Lemma
from symjax_rewrite.trace import flatten

PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)  # sizes that cannot be confused


@dataclass(frozen=True, slots=True)
class Pattern:
    """A lemma compiled: one graph with both sides, references over the same output indices."""

    lemma: Lemma
    terms: TermGraph
    left: Ref
    right: Ref
    out: int

    @property
    def root(self) -> str:
        """The kind of the left side's root."""
        return node(self.terms.graph, self.left.cls).op


def node(g: EGraph, cls: int) -> Node:
    """The first node of a class."""
    return next(iter(g.classes[cls].nodes))


def lemma_avals(lemma: Lemma, dtype: Any = np.float32) -> list[jax.ShapeDtypeStruct]:
    """Example arguments of a lemma, one distinct prime size per letter."""
    letters = sorted({c for word in lemma.shapes for c in word})
    if len(letters) > len(PRIMES):
        raise RuleError("a lemma has too many named sizes", expected=f"<= {len(PRIMES)}")
    size = dict(zip(letters, PRIMES, strict=False))
    return [jax.ShapeDtypeStruct(tuple(size[c] for c in w), dtype) for w in lemma.shapes]


@functools.cache
def compile_lemma(lemma: Lemma) -> Pattern:
    """Trace a lemma.

    Raises:
        RuleError: it does not trace, or its sides differ in shape or dtype.
    """
    avals = lemma_avals(lemma)
    try:
        closed, _ = compat.make_jaxpr(lambda *a: lemma.sides(*a), *avals)
    except Exception as error:
        raise RuleError(
            f"lemma {lemma.name!r} does not trace",
            expected=f"a function of arrays of shapes {', '.join(lemma.shapes)}",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
        ) from error
    outs = closed.out_avals
    if len(outs) != 2 or outs[0].shape != outs[1].shape or outs[0].dtype != outs[1].dtype:
        raise RuleError(
            f"the sides of lemma {lemma.name!r} differ",
            expected="two arrays of one shape and dtype",
            got=", ".join(str(o) for o in outs),
        )
    t = build(flatten(closed))
    left, right = (t.views[v] for v in t.program.outputs)  # type: ignore[index]
    assert left is not None and right is not None
    return Pattern(lemma, t, left, right, len(t.sizes[t.program.outputs[0]]))  # type: ignore[index]


Binding = dict[int, Any]  # leaf class of the pattern: Ref over the leaf's slots, or a coefficient
Indices = dict[int, int]  # index of the pattern: index of the target
State = tuple[Indices, Binding]


def apply_lemma(ctx: Context, pattern: Pattern, cls: int) -> Iterator[Ref]:
    """Every right side that the lemma makes of a class, over the class's slots."""
    n = len(ctx.g.classes[cls].sizes)
    if len(pattern.left.axes) != n:
        return
    target = Ref(cls, tuple(range(n)))
    for order in permutations(range(n)):
        indices = dict(zip(pattern.left.axes, order, strict=True))
        for _, binding in _match(ctx, pattern, pattern.left, target, indices, {}):
            if any(
                _dtype(ctx, b) not in (None, ctx.g.classes[cls].dtype) for b in binding.values()
            ):
                return
            ref = _build(ctx, pattern, binding, cls, indices)
            if ref is not None:
                yield ref
            return


def _dtype(ctx: Context, bound: Any) -> str | None:
    return ctx.g.classes[bound.cls].dtype if isinstance(bound, Ref) else None


def _match(
    ctx: Context, p: Pattern, pref: Ref, tref: Ref, indices: Indices, binding: Binding
) -> Iterator[State]:
    pg = p.terms.graph
    pnode = node(pg, pref.cls)
    tref = ctx.g.find(tref)
    if pnode.op == LEAF:
        yield from _bind(ctx, pref, tref, indices, binding)
    elif pnode.op == CONTRACT or (pnode.op == ADD and len(pnode.args) == 1):
        yield from _match_product(ctx, p, pref, tref, indices, binding)
    elif pnode.op == CONST:
        tnode = node(ctx.g, tref.cls)
        if tnode.op == CONST and tnode.attr[0] == pnode.attr[0]:  # type: ignore[index]
            yield indices, binding
    else:
        for tnode in list(ctx.g.classes[tref.cls].nodes):
            if tnode.op == pnode.op and len(tnode.args) == len(pnode.args):
                yield from _match_node(ctx, p, pref, pnode, tref, tnode, indices, binding)


def _bind(
    ctx: Context, pref: Ref, tref: Ref, indices: Indices, binding: Binding
) -> Iterator[State]:
    if len(pref.axes) != len(tref.axes) or len(set(tref.axes)) != len(tref.axes):
        return
    free_p = [i for i in pref.axes if i not in indices]
    fixed = {indices[i] for i in pref.axes if i in indices}
    free_t = [i for i in tref.axes if i not in fixed]
    if len(free_p) != len(free_t) or not fixed <= set(tref.axes):
        return
    taken = set(indices.values())
    if any(i in taken for i in free_t):
        return
    for order in permutations(free_t):
        new = {**indices, **dict(zip(free_p, order, strict=True))}
        slot = {new[i]: s for s, i in enumerate(pref.axes)}
        ref = Ref(tref.cls, tuple(slot[i] for i in tref.axes))
        known = binding.get(pref.cls)
        if known is None or known == ref:
            yield new, {**binding, pref.cls: ref}


def _match_product(
    ctx: Context, p: Pattern, pref: Ref, tref: Ref, indices: Indices, binding: Binding
) -> Iterator[State]:
    mine = _over(ctx, expand(p.terms.graph, pref.cls, lambda d: True), pref)
    theirs = _over(ctx, expand(ctx.g, tref.cls, lambda d: True), tref)
    scalars = [f for f in mine[1] if not f.axes and node(p.terms.graph, f.cls).op == LEAF]
    factors = [f for f in mine[1] if f not in scalars]
    if len(factors) != len(theirs[1]) or len(mine[2]) != len(theirs[2]) or len(scalars) > 1:
        return
    if scalars:
        if binding.get(scalars[0].cls, theirs[0]) != theirs[0]:
            return
        binding = {**binding, scalars[0].cls: theirs[0]}
    elif mine[0] != theirs[0]:
        return
    for indices2, binding2 in _assign(ctx, p, factors, list(theirs[1]), indices, binding):
        if all(b in indices2 for b in mine[2]):
            yield indices2, binding2


def _over(ctx: Context, product: Product, ref: Ref) -> tuple[Any, list[Ref], list[int]]:
    """Coefficient, factors over the reference's indices, and fresh names of bound indices."""
    bound = [next(ctx.fresh) for _ in product.bound]
    axes = [*ref.axes, *bound]
    factors = [Ref(f.cls, tuple(axes[i] for i in f.axes)) for f in product.factors]
    return product.coefficient, factors, bound


def _assign(
    ctx: Context, p: Pattern, mine: list[Ref], theirs: list[Ref], indices: Indices, binding: Binding
) -> Iterator[State]:
    if not mine:
        yield indices, binding
        return
    first, rest = mine[0], mine[1:]
    for k, other in enumerate(theirs):
        for i2, b2 in _match(ctx, p, first, other, indices, binding):
            yield from _assign(ctx, p, rest, theirs[:k] + theirs[k + 1 :], i2, b2)


def _match_node(
    ctx: Context,
    p: Pattern,
    pref: Ref,
    pnode: Node,
    tref: Ref,
    tnode: Node,
    indices: Indices,
    binding: Binding,
) -> Iterator[State]:
    if len(pnode.bound) != len(tnode.bound):
        return
    if pnode.op in (MAP, REDUCE, SLICE) and pnode.attr != tnode.attr:
        return
    fresh = [next(ctx.fresh) for _ in pnode.bound]
    paxes, taxes = [*pref.axes, *fresh], [*tref.axes, *fresh]
    mine = [Ref(a.cls, tuple(paxes[i] for i in a.axes)) for a in pnode.args]
    theirs = [Ref(a.cls, tuple(taxes[i] for i in a.axes)) for a in tnode.args]
    if pnode.op != ADD:
        states: list[State] = [(indices, binding)]
        for a, b in zip(mine, theirs, strict=True):
            states = [s2 for s in states for s2 in _match(ctx, p, a, b, *s)]
        yield from states
        return
    for order in permutations(range(len(theirs))):
        states = [(indices, binding)]
        for k, a in zip(order, mine, strict=True):
            coefficient = tnode.attr[k]  # type: ignore[index]
            wanted = pnode.attr[mine.index(a)]  # type: ignore[index]
            states = [
                s2
                for s in states
                for s2 in _match_scaled(ctx, p, a, theirs[k], wanted, coefficient, *s)
            ]
        yield from states


def _match_scaled(
    ctx: Context,
    p: Pattern,
    a: Ref,
    b: Ref,
    wanted: Any,
    got: Any,
    indices: Indices,
    binding: Binding,
) -> Iterator[State]:
    """A term of a sum; a coefficient of the target may be a scalar argument of the lemma."""
    if wanted == got:
        yield from _match(ctx, p, a, b, indices, binding)
    pnode = node(p.terms.graph, a.cls)
    if wanted == 1 and pnode.op == CONTRACT:
        inner = _over(ctx, expand(p.terms.graph, a.cls, lambda d: True), a)
        scalars = [f for f in inner[1] if not f.axes and node(p.terms.graph, f.cls).op == LEAF]
        theirs = _over(ctx, expand(ctx.g, b.cls, lambda d: True), b)
        value = theirs[0] * got
        if len(scalars) == 1 and binding.get(scalars[0].cls, value) == value and got != 1:
            rest = [f for f in inner[1] if f != scalars[0]]
            if len(rest) == len(theirs[1]):
                bound = {**binding, scalars[0].cls: value}
                yield from _assign(ctx, p, rest, theirs[1], indices, bound)


def _build(ctx: Context, p: Pattern, binding: Binding, cls: int, indices: Indices) -> Ref | None:
    """The right side with the pattern's leaves replaced, over the slots of `cls`."""
    why = Reason(p.lemma.name, cls)
    dtype = ctx.g.classes[cls].dtype
    made: dict[int, Any] = dict(binding)
    builder = _RightSide(ctx, p, made, dtype, why)
    ref = builder.make(p.right.cls)
    if not isinstance(ref, Ref):
        return None
    to = [indices.get(i) for i in p.right.axes]
    if any(i is None for i in to):
        return None
    return Ref(ref.cls, tuple(to[a] for a in ref.axes))  # type: ignore[misc]


class _RightSide:
    def __init__(self, ctx: Context, p: Pattern, made: Binding, dtype: str, why: Reason) -> None:
        self.ctx, self.p, self.made, self.dtype, self.why = ctx, p, made, dtype, why

    def make(self, pcls: int) -> Any:
        """The target's value of a pattern class: a reference over the class's slots."""
        if pcls in self.made:
            return self.made[pcls]
        pg = self.p.terms.graph
        pnode = node(pg, pcls)
        args = [self.make(a.cls) for a in pnode.args]
        if any(a is None for a in args):
            return None
        numbers: dict[int, Any] = {}
        refs: list[Ref] = []
        coefficient: Any = 1
        coefficients: list[Any] = []
        for k, (a, made) in enumerate(zip(pnode.args, args, strict=True)):
            if not isinstance(made, Ref):
                coefficient = coefficient * made
                continue
            ref = Ref(made.cls, tuple(a.axes[s] for s in made.axes))
            for index, size in zip(ref.axes, self.ctx.g.classes[made.cls].sizes, strict=True):
                numbers[index] = size
            refs.append(ref)
            if pnode.op == ADD:
                coefficients.append(pnode.attr[k])  # type: ignore[index]
        out, total = pnode.out, pnode.out + len(pnode.bound)
        if any(i not in numbers for i in range(total)) or (pnode.op == ADD and coefficient != 1):
            return None
        sizes = tuple(numbers[i] for i in range(out))
        attr = tuple(coefficients) if pnode.op == ADD else pnode.attr
        bound = tuple(numbers[i] for i in range(out, total))
        g, why = self.ctx.g, self.why
        if pnode.op == CONTRACT and len(refs) == 1 and not bound:
            ref = refs[0]
        else:
            ref = g.add(pnode.op, attr, tuple(refs), sizes, bound, self.dtype, why)
        self.made[pcls] = scaled(g, ref, coefficient, sizes, why)
        return self.made[pcls]
