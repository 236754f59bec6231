"""Row algebra and epilogues of a normalised product as programs over its sums (a face).

The terms between the sums and the results are evaluated as they are written. What the sums are is
found by algebra: `Σ_k (a·x + b)(c·x + d)` with a, b, c, d of the rows alone is a polynomial in
Σx and Σx², or in Σ(x - centre)² where x is centred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.codegen import term_lowering
from symjax_rewrite.ir.dataflow import is_computed_from, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.sum_of_products import SumOfProducts, over
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Node, Ref
from symjax_rewrite.kernel_selection.norms.normalized_operand import (
    as_stored,
    is_cast,
    is_product,
    opener,
)
from symjax_rewrite.pallas_kernels.norm.spec import RowSums

CENTRE, SUM, SQUARES = "centre", "sum", "squares"
Step = tuple[str, Any, tuple[int, ...], str]  # kind, data, earlier steps, dtype


@dataclass(slots=True)
class ProgramBuilder:
    """Steps over the sums of one contraction of x, whose slots `contracted` are summed.

    count: elements of those. centred: x's mean is taken from it. operands: by kind ("rows",
    "ends", "fulls") the references read, over x's slots or the results' indices.
    """

    g: EGraph
    x: Ref
    contracted: tuple[int, ...]
    count: int
    centred: bool
    steps: list[Step] = field(default_factory=list)
    number: dict[Any, int] = field(default_factory=dict)
    operands: dict[str, list[Ref]] = field(
        default_factory=lambda: {"rows": [], "ends": [], "fulls": []}
    )

    def step(self, kind: str, data: Any, args: tuple[int, ...] = (), dtype: str = "") -> int:
        """The number of a step; equal steps are one."""
        entry = (kind, data, args, dtype)
        key = ("step", *entry[:1], repr(data), *entry[2:])
        if key not in self.number:
            self.number[key] = len(self.steps)
            self.steps.append(entry)
        return self.number[key]

    def operand(self, kind: str, ref: Ref) -> int:
        """The step that reads an operand."""
        known, ref = self.operands[kind], as_stored(self.g, ref)
        if ref not in known:
            known.append(ref)
        return self.step(kind, known.index(ref))

    def constant(self, value: float) -> int:
        return self.step("const", float(value))

    def times(self, *args: int) -> int:
        """The product of steps; 0 and 1 are recognised."""
        kept = [a for a in args if not self.equals(a, 1.0)]
        if any(self.equals(a, 0.0) for a in kept):
            return self.constant(0)
        if not kept:
            return self.constant(1)
        return kept[0] if len(kept) == 1 else self.step("times", None, tuple(sorted(kept)))

    def plus(self, *terms: tuple[float, int]) -> int:
        """Σ coefficient·step, like steps collected; a sum that cancels exactly is 0."""
        collected: dict[int, float] = {}
        for coefficient, a in terms:
            if not self.equals(a, 0.0):
                collected[a] = collected.get(a, 0.0) + coefficient
        kept = [(c, a) for a, c in collected.items() if c]
        if not kept:
            return self.constant(0)
        if len(kept) == 1 and kept[0][0] == 1:
            return kept[0][1]
        return self.step("plus", tuple(c for c, _ in kept), tuple(a for _, a in kept))

    def equals(self, a: int, value: float) -> bool:
        """Whether a step is this constant."""
        kind, data, _, _ = self.steps[a]
        return kind == "const" and data == value

    def is_of_mean(self, a: int) -> bool:
        """Whether a step is computed of x's mean and constants alone."""
        kind, data, args, _ = self.steps[a]
        combines = kind in ("times", "plus") or (kind == "apply" and data[0] in (ADD, CONTRACT))
        return kind in (CENTRE, "const") or (combines and all(map(self.is_of_mean, args)))

    def row(self, ref: Ref) -> int:
        """A value of the rows, over x's slots."""
        if ref not in self.number:
            self.number[ref] = self._row(ref)
        return self.number[ref]

    def _row(self, ref: Ref) -> int:
        node, dtype = node_of(self.g, ref.cls), self.g.classes[ref.cls].dtype
        if node.op == CONST:
            return self.constant(node.attr[0])
        if node.op == CONTRACT and node.bound:
            made = self._statistic(ref, node)
            return self.operand("rows", ref) if made is None else made
        if node.op not in (MAP, ADD) and not is_product(node):
            return self.operand("rows", ref)
        if not self.reads_statistics(ref.cls):
            return self.operand("rows", ref)
        args = [self.row(over(ref, a)) for a in node.args]
        if node.op == ADD and len(args) == 1 and self._is_mean(node, args[0]):
            return self.step(CENTRE, None)
        return self.apply(node, args, dtype)

    def apply(self, node: Node, args: list[int], dtype: str) -> int:
        """An elementwise node on steps."""
        dtypes = tuple(self.g.classes[a.cls].dtype for a in node.args)
        return self.step("apply", (node.op, node.attr, dtypes), tuple(args), dtype)

    def reads_statistics(self, cls: int) -> bool:
        """Return True if a class of the rows is computed from a sum over x."""
        return is_computed_from(self.g, cls, (self.x.cls,))

    def _is_mean(self, node: Node, arg: int) -> bool:
        total = self.plus((self.count, self.step(CENTRE, None)))
        scale = node.attr[0]
        return self.centred and arg == total and abs(scale * self.count - 1) < 1e-6

    def _statistic(self, ref: Ref, node: Node) -> int | None:
        """`Σ_k Π (a·x + b)` as a polynomial in the sums; None where it is no such thing."""
        bound = set(range(node.out, node.out + len(node.bound)))
        factors = self._factors(node.args, bound)
        forms = [self._linear(ref, node, f, bound) for f in factors]
        linear = [f for f in forms if f is not None]
        slopes = [f for f in linear if not self.equals(f[0], 0.0)]
        if len(linear) < len(forms) or len(slopes) > 2:
            return None
        scale = self.times(*(b for a, b in linear if self.equals(a, 0.0)))
        zero, count = self.constant(0), float(self.count)
        total = zero if self.centred else self.step("sides", SUM)
        if not slopes:  # a sum over other indices than x's, maybe
            return self.plus((float(prod(int(str(n)) for n in node.bound)), scale))
        if len(slopes) == 1:
            (a, b) = slopes[0]
            return self.plus((1, self.times(scale, a, total)), (count, self.times(scale, b)))
        (a, b), (c, d) = slopes
        squares = self.step("sides", SQUARES)
        return self.plus(
            (1, self.times(scale, a, c, squares)),
            (1, self.times(scale, a, d, total)),
            (1, self.times(scale, b, c, total)),
            (count, self.times(scale, b, d)),
        )

    def _factors(self, args: tuple[Ref, ...], bound: set[int]) -> tuple[Ref, ...]:
        """Return the factors of a summand, products opened and casts looked through."""

        def opens(ref: Ref, node: Node) -> bool:
            inside = ref.cls != self.x.cls and bool(set(ref.axes) & bound)
            return inside and (is_cast(self.g, ref.cls) or is_product(node))

        made = SumOfProducts(self.g, opens).product(args)
        return args if made is None else made[0].factors

    def _linear(self, ref: Ref, node: Node, arg: Ref, bound: set[int]) -> tuple[int, int] | None:
        """(a, b) with `arg = a·(x - centre) + b`; None where it is not linear in x."""
        form = opener(self.g, lambda r: bool(set(r.axes) & bound) and r.cls != self.x.cls)
        slope: list[tuple[float, int]] = []
        start: list[tuple[float, int]] = []
        for part in form.terms(arg):
            values = [f for f in part.factors if set(f.axes) & bound]
            rows = [f for f in part.factors if not set(f.axes) & bound]
            made = self.times(*(self.row(over(ref, f)) for f in rows))
            if not values:
                start.append((part.coefficient, made))
            elif len(values) == 1 and self._is_x(ref, node, values[0]):
                slope.append((part.coefficient, made))
            else:
                return None
        a = self.plus(*slope)
        if self.centred:
            start.append((1, self.times(a, self.step(CENTRE, None))))
        return a, self.plus(*start)

    def _is_x(self, ref: Ref, node: Node, value: Ref) -> bool:
        """Whether a factor of a sum is x itself, read along the rows and summed as contracted."""
        if value.cls != self.x.cls or len(set(value.axes)) < len(value.axes):
            return False
        for slot, i in enumerate(value.axes):
            if i < node.out and (slot in self.contracted or ref.axes[i] != slot):
                return False
            if i >= node.out and slot not in self.contracted:
                return False
        return len(node.bound) == len(self.contracted)

    def prune(self, roots: tuple[int, ...]) -> tuple[list[Step], tuple[int, ...]]:
        """The steps that some numbers need, renumbered."""
        needed, stack = set(), list(roots)
        while stack:
            a = stack.pop()
            if a not in needed:
                needed.add(a)
                stack.extend(self.steps[a][2])
        order = sorted(needed)
        to = {a: n for n, a in enumerate(order)}
        steps = [
            (kind, data, tuple(to[a] for a in args), dtype)
            for kind, data, args, dtype in (self.steps[a] for a in order)
        ]
        return steps, tuple(to[r] for r in roots)


