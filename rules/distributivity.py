"""Distributivity: `a·(b + c) = a·b + a·c`, both ways, and sums of sums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import (
    Product,
    expand_node,
    flattest,
    is_half,
    is_ring,
    product_node,
    scaled,
    with_scale,
)
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, DELTA, INVERSE, MAP, Node, Ref
from symjax_rewrite.ir.value_analysis import nonnegative
from symjax_rewrite.rewriting.product_trees import count_unread, order_product, read_deltas
from symjax_rewrite.rewriting.rule import DISTRIBUTIVITY, RuleContext, Sides, axiom
from symjax_rewrite.rewriting.scales import apart, shared_power

MAX_SHARED = 4  # common factors of which every subset is tried
MOST_OPENED = 256  # sums within one term of a sum


@axiom(
    "Σ a·(b + c) = Σ a·b + Σ a·c",
    property=DISTRIBUTIVITY,
    on=(CONTRACT,),
    everywhere=True,
    sides=(Sides("sd,do,dr,ro", lambda x, W, A, B: (x @ (W + A @ B), x @ W + (x @ A) @ B)),),
)
def distribute(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Distribute a contraction over a sum, if all terms but one are rounded products.

    The error of the distributed form is then that of the written form. If terms cancel, the
    remainder of the computed terms already has an error of this size (see `_is_safe`). LoRA is such
    a case.
    """
    g, c = ctx.g, ctx.g.classes[cls]
    p = expand_node(g, cls, node, lambda d: False)
    if not p.bound:
        return
    for k, f in enumerate(p.factors):
        total = sum_node(ctx, f.cls)
        if total is None or g.classes[f.cls].dtype != c.dtype:
            continue
        if not _is_useful(ctx, cls, p, f, total):
            continue
        exact = not is_half(c.dtype)  # a mean in bfloat16 loses more than the product
        steady = exact and _moves_rows(p, f) and _keeps_its_size(ctx, total)
        often = sum(1 for x in p.factors if x.cls == f.cls) > 1 and not is_ring(c.dtype)
        if often and not steady:
            ctx.refuse("distribute", "squares of sums cancel", cls)
            continue
        if not steady and not _is_safe(ctx, f.cls, total):
            ctx.refuse("distribute", "terms of unknown sign may cancel", cls)
            continue
        ref = _distributed(ctx, cls, p, k, total)
        if ref is not None:
            yield ref


def sum_node(ctx: RuleContext, cls: int) -> Node | None:
    """Return the flattest sum of at least two terms in a class; None if it must stay whole."""
    if ctx.is_whole(cls):
        return None
    sums = [n for n in ctx.g.classes[cls].nodes if n.op == ADD and len(n.args) > 1]
    return max(sums, key=lambda n: len(n.args), default=None)


def _is_safe(ctx: RuleContext, cls: int, total: Node) -> bool:
    """Return True if the terms have one sign, or all but one contract over the full index space.

    The other term may be broadcast over indices it does not read (one weight, many adapters).
    """
    if _cannot_cancel(ctx, cls, total):
        return True
    sizes = ctx.g.classes[cls].sizes
    rounded = [a for a in total.args if _is_rounded(ctx, a.cls)]
    if any(len(set(a.axes)) < len(sizes) for a in rounded):
        return False
    return len(total.args) - len(rounded) <= 1 and not _share_products(ctx, rounded, total.args)


def _share_products(ctx: RuleContext, rounded: list[Ref], terms: tuple[Ref, ...]) -> bool:
    """Return True if a product opened for one term is computed for another term too.

    As written, both terms read one rounded value of the product. Terms that cancel then do so for
    any rounding error of that value (`1/p − p·p⁻²` is 0). Distributed, the opened product has a
    rounding error of its own. A product and its transpose (P + Pᵀ) read other elements of it, and
    both are opened.
    """
    for a in rounded:
        opened = _products(ctx, a.cls)
        if any(opened & _computed(ctx, b.cls) for b in terms if b.cls != a.cls):
            return True
    return False


