"""Row algebra and epilogues of a normalised product as programs over its sums.

The terms between the sums and the results are evaluated as written. The sums are recognised by
algebra: `Σ_k (a·x + b)(c·x + d)` with row values a, b, c, d is a polynomial in
Σx and Σx², or in Σ(x - centre)² where x is centred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.codegen.step_evaluation import elementwise
from symjax_rewrite.ir.dataflow import is_computed_from, is_float_cast, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.step_program import Handler, Step, StepProgram, place_in, run
from symjax_rewrite.ir.sum_of_products import SumOfProducts
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Node, Ref, over
from symjax_rewrite.kernel_selection.norms.normalized_operand import (
    as_stored,
    multiplies_slots,
    opener,
)
from symjax_rewrite.loops.carry_dependence import holds
from symjax_rewrite.pallas_kernels.norm.spec import RowSums

CENTRE, SUM, SQUARES = "centre", "sum", "squares"


@dataclass(slots=True)
class ProgramBuilder(StepProgram):
    """Steps over the sums of one contraction of x, whose slots `contracted` are summed.

    count: number of contracted elements. centred: x's mean is subtracted. operands: by kind
    ("rows", "ends", "fulls") the references read, over x's slots or the results' indices.
    """

    g: EGraph
    x: Ref
    contracted: tuple[int, ...]
    count: int
    centred: bool
    number: dict[Ref, int] = field(default_factory=dict)
    operands: dict[str, list[Ref]] = field(
        default_factory=lambda: {"rows": [], "ends": [], "fulls": []}
    )

    def operand(self, kind: str, ref: Ref) -> int:
        """Return the step that reads an operand."""
        return self.add(kind, place_in(self.operands[kind], as_stored(self.g, ref)))

    def constant(self, value: float) -> int:
        return self.add("const", float(value))

    def times(self, *args: int) -> int:
        """Return the product of steps; constant factors 0 and 1 are simplified."""
        kept = [a for a in args if not self.equals(a, 1.0)]
        if any(self.equals(a, 0.0) for a in kept):
            return self.constant(0)
        if not kept:
            return self.constant(1)
        return kept[0] if len(kept) == 1 else self.add("times", None, tuple(sorted(kept)))

    def plus(self, *terms: tuple[float, int]) -> int:
        """Return Σ coefficient·step with like steps collected; a sum that cancels exactly is 0."""
        collected: dict[int, float] = {}
        for coefficient, a in terms:
            if not self.equals(a, 0.0):
                collected[a] = collected.get(a, 0.0) + coefficient
        kept = [(c, a) for a, c in collected.items() if c]
        if not kept:
            return self.constant(0)
        if len(kept) == 1 and kept[0][0] == 1:
            return kept[0][1]
        return self.add("plus", tuple(c for c, _ in kept), tuple(a for _, a in kept))

    def equals(self, a: int, value: float) -> bool:
        """Return True if a step is the constant `value`."""
        kind, data, _, _ = self.steps[a]
        return kind == "const" and data == value

    def is_of_mean(self, a: int) -> bool:
        """Return True if a step depends on x's mean and constants alone."""
        kind, data, args, _ = self.steps[a]
        combines = kind in ("times", "plus") or (kind == "apply" and data[0] in (ADD, CONTRACT))
        return kind in (CENTRE, "const") or (combines and all(map(self.is_of_mean, args)))

    def row(self, ref: Ref) -> int:
        """Return the step of a row value, over x's slots."""
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
        if node.op not in (MAP, ADD) and not multiplies_slots(node):
            return self.operand("rows", ref)
        if not is_computed_from(self.g, ref.cls, (self.x.cls,)):
            return self.operand("rows", ref)
        args = [self.row(over(ref, a)) for a in node.args]
        if node.op == ADD and len(args) == 1 and self._is_mean(node, args[0]):
            return self.add(CENTRE, None)
        stored = self.g.classes[as_stored(self.g, self.x).cls].dtype
        if is_float_cast(self.g, ref.cls) and self.is_of_mean(args[0]) and holds(dtype, stored):
            return args[0]  # `x.mean()` rounds to the dtype of x; the kernel holds it in f32
        return self.apply(node, args, dtype)

    def apply(self, node: Node, args: list[int], dtype: str) -> int:
        """Return the step of an elementwise node applied to steps."""
        dtypes = tuple(self.g.classes[a.cls].dtype for a in node.args)
        return self.add("apply", (node.op, node.attr, dtypes), tuple(args), dtype)

    def _is_mean(self, node: Node, arg: int) -> bool:
        total = self.plus((self.count, self.add(CENTRE, None)))
        scale = node.attr[0]
        return self.centred and arg == total and abs(scale * self.count - 1) < 1e-6

    def _statistic(self, ref: Ref, node: Node) -> int | None:
        """Return `Σ_k Π (a·x + b)` as a polynomial in the sums; None where it has another form."""
        bound = set(range(node.out, node.out + len(node.bound)))
        factors = self._factors(node.args, bound)
        forms = [self._linear(ref, node, f, bound) for f in factors]
        linear = [f for f in forms if f is not None]
        slopes = [f for f in linear if not self.equals(f[0], 0.0)]
        if len(linear) < len(forms) or len(slopes) > 2:
            return None
        scale = self.times(*(b for a, b in linear if self.equals(a, 0.0)))
        zero, count = self.constant(0), float(self.count)
        total = zero if self.centred else self.add("sides", SUM)
        if not slopes:  # may be a sum over other indices than x's
            return self.plus((float(prod(int(str(n)) for n in node.bound)), scale))
        if len(slopes) == 1:
            (a, b) = slopes[0]
            if self.centred and b != self.times(a, self.add(CENTRE, None)):
                total = self.add("sides", SUM)  # of x − mean: the rounding error of the mean
            return self.plus((1, self.times(scale, a, total)), (count, self.times(scale, b)))
        (a, b), (c, d) = slopes
        squares = self.add("sides", SQUARES)
        return self.plus(
            (1, self.times(scale, a, c, squares)),
            (1, self.times(scale, a, d, total)),
            (1, self.times(scale, b, c, total)),
            (count, self.times(scale, b, d)),
        )

    def _factors(self, args: tuple[Ref, ...], bound: set[int]) -> tuple[Ref, ...]:
        """Return the factors of a summand, with products opened and casts ignored."""

        def opens(ref: Ref, node: Node) -> bool:
            inside = ref.cls != self.x.cls and bool(set(ref.axes) & bound)
            return inside and (is_float_cast(self.g, ref.cls) or multiplies_slots(node))

        made = SumOfProducts(self.g, opens).product(args)
        return args if made is None else made[0].factors

    def _linear(self, ref: Ref, node: Node, arg: Ref, bound: set[int]) -> tuple[int, int] | None:
        """Return (a, b) with `arg = a·(x - centre) + b`; None where it is not linear in x."""
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
            start.append((1, self.times(a, self.add(CENTRE, None))))
        return a, self.plus(*start)

    def _is_x(self, ref: Ref, node: Node, value: Ref) -> bool:
        """Return True if a factor of a sum is x itself, summed over the contracted index."""
        if value.cls != self.x.cls or len(set(value.axes)) < len(value.axes):
            return False
        for slot, i in enumerate(value.axes):
            if i < node.out and (slot in self.contracted or ref.axes[i] != slot):
                return False
            if i >= node.out and slot not in self.contracted:
                return False
        return len(node.bound) == len(self.contracted)


