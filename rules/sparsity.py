"""Sparsity: contractions with one-hot, diagonal and triangular indicators.

Diagonals need no rule of their own: a delta under a sum renames an index (`order`). Sums guarded
by an indicator are read where it is 1 only, so what an unguarded product would give at zeros
times infinity does not arise.
"""

from __future__ import annotations

from collections.abc import Iterator

from symjax_rewrite.ir import CONTRACT, CUMSUM, IOTA, MAP, TAKE, Node, Ref
from symjax_rewrite.ops import dtype_kind
from symjax_rewrite.order import order_product
from symjax_rewrite.product import Product, expand_node, is_half
from symjax_rewrite.rule import SPARSITY, Context, axiom


@axiom("Σᵥ [x = v]·W(v) = W(x) if 0 ≤ x < n else 0", property=SPARSITY, on=(CONTRACT,))
def one_hot(ctx: Context, cls: int, node: Node) -> Iterator[Ref]:
    """A contraction with a one-hot factor is a gather, zero where the label is out of range."""
    c = ctx.g.classes[cls]
    p = expand_node(ctx.g, cls, node, lambda d: ctx.uses(d) <= 1)
    for k, f in enumerate(p.factors):
        test = indicator(ctx, f, "eq")
        if test is None:
            continue
        label, index = test
        rest = [g for j, g in enumerate(p.factors) if j != k]
        if index < p.out or not rest or index in label.axes:
            continue
        ref = _gathered(ctx, cls, p, rest, label, index)
        if ref is not None:
            product = Product(1, tuple(ref), p.out, p.bound, p.precision)
            found = order_product(
                ctx, _without(product, index), c.sizes, c.dtype, one_hot.reason(cls)
            )
            if found is not None and p.coefficient == 1:
                yield found


def indicator(ctx: Context, f: Ref, kind: str) -> tuple[Ref, int] | None:
    """`(x, v)` of a factor `[x kind v]`, both over the product's indices; v is an index."""
    for outer in ctx.g.classes[f.cls].nodes:
        if outer.op != MAP or outer.attr[0] not in ("convert_element_type", "select_n"):  # type: ignore[index]
            continue
        test = outer.args[0]
        for inner in ctx.g.classes[test.cls].nodes:
            if inner.op != MAP or inner.attr[0] != kind:  # type: ignore[index]
                continue
            axes = [f.axes[test_axis] for test_axis in test.axes]
            left, right = (Ref(a.cls, tuple(axes[i] for i in a.axes)) for a in inner.args)
            if not _is_index(ctx, right):
                if kind != "eq" or not _is_index(ctx, left):
                    continue
                left, right = right, left
            if dtype_kind(ctx.g.classes[left.cls].dtype) in "iu":
                return left, right.axes[0]
    return None


def _is_index(ctx: Context, ref: Ref) -> bool:
    return any(n.op == IOTA for n in ctx.g.classes[ref.cls].nodes)


def _gathered(
    ctx: Context, cls: int, p: Product, rest: list[Ref], label: Ref, index: int
) -> list[Ref] | None:
    """Every other factor that reads the index, read at the label instead."""
    sizes = (*ctx.g.classes[cls].sizes, *p.bound)
    out = []
    for f in rest:
        if index not in f.axes:
            out.append(f)
            continue
        if f.axes.count(index) != 1 or set(f.axes) & set(label.axes) or _is_half_int(ctx, f):
            return None
        kept = [i for i in dict.fromkeys((*f.axes, *label.axes)) if i != index]
        local = {i: n for n, i in enumerate([*kept, index])}
        made = ctx.g.add(
            TAKE,
            None,
            (
                Ref(f.cls, tuple(local[i] for i in f.axes)),
                Ref(label.cls, tuple(local[i] for i in label.axes)),
            ),
            tuple(sizes[i] for i in kept),
            (sizes[index],),
            ctx.g.classes[f.cls].dtype,
            one_hot.reason(cls),
        )
        out.append(Ref(made.cls, tuple(kept[i] for i in made.axes)))
    return out


def _is_half_int(ctx: Context, f: Ref) -> bool:
    return dtype_kind(ctx.g.classes[f.cls].dtype) not in "fciu"


def _without(p: Product, index: int) -> Product:
    bound = p.bound[: index - p.out] + p.bound[index - p.out + 1 :]
    factors = tuple(Ref(f.cls, tuple(i - (i > index) for i in f.axes)) for f in p.factors)
    return p._replace(factors=factors, bound=bound)


@axiom("Σⱼ [i ≥ j]·f(j) = prefix sum of f at i", property=SPARSITY, on=(CONTRACT,))
def triangular_prefix(ctx: Context, cls: int, node: Node) -> Iterator[Ref]:
    """A contraction with a triangle of ones is a cumulative sum, forwards or backwards."""
    c = ctx.g.classes[cls]
    if is_half(c.dtype):
        return
    p = expand_node(ctx.g, cls, node, lambda d: ctx.uses(d) <= 1)
    for k, f in enumerate(p.factors):
        for kind, reverse in (("ge", False), ("le", True)):
            test = indicator(ctx, f, kind)
            if test is None or not _is_index(ctx, test[0]):
                continue
            i, j = test[0].axes[0], test[1]
            if i >= p.out > j:
                i, j, reverse = j, i, not reverse
            rest = [g for m, g in enumerate(p.factors) if m != k]
            if i >= p.out or j < p.out or not rest or any(i in g.axes for g in rest):
                continue
            # The prefix runs over j, which takes the place of output i.
            swapped = tuple(Ref(g.cls, tuple(i if a == j else a for a in g.axes)) for g in rest)
            if c.sizes[i] != p.bound[j - p.out] or p.coefficient != 1:
                continue
            inner = _without(Product(1, swapped, p.out, p.bound, p.precision), j)
            ref = order_product(ctx, inner, c.sizes, c.dtype, triangular_prefix.reason(cls))
            if ref is None or i not in ref.axes:
                continue
            local = {a: n for n, a in enumerate(ref.axes)}
            made = ctx.g.add(
                CUMSUM,
                (local[i], reverse),
                (Ref(ref.cls, tuple(range(len(ref.axes)))),),
                tuple(c.sizes[a] for a in ref.axes),
                (),
                c.dtype,
                triangular_prefix.reason(cls),
            )
            yield Ref(made.cls, tuple(ref.axes[a] for a in made.axes))
