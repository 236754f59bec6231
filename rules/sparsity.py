"""Sparsity: contractions with one-hot, diagonal and triangular indicators.

Diagonals need no rule of their own, because a delta under a sum renames an index (`order`). Sums
guarded by an indicator are read only where it is 1. The products of zero and infinity of an
unguarded product therefore do not occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import nn

from symjax_rewrite.ir.primitives import dtype_kind, holds
from symjax_rewrite.ir.products import Product, expand_node, flattest, is_half
from symjax_rewrite.ir.term import (
    ADD,
    CONCAT,
    CONST,
    CONTRACT,
    CUMSUM,
    DELTA,
    IOTA,
    MAP,
    SLICE,
    TAKE,
    Node,
    Ref,
)
from symjax_rewrite.ir.value_analysis import shown_case
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import SPARSITY, RuleContext, Sides, axiom
from symjax_rewrite.rules.distributivity import splice
from symjax_rewrite.rules.locality import zero_of


def _row_or_zero(x: Any, W: Any) -> Any:
    inside = (x >= 0) & (x < len(W))
    return jnp.where(inside[:, None], W[jnp.clip(x, 0, len(W) - 1)], 0)


@axiom(
    "Σᵥ [x = v]·W(v) = W(x) if 0 ≤ x < n else 0",
    property=SPARSITY,
    on=(CONTRACT,),
    needs=(IOTA, TAKE),
    sides=(
        Sides(
            "n!9,dk", lambda x, W: (nn.one_hot(x, len(W), dtype=W.dtype) @ W, _row_or_zero(x, W))
        ),
    ),
)
def one_hot(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a contraction with a one-hot factor as a gather, zero for labels out of range."""
    c = ctx.g.classes[cls]
    p = expand_node(ctx.g, cls, node, lambda d: ctx.uses(d) <= 1)
    for k, f in enumerate(p.factors):
        test = one_hot_of(ctx, f) or _identity_rows(ctx, f)
        if test is None:
            continue
        label, index, *beyond = test
        rest = [g for j, g in enumerate(p.factors) if j != k]
        if index < p.out or index in label.axes or not any(index in g.axes for g in rest):
            continue  # alone, Σᵥ [x = v] is 1 only if x is in range
        ref = _gathered(ctx, cls, p, rest, label, index, beyond[0] if beyond else None)
        if ref is not None:
            product = Product(1, tuple(ref), p.out, p.bound, p.precision)
            found = order_product(
                ctx, product.without(index), c.sizes, c.dtype, one_hot.reason(cls)
            )
            if found is not None and p.coefficient == 1:
                yield found


class Test(NamedTuple):
    """A factor `[left kind right]`, both sides over the product's indices; negated or not."""

    left: Ref
    kind: str
    right: Ref
    negated: bool


def tests(ctx: RuleContext, f: Ref) -> Iterator[Test]:
    """Yield the comparisons of which a factor is the indicator."""
    for outer in ctx.g.classes[f.cls].nodes:
        negated = _is_negated(ctx, outer)
        if negated is None:
            continue
        for inner in ctx.g.classes[outer.args[0].cls].nodes:
            if inner.op == MAP and inner.attr[0] in ("eq", "ge", "gt", "le", "lt"):
                axes = [f.axes[i] for i in outer.args[0].axes]
                left, right = (a.over(axes) for a in inner.args)
                yield Test(left, inner.attr[0], right, negated)


def _is_negated(ctx: RuleContext, outer: Node) -> bool | None:
    """Return False for an indicator of a condition, True for one of its negation, else None."""
    if outer.op != MAP:
        return None
    if outer.attr[0] == "convert_element_type":
        return None if ctx.g.classes[outer.args[0].cls].dtype != "bool" else False
    if outer.attr[0] != "select_n" or len(outer.args) != 3:
        return None
    cases = [_number(ctx, a.cls) for a in outer.args[1:]]
    return False if cases == [0, 1] else True if cases == [1, 0] else None


def _number(ctx: RuleContext, cls: int) -> Any:
    return next((n.attr[0] for n in ctx.g.classes[cls].nodes if n.op == CONST), None)


