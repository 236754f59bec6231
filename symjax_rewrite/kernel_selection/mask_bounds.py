"""Columns that contribute to a row: masks of a tile program read as index ranges.

A mask is a comparison of index numbers: `j <= i`, `i - j < w`, `j < length[b]`. Where the condition
fails, the tile holds its fill. A fold that knows the range skips whole tiles. All regions here are
upper bounds: an expression that is not understood gives no bound. Sides that are not linear in the
index numbers are evaluated (`index_numbers.py`).

A fill of -inf has weight zero. The weight of a finite fill depends on the scores: beside the row's
maximum it is zero, but a row whose keys are all masked is the mean over all keys. `Band.floor` is
that fill: kernels visit the columns outside the range where a maximum does not exceed it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.step_program import Step
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.index_numbers import ZERO, IndexNumbers, diagonals, numbers
from symjax_rewrite.pallas_kernels.fold.spec import Band

SCAN_LIMIT = 1 << 28  # limit on elements of a constant that is read
LOW = -1e3  # a finite fill above it is a number like any other
INTEGERS = {"float32": 1 << 24, "bfloat16": 1 << 8, "float16": 1 << 11, "float64": 1 << 53}


class Length(NamedTuple):
    """Bound `j < operand + extra`, plus the row number where it `follows`."""

    operand: int
    extra: int
    follows: bool


class MaskRegion(NamedTuple):
    """Pairs with `lower <= j - i <= upper` and `j` below a length, if there is one."""

    lower: float = -math.inf
    upper: float = math.inf
    length: Length | None = None

    def meet(self, other: MaskRegion) -> MaskRegion:
        """Return the intersection of both regions."""
        lower, upper = max(self.lower, other.lower), min(self.upper, other.upper)
        return NOWHERE if lower > upper else MaskRegion(lower, upper, self.length or other.length)

    def join(self, other: MaskRegion) -> MaskRegion:
        """Return the least region that contains both."""
        if NOWHERE in (self, other):
            return other if self == NOWHERE else self
        length = self.length if self.length == other.length else None
        return MaskRegion(min(self.lower, other.lower), max(self.upper, other.upper), length)


EVERYWHERE, DIAGONAL = MaskRegion(), MaskRegion(0, 0)
NOWHERE = MaskRegion(math.inf, -math.inf)


class Known(NamedTuple):
    """Known facts of an operand that a tile reads.

    length: its number, if it holds one integer per batch element. pairs: the array of an operand
    over rows and columns that is a constant of the program. lane: its number, if it holds one
    number per row, or one per column. numbers: these, if they are integers and a constant
    of the program.
    """

    length: int | None = None
    pairs: Any = None
    lane: int | None = None
    numbers: IndexNumbers | None = None


Linear = dict[Any, int]  # coefficients of the row, the column, 1 and operands, by their number
ROW, COLUMN, ONE = "row", "column", "one"


def _plus(a: Linear, b: Linear, times: int) -> Linear:
    total = {k: a.get(k, 0) + times * b.get(k, 0) for k in (a | b)}
    return {k: c for k, c in total.items() if c}


@dataclass(slots=True)
class _Reader:
    """Reader of the steps of one tile program.

    floor: the greatest finite fill that was read; -inf before. against: operands, by number, that
    such fills stand beside under an exponential: maxima of the rows.
    """

    steps: Sequence[Step]
    known: Sequence[Known]
    rows: int
    cols: int
    floor: float = -math.inf
    against: set[int] = field(default_factory=set)
    memo: dict[tuple, MaskRegion] = field(default_factory=dict)

    def support(self, step: int, fill: float, finite: bool) -> MaskRegion:
        """Return the region where a value may differ from the fill.

        finite: low finite fills count as -inf too, beside the maximum that `floor` is compared
        with. Without them, only infinite fills are read, which absorb added terms.
        """
        key = (step, fill, finite)
        if key not in self.memo:
            self.memo[key] = self._support(self.steps[step], fill, finite)
        return self.memo[key]

    def _support(self, step: Step, fill: float, finite: bool) -> MaskRegion:
        kind, data, args, dtype = step
        if kind == "const":
            low = finite and fill == -math.inf and _is_low(data, dtype)
            self.floor = max(self.floor, float(data)) if low else self.floor
            same = low or (data == fill and not isinstance(data, complex))
            return NOWHERE if same else EVERYWHERE
        if kind == "value":
            return self._constant(data, lambda x: x != fill)
        if kind in ("delta", "diagonal") and fill == 0:
            return DIAGONAL
        if kind != "apply":
            return EVERYWHERE
        op, attr = data
        if op == ADD:
            return self._sum(attr, args, fill)
        if op == CONTRACT:
            return self._all(args, fill, finite) if fill == 0 else EVERYWHERE
        return self._map(attr[0], args, fill, finite)

    def _sum(self, coefficients: Sequence[Any], args: Sequence[int], fill: float) -> MaskRegion:
        if any(isinstance(c, complex) for c in coefficients):
            return EVERYWHERE
        fills = [math.copysign(1, c) * fill if fill else 0.0 for c in coefficients]
        found = [self.support(a, f, False) for a, f in zip(args, fills, strict=True)]
        return _meet(found) if fill else functools.reduce(MaskRegion.join, found, NOWHERE)

    def _all(self, args: Sequence[int], fill: float, finite: bool) -> MaskRegion:
        return _meet(self.support(a, fill, finite) for a in args)

    def _map(self, name: str, args: Sequence[int], fill: float, finite: bool) -> MaskRegion:
        if name == "select_n" and len(args) == 3:
            no, yes = (self.support(a, fill, finite) for a in args[1:])
            return self._selected(args[0], no, yes)
        if name == "convert_element_type":
            if self.steps[args[0]].dtype == "bool":
                return self.condition(args[0], True) if fill == 0 else EVERYWHERE
            return self.support(args[0], fill, finite)
        if name in ("exp", "exp2") and fill == 0:
            shifted = self._shifted(args[0]) if finite and name == "exp" else None
            return shifted or self.support(args[0], -math.inf, False)
        if name in ("min", "max") and math.isinf(fill):
            if (name == "min") == (fill < 0):
                return self._all(args, fill, finite)
            a, b = (self.support(x, fill, finite) for x in args)
            return a.join(b)
        return EVERYWHERE

    def _shifted(self, step: int) -> MaskRegion | None:
        """Return the region of `score - maximum` with a low fill in the scores, or None."""
        kind, data, args, _ = self.steps[step]
        if kind != "apply" or data[0] != ADD or sorted(data[1]) != [-1, 1]:
            return None
        score, top = (args[data[1].index(c)] for c in (1, -1))
        while (
            (at := self.steps[top]).kind == "apply"
            and at.data[0] == MAP
            and (at.data[1][0] == "convert_element_type")
        ):
            top = at.args[0]
        lane = self.known[at.data].lane if at.kind == "value" else None
        if lane is None or self.support(score, -math.inf, False) != EVERYWHERE:
            return None
        self.against.add(lane)
        return self.support(score, -math.inf, True)

    def _selected(self, test: int, no: MaskRegion, yes: MaskRegion) -> MaskRegion:
        """Return the region of a selection between two cases of some regions."""
        chosen = self.condition(test, True).meet(yes)
        return chosen.join(self.condition(test, False).meet(no))

    def _constant(self, read: int, seen: Any) -> MaskRegion:
        """Return the region where a constant array over rows and columns differs from the fill."""
        array = self.known[read].pairs
        if array is None:
            return EVERYWHERE
        inside = seen(array)
        (i,) = np.nonzero(inside.any(axis=1))
        if not len(i):
            return NOWHERE
        first, last = np.argmax(inside[i], axis=1), np.argmax(inside[i, ::-1], axis=1)
        return MaskRegion(int((first - i).min()), int((array.shape[1] - 1 - last - i).max()))

    def condition(self, step: int, wanted: bool) -> MaskRegion:
        """Return the region where a boolean may be `wanted`."""
        key = (step, wanted)
        if key not in self.memo:
            self.memo[key] = self._condition(self.steps[step], wanted)
        return self.memo[key]

    def _condition(self, step: Step, wanted: bool) -> MaskRegion:
        kind, data, args, dtype = step
        if dtype != "bool":
            return EVERYWHERE
        if kind == "const":
            return EVERYWHERE if bool(data) == wanted else NOWHERE
        if kind == "value":
            return self._constant(data, lambda x: x == wanted)
        if kind == "delta":
            return DIAGONAL if wanted else EVERYWHERE
        if kind != "apply" or data[0] != MAP:
            return EVERYWHERE
        name = data[1][0]
        if name == "not":
            return self.condition(args[0], not wanted)
        if name in ("and", "or"):
            a, b = (self.condition(x, wanted) for x in args)
            return a.meet(b) if (name == "and") == wanted else a.join(b)
        if name == "select_n" and len(args) == 3:
            no, yes = (self.condition(a, wanted) for a in args[1:])
            return self._selected(args[0], no, yes)
        if name in _OPPOSITE:
            return self._compared(name if wanted else _OPPOSITE[name], args[0], args[1])
        return EVERYWHERE

    def _compared(self, name: str, a: int, b: int) -> MaskRegion:
        """Return the region where a comparison of index numbers holds."""
        if name == "ne":
            return EVERYWHERE
        if name == "eq":
            both = self._compared("le", a, b).meet(self._compared("ge", a, b))
            return self._evaluated(name, a, b, False) if both == EVERYWHERE else both
        if name in ("ge", "gt"):
            a, b, name = b, a, "le" if name == "ge" else "lt"
        kind, data, args, dtype = self.steps[a]
        is_abs = kind == "apply" and data[0] == MAP and data[1][0] == "abs"
        a = args[0] if is_abs else a
        left, right = self.linear(a), self.linear(b)
        if left is None or right is None:
            return self._evaluated(name, a, b, is_abs)
        negated = {k: -c for k, c in left.items()}
        if is_abs and not self._fits(negated, dtype):
            return EVERYWHERE
        sides = (left, negated) if is_abs else (left,)
        return _meet(self._below(_plus(side, right, -1), name == "lt") for side in sides)

    def _evaluated(self, name: str, a: int, b: int, is_abs: bool) -> MaskRegion:
        """Return the region where a comparison of integers holds, of `abs(a)` if `is_abs`."""
        if dtype_kind(self.steps[a].dtype) not in "iub":
            return EVERYWHERE
        stored = [k.numbers for k in self.known]
        x, y = (numbers(self.steps, step, stored, self.rows, self.cols) for step in (a, b))
        if x is None or y is None:
            return EVERYWHERE
        found = []
        for sign in (1, -1) if is_abs else (1,):  # rows on the left, columns on the right
            sides = sign * x.of_row - y.of_row, y.of_column - sign * x.of_column
            found.append(MaskRegion(*diagonals(name, *sides, self.rows, self.cols)))
        return _meet(found)

    def _below(self, e: Linear, strictly: bool) -> MaskRegion:
        """Return the region where `e <= 0`, or `e < 0`."""
        row, column, constant = e.get(ROW, 0), e.get(COLUMN, 0), e.get(ONE, 0) + strictly
        symbols = {k: c for k, c in e.items() if k not in (ROW, COLUMN, ONE)}
        ends = (0, self.rows - 1)
        if symbols:
            if column == 1 and row in (0, -1) and [*symbols.values()] == [-1]:
                (operand,) = symbols
                return MaskRegion(length=Length(operand, 1 - constant, row == -1))
            return EVERYWHERE
        if column == 1:
            return MaskRegion(upper=max(-constant - (row + 1) * i for i in ends))
        if column == -1:
            return MaskRegion(lower=min(constant + (row - 1) * i for i in ends))
        return NOWHERE if column == row == 0 and constant > 0 else EVERYWHERE

    def linear(self, step: int) -> Linear | None:
        """Return a value as a linear form of index numbers that cannot wrap around, or None."""
        kind, data, args, dtype = self.steps[step]
        out: Linear | None = None
        if kind == "const":
            if not isinstance(data, (complex, bool)) and float(data).is_integer():
                out = {ONE: int(data)}
        elif kind == "index":
            out = {ROW if data else COLUMN: 1}
        elif kind == "value":
            length = self.known[data].length
            out = {length: 1} if length is not None and dtype in ("int32", "int64") else None
        elif kind == "apply" and data[0] == ADD:
            out = self._linear_sum(data[1], args)
        elif kind == "apply" and data[0] == MAP and data[1][0] == "convert_element_type":
            out = self.linear(args[0]) if self.steps[args[0]].dtype != "bool" else None
        return out if out is not None and self._fits(out, dtype) else None

    def _linear_sum(self, coefficients: Sequence[Any], args: Sequence[int]) -> Linear | None:
        total: Linear = {}
        for c, a in zip(coefficients, args, strict=True):
            term = self.linear(a)
            if term is None or isinstance(c, complex) or Fraction(c).denominator != 1:
                return None
            total = _plus(total, term, int(c))
        return total

    def _fits(self, e: Linear, dtype: str) -> bool:
        corners = [
            e.get(ROW, 0) * i + e.get(COLUMN, 0) * j + e.get(ONE, 0)
            for i in (0, self.rows - 1)
            for j in (0, self.cols - 1)
        ]
        if dtype_kind(dtype) == "f":
            loose = e.keys() - {ROW, COLUMN, ONE}
            return not loose and max(map(abs, corners)) <= INTEGERS.get(dtype, 0)
        if dtype_kind(dtype) not in "iu":
            return False
        info = np.iinfo(dtype)
        return info.min <= min(corners) and max(corners) <= info.max


def _meet(regions: Iterable[MaskRegion]) -> MaskRegion:
    return functools.reduce(MaskRegion.meet, regions, EVERYWHERE)


_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _is_low(value: Any, dtype: str) -> bool:
    """Return True if a constant is a finite fill that may lie below every score."""
    if dtype_kind(dtype) != "f" or isinstance(value, complex):
        return False
    return math.isfinite(value) and value <= LOW


def band_of(
    steps: Sequence[Step],
    known: Sequence[Known],
    outputs: Sequence[tuple[int, float]],
    rows: int,
    cols: int,
) -> Band:
    """Return a band outside which every output of a fold reads its neutral fill.

    Args:
        steps: the tile program.
        known: known facts of each operand it reads, in their order.
        outputs: for every reduction its step and its neutral fill: -inf, inf or 0.
        rows: number of rows.
        cols: number of columns.
    """
    region, floor = NOWHERE, -math.inf
    tops: set[int | None] = set()  # maxima that the floor is compared with; None: a fold's own
    for step, fill in outputs:
        reader = _Reader(steps, known, rows, cols)
        seen = reader.support(step, fill, True)
        if reader.floor > -math.inf:
            mine: set[int | None] = {None} if fill else {*reader.against}
            if len(tops | mine) > 1:
                seen = _Reader(steps, known, rows, cols).support(step, fill, False)
            else:
                tops, floor = tops | mine, max(floor, reader.floor)
        region = region.join(seen)
    if region == NOWHERE:
        return Band()
    lower = None if region.lower <= 1 - rows else int(region.lower)
    upper = None if region.upper >= cols - 1 else int(region.upper)
    band = Band(lower, upper) if region.length is None else Band(lower, upper, *region.length)
    if band == Band() or floor == -math.inf:
        return band
    return replace(band, floor=floor, against=next(iter(tops)))


def known_operand(
    t: TermGraph, number: int, cls: int, axes: tuple[str, ...], batch: Sequence[str]
) -> Known:
    """Return the known facts of operand `number`, a class with named axes."""
    own = set(axes) - set(batch)
    if not own:
        return Known(length=number)
    value = t.program.consts.get(t.leaf_value.get(cls, -1))
    known = own == {*axes} and value is not None and value.size <= SCAN_LIMIT
    array = np.asarray(value) if known and getattr(value, "is_fully_addressable", True) else None
    if len(own) == 1:
        line = None
        if array is not None and array.ndim == 1 and dtype_kind(str(array.dtype)) in "iub":
            line = IndexNumbers(array, ZERO) if axes == ("m",) else IndexNumbers(ZERO, array)
            line = line if axes[0] in ("m", "n") else None
        return Known(lane=number, numbers=line)
    if array is None or array.ndim != 2:
        return Known()
    return Known(pairs=array if axes == ("m", "n") else array.T)
