"""The orientation of matrix products: the order of the operands, and the axes that are summed.

Xᵀ y = y X, and A B = (Bᵀ Aᵀ)ᵀ. XLA folds transposes into a product and keeps its order of operands.
On a CPU a left operand that is summed over its first axis then takes some time per element, and so
does a transposed matrix on the right of a vector, if its sums are long. The values differ by the
order in which a sum is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from jax import lax

from symjax_rewrite.candidates import Candidate, Context, Replacement
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.placed_products import (
    PlacedProduct,
    has_batch,
    is_plain,
    is_product,
    placed_product,
)
from symjax_rewrite.cost.product_layouts import (
    added_seconds,
    copy_seconds,
    product_seconds,
    swapped_seconds,
)
from symjax_rewrite.cost.profile_groups import ProductLayouts
from symjax_rewrite.ir.dataflow import makers_of, numbers, users_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.transposed_values import TransposedValue, transposed_value
from symjax_rewrite.rewriting.equation_forms import candidate, is_sharded
from symjax_rewrite.rewriting.grouped_heads import ungrouped
from symjax_rewrite.rewriting.rule import LOCALITY, ORIENTATION

RULE = (ORIENTATION, LOCALITY)


class OrientedProducts:
    """Pass that writes products so that operands and results are read in the order of memory."""

    name = ORIENTATION

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the products that are cheaper in another orientation."""
        facts = context.device.layouts
        if facts is None or not (context.runs(self.name) and context.reorders()):
            return
        products = [*filter(is_product, program.equations)]
        if not products:
            return
        makers, users = program.once(makers_of), program.once(users_of)
        outputs = set(numbers(program.outputs))
        for e in products:
            if not is_plain(e) or is_sharded(e):
                continue
            if has_batch(e):
                yield from _without_copies(program, e, makers, context.device)
                continue
            found = placed_product(program, e, makers, users, outputs)
            if found is not None:
                yield from _oriented(program, found, users, facts, context.device)
        for e in program.equations:
            if e.name == "transpose" and not all(map(is_product, users.get(e.outvals[0], ()))):
                found = transposed_value(e, makers, users, outputs)
                if found is not None and found.equations:
                    yield from _moved(e, found, facts, context.device)


def _moved(
    e: Equation, found: TransposedValue, facts: ProductLayouts, device: Device
) -> Iterator[Candidate]:
    """Yield a transposition of a function of products as a function of transposed products."""
    aval: Any = e.eqn.outvars[0].aval
    used = (e, *found.equations, *found.products)
    if not all(map(is_plain, found.products)) or any(map(is_sharded, used)):
        return
    if aval.size < facts.least_elements:
        return
    in_order = copy_seconds(2 * aval.size * aval.dtype.itemsize, device)
    before = in_order + aval.size * facts.result_s
    after = in_order + sum(swapped_seconds(p, facts) for p in found.products)
    after += len(found.stored) * aval.size * facts.copy_s
    if margins.pays(before, after, "orientation", device):
        part = Replacement(e.outvals, found.reads, found.computed, source=e.eqn)
        yield candidate(RULE, e.where(), part, (before, after))


def _without_copies(
    program: Program, e: Equation, makers: Mapping[int, Equation], device: Device
) -> Iterator[Candidate]:
    """Yield a batched product that does not copy its repeated operand, if that pays."""
    found = ungrouped(program, e, makers, device)
    if found is not None and margins.pays(*found[1:], "orientation", device):
        part, before, after = found
        yield candidate(RULE, e.where(), part, (before, after))


def _oriented(
    program: Program,
    p: PlacedProduct,
    users: Mapping[int, list[Equation]],
    facts: ProductLayouts,
    device: Device,
) -> Iterator[Candidate]:
    """Yield the other orientation of a product if it pays."""
    left, right = p.left.matrix, p.right.matrix
    if left.free == right.free == 1 or max(left.elements, right.elements) < facts.least_elements:
        return
    if not p.has_vector:
        # A product that reads the result folds its transpose, and XLA lays out constants itself.
        read_by_products = any(e.name == "dot_general" for e in users.get(p.target, ()))
        if read_by_products or not {p.left.value, p.right.value}.isdisjoint(program.consts):
            return
    dtype = str(program.avals[p.target].dtype)
    base = product_seconds(left, right, dtype, device)
    before = base + added_seconds(left, right, facts)
    after = base
    if not p.has_vector:
        after += added_seconds(right, left, facts) + left.free * right.free * facts.result_s
    if margins.pays(before, after, "orientation", device):
        fun = _times_vector(program, p) if p.has_vector else _swapped(p)
        reads = (p.left.value, p.right.value)
        part = Replacement((p.target,), reads, fun, source=p.equation.eqn)
        yield candidate(RULE, p.equation.where(), part, (before, after))


def _dot(p: PlacedProduct, was_right: bool) -> Callable[..., Any]:
    """Return the product with the precision and dtype as written.

    was_right: True if its left operand is the right one of the equation.
    """
    params = p.equation.eqn.params
    precision = params["precision"]
    if was_right and isinstance(precision, tuple):
        precision = precision[::-1]

    def dot(a: Any, b: Any, axes: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
        kind = params["preferred_element_type"]
        return lax.dot_general(a, b, (axes, ((), ())), precision, preferred_element_type=kind)

    return dot


def _times_vector(program: Program, p: PlacedProduct) -> Callable[..., Any]:
    """Return M v, or v M if the summed axes of M stand first, from the two operands."""
    is_right = p.left.matrix.free == 1  # the matrix
    matrix, vector = (p.right, p.left) if is_right else (p.left, p.right)
    shape = program.avals[p.target].shape
    stands_left = not matrix.first
    dot = _dot(p, stands_left == is_right)
    flat = replace(vector, free=(), first=False).axes()

    def run(left: Any, right: Any) -> Any:
        m, v = (right, left) if is_right else (left, right)
        v = lax.reshape(v, vector.summed)
        ends = (matrix.axes(), flat)
        made = dot(m, v, ends) if stands_left else dot(v, m, ends[::-1])
        return lax.reshape(made, shape)

    return run


def _swapped(p: PlacedProduct) -> Callable[..., Any]:
    """Return (Bᵀ Aᵀ)ᵀ; the barrier prevents XLA from folding the transposition into the product."""
    dot, count = _dot(p, not p.transposed), len(p.right.free)

    def run(left: Any, right: Any) -> Any:
        made = lax.optimization_barrier(dot(right, left, (p.right.axes(), p.left.axes())))
        return lax.transpose(made, (*range(count, made.ndim), *range(count)))

    return run
