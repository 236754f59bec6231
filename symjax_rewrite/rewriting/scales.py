"""Where a product is multiplied with the numbers in it (imports products and their order).

`m · ((G·K) @ m)` with K = 1e-11, m = 1e24 is finite in float32, `G · (m · (K @ m))` is infinite: a
number below 1 keeps what it scales in range, and must be a part of every product that its factor is
a part of. So it is multiplied with that factor, or with what the factor is multiplied with first,
whichever is smaller: `(s·W) @ x = W @ (s·x)` still saves the pass over W. A number above 1 is
multiplied with last: no partial product is then larger than the written one, and the result is the
same. What is so far from 1 that a factor it moved to could be flushed to zero stays where it was.
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
from symjax_rewrite.rewriting.rule import RuleContext

NOISE = 1e-14  # relative: of a coefficient that was multiplied up and divided again


class Leaf(NamedTuple):
    """A factor of a product: its class, elements, and how a number may be multiplied with it.

    narrow: it has another dtype than the product. summed: it is summed alone, beforehand. frozen:
    it is computed beforehand, and so is a multiple of it.
    """

    cls: int
    elements: float
    narrow: bool
    summed: bool
    frozen: bool


@dataclass(slots=True)
class Places:
    """Numbers by what they are multiplied with.

    before: leaves, before they are summed. after: sets of leaves, when they are multiplied. last:
    the whole product.
    """

    before: dict[int, Any] = field(default_factory=dict)
    after: dict[int, Any] = field(default_factory=dict)
    last: Any = 1


def _homes(s: Scale, leaves: Sequence[Leaf], met: Counter[int]) -> int:
    """The bit set of the leaves that a number scaled.

    Of a factor that is there twice, two numbers scaled one each: `met` counts those that have one.
    """
    inside = 0
    for cls, many in Counter(s.homes).items():
        mine = [k for k, leaf in enumerate(leaves) if leaf.cls == cls]
        first = met[cls] if met[cls] + many <= len(mine) else 0
        met[cls] = first + many
        inside |= sum(1 << k for k in mine[first : first + many])
    return inside


class _Place(NamedTuple):
    """A place for one number: its price in elements, and whether it is what was scaled."""

    price: float
    moved: bool
    written: bool
    leaf: int | None
    inside: int


def shared_power(coefficients: Sequence[Any], dtype: str) -> float:
    """The least power of two no coefficient exceeds, at least 1: it stays outside of a sum.

    `4·(A@x) + (B@x)` is `4·((A + B/4)@x)`: 4·A may be infinite where 4·(A@x) is not.
    """
    if dtype_kind(dtype) != "f" or any(isinstance(k, complex) for k in coefficients):
        return 1
    largest = max(map(abs, coefficients))
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 1 else 1


def apart(p: Product, count: Any = 1) -> tuple[Any, Product] | None:
    """The number a product is multiplied with last, and the product with the others in it.

    A count of equal terms (Σ_k a = |k|·a) meets the first number that keeps it below 1, as in a
    mean. None where the coefficient is beyond what a float holds.
    """
    outer, scales = p.coefficient, list(p.scales)
    if not isinstance(outer, int) and not 0 < abs(outer) < math.inf:
        return None
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
    """The bit set of the leaves of a tree."""
    return 1 << tree if isinstance(tree, int) else leaves_of(tree[0]) | leaves_of(tree[1])


def place(
    scales: Sequence[Scale],
    tree: Tree,
    leaves: Sequence[Leaf],
    elements: Callable[[int], float],
    dtype: str,
) -> Places:
    """The cheapest permitted place in a tree for each number; `elements` of a set of leaves."""
    places, met = Places(), Counter[int]()
    for s in scales:
        homes = _homes(s, leaves, met) or (1 << len(leaves)) - 1  # slices of the factors
        best = _best(list(_options(tree, None, homes, leaves, elements)), s.value, dtype)
        if best is None:
            places.last = places.last * s.value
        elif best.leaf is not None:
            places.before[best.leaf] = places.before.get(best.leaf, 1) * s.value
        else:
            places.after[best.inside] = places.after.get(best.inside, 1) * s.value
    return places


def _best(found: list[_Place], value: Any, dtype: str) -> _Place | None:
    """The cheapest of some places; None where a number is multiplied with last.

    A number far from 1 stays with the product that it scaled, where that is computed. Where it is
    not, the order of its factors has changed, and with it the range of what they make.
    """
    if is_moderate(value, dtype):
        return min(found, key=lambda x: (x.price, not x.written), default=None)
    written = [x for x in found if x.written and not x.moved]
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
    """Places of a number that scaled the leaves `homes`: their parts, and what these meet first."""
    inside = leaves_of(tree)
    if not inside & homes:
        return
    if inside & ~homes == 0:
        written = inside == homes
        alone = isinstance(tree, int)
        if isinstance(tree, int):
            leaf = leaves[tree]
            if not leaf.narrow:
                yield _Place(0 if leaf.frozen else leaf.elements, False, written, tree, inside)
        else:
            yield _Place(elements(inside), False, written, None, inside)
        if sibling is not None and not (alone and leaves[tree].summed):
            yield from _beside(sibling, leaves, elements)
    if not isinstance(tree, int):
        for part, other in (tree, tree[::-1]):
            yield from _options(part, other, homes, leaves, elements)


def _beside(
    sibling: Tree, leaves: Sequence[Leaf], elements: Callable[[int], float]
) -> Iterator[_Place]:
    """What a factor is multiplied with first, as a place for a number of that factor."""
    inside = leaves_of(sibling)
    if not isinstance(sibling, int):
        yield _Place(elements(inside), True, False, None, inside)
    elif not leaves[sibling].narrow:
        frozen = leaves[sibling].frozen
        yield _Place(0 if frozen else elements(inside), True, False, None, inside)


def scaled_inside(
    ctx: RuleContext, ref: Ref, scale: Any, sizes: tuple[Dim, ...], why: Justification
) -> Ref:
    """scale·ref; a number below 1 scales the smallest factor of a sum of products.

    So it is where nobody knows which factors it scaled as written.
    """
    g, dtype = ctx.g, ctx.g.classes[ref.cls].dtype
    nodes = [n for n in g.classes[ref.cls].nodes if n.op == CONTRACT and n.bound]
    if dtype_kind(dtype) != "f" or abs(scale) >= 1 or not nodes:
        return scaled(g, ref, scale, sizes, why)
    args = nodes[0].args
    mine = [k for k, a in enumerate(args) if g.classes[a.cls].dtype == dtype]
    if not mine:
        return scaled(g, ref, scale, sizes, why)
    k = min(mine, key=lambda k: ctx.elements(args[k].cls))
    args = (*args[:k], scaled_factor(g, args[k], scale, why), *args[k + 1 :])
    attr, bound = nodes[0].attr, nodes[0].bound
    made = g.add(CONTRACT, attr, args, g.classes[ref.cls].sizes, bound, dtype, why)
    return made.over(ref.axes)


def scaled_factor(g: EGraph, f: Ref, scale: Any, why: Justification) -> Ref:
    """A factor of a term times a number, over the indices of the term."""
    made = scaled(g, g.ref(f.cls), scale, g.classes[f.cls].sizes, why)
    return made.over(f.axes)
