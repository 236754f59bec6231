"""Products: contractions flattened through their factors.

A class that is a contraction of contractions is one n-ary product `c · Σ_bound Π factors`. All laws
of products (order, distribution, common factors, partial access) are stated on this form.

    (a @ (2 * b)) @ c  →  2 · Σ_k Σ_l a[i, k]·b[k, l]·c[l, j]
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from symjax_rewrite.ir.egraph import ORIGINAL, EGraph, Justification
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONTRACT, Node, Ref

MAX_FACTORS = 48  # 48³/6 connected pairs fit the default budget of pairs
HALF = frozenset({"float16", "bfloat16"})


class Scale(NamedTuple):
    """A number that scales the product of some of the factors in the written program.

    homes: the classes of those factors, sorted; one entry for each factor.
    """

    value: Any
    homes: tuple[int, ...]


class Product(NamedTuple):
    """coefficient · Σ over bound of the product of factors.

    Factors read indices `0..out-1` (slots of the class) and `out..` (bound). `coefficient` is the
    product of all scales. `scales` are the numbers in it that must stay with the factors they
    scale: outside the product, a value that is finite as written might be inf.
    """

    coefficient: Any
    factors: tuple[Ref, ...]
    out: int
    bound: tuple[Dim, ...]
    precision: object = None
    scales: tuple[Scale, ...] = ()

    @property
    def summed(self) -> range:
        """Return the bound indices."""
        return range(self.out, self.out + len(self.bound))

    def besides(self, k: int) -> list[Ref]:
        """Return the factors but the k-th."""
        return [*self.factors[:k], *self.factors[k + 1 :]]

    def without(self, gone: int) -> Product:
        """Return the product less a bound index that no factor reads."""
        k = gone - self.out
        factors = tuple([f.without(gone) for f in self.factors])
        return self._replace(factors=factors, bound=self.bound[:k] + self.bound[k + 1 :])


def is_half(dtype: str) -> bool:
    """Return True for dtypes whose scales must stay in a sum (257 is 256 in bfloat16)."""
    return dtype in HALF or dtype.startswith("float8")


def held_dtype(dtype: str) -> str:
    """Return the dtype in which a kernel holds values of a dtype between two operations.

    float8 stays, because each operation rounds by a large part of its result.
    """
    return "float32" if dtype in HALF else dtype


def is_rounded(node: Node, dtypes: Iterable[str], dtype: str) -> bool:
    """Return True for a product in half precision of wider factors: it rounds as a cast does."""
    return node.op == CONTRACT and dtype in HALF and not HALF.issuperset(dtypes)


@functools.cache
def ends_early(dtype: str) -> bool:
    """Return True for dtypes that a sum of products may overflow (float16 ends at 65504)."""
    return dtype_kind(dtype) == "f" and float(jax.numpy.finfo(dtype).max) < 1e30


def expand(
    g: EGraph, cls: int, may_open: Callable[[int], bool], made: dict[int, Product] | None = None
) -> Product:
    """Return the flattest product of a class; `may_open` tells which factor classes are expanded.

    made: products of classes that are known already; new ones are added.
    """
    made = {} if made is None else made
    _expand_all(g, [cls], may_open, made, set())
    return made[cls]


def _expand_all(
    g: EGraph,
    classes: list[int],
    may_open: Callable[[int], bool],
    made: dict[int, Product],
    begun: set[int],
) -> None:
    """Expand classes, operands first, each once (a chain of squares has 2ⁿ paths).

    A class that recurs in its own expansion (a = 1·a) is a factor there.
    """
    stack = list(reversed(classes))
    while stack:
        cls = stack[-1]
        if cls in made:
            stack.pop()
            continue
        node = product_node(g, cls)
        if node is None:
            made[cls] = Product(1, (g.ref(cls),), len(g.classes[cls].sizes), ())
        elif cls in begun:
            made[cls] = _open(g, cls, node, may_open, made)
        else:
            begun.add(cls)
            stack += [c for c in _opened(g, cls, node, may_open) if c not in begun]


def _opened(g: EGraph, cls: int, node: Node, may_open: Callable[[int], bool]) -> list[int]:
    """Return the classes of the factors to expand, the last first."""
    dtype = g.classes[cls].dtype
    found = [g.find(a).cls for a in reversed(node.args)]
    return [c for c in found if c != cls and g.classes[c].dtype == dtype and may_open(c)]


def flattest(g: EGraph, cls: int) -> Product:
    """Return the class as a product with every factor expanded; cached until the next union."""
    return expand(g, cls, lambda _: True, g.facts("product"))


def product_node(g: EGraph, cls: int) -> Node | None:
    """Return the node of a class that is a product: a contraction, or a scaled single term."""
    best: Node | None = None
    for node, reason in g.classes[cls].nodes.items():
        if node.op == CONTRACT or (node.op == ADD and len(node.args) == 1):
            if g.merged and any(g.find(a).cls == cls for a in node.args):
                continue  # I·a = a: a class is no product of itself
            if reason == ORIGINAL:
                return node
            if best is None or len(node.args) > len(best.args):
                best = node
    return best


def expand_node(g: EGraph, cls: int, node: Node, may_open: Callable[[int], bool]) -> Product:
    """Return the flattest product of one contraction or scaled term of a class."""
    made: dict[int, Product] = {}
    _expand_all(g, _opened(g, cls, node, may_open)[::-1], may_open, made, {cls})
    return _open(g, cls, node, may_open, made)


def _open(
    g: EGraph, cls: int, node: Node, may_open: Callable[[int], bool], made: dict[int, Product]
) -> Product:
    """Substitute the products of a node's factors, as far as `MAX_FACTORS` allows."""
    dtype = g.classes[cls].dtype
    coefficient: Any = node.attr[0] if node.op == ADD else 1
    precision = node.attr if node.op == CONTRACT else None
    factors: list[Ref] = []
    bound = list(node.bound)
    scales: tuple[Scale, ...] = ()
    for k, arg in enumerate(node.args):
        arg = g.find(arg)
        inner = made.get(arg.cls)
        if inner is None or g.classes[arg.cls].dtype != dtype or not may_open(arg.cls):
            factors.append(arg)
            continue
        merged = merge_precision(precision, inner.precision)
        many = len(factors) + len(inner.factors) + len(node.args) - k - 1 > MAX_FACTORS
        if merged is _CLASH or many:
            factors.append(arg)
            continue
        precision = merged
        coefficient = coefficient * inner.coefficient
        scales += inner.scales
        to = [*arg.axes, *(node.out + len(bound) + k for k in range(len(inner.bound)))]
        bound.extend(inner.bound)
        factors.extend(f.over(to) for f in inner.factors)
    p = Product(coefficient, tuple(factors), node.out, tuple(bound), precision, scales)
    return with_scale(p, node.attr[0], dtype) if node.op == ADD else p