def _products(ctx: RuleContext, cls: int) -> set[int]:
    """Return the classes that are opened if a class is read as one product."""
    found, stack = set[int](), [cls]
    while stack:
        c = stack.pop()
        node = product_node(ctx.g, c)
        if c in found or node is None:
            continue
        found.add(c)
        stack += [ctx.g.find(a).cls for a in node.args]
    return found


def _computed(ctx: RuleContext, cls: int) -> set[int]:
    """Return a class and the classes from which it is computed as written."""
    found, stack = set[int](), [cls]
    while stack:
        c = stack.pop()
        if c not in found:
            found.add(c)
            stack += [ctx.g.find(a).cls for a in ctx.g.classes[c].first.args]
    return found


def _cannot_cancel(ctx: RuleContext, cls: int, total: Node) -> bool:
    """Return True if the terms of a sum have one sign, or if the numerics level permits it."""
    if ctx.permits("cancels", ctx.g.classes[cls].dtype):
        return True
    signs = {_is_positive(k) for k in total.attr}
    return len(signs) == 1 and all(nonnegative(ctx.g, a.cls) for a in total.args)


def _moves_rows(p: Product, f: Ref) -> bool:
    """Return True if a product is a matrix f times an operand, and keeps the operand's size.

    A trace of products does not: a small result of f may be multiplied before the sum.
    """
    if len(p.factors) != 2 or len(p.bound) != 1 or len(set(f.axes)) != len(f.axes):
        return False
    other = next((x for x in p.factors if x is not f), f)
    free = [i for i in f.axes if i < p.out]
    return p.out in f.axes and p.out in other.axes and not set(free) & set(other.axes)


def _keeps_its_size(ctx: RuleContext, total: Node) -> bool:
    """Return True if a sum of numbers and deltas is at least half its terms: I − 11ᵀ/n, n > 2."""
    terms = []
    for k, a in zip(total.attr, total.args, strict=True):
        value = _number_of(ctx, a.cls)
        if value is None or isinstance(k, complex):
            return False
        terms.append((k * value[0], value[1]))
    steady = [x for x, delta in terms if not delta]
    deltas = [x for x, delta in terms if delta]
    if len(deltas) > MAX_SHARED:
        return False
    for many in range(len(deltas) + 1):
        for met in combinations(deltas, many):
            values = [*steady, *met]
            if abs(sum(values)) < 0.5 * sum(map(abs, values)):
                return False
    return True


def _number_of(ctx: RuleContext, cls: int) -> tuple[float, bool] | None:
    """Return the one number of a class, and True if it is only on a diagonal; or None."""
    for node in ctx.g.classes[cls].nodes:
        if node.op == DELTA:
            return 1.0, True
        if node.op == CONST and isinstance(node.attr[0], (int, float)):
            return float(node.attr[0]), False
    return None


def _is_rounded(ctx: RuleContext, cls: int) -> bool:
    """Return True if a class is a sum of products, whose rounding error is relative to its size.

    An outer product counts as a sum of products of rank one. A selection of single values (a
    diagonal, one-hot labels) rounds nothing. A diagonal between two matrices scales the summed
    terms.
    """
    p = read_deltas(ctx, flattest(ctx.g, cls))
    thin = len(p.factors) > 1 and ctx.elements(cls) > sum(ctx.elements(f.cls) for f in p.factors)
    return (bool(p.bound) or thin) and not any(_picks(ctx, f.cls) for f in p.factors)


def _picks(ctx: RuleContext, cls: int) -> bool:
    for n in ctx.g.classes[cls].nodes:
        if n.op == DELTA:
            return True
        if n.op == MAP and n.args and ctx.g.classes[n.args[0].cls].dtype == "bool":
            return True
    return False


def _is_useful(ctx: RuleContext, cls: int, p: Product, f: Ref, total: Node) -> bool:
    """Return True if distributing avoids a term.

    The term is a low-rank product, or any product if the result is smaller, or it is constant along
    a summed index.
    """
    dense = ctx.elements(f.cls)
    thin = ctx.elements(cls) < dense
    for arg in total.args:
        read = {f.axes[i] for i in arg.axes}
        if any(i >= p.out and i not in read for i in f.axes):
            return True
        factors = flattest(ctx.g, arg.cls).factors
        if len(factors) > 1 and (thin or dense > sum(ctx.elements(x.cls) for x in factors)):
            return True
    return False


