"""Locality: a part of a term is computed from the required parts of its operands.

A slice or one element of a term reads slices of its operands. A contraction over a concatenated
index is the sum of contractions over the blocks (block matrices).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.ir.egraph import Justification
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import Product, expand_node
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONCAT, CONST, CONTRACT, MAP, REDUCE, SLICE, TAKE, Node, Ref
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import LOCALITY, RuleContext, Sides, axiom

Entry = tuple[Any, int]  # the slice of a slot (None: no slice), the index that it then reads


@axiom(
    "(a·b)[s] = a[s]·b",
    property=LOCALITY,
    on=(SLICE,),
    again=True,
    sides=(Sides("ij,jk", lambda a, b: ((a @ b)[1:3], a[1:3] @ b)),),
)
def partial_access(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a slice of a term as the term of slices."""
    g, c = ctx.g, ctx.g.classes[cls]
    attrs, (source,) = g.canonical_args(SLICE, node.attr, node.args)
    by_slot = dict(enumerate(zip(attrs, source.axes, strict=True)))
    for inner, reason in list(g.classes[source.cls].nodes.items()):
        if reason.rule == "contraction_order":
            continue
        if inner.op in (CONTRACT, ADD, MAP, REDUCE):
            yield from _through(ctx, cls, inner, by_slot, len(c.sizes))
        elif inner.op == SLICE:
            yield from _compose(ctx, cls, by_slot, inner)
        elif inner.op == CONCAT:
            yield from _one_piece(ctx, cls, inner, by_slot)


def _through(
    ctx: RuleContext, cls: int, inner: Node, by_slot: dict[int, Entry], out: int
) -> Iterator[Ref]:
    c = ctx.g.classes[cls]
    entries: dict[int, Entry] = dict(by_slot)
    entries.update({inner.out + k: (None, out + k) for k in range(len(inner.bound))})
    sizes = (*c.sizes, *inner.bound)
    why = partial_access.reason(cls)
    args = tuple(sliced(ctx, a, entries, sizes, why) for a in inner.args)
    if inner.op == CONTRACT and inner.bound:
        p = Product(1, args, out, inner.bound, inner.attr)
        ref = order_product(ctx, p, c.sizes, c.dtype, why)
        if ref is not None:
            yield ref
        return
    yield ctx.g.add(inner.op, inner.attr, args, c.sizes, inner.bound, c.dtype, why)


def sliced(
    ctx: RuleContext,
    ref: Ref,
    entries: dict[int, Entry],
    sizes: Sequence[Dim] | Mapping[int, Dim],
    why: Justification,
) -> Ref:
    """Return `ref` with every index it reads sliced and renamed as `entries` says."""
    ref = ctx.g.find(ref)
    attrs, axes = zip(*(entries[i] for i in ref.axes), strict=True) if ref.axes else ((), ())
    arg = Ref(ref.cls, axes)
    if all(a is None for a in attrs):
        return arg
    return ctx.g.term(SLICE, (arg,), sizes, ctx.g.classes[ref.cls].dtype, why, attr=attrs)