def program(
    steps: list[Step], root: int, primitives: dict[str, Any], sides: tuple[str, ...]
) -> Callable[[RowSums], Any]:
    """The steps as a function of the sums; values broadcast to [m, n]."""

    def run(s: RowSums) -> Any:
        made: list[Any] = []
        total = s.centre.dtype
        for kind, data, args, dtype in steps:
            xs = [made[a] for a in args]
            if kind == "const":
                made.append(np.asarray(data, total))
            elif kind == CENTRE:
                made.append(s.centre)
            elif kind == "sides":
                made.append(s.sides[sides.index(data)])
            elif kind == "product":
                made.append(s.products[data])
            elif kind == "column":
                made.append(s.columns[data[0]][data[1]])
            elif kind in ("rows", "ends", "fulls"):
                made.append(getattr(s, kind)[data].astype(total))
            elif kind == "times":
                made.append(_product(xs))
            elif kind == "plus":
                made.append(_sum(data, xs, total))
            elif kind == "cast":
                made.append(xs[0].astype(np.dtype(dtype)).astype(total))
            else:
                made.append(_apply(data, xs, dtype, primitives))
        return made[root]

    return run


def _product(xs: list[Any]) -> Any:
    out = xs[0]
    for x in xs[1:]:
        out = out * x
    return out


def _sum(coefficients: tuple, xs: list[Any], dtype: Any) -> Any:
    out: Any = None
    for c, x in zip(coefficients, xs, strict=True):
        term = x if c == 1 else x * np.asarray(c, dtype)
        out = term if out is None else out + term
    return out


def _apply(what: tuple, args: list[Any], dtype: str, primitives: dict[str, Any]) -> Any:
    """An elementwise node as written, in its own dtypes."""
    op, attr, dtypes = what
    xs = [jnp.asarray(x).astype(np.dtype(t)) for x, t in zip(args, dtypes, strict=True)]
    if op == ADD:
        literals = tuple(1 if c == 1 else term_lowering.literal(c, dtype) for c in attr)
        return _sum(literals, xs, np.dtype(dtype))
    if op == CONTRACT:
        return _product(xs)
    return term_lowering.in_kernel(attr, xs, dtype, primitives)
