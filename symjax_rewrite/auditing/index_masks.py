"""Masks that depend on indices alone: how many elements they keep, and whether in a band.

A mask is evaluated in NumPy on some rows, so it may be spelled in any way: comparisons of iotas,
blocks by integer division, constant arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, DELTA, IOTA, LEAF, MAP, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.literal_folding import NUMPY as UFUNCS

ROWS = 32  # rows of a mask that are evaluated
MOST_COLUMNS = 1 << 20

NUMPY: dict[str, Callable[..., Any]] = {
    **UFUNCS,
    "not": np.logical_not, "xor": np.bitwise_xor, "sign": np.sign, "rem": np.fmod,
    "div": lambda a, b: np.trunc(a / b), "floor": np.floor, "ceil": np.ceil,
    "select_n": lambda which, *cases: np.where(which, cases[-1], cases[0]),
    "convert_element_type": lambda a: a, "square": np.square,
}  # fmt: skip


class IndexMask(NamedTuple):
    """A mask of two indices: the share of elements it keeps, and the widest row's share of columns.

    span: from the first to the last element that is kept, of the widest row that was evaluated.
    rows: True if the rows differ.
    """

    kept: float
    span: float
    rows: bool


def index_mask(t: TermGraph, cls: int) -> IndexMask | None:
    """Return the mask that a boolean class of two indices is, if it depends on nothing else."""
    sizes = t.graph.classes[cls].sizes
    if len(sizes) != 2 or not all(isinstance(s, int) and s > 1 for s in sizes):
        return None
    rows, columns = map(int, sizes)  # pyright: ignore[reportArgumentType]
    if columns > MOST_COLUMNS:
        return None
    sampled = np.unique(np.linspace(0, rows - 1, min(ROWS, rows)).astype(int))
    index = (sampled[:, None], np.arange(columns)[None, :])
    value = _value(t, Ref(cls, (0, 1)), index)
    if value is None:
        return None
    kept = np.broadcast_to(np.asarray(value, bool), (len(sampled), columns))
    places = [np.flatnonzero(row) for row in kept]
    spans = [p[-1] - p[0] + 1 for p in places if len(p)]
    differ = not (kept == kept[:1]).all()
    return IndexMask(float(kept.mean()), max(spans, default=0) / columns, differ)


def _value(t: TermGraph, ref: Ref, index: tuple[Any, ...]) -> Any:
    """Return a reference at arrays of indices; None if it depends on anything else."""
    node, places = node_of(t.graph, ref.cls), tuple([index[i] for i in ref.axes])
    if node.op == IOTA:
        return places[0]
    if node.op == CONST:
        return node.attr[0]
    if node.op == DELTA:
        return places[0] == places[1]
    if node.op == LEAF:
        return _constant(t, ref.cls, places)
    if node.op not in (ADD, MAP, CONTRACT) or node.bound:
        return None
    args = [_value(t, a, places) for a in node.args]
    if any(a is None for a in args):
        return None
    if node.op == ADD:
        return sum(float(c) * np.asarray(a) for c, a in zip(node.attr, args, strict=True))
    if node.op == CONTRACT:
        return np.prod(np.broadcast_arrays(*args), axis=0) if len(args) > 1 else args[0]
    function = NUMPY.get(node.attr[0])
    return None if function is None else function(*map(np.asarray, args))


def _constant(t: TermGraph, cls: int, places: tuple[Any, ...]) -> Any:
    const = t.program.consts.get(t.leaf_value[cls])
    if const is None or getattr(const, "shape", None) != t.graph.classes[cls].sizes:
        return None
    return np.asarray(const)[tuple(np.broadcast_arrays(*places))] if places else const