@axiom(
    "(a·b)[x] = a[x]·b",
    property=LOCALITY,
    on=(TAKE,),
    again=True,
    sides=(Sides("r!7,ij,jk", lambda x, a, b: ((a @ b)[x], a[x] @ b)),),
)
def gather_parts(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a gather of a term as the term of gathers; fill values are selected last.

    Inner index values are clamped, so the rewritten program reads no element that the written
    program would not read.
    """
    g, c = ctx.g, ctx.g.classes[cls]
    source, *values = node.args
    why = gather_parts.reason(cls)
    mode, _, windows = node.attr
    inside = ("clip" if mode == "fill" else mode, None, windows)
    for inner, reason in list(g.classes[source.cls].nodes.items()):
        if reason.rule == "contraction_order" or inner.op not in (CONTRACT, ADD, MAP, REDUCE):
            continue
        # Indices: of the result, of the inner sum, and of the gather's selection.
        out, bound = len(c.sizes), inner.bound
        beyond = out + len(bound)
        selected = {beyond + j: x for j, x in enumerate(values)}
        read = [i if i < node.out else beyond + i - node.out for i in source.axes]
        to = [*read, *range(out, beyond)]
        sizes = (*c.sizes, *bound, *node.bound)
        args = tuple(
            _gathered(ctx, g.find(a).over(to), inside, selected, sizes, why) for a in inner.args
        )
        if inner.op == CONTRACT and inner.bound:
            p = Product(1, args, out, inner.bound, inner.attr)
            ref = order_product(ctx, p, c.sizes, c.dtype, why)
        else:
            ref = g.add(inner.op, inner.attr, args, c.sizes, inner.bound, c.dtype, why)
        if ref is not None and mode == "fill":
            ref = _filled(ctx, ref, node, c, why)
        if ref is not None:
            yield ref


def _gathered(
    ctx: RuleContext,
    a: Ref,
    attr: tuple,
    selected: dict[int, Ref],
    sizes: tuple[Dim, ...],
    why: Justification,
) -> Ref:
    """Return an operand of a gathered term, read at the values of the `selected` indices."""
    mode, fill, windows = attr
    window_of = dict(zip(selected, windows, strict=True))
    chosen = [k for k in selected if k in a.axes]
    if not chosen:
        return a
    window = tuple(window_of[k] for k in chosen)
    args = (a, *(selected[k] for k in chosen))
    out = {i for x in args for i in x.axes} | {w for w in window if w is not None}
    return ctx.g.term(
        TAKE,
        args,
        sizes,
        ctx.g.classes[a.cls].dtype,
        why,
        attr=(mode, fill, window),
        out=sorted(out - set(chosen)),
        summed=chosen,
    )


def _filled(ctx: RuleContext, ref: Ref, node: Node, c: Any, why: Justification) -> Ref | None:
    """Return `ref` if every index value of a gather is in range, and its fill value otherwise."""
    g = ctx.g
    _, fill, windows = node.attr
    test: Ref | None = None
    for x, size, w in zip(node.args[1:], node.bound, windows, strict=True):
        last = size - (1 if w is None else c.sizes[w])
        dtype = g.classes[x.cls].dtype
        if not isinstance(last, int) or not 0 <= last <= np.iinfo(dtype).max:
            return None
        for name, bound in (("ge", 0), ("le", last)):
            end = g.add(CONST, (bound, dtype, repr(bound)), (), (), (), dtype, why)
            made = g.apply(MAP, (name, ()), (x, end), "bool", why)
            test = g.apply(MAP, ("and", ()), (test, made), "bool", why) if test else made
    assert test is not None
    outside = g.add(CONST, fill, (), (), (), c.dtype, why)
    return g.add(MAP, ("select_n", ()), (test, outside, ref), c.sizes, (), c.dtype, why)


def _compose(ctx: RuleContext, cls: int, by_slot: dict[int, Entry], inner: Node) -> Iterator[Ref]:
    """Compose slices, a[s][t] = a[s∘t].

    A diagonal other than the main diagonal is not a slice whose two axes are read alike, so such a
    diagonal is not composed.
    """
    c = ctx.g.classes[cls]
    attrs, axes = [], []
    for attr, index in zip(inner.attr, inner.args[0].axes, strict=True):
        if index < 0:
            attrs.append(attr)
            axes.append(-1)
            continue
        over, new = by_slot[index]
        attrs.append(_compose_entry(attr, over))
        axes.append(new)
    read = [(i, a) for i, a in zip(axes, attrs, strict=True) if i >= 0]
    if len({i for i, _ in read}) < len(set(read)):
        return
    arg = Ref(inner.args[0].cls, tuple(axes))
    why = partial_access.reason(cls)
    yield ctx.g.add(SLICE, tuple(attrs), (arg,), c.sizes, (), c.dtype, why)


def _compose_entry(first: Any, then: Any) -> Any:
    if first is None:
        return then
    if then is None:
        return first
    start, stride = first
    if isinstance(then, tuple):
        return (start + stride * then[0], stride * then[1])
    return start + stride * then


def _one_piece(ctx: RuleContext, cls: int, inner: Node, by_slot: dict[int, Entry]) -> Iterator[Ref]:
    """Rewrite a slice within one block of a concatenation as a slice of this block."""
    target, piece_sizes = inner.attr
    c = ctx.g.classes[cls]
    attr, index = by_slot[target]
    if attr is None or not all(isinstance(s, int) for s in piece_sizes):
        return
    start, stride = attr if isinstance(attr, tuple) else (attr, 1)
    count = c.sizes[index] if index >= 0 else 1
    if not isinstance(count, int) or count == 0:
        return
    begin = 0
    for k, size in enumerate(piece_sizes):
        last = start + stride * (count - 1)
        if begin <= start and last < begin + size:
            shifted = (start - begin, stride) if isinstance(attr, tuple) else start - begin
            whole = isinstance(attr, tuple) and (start - begin, stride, count) == (0, 1, size)
            entries = dict(by_slot)
            entries[target] = (None if whole else shifted, index)
            yield sliced(ctx, inner.args[k], entries, c.sizes, partial_access.reason(cls))
        begin += size


@axiom(
    "Σ over [K₁, K₂] of a·b = Σ_K₁ a₁·b₁ + Σ_K₂ a₂·b₂",
    property=LOCALITY,
    on=(CONTRACT,),
    again=True,
    needs=(CONCAT,),
    sides=(
        Sides(
            "ij,ik,jl,kl",
            lambda a, b, c, d: (
                jnp.concatenate([a, b], 1) @ jnp.concatenate([c, d]),
                a @ c + b @ d,
            ),
        ),
    ),
)
def block_products(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a contraction with a concatenated factor block by block, without blocks of zeros."""
    if not node.bound:
        return
    for k, arg in enumerate(node.args):
        for inner in list(ctx.g.classes[ctx.g.find(arg).cls].nodes):
            if inner.op != CONCAT or not _all_ints(inner.attr[1]):
                continue
            p = expand_node(ctx.g, cls, node, lambda d: False)
            index = ctx.g.find(node.args[k]).axes[inner.attr[0]]
            if sum(i == index for f in p.factors for i in f.axes if f == p.factors[k]) != 1:
                continue
            pieces = _pieces(ctx, cls, p, k, inner, index)
            if pieces is not None:
                yield pieces


def _all_ints(sizes: tuple[Dim, ...]) -> bool:
    return all(isinstance(s, int) and s > 0 for s in sizes)


def _pieces(ctx: RuleContext, cls: int, p: Product, k: int, inner: Node, index: int) -> Ref | None:
    c = ctx.g.classes[cls]
    why = block_products.reason(cls)
    source = ctx.g.find(p.factors[k])
    summed = index >= p.out
    refs, begin = [], 0
    for piece, size in zip(inner.args, inner.attr[1], strict=True):
        sizes = [*c.sizes, *p.bound]
        sizes[index] = size
        same: dict[int, Entry] = {i: (None, i) for i in range(len(sizes))}
        part = {**same, index: ((begin, 1) if size > 1 else begin, index if size > 1 else -1)}
        factors = []
        for j, f in enumerate(p.factors):
            if j == k:
                axes = tuple(source.axes[i] for i in piece.axes)
                factors.append(ctx.g.find(Ref(piece.cls, axes)))
            else:
                factors.append(_part(ctx, f, part, index, size, tuple(sizes), why))
        begin += size
        if any(ctx.is_zero(f.cls) for f in factors):
            refs.append(_zero(ctx, c.dtype, why))
            continue
        ref = _piece_product(ctx, p, factors, sizes, index, c.dtype, why)
        if ref is None:
            return None
        refs.append(ref)
    if not summed:
        attr = (index, inner.attr[1])
        return ctx.g.add(CONCAT, attr, tuple(refs), c.sizes, (), c.dtype, why)
    terms = [r for r in refs if not ctx.is_zero(r.cls)]
    if not terms:
        return _zero(ctx, c.dtype, why)
    if len(terms) == 1:
        return terms[0]
    return ctx.g.add(ADD, (1,) * len(terms), tuple(terms), c.sizes, (), c.dtype, why)


def _part(
    ctx: RuleContext,
    f: Ref,
    part: dict[int, Entry],
    index: int,
    size: int,
    sizes: tuple,
    why: Justification,
) -> Ref:
    """Return a factor restricted to one block, which is its own block if concatenated alike."""
    if index not in f.axes:
        return f
    made = sliced(ctx, f, part, sizes, why)
    for inner in list(ctx.g.classes[ctx.g.find(f).cls].nodes):
        if inner.op != CONCAT or f.axes.count(index) != 1:
            continue
        if f.axes[inner.attr[0]] == index and _all_ints(inner.attr[1]):
            by_slot = {s: part[i] for s, i in enumerate(f.axes)}
            for ref in _restrict(ctx, inner, by_slot, size, sizes, why):
                return ref
    return made


def _restrict(
    ctx: RuleContext,
    inner: Node,
    by_slot: dict[int, Entry],
    size: int,
    sizes: tuple,
    why: Justification,
) -> Iterator[Ref]:
    target, piece_sizes = inner.attr
    attr = by_slot[target][0]
    start = attr[0] if isinstance(attr, tuple) else attr
    begin = 0
    for k, piece in enumerate(piece_sizes):
        if begin == start and piece == size:
            entries = {s: (None if s == target else e[0], e[1]) for s, e in by_slot.items()}
            yield sliced(ctx, inner.args[k], entries, sizes, why)
        begin += piece


def _piece_product(
    ctx: RuleContext,
    p: Product,
    factors: list[Ref],
    sizes: list,
    index: int,
    dtype: str,
    why: Justification,
) -> Ref | None:
    if sizes[index] == 1:
        factors = [f if index not in f.axes else _drop(ctx, f, index, dtype, why) for f in factors]
    piece = p._replace(factors=tuple(factors), bound=tuple(sizes[p.out :]))
    if sizes[index] == 1 and index >= p.out:
        piece = piece.without(index)
    return order_product(ctx, piece, tuple(sizes[: p.out]), dtype, why)


def _drop(ctx: RuleContext, f: Ref, index: int, dtype: str, why: Justification) -> Ref:
    """Return a factor at element 0 of an index of size 1."""
    entries: dict[int, Entry] = {i: (None, i) for i in f.axes}
    entries[index] = (0, -1)
    sizes = dict(zip(f.axes, ctx.g.classes[f.cls].sizes, strict=True))
    return sliced(ctx, f, entries, sizes, why)


def _zero(ctx: RuleContext, dtype: str, why: Justification) -> Ref:
    return ctx.g.add(CONST, zero_of(dtype), (), (), (), dtype, why)


def zero_of(dtype: str) -> tuple[Any, str, str]:
    """Return zero as a constant's attribute."""
    zero = {"i": 0, "u": 0, "c": 0j}.get(dtype_kind(dtype), 0.0)
    return (zero, dtype, repr(zero))
