"""The orientation of matrix products: the order of the operands, and the axes that are summed.

Xᵀ y = y X, and A B = (Bᵀ Aᵀ)ᵀ. XLA folds transposes into a product and keeps its order of operands.
On a CPU a left operand that is summed over its first axis then takes some time per element, and so
does a transposed matrix on the right of a vector, if its sums are long. The values differ by the
order in which a sum is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from symjax_rewrite.candidates import Candidate, Context, Replacement
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.product_layouts import (
    Matrix,
    added_seconds,
    copy_seconds,
    product_seconds,
    swapped_seconds,
)
from symjax_rewrite.cost.profile_groups import ProductLayouts
from symjax_rewrite.ir.dataflow import makers_of, numbers, users_of
from symjax_rewrite.ir.flat_program import Equation, Program, Value
from symjax_rewrite.ir.transposed_values import TransposedValue, transposed_value
from symjax_rewrite.rewriting.equation_forms import candidate, is_sharded
from symjax_rewrite.rewriting.grouped_heads import ungrouped
from symjax_rewrite.rewriting.rule import LOCALITY, ORIENTATION

DTYPES = ("float32", "float64")
RULE = (ORIENTATION, LOCALITY)


@dataclass(frozen=True, slots=True)
class StoredOperand:
    """An operand as it is stored: its free axes and its summed axes, each group in one piece.

    value: its number, before transposes. free, summed: sizes in stored order. first: True if the
    summed axes stand first. order: numbers of the summed pairs of axes, in stored order.
    transposed: True if transposes stand between.
    """

    value: int
    free: tuple[int, ...]
    summed: tuple[int, ...]
    first: bool
    order: tuple[int, ...]
    transposed: bool

    @property
    def matrix(self) -> Matrix:
        """Return the operand with each group of axes as one."""
        transposed = self.transposed or len(self.free) + len(self.summed) > 2
        return Matrix(math.prod(self.free), math.prod(self.summed), self.first, transposed)

    def axes(self) -> tuple[int, ...]:
        """Return the summed axes."""
        start = 0 if self.first else len(self.free)
        return tuple(range(start, start + len(self.summed)))


@dataclass(frozen=True, slots=True)
class PlacedProduct:
    """A product of two operands as XLA sees it: transposes of operands and result are folded.

    target: the value that holds it, over the free axes of the left and of the right operand.
    transposed: True if the target is the transpose of the equation's own result.
    """

    equation: Equation
    target: int
    left: StoredOperand
    right: StoredOperand
    transposed: bool

    @property
    def has_vector(self) -> bool:
        """Return True if an operand is a vector, so that the result needs no transposition."""
        return 1 in (self.left.matrix.free, self.right.matrix.free)


class OrientedProducts:
    """Pass that writes products so that operands and results are read in the order of memory."""

    name = ORIENTATION

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the products that are cheaper in another orientation."""
        facts = context.device.layouts
        if facts is None or not (context.runs(self.name) and context.reorders()):
            return
        products = [*filter(_is_product, program.equations)]
        if not products:
            return
        makers, users = makers_of(program.equations), users_of(program.equations)
        outputs = set(numbers(program.outputs))
        for e in products:
            if not _is_plain(e):
                continue
            if _has_batch(e):
                yield from _without_copies(program, e, makers, context.device)
                continue
            found = _read(program, e, makers, users, outputs)
            if found is not None:
                yield from _oriented(program, found, users, facts, context.device)
        for e in program.equations:
            if e.name == "transpose" and not all(map(_is_product, users.get(e.outvals[0], ()))):
                found = transposed_value(e, makers, users, outputs)
                if found is not None and found.equations:
                    yield from _moved(e, found, facts, context.device)


def across_seconds(program: Program, device: Device, within: Iterable[Equation]) -> float:
    """Return the seconds that products take longer since they read operands across their rows.

    within: the products that count. Of products in batches nothing is known.
    """
    if device.layouts is None:
        return 0.0
    makers, users = makers_of(program.equations), users_of(program.equations)
    seconds, outputs = 0.0, set(numbers(program.outputs))
    for e in filter(_is_product, within):
        if not _is_plain(e) or _has_batch(e):
            continue
        found = _read(program, e, makers, users, outputs)
        if found is not None:
            seconds += added_seconds(found.left.matrix, found.right.matrix, device.layouts)
    return seconds