def with_scale(p: Product, value: Any, dtype: str) -> Product:
    """Return the product with a note that `value`, part of its coefficient, scales all its factors.

    Scales of the same factors are multiplied into one number, as are scales of all factors but one:
    only the last product lies between the two.
    """
    if dtype_kind(dtype) != "f" or value in (0, 1):
        return p
    homes, kept = tuple(sorted(f.cls for f in p.factors)), list(p.scales)
    for s in p.scales:
        near = len(homes) - len(s.homes) <= 1 and not Counter(s.homes) - Counter(homes)
        if near and 0 < abs(value * s.value) < math.inf:
            value, homes = value * s.value, s.homes
            kept.remove(s)
            break
    if not is_held(value, dtype):
        return p._replace(scales=tuple(kept))
    return p._replace(scales=(*kept, Scale(value, homes)))


def is_held(value: Any, dtype: str) -> bool:
    """Return True if a number must stay with its factors: numbers below 1 must.

    A number above 1 may be multiplied last if the result is finite. A number so large that products
    without it would be flushed to zero may not.
    """
    return abs(value) < 1 or not is_moderate(value, dtype)


@functools.cache
def is_moderate(value: Any, dtype: str) -> bool:
    """Return True if a number may scale another factor: it is within 2^±(range/8).

    A number below 1 that moves to another factor makes nothing infinite; that factor may be flushed
    to zero where the written factor was not. An eighth of the exponents (2^±16 in float32, 2^±2 in
    float16) is the range by which a sum over as many elements may differ in another order.
    """
    return abs(math.log2(abs(value))) <= math.log2(float(jax.numpy.finfo(dtype).max)) / 8


_CLASH = object()
_LEVEL = {"DEFAULT": 0, "HIGH": 1, "HIGHEST": 2}


def merge_precision(a: Any, b: Any) -> Any:
    """Return the stronger of two precisions; `_CLASH` if they do not compare (dot algorithms)."""
    if a == b or b is None:
        return a
    if a is None:
        return b
    try:
        return max(a, b, key=lambda p: [_LEVEL[str(x)] for x in p])
    except (KeyError, TypeError):
        return _CLASH


def is_ring(dtype: str) -> bool:
    """Return True for integer dtypes: the ring laws hold exactly."""
    return dtype_kind(dtype) in "iu"


def scaled(
    g: EGraph, ref: Ref, coefficient: Any, sizes: tuple[Dim, ...], why: Justification
) -> Ref:
    """Return coefficient · ref."""
    if coefficient == 1:
        return ref
    return g.add(ADD, (coefficient,), (ref,), sizes, (), g.classes[ref.cls].dtype, why)