def _index(ctx: RuleContext, ref: Ref) -> tuple[int, int] | None:
    """Return `(index, offset)` of a value that is an index plus a constant, or None."""
    for n in ctx.g.classes[ref.cls].nodes:
        if n.op == IOTA:
            return ref.axes[0], 0
        if n.op == ADD and n.attr == (1, 1) and len(n.args) == 2:
            offset = next((_number(ctx, a.cls) for a in n.args if not a.axes), None)
            base = next((a for a in n.args if a.axes), None)
            if base is None or not isinstance(offset, int):
                continue
            c = ctx.g.classes[base.cls]
            if any(m.op == IOTA for m in c.nodes) and holds(c.dtype, offset, c.sizes[0]):
                return ref.axes[base.axes[0]], offset
    return None


def one_hot_of(ctx: RuleContext, f: Ref) -> tuple[Ref, int] | None:
    """Return `(x, v)` of a factor `[x = v]`, an integer value and an index; or None."""
    for test in tests(ctx, f):
        if test.kind != "eq" or test.negated:
            continue
        for label, other in ((test.left, test.right), (test.right, test.left)):
            found = _index(ctx, other)
            if found and not found[1] and dtype_kind(ctx.g.classes[label.cls].dtype) in "iu":
                return label, found[0]
    return None


def _identity_rows(ctx: RuleContext, f: Ref) -> tuple[Ref, int, Any] | None:
    """Return `(x, v, out of range)` of a factor I[x, v], rows of an identity matrix; or None."""
    for n in ctx.g.classes[f.cls].nodes:
        if n.op != TAKE or len(n.args) != 2 or n.attr[2] != (None,):
            continue
        mode, fill, _ = n.attr
        if mode == "fill" and fill[0] == fill[0]:
            continue  # a sum of fill values equals the fill value only if it is NaN
        matrix, x = n.args
        columns = [i for i in matrix.axes if i < n.out]
        identity = any(m.op == DELTA for m in ctx.g.classes[matrix.cls].nodes)
        if identity and len(columns) == 1 and columns[0] not in x.axes:
            label = x.over(f.axes)
            return label, f.axes[columns[0]], (mode, fill, (None,))
    return None


def triangle_of(ctx: RuleContext, f: Ref) -> tuple[int, int, int] | None:
    """Return `(i, j, b)` of a factor `[i ≥ j + b]` in two indices, in any spelling; or None."""
    for test in tests(ctx, f):
        left, right = _index(ctx, test.left), _index(ctx, test.right)
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
    ctx: RuleContext, cls: int, p: Product, rest: list[Ref], label: Ref, index: int, beyond: Any
) -> list[Ref] | None:
    """Return the other factors that read the index, read at the label instead.

    beyond: the value for a label out of range, as in a gather; None: zero.
    """
    sizes = (*ctx.g.classes[cls].sizes, *p.bound)
    out = []
    for f in rest:
        if index not in f.axes:
            out.append(f)
            continue
        if f.axes.count(index) != 1 or set(f.axes) & set(label.axes):
            return None
        dtype, why = ctx.g.classes[f.cls].dtype, one_hot.reason(cls)
        attr = beyond or ("fill", zero_of(dtype), (None,))
        made = ctx.g.term(TAKE, (f, label), sizes, dtype, why, attr=attr, summed=(index,))
        out.append(made)
    return out