def _is_product(e: Equation) -> bool:
    return e.name == "dot_general"


def _has_batch(e: Equation) -> bool:
    return bool(e.eqn.params["dimension_numbers"][1][0])


def _moved(
    e: Equation, found: TransposedValue, facts: ProductLayouts, device: Device
) -> Iterator[Candidate]:
    """Yield a transposition of a function of products as a function of transposed products."""
    aval: Any = e.eqn.outvars[0].aval
    used = (e, *found.equations, *found.products)
    if not all(map(_is_plain, found.products)) or any(map(is_sharded, used)):
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


def _is_plain(e: Equation) -> bool:
    """Return True for sums of products of one real dtype, of static sizes and in one place."""
    params = e.eqn.params
    avals: list[Any] = [v.aval for v in (*e.eqn.invars, *e.eqn.outvars)]
    return (
        bool(params["dimension_numbers"][0][0])
        and avals[0].dtype in DTYPES
        and all(a.dtype == avals[0].dtype for a in avals)
        and all(isinstance(n, int) for a in avals for n in a.shape)
        and not is_sharded(e)
    )


def _without_copies(
    program: Program, e: Equation, makers: Mapping[int, Equation], device: Device
) -> Iterator[Candidate]:
    """Yield a batched product that does not copy its repeated operand, if that pays."""
    found = ungrouped(program, e, makers, device)
    if found is not None and margins.pays(*found[1:], "orientation", device):
        part, before, after = found
        yield candidate(RULE, e.where(), part, (before, after))


def _read(
    program: Program,
    e: Equation,
    makers: Mapping[int, Equation],
    users: Mapping[int, list[Equation]],
    outputs: set[int],
) -> PlacedProduct | None:
    """Return a product without batch axes, or None if the axes of an operand stand in no groups."""
    summed, _ = e.eqn.params["dimension_numbers"]
    pairs = zip(e.invals, summed, strict=True)
    left, right = (_side(program, v, tuple(axes), makers) for v, axes in pairs)
    if left is None or right is None or left.order != right.order:
        return None
    target, readers = e.outvals[0], users.get(e.outvals[0], [])
    found = PlacedProduct(e, target, left, right, False)
    transposed = len(readers) == 1 and target not in outputs and _is_turn(readers[0])
    if transposed and not found.has_vector:
        return PlacedProduct(e, readers[0].outvals[0], right, left, True)
    return found


def _is_turn(e: Equation) -> bool:
    return e.name == "transpose" and tuple(e.eqn.params["permutation"]) == (1, 0)


def _side(
    program: Program, v: Value, axes: tuple[int, ...], makers: Mapping[int, Equation]
) -> StoredOperand | None:
    """Return an operand as stored, looking through transposes that leave its axes in groups."""
    if not isinstance(v, int):
        return None
    shape = program.avals[v].shape
    labels = [axes.index(k) if k in axes else len(axes) + k for k in range(len(shape))]
    found, written = _grouped(v, shape, labels, len(axes)), v
    while v in makers and makers[v].name == "transpose" and isinstance(makers[v].invals[0], int):
        turn = makers[v].eqn.params["permutation"]
        v = makers[v].invals[0]
        assert isinstance(v, int)
        labels = [labels[turn.index(k)] for k in range(len(turn))]
        found = _grouped(v, program.avals[v].shape, labels, len(axes)) or found
    return found and replace(found, transposed=found.value != written)


def _grouped(v: int, shape: tuple[int, ...], labels: list[int], pairs: int) -> StoredOperand | None:
    """Return an operand whose axes have these labels: numbers of pairs, or above these if free."""
    is_summed = [i < pairs for i in labels]
    order = tuple(i for i in labels if i < pairs)
    free = [i for i in labels if i >= pairs]
    first = is_summed[0]
    if free != sorted(free) or is_summed != sorted(is_summed, reverse=first):
        return None
    sizes = list(zip(shape, is_summed, strict=True))
    ours, theirs = (tuple(n for n, s in sizes if s == is_sum) for is_sum in (False, True))
    return StoredOperand(v, ours, theirs, first and bool(ours), order, False)


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
