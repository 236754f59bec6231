"""Movement of array entries along one axis, for each primitive that only moves entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.flat_program import Equation

Move = Callable[[np.ndarray, Any], np.ndarray]  # entries with the axis first, fill value


def entry_moves(e: Equation, axis: int) -> list[Move] | None:
    """Return for every result how the entries along an axis move; None for any other computation.

    The other axes stay unchanged. Padding is with zeros.
    """
    row = _ROWS.get(e.name)
    return None if row is None else row(e, axis)


def _slice(e: Equation, axis: int) -> list[Move] | None:
    p, shape = e.eqn.params, shape_of(e.eqn.invars[0])
    strides = p["strides"] or (1,) * len(shape)
    where = list(zip(p["start_indices"], p["limit_indices"], strides, strict=True))
    if any(w != (0, shape[k], 1) for k, w in enumerate(where) if k != axis):
        return None
    return [lambda x, _: x[slice(*where[axis])]]


def _pad(e: Equation, axis: int) -> list[Move] | None:
    fill, config = e.invals[1], e.eqn.params["padding_config"]
    if isinstance(fill, int) or np.asarray(fill.val) != 0:
        return None
    if any(tuple(c) != (0, 0, 0) for k, c in enumerate(config) if k != axis):
        return None
    low, high, inside = map(int, config[axis])

    def padded(x: np.ndarray, gap: Any) -> np.ndarray:
        size = max(len(x) + inside * (len(x) - 1), 0)
        out = np.full((max(low, 0) + size + max(high, 0), *x.shape[1:]), gap, x.dtype)
        out[max(low, 0) : max(low, 0) + size : inside + 1] = x
        return out[max(-low, 0) : len(out) - max(-high, 0)]

    return [padded]


def _split(e: Equation, axis: int) -> list[Move] | None:
    if e.eqn.params["axis"] != axis:
        return None
    ends = np.cumsum(e.eqn.params["sizes"])
    return [
        lambda x, _, start=end - size, end=end: x[start:end]
        for end, size in zip(ends, e.eqn.params["sizes"], strict=True)
    ]


_ROWS: dict[str, Callable[[Equation, int], list[Move] | None]] = {
    "slice": _slice,
    "pad": _pad,
    "split": _split,
}

MOVES = frozenset({*_ROWS, "concatenate", "transpose"})
