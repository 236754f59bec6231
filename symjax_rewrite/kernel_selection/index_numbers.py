"""Integers of a tile program, as a function of the row plus a function of the column.

A mask may compare any such integers: `i // c == j // c` of attention in chunks, segments that are
known when the program is traced. Both functions are evaluated at all rows and columns, and the
pairs where a comparison holds lie between two diagonals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.step_program import Step, pruned
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP

MOST = 1 << 22  # rows or columns
LARGEST = 1 << 40  # of a number: sums in 64 bits do not wrap around
LEAST_CORNER = 1 / 8  # of the rows or columns: a smaller corner is not worth a bound

_MAPS: Mapping[str, Callable[..., Any]] = {
    "mul": np.multiply, "abs": np.abs, "sign": np.sign, "min": np.minimum, "max": np.maximum,
    "rem": np.fmod, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert,
    "div": lambda x, y: np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y)),
    "select_n": lambda which, no, yes: np.where(which, yes, no),
    "shift_right_arithmetic": np.right_shift,
}  # fmt: skip
_SECOND = {  # bounds of the second argument
    "mul": (-MOST, MOST), "div": (1, LARGEST), "rem": (1, LARGEST),
    "shift_right_arithmetic": (0, 31),
}  # fmt: skip


class IndexNumbers(NamedTuple):
    """The integers `of_row[i] + of_column[j]`; an array of one element is the same for all."""

    of_row: np.ndarray
    of_column: np.ndarray


ZERO = np.zeros(1, np.int64)


def numbers(
    steps: Sequence[Step], root: int, stored: Sequence[IndexNumbers | None], rows: int, cols: int
) -> IndexNumbers | None:
    """Return the integers of a step, or None.

    stored: the integers of each operand, None where they are not known.
    """
    if max(rows, cols) > MOST:
        return None
    made: list[IndexNumbers] = []
    needed = pruned(steps, (root,))[0]
    for kind, data, args, dtype in needed:
        found: IndexNumbers | None = None
        if dtype_kind(dtype) not in "iub":
            return None
        if kind == "const":
            found = IndexNumbers(np.full(1, int(data), object), ZERO)
        elif kind == "index":
            found = (
                IndexNumbers(np.arange(rows), ZERO) if data else IndexNumbers(ZERO, np.arange(cols))
            )
        elif kind == "value":
            found = stored[data]
        elif kind == "apply":
            read = [(made[a], needed[a].dtype) for a in args]
            op, attr = data
            found = _sum(attr, read) if op == ADD else _mapped(op, attr, read)
        if found is None or not _fits(found, dtype):
            return None
        made.append(IndexNumbers(found.of_row.astype(np.int64), found.of_column.astype(np.int64)))
    return made[-1]


Read = Sequence[tuple[IndexNumbers, str]]  # with their dtype


def _sum(coefficients: Sequence[Any], read: Read) -> IndexNumbers | None:
    if any(isinstance(c, complex) or int(c) != c or abs(c) > MOST for c in coefficients):
        return None
    terms = [(int(c), x) for c, (x, _) in zip(coefficients, read, strict=True)]
    rows, cols = (sum((c * x[n] for c, x in terms), ZERO) for n in (0, 1))
    return IndexNumbers(rows, cols)


def _mapped(op: Any, attr: Any, read: Read) -> IndexNumbers | None:
    """Return a function of integers that all depend on the row alone, or on the column alone."""
    if op == MAP and attr[0] == "convert_element_type":
        return read[0][0]
    along = {n for x, _ in read for n in (0, 1) if x[n].size > 1}
    name = attr[0] if op == MAP else "mul" if op == CONTRACT else ""
    fun = _MAPS.get(name)
    if fun is None or len(along) > 1 or len(read) > (3 if name == "select_n" else 2):
        return None
    if name == "shift_right_arithmetic" and dtype_kind(read[0][1]) == "u":
        return None  # it repeats the highest bit
    kinds = [bool if dtype == "bool" else np.int64 for _, dtype in read]
    values = [(x.of_row + x.of_column).astype(k) for (x, _), k in zip(read, kinds, strict=True)]
    least, most = _SECOND.get(name, (-LARGEST, LARGEST))
    if not all(((least <= x) & (x <= most)).all() for x in values[1:]):
        return None
    made = fun(*values)
    return IndexNumbers(ZERO, made) if along == {1} else IndexNumbers(made, ZERO)


def _fits(x: IndexNumbers, dtype: str) -> bool:
    """Return True if neither numbers nor their magnitudes wrap around in a dtype."""
    least, greatest = (sum(int(f(a)) for a in x) for f in (np.min, np.max))
    if dtype == "bool":
        return least >= 0 and greatest <= 1
    info = np.iinfo(dtype)
    return max(-LARGEST, info.min, -info.max) <= least and greatest <= min(LARGEST, info.max)


def diagonals(
    name: str, of_row: np.ndarray, of_column: np.ndarray, rows: int, cols: int
) -> tuple[float, float]:
    """Return the least and the greatest `j - i` where `of_row[i]` compares with `of_column[j]`.

    They are infinite where the bound excludes few pairs. name: "eq", "le" or "lt".
    """
    of_row, of_column = np.broadcast_to(of_row, rows), np.broadcast_to(of_column, cols)
    order = np.argsort(of_row, kind="stable")
    ranked = of_row[order]
    end = np.searchsorted(ranked, of_column, "left" if name == "lt" else "right")
    if name == "eq":
        start = np.searchsorted(ranked, of_column, "left")
        j = np.flatnonzero(end > start)
        least, greatest = order[start[j]], order[end[j] - 1]
    else:
        j = np.flatnonzero(end)
        least, greatest = (f.accumulate(order)[end[j] - 1] for f in (np.minimum, np.maximum))
    if not len(j):
        return math.inf, -math.inf
    lower, upper = int((j - greatest).min()), int((j - least).max())
    small = LEAST_CORNER * max(rows, cols)
    return (
        lower if lower + rows - 1 > small else -math.inf,
        upper if cols - 1 - upper > small else math.inf,
    )
