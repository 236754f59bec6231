"""Lowering of each kind of term to `jax.lax`.

Operands are pairs `(array, labels)`; a label is the index that an axis reads. Results have the same
form, so the order of axes is free until a consumer fixes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.term_cost import is_dot
from symjax_rewrite.ir.products import HALF, is_half
from symjax_rewrite.ir.sizes import Dim, Poly
from symjax_rewrite.ir.term import (
    ADD,
    CONCAT,
    CONST,
    CONTRACT,
    CONV,
    CUMSUM,
    DELTA,
    INVERSE,
    IOTA,
    MAP,
    REDUCE,
    SLICE,
    SOLVE,
    TAKE,
    Node,
)

Labels = tuple[int, ...]
Operand = tuple[Any, Labels]
Sizes = tuple[Any, ...]

# Elementwise functions of half-precision values that do not round, and one that differs in the last
# bit only.
EXACT = frozenset("select_n neg abs max min sign floor ceil round stop_gradient nextafter".split())


def jax_sizes(sizes: Sequence[Dim], env: Mapping[str, Any]) -> Sizes:
    """Return sizes as JAX shape entries."""
    return tuple(s.at(env) if isinstance(s, Poly) else s for s in sizes)


def arrange(data: Any, labels: Labels, order: Labels, sizes: Sizes) -> Any:
    """Return the array over exactly the indices of `order`: transposed, then broadcast.

    `sizes[i]` is the size of index i.
    """
    if labels == order:
        return data
    position = {i: n for n, i in enumerate(order)}
    wanted = sorted(range(len(labels)), key=lambda a: position[labels[a]])
    if wanted != list(range(len(labels))):
        data = lax.transpose(data, wanted)
    dims = tuple(position[labels[a]] for a in wanted)
    if len(dims) == len(order):
        return data
    return lax.broadcast_in_dim(data, tuple(sizes[i] for i in order), dims)


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
) -> Operand:
    """Lower one node; `sizes[i]` is the size of its index i.

    `guards` are the positions of operands that are deltas. They are lowered to selects, so that no
    infinity or NaN off the diagonal gets into a product.
    """
    operands = [read_diagonals(data, labels) for data, labels in operands]
    if guards:
        masks = [operands[k] for k in sorted(guards)]
        plain = [o for k, o in enumerate(operands) if k not in guards]
        return _guarded(node, plain, masks, sizes, dtype)
    if node.op == MAP:
        return _map(node, operands, sizes, dtype, primitives)
    return _LOWER[node.op](node, operands, sizes, dtype)


def read_diagonals(data: Any, labels: Labels) -> Operand:
    """Return an operand with repeated indices read as diagonals, by strided slices."""
    while len(set(labels)) < len(labels):
        twice = next(i for i in labels if labels.count(i) > 1)
        a, b = [n for n, i in enumerate(labels) if i == twice][:2]
        rest = [n for n in range(len(labels)) if n not in (a, b)]
        n = data.shape[a]
        data = lax.transpose(data, [*rest, a, b])
        lead = data.shape[:-2]
        flat = lax.reshape(data, (*lead, n * n))
        data = lax.slice_in_dim(flat, 0, n * n, n + 1, axis=len(lead))
        labels = (*(labels[k] for k in rest), twice)
    return data, labels


def _guarded(
    node: Node, plain: list[Operand], masks: list[Operand], sizes: Sizes, dtype: str
) -> Operand:
    order = tuple(range(len(sizes)))
    ones = (lax.full((), 1, np.dtype(dtype)), ())
    data, labels = _multiply(_promoted(plain or [ones], dtype), sizes, len(sizes))
    data = arrange(data, labels, order, sizes)
    for mask, mask_labels in masks:
        inside = lax.ne(mask, lax.full_like(mask, 0))
        inside = arrange(inside, mask_labels, order, sizes)
        data = lax.select(inside, data, lax.full_like(data, 0))
    data, labels = _sum_out((data, order), set(range(node.out)))
    return lax.convert_element_type(data, np.dtype(dtype)), labels


def _contract(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    out = node.out
    needed: list[set[int]] = []
    for k in range(len(operands)):
        others = {i for j, o in enumerate(operands) if j != k for i in o[1]}
        needed.append(others | set(range(out)))
    read = {i for _, labels in operands for i in labels}
    private = any(set(o[1]) - need for o, need in zip(operands, needed, strict=True))
    if private or not is_dot(node):  # only a dot takes and returns other dtypes directly
        operands = _promoted(operands, dtype)
    left = {i for o, need in zip(operands, needed, strict=True) for i in o[1] if i in need}
    if all(i < out for i in left):  # sums stay wide until they are multiplied
        operands = _promoted(operands, _accumulator(dtype))
    operands = [_sum_out(o, need) for o, need in zip(operands, needed, strict=True)]
    if all(i < out for i in left):
        result = _multiply(operands, sizes, out)
    elif is_dot(node) or (len(operands) == 2 and out == 0):
        made = dtype
        if jnp.issubdtype(dtype, jnp.inexact) and all(
            jnp.issubdtype(data.dtype, jnp.integer) for data, _ in operands
        ):  # an integer beside a float is converted; two integers stay integers
            made = _accumulator(dtype)
            operands = _promoted(operands, made)
        result = _dot(operands[0], operands[1], out, node.attr, made)
    else:  # a half-precision dot accumulates in float32, and so does its replacement
        data, labels = _multiply(_promoted(operands, _accumulator(dtype)), sizes, len(sizes))
        result = _sum_out((data, labels), set(range(out)))
    result = (lax.convert_element_type(result[0], np.dtype(dtype)), result[1])
    return _times_counts(result, [sizes[i] for i in range(out, len(sizes)) if i not in read], dtype)


def _promoted(operands: list[Operand], dtype: str) -> list[Operand]:
    """Return the operands in one dtype that represents all of them and the result exactly."""
    common = functools.reduce(jnp.promote_types, [o[0].dtype for o in operands], np.dtype(dtype))
    return [(lax.convert_element_type(data, common), labels) for data, labels in operands]


def _times_counts(result: Operand, counts: list[Any], dtype: str) -> Operand:
    data, labels = result
    for count in counts:
        number = lax.convert_element_type(jnp.asarray(count), dtype)
        data = lax.mul(data, lax.broadcast(number, data.shape))
    return data, labels


def _sum_out(operand: Operand, needed: set[int]) -> Operand:
    data, labels = operand
    gone = tuple(a for a, i in enumerate(labels) if i not in needed)
    if not gone:
        return operand
    wide = lax.convert_element_type(data, np.dtype(_accumulator(str(data.dtype))))
    total = lax.convert_element_type(jax_internals.reduce_monoid("sum", wide, gone), data.dtype)
    return total, tuple(i for i in labels if i in needed)


def _accumulator(dtype: str) -> str:
    """Return the dtype in which a sum is accumulated."""
    return "float32" if is_half(dtype) else dtype


def _multiply(operands: list[Operand], sizes: Sizes, out: int) -> Operand:
    """Return the elementwise product over the indices read, ordered as the widest operand."""
    order = _common_order(operands, out)
    arrays = [arrange(d, labels, order, sizes) for d, labels in operands]
    data = arrays[0]
    for other in arrays[1:]:
        data = lax.mul(data, other)
    return data, order


def _common_order(operands: list[Operand], out: int) -> Labels:
    """Return the order of the widest operands that most of them have already."""
    most = max(len(labels) for _, labels in operands)
    orders = [labels for _, labels in operands if len(labels) == most]
    widest = max(orders, key=orders.count)
    rest = sorted({i for _, labels in operands for i in labels} - set(widest))
    return (*rest, *widest) if rest else widest


def _dot(left: Operand, right: Operand, out: int, precision: Any, dtype: str) -> Operand:
    """Return a dot_general with its operands in the order that reads memory contiguously.

    XLA on CPU runs `Hᵀ @ y` and `y @ Hᵀ` 5 to 50 times slower than `H @ y` and `y @ H`.
    """
    # Batch axes are in the order of the larger operand: the other operand is transposed.
    larger, other = (left, right) if _elements(left[0]) > _elements(right[0]) else (right, left)
    shared = [i for i in larger[1] if i in other[1]]
    batch = [i for i in shared if i < out]
    summed = [i for i in shared if i >= out]
    if _better_swapped(left, right, summed):
        left, right = right, left
    (a, la), (b, lb) = left, right
    dims = (
        ([la.index(i) for i in summed], [lb.index(i) for i in summed]),
        ([la.index(i) for i in batch], [lb.index(i) for i in batch]),
    )
    data = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=np.dtype(dtype))
    free = [i for i in la if i not in shared] + [i for i in lb if i not in shared]
    return data, (*batch, *free)


def _better_swapped(left: Operand, right: Operand, summed: list[int]) -> bool:
    """Return True if swapped operands cost less to read; ties keep the natural output order."""
    now, then = _stride_cost(left, right, summed), _stride_cost(right, left, summed)
    if now != then:
        return then < now
    mine = min((i for i in left[1] if i not in right[1]), default=-1)
    theirs = min((i for i in right[1] if i not in left[1]), default=mine)
    return theirs < mine


def _stride_cost(left: Operand, right: Operand, summed: list[int]) -> float:
    """Return the number of elements read with a stride.

    Reads are contiguous if the left operand contracts its last axis and the right operand its
    first. Measured on CPU (experiments/linear_algebra): a left operand contracted on its first axis
    costs up to 40 times as much. A right operand contracted on its last axis costs hardly more.
    """
    (a, la), (b, lb) = left, right
    cost = 0.0 if len(la) < 2 or la[-1] in summed else float(_elements(a))
    return cost + (0.0 if len(lb) < 2 or lb[-1] not in summed else 0.1 * _elements(b))


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
    k = 0 if _elements(operands[0][0]) <= _elements(operands[1][0]) else 1
    data, labels = operands[k]
    if data.dtype not in (np.float32, np.float64) or not _at_least(data.shape[1], 16):
        return operands
    turned = (lax.optimization_barrier(lax.transpose(data, (1, 0))), labels[::-1])
    return [turned if j == k else o for j, o in enumerate(operands)]


def _at_least(size: Any, least: int) -> bool:
    return isinstance(size, int) and size >= least


def _elements(data: Any) -> int:
    out = 1
    for s in data.shape:
        out *= s if isinstance(s, int) else 64
    return out


def _add(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    order = _common_order(operands, node.out)
    total: Any = None
    pairs = list(zip(node.attr, operands, strict=True))
    pairs.sort(key=lambda p: not _is_positive(p[0]))
    for coefficient, (data, labels) in pairs:
        term = arrange(data, labels, order, sizes)
        if total is None:
            total = lax.neg(term) if coefficient == -1 else _scale(term, coefficient, dtype)
        elif coefficient == -1:
            total = lax.sub(total, term)
        else:
            total = lax.add(total, _scale(term, coefficient, dtype))
    return total, order


def _is_positive(coefficient: Any) -> bool:
    return not isinstance(coefficient, complex) and coefficient > 0


def _scale(data: Any, coefficient: Any, dtype: str) -> Any:
    if coefficient == 1:
        return data
    return lax.mul(data, lax.full_like(data, literal(coefficient, dtype)))


def literal(value: Any, dtype: str) -> Any:
    """Return a coefficient rounded once, in the dtype; integers wrap as in their arithmetic."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        bits = 8 * kind.itemsize
        wrapped = int(value) % (1 << bits)
        if kind.kind == "i" and wrapped >= 1 << (bits - 1):
            wrapped -= 1 << bits
        return np.asarray(wrapped, kind)
    return np.asarray(value).astype(kind)


