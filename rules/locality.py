"""Locality: a part of a term is computed from the required parts of its operands.

A slice or one element of a term reads slices of its operands. A contraction over a concatenated
index is the sum of contractions over the blocks (block matrices).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.ir.products import Product, expand_node
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONCAT, CONST, CONTRACT, MAP, REDUCE, SLICE, TAKE, Node, Ref
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import Entry, RightSide
from symjax_rewrite.rewriting.rule import LOCALITY, RuleContext, axiom, built


def _applied(r: RightSide, inner: Node, args: Sequence[Ref], summed: Sequence[int]) -> Ref:
    """Return the operation of a node, applied to parts of its operands."""
    if inner.op == CONTRACT and inner.bound:
        return r.product(args, summed, precision=inner.attr)
    return r.term(inner.op, args, inner.attr, out=r.out, summed=summed)


@axiom(law("(a·b)[1:3] = a[1:3]·b", a="ij", b="jk"), property=LOCALITY, on=(SLICE,), again=True)
def partial_access(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a slice of a term as the term of slices."""
    attrs, (source,) = ctx.g.canonical_args(SLICE, node.attr, node.args)
    by_slot = dict(enumerate(zip(attrs, source.axes, strict=True)))
    for inner, reason in list(ctx.g.classes[source.cls].nodes.items()):
        if reason.rule == "contraction_order":
            continue
        r = RightSide.of(ctx, partial_access, cls, inner.bound)
        yield from built(_part, r, inner, by_slot)


def _part(r: RightSide, inner: Node, by_slot: dict[int, Entry]) -> Ref | None:
    """Return a slice of a node, as a term of slices of its operands."""
    if inner.op in (CONTRACT, ADD, MAP, REDUCE):
        summed = [*r.sizes][len(r.out) :]
        entries = by_slot | {inner.out + k: (None, i) for k, i in enumerate(summed)}
        return _applied(r, inner, [r.sliced(a, entries) for a in inner.args], summed)
    if inner.op == SLICE:
        return _composed(r, by_slot, inner)
    return _within_block(r, inner, by_slot) if inner.op == CONCAT else None


def _composed(r: RightSide, by_slot: dict[int, Entry], inner: Node) -> Ref | None:
    """Compose slices, a[s][t] = a[s∘t].

    A diagonal other than the main diagonal is not a slice whose two axes are read alike, so such a
    diagonal is not composed.
    """
    pairs = list(zip(inner.attr, inner.args[0].axes, strict=True))
    entries = [(a, -1) if i < 0 else (_compose(a, by_slot[i][0]), by_slot[i][1]) for a, i in pairs]
    read = {(i, a) for a, i in entries if i >= 0}
    if len({i for i, _ in read}) < len(read):
        return None
    attrs, axes = zip(*entries, strict=True) if entries else ((), ())
    return r.term(SLICE, (Ref(inner.args[0].cls, axes),), attrs)


def _compose(first: Any, then: Any) -> Any:
    if first is None or then is None:
        return then if first is None else first
    start, stride = first
    if isinstance(then, tuple):
        return (start + stride * then[0], stride * then[1])
    return start + stride * then


def _within_block(r: RightSide, inner: Node, by_slot: dict[int, Entry]) -> Ref | None:
    """Rewrite a slice within one block of a concatenation as a slice of this block."""
    target, sizes = inner.attr
    attr, index = by_slot[target]
    count = r.sizes[index] if index >= 0 else 1
    if attr is None or not all(isinstance(s, int) for s in (*sizes, count)) or count == 0:
        return None
    start, stride = attr if isinstance(attr, tuple) else (attr, 1)
    for k, (begin, size) in enumerate(zip(_starts(sizes), sizes, strict=True)):
        if begin <= start and start + stride * (count - 1) < begin + size:
            at = start - begin
            part = (at, stride) if isinstance(attr, tuple) else at
            whole = isinstance(attr, tuple) and (at, stride, count) == (0, 1, size)
            return r.sliced(inner.args[k], by_slot | {target: (None if whole else part, index)})
    return None


def _starts(sizes: Sequence[Any]) -> list[Any]:
    return [0, *accumulate(sizes[:-1])]