def program(
    steps: Sequence[Step], root: int, primitives: dict[str, Any], sides: tuple[str, ...]
) -> Callable[[RowSums], Any]:
    """Return the steps as a function of the sums; values broadcast to [m, n]."""

    def finish(s: RowSums) -> Any:
        total = s.centre.dtype

        def applied(what: tuple, args: list[Any], dtype: str) -> Any:
            dtypes = map(np.dtype, what[2])  # as written
            xs = [jnp.asarray(x).astype(t) for x, t in zip(args, dtypes, strict=True)]
            return elementwise(what[:2], xs, dtype, primitives)

        def read(kind: str) -> Handler:
            return lambda number, args, dtype: getattr(s, kind)[number].astype(total)

        def sums(op: str) -> Handler:
            return lambda data, args, dtype: elementwise((op, data), args, total, primitives)

        made = run(
            steps,
            {
                "const": lambda value, args, dtype: np.asarray(value, total),
                CENTRE: lambda data, args, dtype: s.centre,
                "sides": lambda name, args, dtype: s.sides[sides.index(name)],
                "product": lambda number, args, dtype: s.products[number],
                "column": lambda place, args, dtype: s.columns[place[0]][place[1]],
                "times": sums(CONTRACT),
                "plus": sums(ADD),
                "cast": lambda data, args, dtype: args[0].astype(np.dtype(dtype)).astype(total),
                "apply": applied,
            }
            | {kind: read(kind) for kind in ("rows", "ends", "fulls")},
        )
        return made[root]

    return finish