def _distributed(ctx: RuleContext, cls: int, p: Product, k: int, total: Node) -> Ref | None:
    c = ctx.g.classes[cls]
    why = distribute.reason(cls)
    terms, coefficients = [], []
    for coefficient, arg in zip(total.attr, total.args, strict=True):
        inner = flattest(ctx.g, arg.cls)
        inner = with_scale(
            inner._replace(coefficient=inner.coefficient * coefficient), coefficient, c.dtype
        )
        parted = apart(splice(p, k, arg.over(p.factors[k].axes), inner))
        ref = order_product(ctx, parted[1], c.sizes, c.dtype, why) if parted else None
        if parted is None or ref is None:
            return None
        terms.append(ref)
        coefficients.append(parted[0])
    return ctx.g.add(ADD, tuple(coefficients), tuple(terms), c.sizes, (), c.dtype, why)


def splice(p: Product, k: int, at: Ref, inner: Product) -> Product:
    """Return the product with factor k replaced by `inner`, whose outputs read the axes of `at`."""
    to = [*at.axes, *(p.out + len(p.bound) + j for j in range(len(inner.bound)))]
    opened = tuple(f.over(to) for f in inner.factors)
    return Product(
        p.coefficient * inner.coefficient,
        p.factors[:k] + opened + p.factors[k + 1 :],
        p.out,
        p.bound + inner.bound,
        p.precision,
        p.scales + inner.scales,
    )