@axiom(law("(a·b)[x] = a[x]·b", x="r!7", a="ij", b="jk"), property=LOCALITY, on=(TAKE,), again=True)
def gather_parts(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a gather of a term as the term of gathers; fill values are selected last.

    Inner index values are clamped, so the rewritten program reads no element that the written
    program would not read.
    """
    source, *values = node.args
    mode, _, windows = node.attr
    inside = ("clip" if mode == "fill" else mode, None)
    for inner, reason in list(ctx.g.classes[source.cls].nodes.items()):
        if reason.rule == "contraction_order" or inner.op not in (CONTRACT, ADD, MAP, REDUCE):
            continue
        # Indices: of the result, of the inner sum, and of the gather's selection.
        r = RightSide.of(ctx, gather_parts, cls, (*inner.bound, *node.bound))
        beyond = len(r.out) + len(inner.bound)
        summed = range(len(r.out), beyond)
        selected = {
            beyond + j: (x, w) for j, (x, w) in enumerate(zip(values, windows, strict=True))
        }
        read = [i if i < node.out else beyond + i - node.out for i in source.axes]
        over = [ctx.g.find(a).over([*read, *summed]) for a in inner.args]
        args = [_gathered(r, a, inside, selected) for a in over]
        for ref in built(_applied, r, inner, args, summed):
            filled = _filled(r, ref, node) if mode == "fill" else ref
            if filled is not None:
                yield filled


def _gathered(r: RightSide, a: Ref, inside: tuple, selected: dict[int, tuple]) -> Ref:
    """Return an operand of a gathered term, read at the values of the `selected` indices."""
    chosen = [k for k in selected if k in a.axes]
    if not chosen:
        return a
    values, windows = zip(*(selected[k] for k in chosen), strict=True)
    out = {i for x in (a, *values) for i in x.axes} | {w for w in windows if w is not None}
    out, dtype = sorted(out - set(chosen)), r.g.classes[a.cls].dtype
    return r.term(TAKE, (a, *values), (*inside, windows), dtype=dtype, out=out, summed=chosen)


def _filled(r: RightSide, ref: Ref, node: Node) -> Ref | None:
    """Return `ref` if every index value of a gather is in range, and its fill value otherwise."""
    _, fill, windows = node.attr
    tests: list[tuple[str, Ref, int]] = []
    for x, size, w in zip(node.args[1:], node.bound, windows, strict=True):
        last = size - (1 if w is None else r.sizes[w])
        if not isinstance(last, int) or not 0 <= last <= np.iinfo(r.g.classes[x.cls].dtype).max:
            return None
        tests += [("ge", x, 0), ("le", x, last)]
    made = (
        r.map(name, x, r.const(end, r.g.classes[x.cls].dtype), dtype="bool")
        for name, x, end in tests
    )
    test = reduce(lambda a, b: r.map("and", a, b, dtype="bool"), made)
    outside = r.g.add(CONST, fill, (), (), (), r.dtype, r.why)
    return r.map("select_n", test, outside, ref)


@axiom(
    law("concat([a, b], 1)·concat([c, d]) = a·c + b·d",
        a="ij", b="ik", c="jl", d="kl", concat=jnp.concatenate),
    property=LOCALITY,
    on=(CONTRACT,),
    again=True,
    needs=(CONCAT,),
)  # fmt: skip
def block_products(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a contraction with a concatenated factor block by block, without blocks of zeros."""
    if not node.bound:
        return
    for k, arg in enumerate(node.args):
        for inner in ctx.g.nodes(ctx.g.find(arg).cls, CONCAT):
            if not _all_ints(inner.attr[1]):
                continue
            p = expand_node(ctx.g, cls, node, lambda d: False)
            index = ctx.g.find(arg).axes[inner.attr[0]]
            if sum(i == index for f in p.factors for i in f.axes if f == p.factors[k]) != 1:
                continue
            r = RightSide.of(ctx, block_products, cls, p.bound)
            yield from built(_by_blocks, r, p, k, inner, index)


def _all_ints(sizes: tuple[Dim, ...]) -> bool:
    return all(isinstance(s, int) and s > 0 for s in sizes)


def _by_blocks(r: RightSide, p: Product, k: int, inner: Node, index: int) -> Ref:
    source, blocks = r.g.find(p.factors[k]), inner.attr[1]
    refs = []
    for part, begin, size in zip(inner.args, _starts(blocks), blocks, strict=True):
        own = r.g.find(part.over(source.axes))
        block = _Block(r, index, begin, size)
        factors = [own if j == k else block.of(f) for j, f in enumerate(p.factors)]
        zero = any(r.ctx.is_zero(f.cls) for f in factors)
        refs.append(r.zero() if zero else block.product(p, factors))
    if index < p.out:
        return r.term(CONCAT, refs, (index, blocks), out=r.out)
    terms = [ref for ref in refs if not r.ctx.is_zero(ref.cls)] or refs[:1]
    return terms[0] if len(terms) == 1 else r.sum(*((1, t) for t in terms))


class _Block:
    """One block of an index of a product; a block of size 1 is no index."""

    def __init__(self, r: RightSide, index: int, begin: int, size: int) -> None:
        self.r = replace(r, sizes={**r.sizes, index: size})
        self.index, self.size, self.begin = index, size, begin
        one = size == 1
        same: dict[int, Entry] = {i: (None, i) for i in r.sizes}
        self.entries = same | {index: (begin if one else (begin, 1), -1 if one else index)}
        self.dropped = same | {index: (0, -1)} if one else same

    def of(self, f: Ref) -> Ref:
        """Return a factor restricted to the block, which is its own block if concatenated alike."""
        if self.index not in f.axes:
            return f
        made = self.r.sliced(f, self.entries)
        for inner in self.r.g.nodes(self.r.g.find(f).cls, CONCAT):
            target, sizes = inner.attr
            is_alike = f.axes[target] == self.index and f.axes.count(self.index) == 1
            if not is_alike or not _all_ints(sizes):
                continue
            for k, own in enumerate(zip(_starts(sizes), sizes, strict=True)):
                if own == (self.begin, self.size):
                    index = -1 if self.size == 1 else self.index
                    by_slot = {s: self.entries[i] for s, i in enumerate(f.axes)}
                    return self.r.sliced(inner.args[k], by_slot | {target: (None, index)})
        return made

    def product(self, p: Product, factors: list[Ref]) -> Ref:
        """Return the product of the restricted factors."""
        summed = [i for i in p.summed if i != self.index or self.size > 1]
        parts = [self.r.sliced(f, self.dropped) if self.index in f.axes else f for f in factors]
        return self.r.product(parts, summed, p.coefficient, p.precision)
