"""Constant arrays that are functions of their indices: `arange`, lower triangles, few diagonals.

A mask or positions made before the program is traced are arrays in it. As terms over indices they
are the same as masks made inside: bands, products with triangles and folds recognise them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import jax
import numpy as np

from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import constant, dtype_kind
from symjax_rewrite.ir.term import ADD, DELTA, IOTA, MAP, Ref

MOST_ELEMENTS = 1 << 26  # of a constant that is compared with indices
MOST_COPIED = 1 << 22  # the same for numbers that may lie on another device
MOST_DIAGONALS = 8


def of_indices(
    g: EGraph, const: Any, sizes: tuple[Any, ...], primitives: MutableMapping[str, Any]
) -> Ref | None:
    """Return a constant in terms of its indices, or None.

    sizes: of its atoms. primitives: by name; those of the terms are added.
    """
    shape = tuple([n for n in getattr(const, "shape", ()) if n != 1])
    if shape != sizes or not 0 < len(shape) <= 2:
        return None
    kind, is_here = dtype_kind(str(const.dtype)), isinstance(const, np.ndarray)
    most = MOST_ELEMENTS if is_here or kind in "iub" else MOST_COPIED
    if not 0 < const.size <= most or not (is_here or getattr(const, "is_fully_addressable", False)):
        return None
    if len(shape) == 1:
        return _counting(g, np.asarray(const).reshape(shape)) if kind in "iu" else None
    if kind not in "fiub":
        return None
    array = np.ascontiguousarray(const).reshape(shape)
    made = _triangle(g, array, primitives)
    return _diagonals(g, array, primitives) if made is None and kind in "fi" else made


def _counting(g: EGraph, array: np.ndarray) -> Ref | None:
    """Return the numbers from 0 on."""
    if array[0] != 0 or array[-1] != len(array) - 1:
        return None
    alike = np.array_equal(array, np.arange(len(array), dtype=array.dtype))
    return g.add(IOTA, None, (), array.shape, (), str(array.dtype)) if alike else None


def _triangle(g: EGraph, array: np.ndarray, primitives: MutableMapping[str, Any]) -> Ref | None:
    """Return `where(j <= i + k, low, high)`."""
    low, high = array[-1, 0], array[0, -1]
    bits = array.view(f"u{array.itemsize}")  # 0.0 is not -0.0
    inside = bits[-1, 0]
    if inside == bits[0, -1] or low != low or high != high:
        return None
    first, down = bits[0] == inside, bits[:, 0] == inside
    k = int(first.sum()) - 1 if first[0] else -int(down.argmax())
    test = np.tri(array.shape[0], array.shape[1], k, dtype=bool)
    if not np.array_equal(first, test[0]):
        return None
    if not np.array_equal(bits, np.where(test, inside, bits[0, -1])):
        return None
    numbers = np.array([0, 1], array.dtype).view(bits.dtype)
    is_test = {inside, bits[0, -1]} == {*numbers}
    made = _compared(g, "le" if not is_test or low else "gt", array.shape, k, primitives)
    dtype = str(array.dtype)
    if is_test:
        return made if dtype == "bool" else _number(g, made, dtype, primitives)
    primitives.setdefault("select_n", jax.lax.select_n_p)
    cases = [constant(g, x.item(), dtype) for x in (high, low)]
    return g.add(MAP, ("select_n", ()), (made, *cases), array.shape, (), dtype)


def _diagonals(g: EGraph, array: np.ndarray, primitives: MutableMapping[str, Any]) -> Ref | None:
    """Return a number plus Σₖ vₖ·[j = i + k]: an identity, a difference, a centring matrix."""
    rest, dtype = array[0, -1], str(array.dtype)
    if min(array.shape) < 2 or array[-1, 0] != rest or not np.isfinite(rest):
        return None
    right, down = (np.flatnonzero(edge != rest) for edge in (array[0], array[1:, 0]))
    offsets = [*(-1 - down[::-1]).tolist(), *right.tolist()]
    if not 0 < len(offsets) <= MOST_DIAGONALS:
        return None
    values = [(array[0, k] if k >= 0 else array[-k, 0]) - rest for k in offsets]
    alike = np.full_like(array, rest if rest else 0)
    for k, value in zip(offsets, values, strict=True):
        np.fill_diagonal(alike[max(-k, 0) :, max(k, 0) :], rest + value)
    bits = f"u{array.itemsize}"  # 0.0 is not -0.0
    if not all(map(np.isfinite, values)) or not np.array_equal(alike.view(bits), array.view(bits)):
        return None
    refs = [_diagonal(g, array.shape, k, dtype, primitives) for k in offsets]
    if rest:
        values, refs = [*values, rest], [*refs, constant(g, 1, dtype)]
    numbers = tuple([x.item() for x in values])
    if numbers == (1,):
        return refs[0]
    return g.add(ADD, numbers, tuple(refs), array.shape, (), dtype)


def _diagonal(
    g: EGraph, shape: tuple[int, ...], k: int, dtype: str, primitives: MutableMapping[str, Any]
) -> Ref:
    """Return `[j = i + k]`."""
    if k == 0:
        return g.add(DELTA, None, (), shape, (), dtype)
    return _number(g, _compared(g, "eq", shape, k, primitives), dtype, primitives)


def _compared(
    g: EGraph, name: str, shape: tuple[int, ...], k: int, primitives: MutableMapping[str, Any]
) -> Ref:
    """Return the comparison of j with i + k."""
    row, column = (
        g.add(IOTA, None, (), (n,), (), "int32").over((axis,)) for axis, n in enumerate(shape)
    )
    if k:
        row = g.add(ADD, (1, 1), (row, constant(g, k, "int32")), shape[:1], (), "int32")
    primitives.setdefault(name, getattr(jax.lax, f"{name}_p"))
    return g.add(MAP, (name, ()), (column, row), shape, (), "bool")


def _number(g: EGraph, test: Ref, dtype: str, primitives: MutableMapping[str, Any]) -> Ref:
    """Return 1 where a test holds and 0 elsewhere."""
    cast = ("convert_element_type", (("new_dtype", dtype),))
    primitives.setdefault(cast[0], jax.lax.convert_element_type_p)
    return g.add(MAP, cast, (test,), g.classes[test.cls].sizes, (), dtype)
