"""Sparsity: contractions with one-hot, diagonal and triangular indicators.

Diagonals need no rule of their own, because a delta under a sum renames an index (`order`). Sums
guarded by an indicator are read only where it is 1. The products of zero and infinity of an
unguarded product therefore do not occur.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import nn

from symjax_rewrite.ir.index_tests import index_of, indicated, label_of
from symjax_rewrite.ir.primitives import holds
from symjax_rewrite.ir.products import flattest, is_half
from symjax_rewrite.ir.term import (
    ADD,
    CONCAT,
    CONTRACT,
    CUMSUM,
    DELTA,
    IOTA,
    MAP,
    TAKE,
    Node,
    Ref,
)
from symjax_rewrite.ir.value_analysis import selected_case
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import RightSide, zero_of
from symjax_rewrite.rewriting.rule import SPARSITY, RuleContext, axiom, built
from symjax_rewrite.rewriting.scales import apart
from symjax_rewrite.rules.distributivity import splice


def _row_or_zero(x: Any, W: Any) -> Any:
    inside = (x >= 0) & (x < len(W))
    return jnp.where(inside[:, None], W[jnp.clip(x, 0, len(W) - 1)], 0)


@axiom(
    law("one_hot(x, W)·W = row_or_zero(x, W)", x="n!9", W="dk", row_or_zero=_row_or_zero,
        one_hot=lambda x, W: nn.one_hot(x, len(W), dtype=W.dtype)),
    property=SPARSITY,
    on=(CONTRACT,),
    needs=(IOTA, TAKE),
)  # fmt: skip
def one_hot(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a contraction with a one-hot factor as a gather: Σᵥ [x = v]·W(v) = W(x).

    For labels out of range it is zero.
    """
    p = ctx.opened(cls, node)
    r = RightSide.of(ctx, one_hot, cls, p.bound)
    for k, f in enumerate(p.factors):
        test = label_of(ctx.g, indicated(ctx.g, f)) or _identity_rows(ctx, f)
        if test is None or test[1] < p.out:
            test = _shifted_index(r, f, p.summed) or test
        if test is None:
            continue
        label, index, *beyond = test
        rest = p.besides(k)
        if index < p.out or index in label.axes or not any(index in g.axes for g in rest):
            continue  # alone, Σᵥ [x = v] is 1 only if x is in range
        made = _gathered(r, rest, label, index, *beyond)
        if made is not None and p.coefficient == 1:
            summed = [i for i in p.summed if i != index]
            yield from built(r.product, made, summed, precision=p.precision)


def _shifted_index(r: RightSide, f: Ref, summed: Container[int]) -> tuple[Ref, int] | None:
    """Return `(i + a - b, j)` of a factor [i + a = j + b], where j is summed; or None."""
    for test in indicated(r.g, f):
        if test.kind != "eq" or test.negated:
            continue
        for label, other in ((test.left, test.right), (test.right, test.left)):
            start, found = index_of(r.g, label), index_of(r.g, other)
            if start is None or found is None or found[1] == 0 or found[0] not in summed:
                continue
            c, offset = r.g.classes[label.cls], -found[1]
            if holds(c.dtype, offset, 1) and holds(c.dtype, start[1] + offset, c.sizes[0]):
                by = r.const(offset, c.dtype)
                return r.term(ADD, (label, by), (1, 1), dtype=c.dtype), found[0]
    return None


def _identity_rows(ctx: RuleContext, f: Ref) -> tuple[Ref, int, Any] | None:
    """Return `(x, v, out of range)` of a factor I[x, v], rows of an identity matrix; or None."""
    for n in ctx.g.nodes(f.cls, TAKE):
        if len(n.args) != 2 or n.attr[2] != (None,):
            continue
        mode, fill, _ = n.attr
        if mode == "fill" and fill[0] == fill[0]:
            continue  # a sum of fill values equals the fill value only if it is NaN
        matrix, x = n.args
        columns = [i for i in matrix.axes if i < n.out]
        if ctx.has(matrix.cls, DELTA) and len(columns) == 1 and columns[0] not in x.axes:
            label = x.over(f.axes)
            return label, f.axes[columns[0]], (mode, fill, (None,))
    return None


def triangle_of(ctx: RuleContext, f: Ref) -> tuple[int, int, int] | None:
    """Return `(i, j, b)` of a factor `[i ≥ j + b]` in two indices, in any spelling; or None."""
    for test in indicated(ctx.g, f):
        left, right = index_of(ctx.g, test.left), index_of(ctx.g, test.right)
        if left is None or right is None or test.kind == "eq":
            continue
        (i, a), (j, b) = left, right
        # i - j ≥ bound, or i - j ≤ bound; the negation of one is the other.
        strict = test.kind in ("gt", "lt")
        from_below = test.kind in ("ge", "gt")
        bound = b - a + strict if from_below else b - a - strict
        if test.negated:
            bound = bound - 1 if from_below else bound + 1
            from_below = not from_below
        return (i, j, bound) if from_below else (j, i, -bound)
    return None