@axiom(
    "Σₖ (c ? a : 0)·b = c ? Σₖ a·b : 0  (k ∉ c)",
    property=SPARSITY,
    on=(CONTRACT,),
    needs=(MAP,),
    sides=(
        Sides(
            "i!9,ij,jk,kr",
            lambda m, a, b, c: (
                jnp.where(m[:, None] > 3, a @ b, 0) @ c,
                jnp.where(m[:, None] > 3, a @ (b @ c), 0),
            ),
        ),
    ),
)
def masked_product(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Move a mask of rows from between two products to the rows of the result.

    Neither form reads the masked elements, so these may be inf or nan. The product 0 · b is dropped
    even if b is inf or nan. A mask on a summed index stays, because it would have to be multiplied
    with the masked elements.
    """
    c = ctx.g.classes[cls]
    p = expand_node(ctx.g, cls, node, lambda d: ctx.uses(d) <= 1)
    why = masked_product.reason(cls)
    for k, f in enumerate(p.factors):
        for mask in list(ctx.g.classes[f.cls].nodes):
            shown = shown_case(ctx.g, mask)
            if shown is None or ctx.g.classes[f.cls].dtype != c.dtype:
                continue
            which, case = (
                a.over(f.axes) for a in (ctx.g.find(mask.args[0]), ctx.g.find(mask.args[shown]))
            )
            if any(i >= p.out for i in which.axes):
                continue
            opened = splice(p, k, case, flattest(ctx.g, case.cls))
            ref = order_product(ctx, opened, c.sizes, c.dtype, why)
            if ref is not None:
                zero = ctx.g.add(CONST, zero_of(c.dtype), (), (), (), c.dtype, why)
                cases = (ref, zero) if shown == 1 else (zero, ref)
                yield ctx.g.add(MAP, mask.attr, (which, *cases), c.sizes, (), c.dtype, why)


@axiom(
    "Σⱼ [i ≥ j + b]·f(j) = prefix sum of f at i − b",
    property=SPARSITY,
    on=(CONTRACT,),
    needs=(IOTA,),
    sides=(Sides("ij", lambda a: (jnp.tri(len(a), dtype=a.dtype) @ a, jnp.cumsum(a, 0, a.dtype))),),
)
def triangular_prefix(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a contraction with a triangle of ones as a cumulative sum, forwards or backwards."""
    c = ctx.g.classes[cls]
    if is_half(c.dtype):
        return
    p = expand_node(ctx.g, cls, node, lambda d: ctx.uses(d) <= 1)
    for k, f in enumerate(p.factors):
        test = triangle_of(ctx, f)
        if test is None:
            continue
        i, j, shift = test
        reverse = i >= p.out > j
        if reverse:
            i, j = j, i
        rest = [g for m, g in enumerate(p.factors) if m != k]
        if i >= p.out or j < p.out or not rest or any(i in g.axes for g in rest):
            continue
        # The prefix runs over j, which replaces output i.
        swapped = tuple(g.moved(j, i) for g in rest)
        size = c.sizes[i]
        if size != p.bound[j - p.out] or p.coefficient != 1:
            continue
        if shift and not (isinstance(size, int) and abs(shift) < size):
            continue
        inner = Product(1, swapped, p.out, p.bound, p.precision).without(j)
        ref = order_product(ctx, inner, c.sizes, c.dtype, triangular_prefix.reason(cls))
        if ref is None or i not in ref.axes:
            continue
        why = triangular_prefix.reason(cls)
        made = ctx.g.apply(CUMSUM, (i, reverse), (ref,), c.dtype, why)
        if shift:
            made = _shifted(ctx, made, i, -shift if reverse else shift, reverse)
        yield made


def _shifted(ctx: RuleContext, ref: Ref, at: int, by: int, reverse: bool) -> Ref:
    """Return sums S over n indices, read at i − by: 0 before the start, the last after the end."""
    g, why = ctx.g, triangular_prefix.reason(ref.cls)
    c = g.classes[ref.cls]
    slot, count = ref.axes.index(at), abs(by)
    n = c.sizes[slot]
    sizes: dict[int, Any] = dict(zip(ref.axes, c.sizes, strict=True))
    assert isinstance(n, int)

    def part(entry: Any, count: int | None) -> Ref:
        """Return S with index `at` sliced by the entry; a count of None is one element."""
        read = ref if count is not None else ref.moved(at, -1)
        attr = tuple([entry if k == slot else None for k in range(len(ref.axes))])
        return g.term(
            SLICE, (read,), sizes if count is None else sizes | {at: count}, c.dtype, why, attr=attr
        )

    summed = part((0, 1) if by > 0 else (count, 1), n - count)
    empty = (by > 0) != reverse
    rest = (
        g.add(CONST, zero_of(c.dtype), (), (), (), c.dtype)
        if empty
        else part(n - 1 if by < 0 else 0, None)
    )
    pieces = [(count, rest), (n - count, summed)][:: 1 if by > 0 else -1]
    attr = (at, tuple([size for size, _ in pieces]))
    return g.term(CONCAT, [r for _, r in pieces], sizes, c.dtype, why, attr=attr)
