"""The right side of a law: terms over named indices, with the dtype of the class they are equal to.

Indices 0, 1, … are the slots of the class; any other index has a name and a size of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symjax_rewrite.ir.egraph import EGraph, Justification
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import Product
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONST, DELTA, INVERSE, MAP, SLICE, Ref, identity
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import Axiom, NotBuiltError, RuleContext
from symjax_rewrite.rewriting.scales import scaled_factor

Params = tuple[tuple[str, Any], ...]
Entry = tuple[Any, int]  # the slice of an index (None: no slice), the index that it then reads


@dataclass(frozen=True, slots=True)
class RightSide:
    """Builds terms at a class, for a rule.

    sizes: of the indices, by name. out: the indices of the result.
    """

    ctx: RuleContext
    why: Justification
    dtype: str
    sizes: Mapping[int, Dim]
    out: tuple[int, ...]

    @classmethod
    def of(
        cls, ctx: RuleContext, rule: Axiom | Justification, at: int, more: Sequence[Dim] = ()
    ) -> RightSide:
        """Return the builder of a rule at a class; `more` are sizes of further indices."""
        c = ctx.g.classes[at]
        why = rule.reason(at) if isinstance(rule, Axiom) else rule
        sizes = dict(enumerate((*c.sizes, *more)))
        return cls(ctx, why, c.dtype, sizes, identity(len(c.sizes)))

    @property
    def g(self) -> EGraph:
        """Return the e-graph."""
        return self.ctx.g

    def refused(self, reason: str) -> NotBuiltError:
        """Record that the rule matched at the class; return the error that gives its form up."""
        self.ctx.refuse(self.why.rule, reason, self.why.source)
        return NotBuiltError()

    def term(self, op: str, args: Sequence[Ref], attr: Any = None, **more: Any) -> Ref:
        """Return a term over the indices that its operands read, less the `summed` indices."""
        dtype = more.pop("dtype", self.dtype)
        return self.g.term(op, args, self.sizes, dtype, self.why, attr=attr, **more)

    def sum(self, *terms: tuple[Any, Ref]) -> Ref:
        """Return Σ coefficient·term."""
        coefficients, refs = zip(*terms, strict=True)
        return self.term(ADD, refs, coefficients)

    def scaled(self, k: Any, ref: Ref) -> Ref:
        """Return k·ref."""
        return ref if k == 1 else self.sum((k, ref))

    def inside(self, k: Any, ref: Ref) -> Ref:
        """Return k·ref as a multiple of the whole class."""
        return scaled_factor(self.g, ref, k, self.why)

    def map(self, name: str, *args: Ref, dtype: str = "", params: Params = ()) -> Ref:
        """Return an elementwise function of some values; `params` are those of its primitive."""
        return self.g.apply(MAP, (name, params), args, dtype or self.dtype, self.why)

    def const(self, value: Any, dtype: str = "") -> Ref:
        """Return a number."""
        attr = (value, dtype or self.dtype, repr(value))
        return self.g.add(CONST, attr, (), (), (), attr[1], self.why)

    def zero(self) -> Ref:
        """Return 0."""
        return self.g.add(CONST, zero_of(self.dtype), (), (), (), self.dtype, self.why)

    def inverse(self, matrix: Ref) -> Ref:
        """Return the inverse of a matrix, over the same indices as the matrix."""
        return self.term(INVERSE, (matrix,), (0, 1))

    def delta(self, i: int, j: int) -> Ref:
        """Return 1 where two indices are equal, and 0 elsewhere."""
        return self.term(DELTA, (), out=(i, j))

    def ordered(self, p: Product) -> Ref:
        """Return a product over the slots of the class, in its cheapest order.

        Raises:
            NotBuiltError: as of `order_product`.
        """
        sizes = tuple([self.sizes[i] for i in self.out])
        return order_product(self.ctx, p, sizes, self.dtype, self.why)

    def product(
        self,
        factors: Iterable[Ref],
        summed: Sequence[int] = (),
        k: Any = 1,
        precision: Any = None,
        out: Sequence[int] | None = None,
    ) -> Ref:
        """Return k·Σ over the summed indices of a product, in its cheapest order.

        out: the indices of the result; default: those of the class.

        Raises:
            NotBuiltError: as of `order_product`.
        """
        out = self.out if out is None else tuple(out)
        local = {name: n for n, name in enumerate((*out, *summed))}
        over = tuple([f.over(local) for f in factors])
        p = Product(k, over, len(out), tuple([self.sizes[i] for i in summed]), precision)
        sizes = tuple([self.sizes[i] for i in out])
        return order_product(self.ctx, p, sizes, self.dtype, self.why).over(out)

    def sliced(self, ref: Ref, entries: Mapping[int, Entry]) -> Ref:
        """Return `ref` with every index it reads sliced and renamed as `entries` says."""
        ref = self.g.find(ref)
        attrs, axes = zip(*(entries[i] for i in ref.axes), strict=True) if ref.axes else ((), ())
        arg = Ref(ref.cls, axes)
        if all(a is None for a in attrs):
            return arg
        return self.term(SLICE, (arg,), attrs, dtype=self.g.classes[ref.cls].dtype)


def zero_of(dtype: str) -> tuple[Any, str, str]:
    """Return zero as a constant's attribute."""
    zero = {"i": 0, "u": 0, "c": 0j}.get(dtype_kind(dtype), 0.0)
    return (zero, dtype, repr(zero))
