"""Constant arrays that are functions of their indices: `arange`, and lower triangles of one value.

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
from symjax_rewrite.ir.term import ADD, IOTA, MAP, Ref

MOST_ELEMENTS = 1 << 26  # of a constant that is compared with indices
MOST_COPIED = 1 << 22  # the same for numbers that may lie on another device


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
    return _triangle(g, np.asarray(const).reshape(shape), primitives) if kind in "fiub" else None


def _counting(g: EGraph, array: np.ndarray) -> Ref | None:
    """Return the numbers from 0 on."""
    if array[0] != 0 or array[-1] != len(array) - 1:
        return None
    alike = np.array_equal(array, np.arange(len(array), dtype=array.dtype))
    return g.add(IOTA, None, (), array.shape, (), str(array.dtype)) if alike else None


def _triangle(g: EGraph, array: np.ndarray, primitives: MutableMapping[str, Any]) -> Ref | None:
    """Return `where(j <= i + k, low, high)`."""
    low, high = array[-1, 0], array[0, -1]
    bits = np.ascontiguousarray(array).view(f"u{array.itemsize}")  # 0.0 is not -0.0
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
    row, column = (
        g.add(IOTA, None, (), (n,), (), "int32").over((axis,)) for axis, n in enumerate(array.shape)
    )
    if k:
        row = g.add(ADD, (1, 1), (row, constant(g, k, "int32")), array.shape[:1], (), "int32")
    numbers = np.array([0, 1], array.dtype).view(bits.dtype)
    is_test = {inside, bits[0, -1]} == {*numbers}
    name = "le" if not is_test or low else "gt"
    primitives.setdefault(name, getattr(jax.lax, f"{name}_p"))
    made = g.add(MAP, (name, ()), (column, row), array.shape, (), "bool")
    dtype = str(array.dtype)
    if is_test:
        cast = ("convert_element_type", (("new_dtype", dtype),))
        primitives.setdefault(cast[0], jax.lax.convert_element_type_p)
        return made if dtype == "bool" else g.add(MAP, cast, (made,), array.shape, (), dtype)
    primitives.setdefault("select_n", jax.lax.select_n_p)
    cases = [constant(g, x.item(), dtype) for x in (high, low)]
    return g.add(MAP, ("select_n", ()), (made, *cases), array.shape, (), dtype)