@axiom(
    "(a + m·b) + n·b = a + (m+n)·b  (a, b ≥ 0); a + 0 = 1·a",
    property=DISTRIBUTIVITY,
    on=(ADD,),
    sides=(
        Sides(
            "ij,ij", lambda a, b: ((a * a + 2 * (b * b)) + 3 * (b * b), a * a + 5 * (b * b)), "F"
        ),
        Sides("ij", lambda a: (a + 0, 1 * a)),
    ),
)
def flatten_sum(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Flatten sums of sums used once, and count like terms of one sign.

    If terms may cancel, exact terms stay in the sum in which they were written. In `(a − b) + x·W`
    a − b is exact for close a and b, and the rounded a + x·W is not.
    """
    g, c = ctx.g, ctx.g.classes[cls]
    terms: dict[Ref, Any] = {}
    for coefficient, arg in zip(node.attr, node.args, strict=True):
        arg = g.find(arg)
        if ctx.is_zero(arg.cls) and len(node.args) > 1:
            continue
        for k, ref in _all_terms(ctx, arg, c.dtype):
            if ref in terms and not _same_sign(terms[ref], k * coefficient, c.dtype):
                return
            terms[ref] = terms.get(ref, 0) + k * coefficient
    if not terms or (len(terms) == len(node.args) and set(terms) == set(node.args)):
        return
    if any(v == 0 for v in terms.values()) or (is_half(c.dtype) and len(terms) < len(node.args)):
        return
    yield g.add(
        ADD, tuple(terms.values()), tuple(terms), c.sizes, (), c.dtype, flatten_sum.reason(cls)
    )


def _all_terms(ctx: RuleContext, arg: Ref, dtype: str) -> Iterator[tuple[Any, Ref]]:
    """Yield the terms that a term of a sum contributes, through nested sums.

    A sum may be equal to a term within it (`a = (a + b) − b`), so no sum is opened inside itself.
    """
    stack: list[tuple[Any, Ref, frozenset[int]]] = [(1, arg, frozenset())]
    opened = 0
    while stack:
        k, ref, within = stack.pop()
        closed = ref.cls in within or opened == MOST_OPENED
        inner = None if closed else _inner_terms(ctx, ref, dtype, k)
        if inner is None:
            yield k, ref
            continue
        opened += 1
        within |= {ref.cls}
        for j, a in reversed(inner):
            stack.append((k * j, a.over(ref.axes), within))


def _inner_terms(
    ctx: RuleContext, arg: Ref, dtype: str, scale: Any
) -> list[tuple[Any, Ref]] | None:
    """Return the terms of a nested sum over its slots; None if `scale` might make them infinite."""
    g = ctx.g
    inner = _inner_sum(ctx, arg, dtype)
    if inner is None:
        return None
    opened = list(zip(inner.attr, inner.args, strict=True))
    if _cannot_cancel(ctx, arg.cls, inner):
        return opened
    if abs(scale) > 1 and dtype_kind(dtype) == "f" and len(opened) > 1:
        return None
    exact = [
        (k, a) for k, a in opened if not (_is_rounded(ctx, a.cls) or ctx.frozen(a.cls))
    ]  # frozen terms are folded into one constant
    if len(exact) <= 1:
        return opened
    if len(exact) == len(opened):
        return None
    sizes, why = g.classes[arg.cls].sizes, flatten_sum.reason(arg.cls)
    rest = g.add(ADD, tuple(k for k, _ in exact), tuple(a for _, a in exact), sizes, (), dtype, why)
    return [(1, rest), *((k, a) for k, a in opened if (k, a) not in exact)]


def _inner_sum(ctx: RuleContext, arg: Ref, dtype: str) -> Node | None:
    if ctx.uses(arg.cls) > 1 or ctx.is_whole(arg.cls) or ctx.g.classes[arg.cls].dtype != dtype:
        return None
    for node in ctx.g.classes[arg.cls].nodes:
        if node.op == ADD:
            return node
    return None


def _same_sign(a: Any, b: Any, dtype: str) -> bool:
    if isinstance(a, complex) or isinstance(b, complex):
        return a == b
    return is_ring(dtype) or (a > 0) == (b > 0)


def _is_positive(coefficient: Any) -> bool:
    return not isinstance(coefficient, complex) and coefficient > 0


@axiom(
    "Σ a·b + Σ a·c = Σ a·(b + c)",
    property=DISTRIBUTIVITY,
    on=(ADD,),
    not_after=("distribute", "factor"),
    sides=(Sides("nd,do,do", lambda a, b, c: (a @ b + a @ c, a @ (b + c))),),
)
def factor(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Factor a sum of products: shared factors are taken out.

    A low-rank remainder (a product larger than its factors) is never materialised, unless it
    depends on frozen weights alone. Right-hand sides of a solve are never added first: if they are
    large where the matrix is, A⁻¹·b + A⁻¹·c keeps digits that A⁻¹·(b + c) loses.
    """
    terms, dtype = [], ctx.g.classes[cls].dtype
    for k, (coefficient, arg) in enumerate(zip(node.attr, node.args, strict=True)):
        if ctx.g.classes[arg.cls].dtype != dtype:
            continue
        inner = flattest(ctx.g, arg.cls)
        if inner.bound and _reads_inverse(ctx, inner) and not ctx.permits("cancels", dtype):
            ctx.refuse("factor", "a solve magnifies what the sum before it is rounded by", cls)
        elif inner.bound:
            terms.append(SumTerm(k, coefficient * inner.coefficient, arg, inner))
    if len(terms) < 2:
        return
    seen: set = set()
    for group, shared in _shared_factors(ctx, terms):
        key = (tuple(t.number for t in group), tuple(sorted(map(tuple, shared))))
        if key not in seen:
            seen.add(key)
            ref = _factored(ctx, cls, node, group, shared)
            if ref is not None:
                yield ref


def _reads_inverse(ctx: RuleContext, p: Product) -> bool:
    """Return True if a factor of a product is the inverse of a matrix."""
    return any(n.op == INVERSE for f in p.factors for n in ctx.g.classes[f.cls].nodes)


class SumTerm:
    """One product of a sum, its factors over the sum's indices and its own bound indices."""

    def __init__(self, number: int, coefficient: Any, arg: Ref, inner: Product) -> None:
        self.number, self.coefficient, self.inner = number, coefficient, inner
        axes: list[Any] = [*arg.axes, *(("b", k) for k in range(len(inner.bound)))]
        self.factors = [(f.cls, tuple(axes[i] for i in f.axes)) for f in inner.factors]
        self.sizes = {("b", k): size for k, size in enumerate(inner.bound)}


Match = tuple[tuple[int, ...], ...]  # for every shared factor: its number in each term


def _shared_factors(
    ctx: RuleContext, terms: list[SumTerm]
) -> Iterator[tuple[list[SumTerm], Match]]:
    """Yield groups of terms, with the sets of factors that they share."""
    for anchor, (cls, axes) in enumerate(terms[0].factors):
        yield from _anchored(terms, 0, anchor, cls, axes)
    for first in range(1, len(terms) - 1):
        for anchor, (cls, axes) in enumerate(terms[first].factors):
            if not any(cls == f[0] for t in terms[:first] for f in t.factors):
                yield from _anchored(terms, first, anchor, cls, axes)


def _anchored(
    terms: list[SumTerm], first: int, anchor: int, cls: int, axes: tuple
) -> Iterator[tuple[list[SumTerm], Match]]:
    group, maps, rows = [terms[first]], [{i: i for i in axes}], [[anchor]]
    for t in terms[first + 1 :]:
        for k, (other, theirs) in enumerate(t.factors):
            mapping = _match_axes(axes, theirs, {}) if other == cls else None
            if mapping is not None:
                group.append(t)
                maps.append(mapping)
                rows.append([k])
                break
    if len(group) < 2:
        return
    shared = [tuple(r[0] for r in rows)]
    for k, (other, theirs) in enumerate(group[0].factors):
        if k == anchor:
            continue
        found = _extend(group, maps, shared, k, other, theirs)
        if found:
            shared.append(found)
    if len(shared) > MAX_SHARED:
        yield group, (shared[0],)
        yield group, tuple(shared)
        return
    for size in range(1, len(shared) + 1):
        for subset in combinations(shared, size):
            yield group, subset


def _match_axes(mine: tuple, theirs: tuple, known: dict) -> dict | None:
    """Return the renaming of indices `mine` to `theirs`, or None; outputs must be equal."""
    out = dict(known)
    for i, j in zip(mine, theirs, strict=True):
        if isinstance(i, int) or isinstance(j, int):
            if i != j:
                return None
        elif out.setdefault(i, j) != j:
            return None
    bound = [v for k, v in out.items() if not isinstance(k, int)]
    return out if len(set(bound)) == len(bound) else None


def _extend(
    group: list[SumTerm], maps: list[dict], shared: list, k: int, cls: int, axes: tuple
) -> tuple[int, ...] | None:
    row = [k]
    new_maps = [{**maps[0], **{i: i for i in axes}}]
    for n, t in enumerate(group[1:], start=1):
        taken = {s[n] for s in shared}
        for j, (other, theirs) in enumerate(t.factors):
            if other == cls and j not in taken:
                mapping = _match_axes(axes, theirs, maps[n])
                if mapping is not None:
                    row.append(j)
                    new_maps.append(mapping)
                    break
        else:
            return None
    maps[:] = new_maps
    return tuple(row)


def _factored(
    ctx: RuleContext, cls: int, node: Node, group: list[SumTerm], shared: Match
) -> Ref | None:
    """Return Σ shared·(Σ of remainders) + the other terms."""
    c = ctx.g.classes[cls]
    why = factor.reason(cls)
    lead = group[0]
    common = [lead.factors[row[0]] for row in shared]
    common_bound = list(dict.fromkeys(i for _, a in common for i in a if not isinstance(i, int)))
    maps = []
    for n, t in enumerate(group):
        mapping: dict = {}
        for row in shared:
            found = _match_axes(lead.factors[row[0]][1], t.factors[row[n]][1], mapping)
            if found is None:
                return None
            mapping = found
        maps.append({v: k for k, v in mapping.items()})
    power = shared_power([t.coefficient for t in group], c.dtype)
    rest = _remainder(ctx, cls, group, shared, maps, common_bound, power)
    if rest is None:
        return None
    mixed = any(len({isinstance(i, int) for i in axes}) > 1 for _, axes in common)
    if common_bound and not mixed and _is_made(ctx, rest):
        reason = "fused sums would become a vector times a matrix that is made for it"
        ctx.refuse("factor", reason, cls)
        return None
    index = {i: i for i in range(len(c.sizes))}
    index.update({b: len(c.sizes) + n for n, b in enumerate(common_bound)})
    factors = (*(Ref(f, a).over(index) for f, a in common), rest)
    bound = tuple(lead.sizes[b] for b in common_bound)
    p = Product(1, factors, len(c.sizes), bound, lead.inner.precision)
    product = order_product(ctx, p, c.sizes, c.dtype, why)
    if product is None:
        return None
    inside = {t.number for t in group}
    others = [k for k in range(len(node.args)) if k not in inside]
    if not others:
        return scaled(ctx.g, product, power, c.sizes, why)
    coefficients = (power, *(node.attr[k] for k in others))
    return ctx.g.add(
        ADD, coefficients, (product, *(node.args[k] for k in others)), c.sizes, (), c.dtype, why
    )


def _is_made(ctx: RuleContext, rest: Ref) -> bool:
    """Return True if a sum has elementwise terms, which no fused loop would write to memory."""
    sums = (n for n in ctx.g.classes[rest.cls].nodes if n.op == ADD)
    firsts = (ctx.g.classes[ctx.g.find(a).cls].first for n in sums for a in n.args)
    return any(n.op in (MAP, ADD, CONTRACT) and not n.bound for n in firsts)


def _remainder(
    ctx: RuleContext,
    cls: int,
    group: list[SumTerm],
    shared: Match,
    maps: list[dict],
    common_bound: list,
    power: float,
) -> Ref | None:
    """Return the sum of the terms without the shared factors, divided by `power`.

    The sum is over its outputs and the common bound indices.
    """
    c = ctx.g.classes[cls]
    why = factor.reason(cls)
    out_sizes: tuple[Dim, ...] = (*c.sizes, *(group[0].sizes[b] for b in common_bound))
    place = {b: len(c.sizes) + n for n, b in enumerate(common_bound)}
    args, coefficients, storages = [], [], set()
    for n, t in enumerate(group):
        taken = {row[n] for row in shared}
        left = [f for k, f in enumerate(t.factors) if k not in taken]
        own = [b for b in t.sizes if maps[n].get(b) not in place]
        index: dict[Any, int] = {i: i for i in range(len(c.sizes))}
        index.update({b: len(out_sizes) + k for k, b in enumerate(own)})
        index.update({b: place[maps[n][b]] for b in t.sizes if maps[n].get(b) in place})
        factors = tuple(Ref(f, a).over(index) for f, a in left)
        p = Product(1, factors, len(out_sizes), tuple(t.sizes[b] for b in own), t.inner.precision)
        coefficient = t.coefficient if power == 1 else t.coefficient / power
        if not factors:
            counted = count_unread(p, c.dtype)
            if counted is None:
                return None
            coefficient = coefficient * counted.coefficient
            one = 1 if is_ring(c.dtype) else 1.0
            ref = ctx.g.add(CONST, (one, c.dtype, repr(one)), (), (), (), c.dtype, why)
        else:
            if _densifies(ctx, p, out_sizes):
                ctx.refuse("factor", "a low-rank product would become dense", cls)
                return None
            found = order_product(ctx, p, out_sizes, c.dtype, why)
            if found is None:
                return None
            ref = found
            storages.update(ctx.storage(f.cls) for f in factors)
        args.append(ref)
        coefficients.append(coefficient)
    if len(storages) > 1:
        ctx.refuse("factor", f"weights stored differently ({', '.join(sorted(storages))})", cls)
        return None
    if len({*args}) < len(args):
        merged: dict[Ref, Any] = {}
        for ref, k in zip(args, coefficients, strict=True):
            if ref in merged and not _same_sign(merged[ref], k, c.dtype):
                return None
            merged[ref] = merged.get(ref, 0) + k
        args, coefficients = list(merged), list(merged.values())
    return ctx.g.add(ADD, tuple(coefficients), tuple(args), out_sizes, (), c.dtype, why)


def _densifies(ctx: RuleContext, p: Product, sizes: tuple[Dim, ...]) -> bool:
    """Return True if the product is larger than its factors."""
    if len(p.factors) < 2 or all(ctx.frozen(f.cls) for f in p.factors):
        return False
    read = sorted({i for f in p.factors for i in f.axes if i < p.out})
    dense = ctx.count(sizes[i] for i in read)
    return dense > sum(ctx.elements(f.cls) for f in p.factors)