def _gathered(
    r: RightSide, rest: list[Ref], label: Ref, index: int, beyond: Any = None
) -> list[Ref] | None:
    """Return the other factors that read the index, read at the label instead.

    beyond: the value for a label out of range, as in a gather; None: zero.
    """
    out = []
    for f in rest:
        if index in f.axes:
            if f.axes.count(index) != 1 or set(f.axes) & set(label.axes):
                return None
            dtype = r.g.classes[f.cls].dtype
            attr = beyond or ("fill", zero_of(dtype), (None,))
            f = r.term(TAKE, (f, label), attr, dtype=dtype, summed=(index,))
        out.append(f)
    return out


@axiom(
    law("where(m[:, None] > 3, a·b, 0)·c = where(m[:, None] > 3, a·(b·c), 0)",
        m="i!9", a="ij", b="jk", c="kr"),
    property=SPARSITY,
    on=(CONTRACT,),
    needs=(MAP,),
)  # fmt: skip
def masked_product(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Move a mask of rows from between two products to the rows of the result.

    Neither form reads the masked elements, so these may be inf or nan. The product 0 · b is dropped
    even if b is inf or nan. A mask on a summed index stays, because it would have to be multiplied
    with the masked elements.
    """
    p = ctx.opened(cls, node)
    r = RightSide.of(ctx, masked_product, cls)
    for k, f in enumerate(p.factors):
        for mask in ctx.g.nodes(f.cls, MAP):
            selected = selected_case(ctx.g, mask)
            if selected is None or ctx.g.classes[f.cls].dtype != r.dtype:
                continue
            which, case = (ctx.g.find(mask.args[n]).over(f.axes) for n in (0, selected))
            if any(i >= p.out for i in which.axes):
                continue
            for ref in built(r.ordered, splice(p, k, case, flattest(ctx.g, case.cls))):
                cases = (ref, r.zero()) if selected == 1 else (r.zero(), ref)
                yield r.term(MAP, (which, *cases), mask.attr)


@axiom(
    law("tri(a)·a = cumsum(a)", a="ij", tri=lambda a: jnp.tri(len(a), dtype=a.dtype),
        cumsum=lambda a: jnp.cumsum(a, 0, a.dtype)),
    property=SPARSITY,
    on=(CONTRACT, ADD),
    needs=(IOTA,),
)  # fmt: skip
def triangular_prefix(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a contraction with a triangle of ones as a cumulative sum, forwards or backwards.

    Σⱼ [i ≥ j + b]·f(j) is the prefix sum of f at i − b.
    """
    if node.op == ADD and len(node.args) > 1:
        return
    scale, p = apart(ctx.opened(cls, node))
    r = RightSide.of(ctx, triangular_prefix, cls, p.bound)
    for k, f in enumerate(() if is_half(r.dtype) else p.factors):
        test = triangle_of(ctx, f)
        if test is None:
            continue
        i, j, shift = test
        reverse = i >= p.out > j
        if reverse:
            i, j = j, i
        rest = p.besides(k)
        if i >= p.out or j < p.out or not rest or any(i in g.axes for g in rest):
            continue
        size = r.sizes[i]
        if size != r.sizes[j]:
            continue
        if shift and not (isinstance(size, int) and abs(shift) < size):
            continue
        # The prefix runs over j, which replaces output i.
        summed = [n for n in p.summed if n != j]
        moved = [g.moved(j, i) for g in rest]
        for ref in built(r.product, moved, summed, p.coefficient, p.precision):
            if i in ref.axes:
                made = r.term(CUMSUM, (ref,), (i, reverse))
                if shift:
                    made = _shifted(r, made, i, -shift if reverse else shift, reverse)
                yield r.scaled(scale, made)


def _shifted(r: RightSide, ref: Ref, at: int, by: int, reverse: bool) -> Ref:
    """Return sums S over n indices, read at i − by: 0 before the start, the last after the end."""
    n, count = r.sizes[at], abs(by)
    assert isinstance(n, int)

    def part(entry: Any, size: int | None) -> Ref:
        """Return S with index `at` sliced by the entry; a size of None is one element."""
        entries = {i: (None, i) for i in r.sizes} | {at: (entry, -1 if size is None else at)}
        return replace(r, sizes={**r.sizes, at: size or 1}).sliced(ref, entries)

    summed = part((0, 1) if by > 0 else (count, 1), n - count)
    empty = (by > 0) != reverse
    rest = r.zero() if empty else part(n - 1 if by < 0 else 0, None)
    blocks = [(count, rest), (n - count, summed)][:: 1 if by > 0 else -1]
    sizes, refs = zip(*blocks, strict=True)
    return r.term(CONCAT, refs, (at, sizes))
