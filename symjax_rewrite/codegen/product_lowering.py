"""Lowering of a product of two arrays, with operands and result in the order that costs least.

Operands are pairs `(array, labels)`; a label is the index that an axis reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from symjax_rewrite.cost.product_layouts import moves_operands
from symjax_rewrite.cost.term_cost import is_dot
from symjax_rewrite.ir.term import Node

Labels = tuple[int, ...]
Operand = tuple[Any, Labels]
Sizes = tuple[Any, ...]


def arrange(data: Any, labels: Labels, order: Labels, sizes: Sizes | Mapping[int, Any]) -> Any:
    """Return the array over exactly the indices of `order`: transposed, then broadcast.

    `sizes[i]` is the size of index i.
    """
    if labels == order:
        return data
    position = {i: n for n, i in enumerate(order)}
    wanted = sorted(range(len(labels)), key=lambda a: position[labels[a]])
    if wanted != list(range(len(labels))):
        data = lax.transpose(data, wanted)
    if len(wanted) == len(order):
        return data
    dims = tuple(position[labels[a]] for a in wanted)
    return lax.broadcast_in_dim(data, tuple(sizes[i] for i in order), dims)


def product_of(
    left: Operand, right: Operand, out: int, precision: Any, dtype: str, order: Sequence[int]
) -> Operand:
    """Return a dot_general with its operands in the order that reads memory contiguously.

    XLA on CPU runs `Hᵀ @ y` and `y @ Hᵀ` 5 to 50 times slower than `H @ y` and `y @ H`.
    """
    # Batch axes are in the order of the larger operand: the other operand is transposed.
    larger, other = (left, right) if elements(left[0]) > elements(right[0]) else (right, left)
    shared = [i for i in larger[1] if i in other[1]]
    batch = [i for i in shared if i < out]
    summed = [i for i in shared if i >= out]
    if _better_swapped(left, right, summed, batch, order):
        left, right = right, left
    left, right, batch = _turned(left, right, summed, batch, order)
    (a, la), (b, lb) = left, right
    pairs, batches = (([la.index(i) for i in x], [lb.index(i) for i in x]) for x in (summed, batch))
    dims = (pairs, batches)
    data = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=np.dtype(dtype))
    free = [i for labels in (la, lb) for i in labels if i not in {*summed, *batch}]
    return data, (*batch, *free)


def _turned(
    left: Operand, right: Operand, summed: list[int], batch: list[int], order: Sequence[int]
) -> tuple[Operand, Operand, list[int]]:
    """Return the operands in orders that save the result's transposition, and the batch axes.

    The result has the batch axes first, then the free axes of the left operand and those of the
    right one, each in the operand's order. An axis that its reader has before those of both becomes
    one of the batch, and the operand without it is repeated. Small operands are moved so; a result
    that is not much larger than they are is transposed.
    """
    shared = {*summed, *batch}
    frees = [[i for i in labels if i not in shared] for _, labels in (left, right)]
    made = [*batch, *frees[0], *frees[1]]
    wanted = [i for i in order if i in made]
    unchanged = left, right, batch
    if wanted == made or len(wanted) < len(made) or wanted[: len(batch)] != batch:
        return unchanged
    outer, sides = _runs(wanted[len(batch) :], frees)
    if len(sides) < 2:
        return unchanged
    if sides[0][0] not in frees[0]:
        left, right = right, left
    batch = [*batch, *outer]
    by_rows = right[1][-1] in summed
    kept = (*sides[1], *summed) if by_rows else (*summed, *sides[1])
    orders = (*batch, *sides[0], *summed), (*batch, *kept)
    sizes = _sizes_of(left, right)
    moved = sum(
        count_of(sizes[i] for i in order)
        for (_, labels), order in zip((left, right), orders, strict=True)
        if labels != order
    )
    if not moves_operands(moved, count_of(sizes[i] for i in wanted)):
        return unchanged
    first, second = (
        (arrange(*operand, order, sizes), order)
        for operand, order in zip((left, right), orders, strict=True)
    )
    return first, second, batch


def _runs(wanted: list[int], frees: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Cut axes into outer ones and the longest last two runs of one operand's axes each."""
    sides: list[list[int]] = []
    for k in range(len(wanted) - 1, -1, -1):
        side = wanted[k] in frees[0]
        if not sides or (sides[0][0] in frees[0]) != side:
            if len(sides) == 2:
                return wanted[: k + 1], sides
            sides.insert(0, [])
        sides[0].insert(0, wanted[k])
    return [], sides


