"""Lowering of each kind of term to `jax.lax`.

Operands are pairs `(array, labels)`; a label is the index that an axis reads. Results have the same
form, so the order of axes is free until a consumer fixes it.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.codegen.product_lowering import (
    Labels,
    Operand,
    Sizes,
    arrange,
    count_of,
    elements,
    product_of,
)
from symjax_rewrite.cost.term_cost import is_dot
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.products import HALF, is_half
from symjax_rewrite.ir.sizes import Dim, Poly
from symjax_rewrite.ir.term import Node

# Elementwise functions of half-precision values that do not round, and one that differs in the last
# bit only.
EXACT = frozenset("select_n neg abs max min sign floor ceil round stop_gradient nextafter".split())


def jax_sizes(sizes: Sequence[Dim], env: Mapping[str, Any]) -> Sizes:
    """Return sizes as JAX shape entries."""
    return tuple(s.at(env) if isinstance(s, Poly) else s for s in sizes)


def in_order(data: Any, labels: Labels, sizes: Sizes) -> Any:
    """Return the array over all indices, in order."""
    return arrange(data, labels, tuple(range(len(sizes))), sizes)


def deltas_in(g: EGraph, node: Node) -> frozenset[int]:
    """Return the positions of the operands of a product that are deltas."""
    classes = (g.classes[g.find(a).cls] for a in node.args if node.op == op.CONTRACT)
    return frozenset(k for k, c in enumerate(classes) if any(n.op == op.DELTA for n in c.nodes))


def dropped_label(slot: int) -> int:
    """Return the label of a class slot of which a slice reads one element."""
    return -2 - slot


def lower_node(
    node: Node,
    operands: list[Operand],
    sizes: Sizes,
    dtype: str,
    primitives: Mapping[str, Any],
    guards: frozenset[int] = frozenset(),
    order: Sequence[int] = (),
    short_row: int | None = None,
) -> Operand:
    """Lower one node; `sizes[i]` is the size of its index i.

    `guards` are the positions of operands that are deltas. They are lowered to selects, so that no
    infinity or NaN off the diagonal gets into a product. `order` is the order of the indices that
    the reader has, by default that of their numbers. `short_row`: products with a vector sum the
    operands of a product, but not down rows of so few elements; None: no product does.
    """
    operands = [read_diagonals(data, labels) for data, labels in operands]
    if guards:
        masks = [operands[k] for k in sorted(guards)]
        plain = [o for k, o in enumerate(operands) if k not in guards]
        return _guarded(node, plain, masks, sizes, dtype)
    if node.op == op.MAP:
        return _map(node, operands, sizes, dtype, primitives, order)
    if node.op == op.ADD:
        return _add(node, operands, sizes, dtype, order)
    if node.op == op.CONTRACT:
        return _contract(node, operands, sizes, dtype, order, short_row)
    return _LOWER[node.op](node, operands, sizes, dtype)


def read_diagonals(data: Any, labels: Labels) -> Operand:
    """Return an operand with repeated indices read as diagonals, by strided slices."""
    while len(set(labels)) < len(labels):
        twice = next(i for i in labels if labels.count(i) > 1)
        a, b = [k for k, i in enumerate(labels) if i == twice][:2]
        rest = [k for k in range(len(labels)) if k not in (a, b)]
        n = data.shape[a]
        data = lax.transpose(data, [*rest, a, b])
        flat = lax.reshape(data, (*data.shape[:-2], n * n))
        data = lax.slice_in_dim(flat, 0, n * n, n + 1, axis=len(rest))
        labels = (*(labels[k] for k in rest), twice)
    return data, labels


def _guarded(
    node: Node, plain: list[Operand], masks: list[Operand], sizes: Sizes, dtype: str
) -> Operand:
    ones = (lax.full((), 1, np.dtype(dtype)), ())
    data = in_order(*_multiply(_promoted(plain or [ones], dtype), sizes), sizes)
    for mask, mask_labels in masks:
        inside = in_order(lax.ne(mask, lax.full_like(mask, 0)), mask_labels, sizes)
        data = lax.select(inside, data, lax.full_like(data, 0))
    data, labels = _sum_out((data, tuple(range(len(sizes)))), set(range(node.out)))
    return lax.convert_element_type(data, np.dtype(dtype)), labels


def _contract(
    node: Node,
    operands: list[Operand],
    sizes: Sizes,
    dtype: str,
    order: Sequence[int],
    short_row: int | None,
) -> Operand:
    out = node.out
    uses = Counter(i for _, labels in operands for i in set(labels))
    needed = [{i for i in labels if i < out or uses[i] > 1} for _, labels in operands]
    private = any(uses[i] == 1 and i >= out for i in uses)
    if private or not is_dot(node):  # only a dot takes and returns other dtypes directly
        operands = _promoted(operands, dtype)
    elementwise = all(i < out for need in needed for i in need)
    if elementwise:  # sums stay wide until they are multiplied
        operands = _promoted(operands, _accumulator(dtype))
    pairs = zip(operands, needed, strict=True)
    if short_row is None:
        operands = [_sum_out(o, need) for o, need in pairs]
    else:
        operands = [_sum_by_vector(o, need, short_row) for o, need in pairs]
    if elementwise:
        result = _multiply(operands, sizes, order)
    elif is_dot(node) or (len(operands) == 2 and out == 0):
        made = dtype
        if jnp.issubdtype(dtype, jnp.inexact) and all(
            jnp.issubdtype(data.dtype, jnp.integer) for data, _ in operands
        ):  # an integer beside a float is converted; two integers stay integers
            made = _accumulator(dtype)
            operands = _promoted(operands, made)
        result = product_of(operands[0], operands[1], out, node.attr, made, order)
    else:  # a half-precision dot accumulates in float32, and so does its replacement
        product = _multiply(_promoted(operands, _accumulator(dtype)), sizes, order)
        result = _sum_out(product, set(range(out)))
    result = (lax.convert_element_type(result[0], np.dtype(dtype)), result[1])
    data, labels = result
    for size in (sizes[i] for i in range(out, len(sizes)) if i not in uses):
        number = lax.convert_element_type(jnp.asarray(size), dtype)
        data = lax.mul(data, lax.broadcast(number, data.shape))
    return data, labels


def _promoted(operands: list[Operand], dtype: str) -> list[Operand]:
    """Return the operands in one dtype that represents all of them and the result exactly."""
    common = jax_internals.joint_dtype(dtype, *(data.dtype for data, _ in operands))
    return [(lax.convert_element_type(data, common), labels) for data, labels in operands]


def _sum_out(operand: Operand, needed: set[int]) -> Operand:
    data, labels = operand
    gone = tuple(a for a, i in enumerate(labels) if i not in needed)
    if not gone:
        return operand
    wide = lax.convert_element_type(data, np.dtype(_accumulator(str(data.dtype))))
    total = lax.convert_element_type(jax_internals.reduce_monoid("sum", wide, gone), data.dtype)
    return total, tuple(i for i in labels if i in needed)


def _sum_by_vector(operand: Operand, needed: set[int], short_row: int) -> Operand:
    """Sum along the first or the last axis by a product with a vector of ones.

    short_row: elements; rows of no more are not summed down.
    """
    data, labels = operand
    gone = [a for a, i in enumerate(labels) if i not in needed]
    is_wide = data.ndim > 1 and data.dtype in (np.float32, np.float64)
    if is_wide and gone == [data.ndim - 1]:
        sides, axes = (data, _ones(data, -1)), ((data.ndim - 1,), (0,))
    elif is_wide and gone == [0] and count_of(data.shape[1:]) > short_row:
        sides, axes = (_ones(data, 0), data), ((0,), (0,))
    else:
        return _sum_out(operand, needed)
    total = lax.dot_general(*sides, (axes, ((), ())), precision=lax.Precision.HIGHEST)
    return total, tuple(i for i in labels if i in needed)


def sum_by_rows(data: Any, count: int) -> Any:
    """Return the sum of an array over its first axes, so many, by a product with ones."""
    ones = lax.full(data.shape[:count], 1, data.dtype)
    axes = tuple(range(count))
    return lax.dot_general(ones, data, ((axes, axes), ((), ())), lax.Precision.HIGHEST)


def _ones(data: Any, axis: int) -> Any:
    return lax.full((data.shape[axis],), 1, data.dtype)


def _accumulator(dtype: str) -> str:
    return "float32" if is_half(dtype) else dtype


def _multiply(operands: list[Operand], sizes: Sizes, order: Sequence[int] = ()) -> Operand:
    arrays, made = _arranged(operands, sizes, order)
    return functools.reduce(lax.mul, arrays), made


def _arranged(
    operands: list[Operand], sizes: Sizes, wanted: Sequence[int] = ()
) -> tuple[list[Any], Labels]:
    """Return the operands over the indices that any reads, ordered as most of the widest are.

    Where none reads all, the result is larger than each of them and has the order of its reader.
    """
    most = max(len(labels) for _, labels in operands)
    orders = [labels for _, labels in operands if len(labels) == most]
    widest = max(orders, key=orders.count)
    rest = sorted({i for _, labels in operands for i in labels} - set(widest))
    order = (*rest, *widest)
    if rest and wanted:
        place = {i: n for n, i in enumerate(wanted)}
        order = tuple(sorted(order, key=lambda i: place.get(i, len(place) + i)))
    return [arrange(data, labels, order, sizes) for data, labels in operands], order


def _add(
    node: Node, operands: list[Operand], sizes: Sizes, dtype: str, order: Sequence[int]
) -> Operand:
    """Add the positive terms first, so that the others can be subtracted."""
    arrays, made = _arranged(operands, sizes, order)
    total: Any = None
    terms = list(zip(node.attr, arrays, strict=True))
    for c, term in sorted(terms, key=lambda t: isinstance(t[0], complex) or t[0] <= 0):
        if c == -1:
            total = lax.neg(term) if total is None else lax.sub(total, term)
            continue
        scaled = term if c == 1 else lax.mul(term, lax.full_like(term, literal(c, dtype)))
        total = scaled if total is None else lax.add(total, scaled)
    return total, made


def literal(value: Any, dtype: str) -> Any:
    """Return a coefficient rounded once, in the dtype; integers wrap as in their arithmetic."""
    kind = np.dtype(dtype)
    if kind.kind not in "iu":
        return np.asarray(value).astype(kind)
    bits = 8 * kind.itemsize
    wrapped = int(value) % (1 << bits)
    is_negative = kind.kind == "i" and wrapped >= 1 << (bits - 1)
    return np.asarray(wrapped - (is_negative << bits), kind)


def _map(
    node: Node,
    operands: list[Operand],
    sizes: Sizes,
    dtype: str,
    primitives: Mapping[str, Any],
    order: Sequence[int],
) -> Operand:
    name, params = node.attr
    arrays, made = _arranged(operands, sizes, order)
    if name == "reciprocal":
        return lax.div(lax.full_like(arrays[0], 1), arrays[0]), made
    if name == "convert_element_type":
        return lax.convert_element_type(arrays[0], np.dtype(dtype)), made
    return _primitive(name, primitives).bind(*arrays, **dict(params)), made


def _primitive(name: str, primitives: Mapping[str, Any]) -> Any:
    """Return the primitive of a name: of the program, or of JAX for a name that a rule made."""
    return primitives.get(name) or getattr(lax, f"{name}_p")


def in_kernel(attr: Any, args: Sequence[Any], dtype: str, primitives: Mapping[str, Any]) -> Any:
    """Apply an elementwise function in a kernel: half-precision functions that round run in f32.

    This matches XLA's compilation for a GPU. Pallas-Triton has no half-precision division.
    """
    name, params = attr
    if name == "convert_element_type":
        return args[0].astype(np.dtype(dtype))
    wide = dtype in HALF and name not in EXACT
    if wide:
        args = [x.astype(np.float32) if str(x.dtype) in HALF else x for x in args]
    if name == "reciprocal":
        made = 1 / args[0]
    else:
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
        args = [jnp.broadcast_to(x, shape) for x in args]
        made = _primitive(name, primitives).bind(*args, **dict(params))
    return made.astype(np.dtype(dtype)) if wide else made


def _reduce(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    data, labels = operands[0]
    axes = tuple(a for a, i in enumerate(labels) if i >= node.out)
    result = jax_internals.reduce_monoid(str(node.attr), data, axes)
    return result, tuple(i for i in labels if i < node.out)


def _slice(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    # A dropped axis has a label of its own, so that it can be distinguished.
    data, labels = operands[0]
    spec = {
        dropped_label(slot) if index < 0 else index: attr
        for slot, (index, attr) in enumerate(zip(node.args[0].axes, node.attr, strict=True))
    }
    cuts, gone = [], []
    for axis, i in enumerate(labels):
        attr = spec[i]
        if attr is None:
            cuts.append((0, data.shape[axis], 1))
        elif isinstance(attr, tuple):
            empty = isinstance(sizes[i], int) and sizes[i] == 0
            # A slice of a slice may start after the end of an empty axis.
            start, stride = (0, 1) if empty else attr
            cuts.append((start, start + stride * (sizes[i] - 1) + 1, stride))
        else:
            cuts.append((attr, attr + 1, 1))
            gone.append(axis)
    if cuts:
        data = lax.slice(data, *zip(*cuts, strict=True))
    kept = tuple(i for a, i in enumerate(labels) if a not in gone)
    return lax.squeeze(data, gone), kept


def _concat(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    """Concatenate operands in the order of their axes; a transposed operand is copied.

    XLA folds a transpose into the product that computes the operand. This product may then read
    both of its operands with a stride.
    """
    target, piece_sizes = node.attr
    largest = max(operands, key=lambda o: (len(o[1]), elements(o[0])))[1]
    order = (*sorted(set(range(node.out)) - set(largest)), *largest)
    arrays = [
        arrange(data, labels, order, (*sizes[:target], size, *sizes[target + 1 :]))
        for (data, labels), size in zip(operands, piece_sizes, strict=True)
    ]
    return lax.concatenate(arrays, order.index(target)), order


def _delta(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    rows, columns = (lax.broadcasted_iota(np.int32, tuple(sizes[:2]), k) for k in (0, 1))
    return lax.convert_element_type(lax.eq(rows, columns), np.dtype(dtype)), (0, 1)


def _take(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    """Lower a gather, or a dynamic slice if every index value is one number."""
    mode, fill, windows = node.attr
    (data, labels), *values = operands
    window = dict(enumerate(windows, node.out))
    for k in window:
        data, labels = _varying(data, labels, k, sizes)
    counts = [1 if window.get(i, i) is None else sizes[window.get(i, i)] for i in labels]
    over = tuple(dict.fromkeys(i for _, value_labels in values for i in value_labels))
    if mode == "fill" and any(sizes[i] == 0 for i in window):
        order = tuple(range(node.out))  # no index value is in range
        return lax.full(sizes[: node.out], fill[0], np.dtype(dtype)), order
    common = jax_internals.joint_dtype(*(x.dtype for x, _ in values))
    if common.itemsize < 4:  # the dtype may be too small for the sizes
        common = np.dtype(np.int32)
    if over or mode == "fill":
        numbers = [lax.expand_dims(arrange(x, xl, over, sizes), (len(over),)) for x, xl in values]
        starts = [lax.convert_element_type(x, common) for x in numbers]
        start = lax.concatenate(starts, len(over))
        return _gather(data, labels, window, (start, over), counts, mode, fill)
    at = dict(zip(window, values, strict=True))
    zero = np.zeros((), common)
    starts = [lax.convert_element_type(at[i][0], common) if i in at else zero for i in labels]
    part = lax.dynamic_slice_p.bind(data, *starts, slice_sizes=tuple(counts))
    names = [window.get(i, i) for i in labels]
    gone = [a for a, i in enumerate(names) if i is None]
    return lax.squeeze(part, gone), tuple(i for i in names if i is not None)


def _gather(
    data: Any, labels: Labels, window: dict, start: Operand, counts: list, mode: str, fill: Any
) -> Operand:
    """Return the gather whose index array is over the indices of `start`, its parts last."""
    indices, over = start
    gone = [a for a, i in enumerate(labels) if window.get(i, i) is None]
    batch = [a for a, i in enumerate(labels) if i in over]
    kept = [a for a in range(len(labels)) if a not in gone and a not in batch]
    first = min(labels.index(i) for i in window)
    lead = [a for a in kept if a < first]
    offset = (*range(len(lead)), *range(len(lead) + len(over), len(kept) + len(over)))
    dims = lax.GatherDimensionNumbers(
        offset_dims=offset,
        collapsed_slice_dims=tuple(gone),
        start_index_map=tuple(labels.index(i) for i in window),
        operand_batching_dims=tuple(batch),
        start_indices_batching_dims=tuple(over.index(labels[a]) for a in batch),
    )
    sizes = tuple(1 if a in batch else n for a, n in enumerate(counts))
    value = fill[0] if mode == "fill" else None
    taken = lax.gather(data, indices, dims, sizes, mode=mode, fill_value=value)
    names = [window.get(labels[a], labels[a]) for a in kept]
    return taken, (*names[: len(lead)], *over, *names[len(lead) :])


def _varying(data: Any, labels: Labels, index: int, sizes: Sizes) -> Operand:
    """Return an operand broadcast along an index, if it does not vary along it."""
    if index in labels:
        return data, labels
    return lax.broadcast(data, (sizes[index],)), (index, *labels)


def _cumsum(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    index, reverse = node.attr
    data, labels = _varying(*operands[0], index, sizes)
    return lax.cumsum(data, axis=labels.index(index), reverse=reverse), labels


def _solve(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    """Lower Σ_s C·right with C(p, q) = (A⁻¹)(q, p).

    Summing over p solves A·z = r, and summing over q solves Aᵀ·z = r.
    """
    (data, order), (right, labels) = operands
    summed = node.out
    free = order[0] if order[1] == summed else order[1]
    data = data if order[0] == summed else data.T
    moved = jnp.moveaxis(right, labels.index(summed), 0)
    columns = functools.reduce(operator.mul, moved.shape[1:], 1)
    flat = moved if moved.ndim == 2 else lax.reshape(moved, (moved.shape[0], columns))
    solved = lax.reshape(jnp.linalg.solve(data, flat), moved.shape)
    return solved, (free, *(i for i in labels if i != summed))


def _conv(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    params, left, right, left_shape, right_shape = node.attr
    (x, x_labels), (w, w_labels) = operands
    x = lax.reshape(arrange(x, x_labels, left, sizes), left_shape)
    w = lax.reshape(arrange(w, w_labels, right, sizes), right_shape)
    out = lax.conv_general_dilated_p.bind(x, w, **dict(params))
    return lax.reshape(out, sizes[: node.out]), tuple(range(node.out))


_LOWER: dict[str, Callable[[Node, list[Operand], Sizes, str], Operand]] = {
    op.REDUCE: _reduce,
    op.SLICE: _slice,
    op.CONCAT: _concat,
    op.CONST: lambda node, _, __, dtype: (
        jnp.asarray(np.asarray(node.attr[0]).astype(np.dtype(dtype))),
        (),
    ),
    op.DELTA: _delta,
    op.IOTA: lambda _, __, sizes, dtype: (lax.iota(np.dtype(dtype), sizes[0]), (0,)),
    op.TAKE: _take,
    op.CUMSUM: _cumsum,
    op.INVERSE: lambda _, given, *__: (jnp.linalg.inv(given[0][0]), given[0][1][::-1]),
    op.SOLVE: _solve,
    op.CONV: _conv,
}