def _map(
    node: Node, operands: list[Operand], sizes: Sizes, dtype: str, primitives: Mapping[str, Any]
) -> Operand:
    name, params = node.attr
    order = _common_order(operands, node.out)
    arrays = [arrange(d, labels, order, sizes) for d, labels in operands]
    if name == "reciprocal":
        return lax.div(lax.full_like(arrays[0], 1), arrays[0]), order
    if name == "convert_element_type":
        return lax.convert_element_type(arrays[0], np.dtype(dtype)), order
    primitive = primitives.get(name) or getattr(lax, f"{name}_p")  # rules may define primitives
    return primitive.bind(*arrays, **dict(params)), order


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
        primitive = primitives.get(name) or getattr(lax, f"{name}_p")
        made = primitive.bind(*(jnp.broadcast_to(x, shape) for x in args), **dict(params))
    return made.astype(np.dtype(dtype)) if wide else made


def _reduce(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    data, labels = operands[0]
    axes = tuple(a for a, i in enumerate(labels) if i >= node.out)
    result = jax_internals.reduce_monoid(str(node.attr), data, axes)
    return result, tuple(i for i in labels if i < node.out)


def _slice(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    # A dropped axis has a label of its own, so that it can be distinguished.
    data, labels = operands[0]
    spec: dict[int, Any] = {}
    for slot, (attr, index) in enumerate(zip(node.attr, node.args[0].axes, strict=True)):
        spec[dropped_label(slot) if index < 0 else index] = attr
    starts, limits, strides, gone = [], [], [], []
    for axis, i in enumerate(labels):
        attr, n = spec[i], data.shape[axis]
        if attr is None:
            starts.append(0)
            limits.append(n)
            strides.append(1)
        elif isinstance(attr, tuple):
            start, stride = attr
            if isinstance(sizes[i], int) and sizes[i] == 0:
                start, stride = 0, 1  # slices of slices may start after the end of an empty axis
            starts.append(start)
            limits.append(start + stride * (sizes[i] - 1) + 1)
            strides.append(stride)
        else:
            starts.append(attr)
            limits.append(attr + 1)
            strides.append(1)
            gone.append(axis)
    data = lax.slice(data, starts, limits, strides)
    kept = tuple(i for a, i in enumerate(labels) if a not in gone)
    return lax.squeeze(data, gone), kept


def _concat(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    """Concatenate operands in the order of their axes; a transposed operand is copied.

    XLA folds a transpose into the product that computes the operand. This product may then read
    both of its operands with a stride.
    """
    target, piece_sizes = node.attr
    largest = max(operands, key=lambda o: (len(o[1]), _elements(o[0])))[1]
    order = (*sorted(set(range(node.out)) - set(largest)), *largest)
    arrays = []
    for (data, labels), size in zip(operands, piece_sizes, strict=True):
        local = list(sizes)
        local[target] = size
        arrays.append(arrange(data, labels, order, tuple(local)))
    return lax.concatenate(arrays, order.index(target)), order


def _const(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    return jnp.asarray(np.asarray(node.attr[0]).astype(np.dtype(dtype))), ()


def _delta(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    rows, columns = (lax.broadcasted_iota(np.int32, tuple(sizes[:2]), k) for k in (0, 1))
    return lax.convert_element_type(lax.eq(rows, columns), np.dtype(dtype)), (0, 1)


def _iota(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    return lax.iota(np.dtype(dtype), sizes[0]), (0,)


def _take(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    """Lower a gather, or a dynamic slice if every index value is one number."""
    mode, fill, windows = node.attr
    (data, labels), *values = operands
    for k in range(node.out, node.out + len(windows)):
        if k not in labels:  # the operand does not vary along this index
            data, labels = lax.broadcast(data, (sizes[k],)), (k, *labels)
    window = {node.out + j: w for j, w in enumerate(windows)}
    counts = [1 if i in window and window[i] is None else sizes[window.get(i, i)] for i in labels]
    over = tuple(dict.fromkeys(i for _, value_labels in values for i in value_labels))
    if mode == "fill" and any(sizes[i] == 0 for i in window):
        order = tuple(range(node.out))  # no index value is in range
        return lax.full(sizes[: node.out], fill[0], np.dtype(dtype)), order
    common = functools.reduce(jnp.promote_types, [x.dtype for x, _ in values])
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
    gone = [a for a, i in enumerate(labels) if i in window and window[i] is None]
    names = [window.get(i, i) for a, i in enumerate(labels) if a not in gone]
    return lax.squeeze(part, gone), tuple(i for i in names if i is not None)


def _gather(
    data: Any, labels: Labels, window: dict, start: Operand, counts: list, mode: str, fill: Any
) -> Operand:
    """Return the gather whose index array is over the indices of `start`, its parts last."""
    indices, over = start
    gone = [a for a, i in enumerate(labels) if i in window and window[i] is None]
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


def _cumsum(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    index, reverse = node.attr
    data, labels = operands[0]
    if index not in labels:  # merged with a value that is the same at every place
        data, labels = lax.broadcast(data, (sizes[index],)), (index, *labels)
    return lax.cumsum(data, axis=labels.index(index), reverse=reverse), labels


def _inverse(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    data, labels = operands[0]
    return jnp.linalg.inv(data), labels[::-1]


def _solve(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    """Lower Σ_s C·right with C(p, q) = (A⁻¹)(q, p).

    Summing over p solves A·z = r, and summing over q solves Aᵀ·z = r.
    """
    (data, order), (right, labels) = operands
    summed = node.out
    free = order[0] if order[1] == summed else order[1]
    if order[0] != summed:
        data = data.T
    moved = jnp.moveaxis(right, labels.index(summed), 0)
    flat = moved if moved.ndim == 2 else lax.reshape(moved, (moved.shape[0], _rest(moved)))
    solved = lax.reshape(jnp.linalg.solve(data, flat), moved.shape)
    return solved, (free, *(i for i in labels if i != summed))


def _conv(node: Node, operands: list[Operand], sizes: Sizes, dtype: str) -> Operand:
    params, left, right, left_shape, right_shape = node.attr
    (x, x_labels), (w, w_labels) = operands
    x = lax.reshape(arrange(x, x_labels, left, sizes), left_shape)
    w = lax.reshape(arrange(w, w_labels, right, sizes), right_shape)
    out = jax_internals.convolve(x, w, dict(params))
    return lax.reshape(out, sizes[: node.out]), tuple(range(node.out))


def _rest(data: Any) -> Any:
    out = 1
    for s in data.shape[1:]:
        out = out * s
    return out


_LOWER: dict[str, Callable[[Node, list[Operand], Sizes, str], Operand]] = {
    CONTRACT: _contract,
    ADD: _add,
    REDUCE: _reduce,
    SLICE: _slice,
    CONCAT: _concat,
    CONST: _const,
    DELTA: _delta,
    IOTA: _iota,
    TAKE: _take,
    CUMSUM: _cumsum,
    INVERSE: _inverse,
    SOLVE: _solve,
    CONV: _conv,
}