def _better_swapped(
    left: Operand, right: Operand, summed: list[int], batch: list[int], order: Sequence[int]
) -> bool:
    """Return True if swapped operands cost less, by their reads and by the order of the result.

    The result is copied where its reader has its axes in the other order. Measured, the copy takes
    less time than a left operand that is read with a stride.
    """
    place, shared = {i: n for n, i in enumerate(order)}, {*summed, *batch}
    free = [[place.get(i, i) for i in x[1] if i not in shared] for x in (left, right)]
    mine, theirs = map(min, free) if all(free) else (0, 0)
    copied = _result_elements(left, right, summed) if order else 0
    now, then = (_strides(*sides, summed, batch) for sides in ((left, right), (right, left)))
    written = (then[0], then[1] + copied * (theirs > mine), theirs, then[2])
    return written < (now[0], now[1] + copied * (mine > theirs), mine, now[2])


def _result_elements(left: Operand, right: Operand, summed: list[int]) -> int:
    """Return the number of elements of a product."""
    return count_of(n for i, n in _sizes_of(left, right).items() if i not in summed)


def _sizes_of(left: Operand, right: Operand) -> dict[int, Any]:
    """Return the size of each index."""
    (a, la), (b, lb) = left, right
    return dict(zip(la, a.shape, strict=True)) | dict(zip(lb, b.shape, strict=True))


def _strides(
    left: Operand, right: Operand, summed: list[int], batch: list[int]
) -> tuple[int, int, int]:
    """Return the elements read with a stride: of the left operand, the right one, and of copies.

    Reads are contiguous if the left operand contracts its last axis and the right operand its
    first. Measured on CPU (experiments/linear_algebra): a left operand contracted on its first axis
    costs up to 40 times as much. A right operand contracted on its last axis costs hardly more.
    XLA copies an operand whose batch axes are not its first axes, by rows if reads are contiguous.
    """
    (a, la), (b, lb) = left, right
    shared = len(batch) + len(summed)  # a vector has no further axis
    mine = elements(a) if len(la) > shared and la[-1] not in summed else 0
    theirs = elements(b) if len(lb) > shared and lb[-1] in summed else 0
    kept, own = (list(labels[: len(batch)]) == batch for labels in (la, lb))
    return mine * kept, theirs * own, mine * (not kept) + theirs * (not own)


def transposed_apart(node: Node, operands: list[Operand]) -> list[Operand]:
    """Return the operands of a strided product, with the narrower operand transposed in memory.

    Xᵀ Y is Xᵀ, stored transposed, times Y. The barrier prevents XLA from folding the transposition
    back into the product (`Device.slow_across` says where the folded form is slower).
    """
    if not is_dot(node) or len(operands) != 2:
        return operands
    (_, la), (_, lb) = operands
    summed = set(la) & set(lb)
    free = [i for i in (*la, *lb) if i not in summed]
    if len(la) != 2 or len(lb) != 2 or len(free) != 2 or la[-1] in summed or lb[-1] in summed:
        return operands
    k = 0 if elements(operands[0][0]) <= elements(operands[1][0]) else 1
    data, labels = operands[k]
    n = data.shape[1]
    if data.dtype not in (np.float32, np.float64) or not isinstance(n, int) or n < 16:
        return operands
    transposed = (lax.optimization_barrier(lax.transpose(data, (1, 0))), labels[::-1])
    return [transposed if j == k else o for j, o in enumerate(operands)]


def elements(data: Any) -> int:
    """Return the elements of an array."""
    return count_of(data.shape)


def count_of(sizes: Iterable[Any]) -> int:
    """Return the elements of an array; a named size counts as 64."""
    return math.prod(n if isinstance(n, int) else 64 for n in sizes)
