"""Placement of the numbers in a product: the factor with which each number is multiplied.

`m · ((G·K) @ m)` with K = 1e-11, m = 1e24 is finite in float32, but `G · (m · (K @ m))` is
infinite. A number below 1 keeps the factor that it scales in range. Every product with that factor
must therefore contain the number. The number is multiplied with that factor, or with the first
factor that this factor is multiplied with, whichever is smaller: `(s·W) @ x = W @ (s·x)` still
saves the pass over W. A number above 1 is multiplied last: no partial product is then larger than
the written product, and the result is the same. A number stays at its written factor if it is so
far from 1 that another factor could be flushed to zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symjax_rewrite.ir.egraph import EGraph, Justification
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import Product, Scale, is_moderate, scaled
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import CONTRACT, Ref
from symjax_rewrite.rewriting.contraction_order import Tree
from symjax_rewrite.rewriting.rule import NotBuiltError, RuleContext

NOISE = 1e-14  # relative error of a coefficient that was multiplied and then divided


class Leaf(NamedTuple):
    """A factor of a product: its class, its elements, and the conditions for scaling it.

    narrow: True if its dtype differs from the product's. summed: True if it is summed alone
    beforehand. frozen: True if it is computed beforehand, as is a multiple of it.
    """

    cls: int
    elements: float
    narrow: bool
    summed: bool
    frozen: bool


@dataclass(slots=True)
class Places:
    """The numbers of a product by the values that they multiply.

    before: by leaf, before the leaf is summed. after: by set of leaves, when these are multiplied.
    last: for the whole product.
    """

    before: dict[int, Any] = field(default_factory=dict)
    after: dict[int, Any] = field(default_factory=dict)
    last: Any = 1


def _homes(s: Scale, leaves: Sequence[Leaf], met: Counter[int]) -> int:
    """Return the bit set of the leaves that a number scaled.

    If a factor occurs twice, two numbers scaled one occurrence each; `met` counts the occurrences
    that are already assigned.
    """
    inside = 0
    for cls, many in Counter(s.homes).items():
        mine = [k for k, leaf in enumerate(leaves) if leaf.cls == cls]
        first = met[cls] if met[cls] + many <= len(mine) else 0
        met[cls] = first + many
        inside |= sum(1 << k for k in mine[first : first + many])
    return inside


class _Place(NamedTuple):
    """A place for one number: its price in elements, and True if it is the written place.

    leaf: the number of the leaf, or -1 for the product of the leaves `inside`.
    """

    price: float
    written: bool
    leaf: int
    inside: int


def shared_power(coefficients: Sequence[Any], dtype: str) -> float:
    """Return the least power of two, at least 1, that no coefficient exceeds.

    The power stays outside the sum: `4·(A@x) + (B@x)` becomes `4·((A + B/4)@x)`, because 4·A may be
    infinite although 4·(A@x) is not.
    """
    if dtype_kind(dtype) != "f" or any(isinstance(k, complex) for k in coefficients):
        return 1
    largest = max(map(abs, coefficients))
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 1 else 1


def apart(p: Product, count: Any = 1) -> tuple[Any, Product]:
    """Return the number that multiplies a product last, and the product with the other numbers.

    A count of equal terms (Σ_k a = |k|·a) is combined with the first number that keeps the count
    below 1, as in a mean.

    Raises:
        NotBuiltError: the coefficient is out of the range of floats.
    """
    outer, scales = p.coefficient, list(p.scales)
    if not isinstance(outer, int) and not 0 < abs(outer) < math.inf:
        raise NotBuiltError
    if not scales:
        return outer, p._replace(coefficient=1)
    for k, s in enumerate(scales):
        if count != 1 and abs(s.value * count) <= 1:
            scales[k], count = s._replace(value=s.value * count), 1
    for s in scales:
        outer = outer / s.value
    sign = math.copysign(1, outer)
    outer = sign if abs(outer - sign) < NOISE else outer
    return outer, p._replace(coefficient=p.coefficient / outer, scales=tuple(scales))


def leaves_of(tree: Tree) -> int:
    """Return the bit set of the leaves of a tree."""
    return 1 << tree if isinstance(tree, int) else leaves_of(tree[0]) | leaves_of(tree[1])


def place(
    scales: Sequence[Scale],
    tree: Tree,
    leaves: Sequence[Leaf],
    elements: Callable[[int], float],
    dtype: str,
) -> Places:
    """Return the cheapest permitted place in a tree for each number.

    `elements` returns the elements of a set of leaves.
    """
    places, met = Places(), Counter[int]()
    for s in scales:
        homes = _homes(s, leaves, met) or (1 << len(leaves)) - 1  # slices of the factors
        best = _best(list(_options(tree, None, homes, leaves, elements)), s.value, dtype)
        if best is None:
            places.last = places.last * s.value
        else:
            at, key = (places.before, best.leaf) if best.leaf >= 0 else (places.after, best.inside)
            at[key] = at.get(key, 1) * s.value
    return places


def _best(found: list[_Place], value: Any, dtype: str) -> _Place | None:
    """Return the cheapest of some places; None if a number is multiplied last.

    A number far from 1 stays with the product that it scaled, if this product is computed.
    Otherwise the order of its factors has changed, and the range of their products has changed too.
    """
    if is_moderate(value, dtype):
        return min(found, key=lambda x: (x.price, not x.written), default=None)
    written = [x for x in found if x.written]
    if not written and abs(value) >= 1:
        return None
    return min(written or found, key=lambda x: x.price, default=None)


def _options(
    tree: Tree,
    sibling: Tree | None,
    homes: int,
    leaves: Sequence[Leaf],
    elements: Callable[[int], float],
) -> Iterator[_Place]:
    """Yield places of a number that scaled the leaves `homes`: subtrees and first siblings."""

    def at(part: Tree, written: bool) -> Iterator[_Place]:
        inside = leaves_of(part)
        if not isinstance(part, int):
            yield _Place(elements(inside), written, -1, inside)
        elif not leaves[part].narrow:
            leaf = leaves[part]
            count = leaf.elements if inside & homes else elements(inside)
            yield _Place(0 if leaf.frozen else count, written, part, inside)

    inside = leaves_of(tree)
    if inside & homes and not inside & ~homes:
        yield from at(tree, inside == homes)
        alone = isinstance(tree, int) and leaves[tree].summed
        if sibling is not None and not alone:
            yield from at(sibling, False)
    if inside & homes and not isinstance(tree, int):
        for part, other in (tree, tree[::-1]):
            yield from _options(part, other, homes, leaves, elements)


def scaled_inside(
    ctx: RuleContext, ref: Ref, scale: Any, sizes: tuple[Dim, ...], why: Justification
) -> Ref:
    """Return scale·ref; a number below 1 scales the smallest factor of a sum of products.

    This applies if it is unknown which factors the number scaled as written.
    """
    g, c = ctx.g, ctx.g.classes[ref.cls]
    product = next((n for n in c.nodes if n.op == CONTRACT and n.bound), None)
    if dtype_kind(c.dtype) != "f" or abs(scale) >= 1 or product is None:
        return scaled(g, ref, scale, sizes, why)
    mine = [k for k, a in enumerate(product.args) if g.classes[a.cls].dtype == c.dtype]
    if not mine:
        return scaled(g, ref, scale, sizes, why)
    args, k = list(product.args), min(mine, key=lambda k: ctx.elements(product.args[k].cls))
    args[k] = scaled_factor(g, args[k], scale, why)
    made = g.add(CONTRACT, product.attr, tuple(args), c.sizes, product.bound, c.dtype, why)
    return made.over(ref.axes)


def scaled_factor(g: EGraph, f: Ref, scale: Any, why: Justification) -> Ref:
    """Return a factor of a term times a number, over the indices of the term."""
    if scale == 1:
        return f
    made = scaled(g, g.ref(f.cls), scale, g.classes[f.cls].sizes, why)
    return made.over(f.axes)
