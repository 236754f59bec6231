"""Columns that contribute to a row: masks of a tile program read as index ranges.

A mask is a comparison of index numbers: `j <= i`, `i - j < w`, `j < length[b]`. Where the condition
fails, the tile holds its fill. A fold that knows the range skips whole tiles. All regions here are
upper bounds: an expression that is not understood gives no bound.

A fill of -inf has weight zero. A finite fill is skipped under two conditions: it lies below every
finite score by the exponent range, and every row is proved to have a score. A row whose keys are
all masked with a finite fill is the mean over all keys, also over keys outside the range.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite.ir.primitives import NUMPY, dtype_kind
from symjax_rewrite.ir.step_program import Step
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.pallas_kernels.fold.spec import Band

SCAN_LIMIT = 1 << 28  # limit on elements of a constant that is read
LOW = 0.7  # a fill below -LOW times the greatest number of its dtype is below every score
INTEGERS = {"float32": 1 << 24, "bfloat16": 1 << 8, "float16": 1 << 11, "float64": 1 << 53}


class Length(NamedTuple):
    """Bound `j < operand + extra`, plus the row number where it `follows`."""

    operand: int
    extra: int
    follows: bool


@dataclass(frozen=True, slots=True)
class MaskRegion:
    """Pairs with `lower <= j - i <= upper` and `j` below a length; None is no bound."""

    lower: int | None = None
    upper: int | None = None
    length: Length | None = None
    empty: bool = False

    def meet(self, other: MaskRegion) -> MaskRegion:
        """Return the intersection of both regions."""
        if self.empty or other.empty:
            return NOWHERE
        lower = _tighter(max, self.lower, other.lower)
        upper = _tighter(min, self.upper, other.upper)
        if lower is not None and upper is not None and lower > upper:
            return NOWHERE
        return MaskRegion(lower, upper, self.length or other.length)

    def join(self, other: MaskRegion) -> MaskRegion:
        """Return the least region that contains both."""
        if self.empty or other.empty:
            return other if self.empty else self
        return MaskRegion(
            None if None in (self.lower, other.lower) else min(self.lower, other.lower),  # pyright: ignore
            None if None in (self.upper, other.upper) else max(self.upper, other.upper),  # pyright: ignore
            self.length if self.length == other.length else None,
        )


EVERYWHERE, NOWHERE = MaskRegion(), MaskRegion(empty=True)


def _tighter(pick: Any, a: int | None, b: int | None) -> int | None:
    return pick(a, b) if a is not None and b is not None else a if b is None else b


class Known(NamedTuple):
    """Known facts of an operand that a tile reads.

    length: its number, if it holds one integer per batch element. pairs: the array of an operand
    over rows and columns that is a constant of the program.
    """

    length: int | None = None
    pairs: Any = None


class Linear(NamedTuple):
    """Linear form row·i + column·j + Σ coefficient·operand + constant."""

    row: int
    column: int
    symbols: tuple[tuple[int, int], ...]
    constant: int


@dataclass(slots=True)
class _Reader:
    """Reader of the steps of one tile program.

    finite: low finite fills have weight zero. used: True once such a fill was read.
    """

    steps: Sequence[Step]
    known: Sequence[Known]
    rows: int
    cols: int
    finite: bool = True
    used: bool = False
    memo: dict[tuple[int, float], MaskRegion] = field(default_factory=dict)
    exact: _Reader | None = None

    def strict(self) -> _Reader:
        """Return a reader that accepts only infinite fills, which absorb added terms."""
        if self.exact is None:
            self.exact = self
            if self.finite:
                self.exact = _Reader(self.steps, self.known, self.rows, self.cols, finite=False)
        return self.exact

    def support(self, step: int, fill: float) -> MaskRegion:
        """Return the region where a value may differ from the fill."""
        key = (step, fill)
        if key not in self.memo:
            self.memo[key] = self._support(step, fill)
        return self.memo[key]

    def _support(self, step: int, fill: float) -> MaskRegion:
        kind, data, args, dtype = self.steps[step]
        if kind == "const":
            if not isinstance(data, complex) and data == fill:
                return NOWHERE
            if self.finite and fill == -math.inf and is_low(data, dtype):
                self.used = True
                return NOWHERE
            return EVERYWHERE
        if kind == "value":
            return self._constant(data, lambda x: x != fill)
        if kind in ("delta", "diagonal") and fill == 0:
            return MaskRegion(0, 0)
        if kind != "apply":
            return EVERYWHERE
        op, attr = data
        if op == ADD:
            return self.strict()._sum(attr, args, fill)
        if op == CONTRACT:
            return self._all(args, fill) if fill == 0 else EVERYWHERE
        return self._map(attr[0], args, fill)

    def _sum(self, coefficients: Sequence[Any], args: Sequence[int], fill: float) -> MaskRegion:
        if any(isinstance(c, complex) for c in coefficients):
            return EVERYWHERE
        if fill == 0:
            return functools.reduce(MaskRegion.join, [self.support(a, 0.0) for a in args], NOWHERE)
        signed = [math.copysign(1, c) * fill for c in coefficients]
        found = [self.support(a, f) for a, f in zip(args, signed, strict=True)]
        return functools.reduce(MaskRegion.meet, found, EVERYWHERE)

    def _all(self, args: Sequence[int], fill: float) -> MaskRegion:
        out = EVERYWHERE
        for a in args:
            out = out.meet(self.support(a, fill))
        return out

    def _map(self, name: str, args: Sequence[int], fill: float) -> MaskRegion:
        if name == "select_n" and len(args) == 3:
            yes = self.condition(args[0], True).meet(self.support(args[2], fill))
            return yes.join(self.condition(args[0], False).meet(self.support(args[1], fill)))
        if name == "convert_element_type":
            if self.steps[args[0]][3] == "bool":
                return self.condition(args[0], True) if fill == 0 else EVERYWHERE
            return self.support(args[0], fill)
        if name in ("exp", "exp2") and fill == 0:
            return self.strict().support(args[0], -math.inf)
        if name in ("min", "max") and math.isinf(fill):
            if (name == "min") == (fill < 0):
                return self._all(args, fill)
            return self.support(args[0], fill).join(self.support(args[1], fill))
        return EVERYWHERE

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
        kind, data, args, dtype = self.steps[step]
        if dtype != "bool":
            return EVERYWHERE
        if kind == "const":
            return EVERYWHERE if bool(data) == wanted else NOWHERE
        if kind == "value":
            return self._constant(data, lambda x: x == wanted)
        if kind == "delta":
            return MaskRegion(0, 0) if wanted else EVERYWHERE
        if kind != "apply" or data[0] != MAP:
            return EVERYWHERE
        name = data[1][0]
        if name == "not":
            return self.condition(args[0], not wanted)
        if name in ("and", "or"):
            a, b = (self.condition(x, wanted) for x in args)
            return a.meet(b) if (name == "and") == wanted else a.join(b)
        if name == "select_n" and len(args) == 3:
            yes = self.condition(args[0], True).meet(self.condition(args[2], wanted))
            return yes.join(self.condition(args[0], False).meet(self.condition(args[1], wanted)))
        if name in _OPPOSITE:
            return self._compared(name if wanted else _OPPOSITE[name], *args)
        return EVERYWHERE

    def _compared(self, name: str, a: int, b: int) -> MaskRegion:
        if name == "ne":
            return EVERYWHERE
        if name == "eq":
            return self._compared("le", a, b).meet(self._compared("ge", a, b))
        if name in ("ge", "gt"):
            a, b, name = b, a, "le" if name == "ge" else "lt"
        right = self.linear(b)
        kind, data, args, _ = self.steps[a]
        if right is not None and kind == "apply" and data[0] == MAP and data[1][0] == "abs":
            inside = self.linear(args[0])
            if inside is None:
                return EVERYWHERE
            return self._below(_minus(inside, right), name).meet(
                self._below(_minus(_times(inside, -1), right), name)
            )
        left = self.linear(a)
        if left is None or right is None:
            return EVERYWHERE
        return self._below(_minus(left, right), name)

    def _below(self, e: Linear, name: str) -> MaskRegion:
        """Return the region where `e <= 0`, or `e < 0`."""
        constant = e.constant + (name == "lt")
        ends = (0, self.rows - 1)
        if e.symbols:
            if e.column == 1 and e.row in (0, -1) and [c for _, c in e.symbols] == [-1]:
                return MaskRegion(length=Length(e.symbols[0][0], 1 - constant, e.row == -1))
            return EVERYWHERE
        if e.column == 1:
            return MaskRegion(upper=max(-constant - (e.row + 1) * i for i in ends))
        if e.column == -1:
            return MaskRegion(lower=min(constant + (e.row - 1) * i for i in ends))
        if e.column == 0 and e.row == 0:
            return EVERYWHERE if constant <= 0 else NOWHERE
        return EVERYWHERE

    def linear(self, step: int) -> Linear | None:
        """Return a value as a linear form of index numbers that cannot wrap around, or None."""
        kind, data, args, dtype = self.steps[step]
        out: Linear | None = None
        if kind == "const":
            out = Linear(0, 0, (), int(data)) if _is_integer(data) else None
        elif kind == "index":
            out = Linear(1, 0, (), 0) if data else Linear(0, 1, (), 0)
        elif kind == "value":
            length = self.known[data].length
            wide = dtype in ("int32", "int64")
            out = Linear(0, 0, ((length, 1),), 0) if length is not None and wide else None
        elif kind == "apply" and data[0] == ADD:
            out = self._linear_sum(data[1], args)
        elif kind == "apply" and data[0] == MAP and data[1][0] == "convert_element_type":
            out = self.linear(args[0]) if self.steps[args[0]][3] != "bool" else None
        return out if out is not None and self._fits(out, dtype) else None

    def _linear_sum(self, coefficients: Sequence[Any], args: Sequence[int]) -> Linear | None:
        total = Linear(0, 0, (), 0)
        for c, a in zip(coefficients, args, strict=True):
            term = self.linear(a)
            if term is None or isinstance(c, complex) or Fraction(c).denominator != 1:
                return None
            total = _minus(total, _times(term, -int(c)))
        return total

    def _fits(self, e: Linear, dtype: str) -> bool:
        corners = [
            e.row * i + e.column * j + e.constant
            for i in (0, self.rows - 1)
            for j in (0, self.cols - 1)
        ]
        if dtype_kind(dtype) == "f":
            return not e.symbols and max(map(abs, corners)) <= INTEGERS.get(dtype, 0)
        if dtype_kind(dtype) not in "iu":
            return False
        info = np.iinfo(dtype)
        return info.min <= min(corners) and max(corners) <= info.max


_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}


def _is_integer(value: Any) -> bool:
    if isinstance(value, (complex, bool)):
        return False
    return math.isfinite(value) and float(value).is_integer()


def is_low(value: Any, dtype: str) -> bool:
    """Return True if a constant is a finite fill that lies below every finite score."""
    if dtype_kind(dtype) != "f" or isinstance(value, complex) or not math.isfinite(value):
        return False
    return value <= -LOW * float(jnp.finfo(dtype).max)


def _times(e: Linear, c: int) -> Linear:
    return Linear(c * e.row, c * e.column, tuple((s, c * k) for s, k in e.symbols), c * e.constant)


def _minus(a: Linear, b: Linear) -> Linear:
    symbols = dict(a.symbols)
    for s, c in b.symbols:
        symbols[s] = symbols.get(s, 0) - c
    left = tuple((s, c) for s, c in symbols.items() if c)
    return Linear(a.row - b.row, a.column - b.column, left, a.constant - b.constant)


def band_of(
    steps: Sequence[Step],
    known: Sequence[Known],
    outputs: Sequence[tuple[int, float]],
    rows: int,
    cols: int,
) -> Band:
    """Return the columns that contribute to any output of a fold.

    Args:
        steps: the tile program.
        known: known facts of each operand it reads, in their order.
        outputs: for every reduction its step and its neutral fill: -inf, inf or 0.
        rows: number of rows.
        cols: number of columns.

    Returns:
        A band outside which every output reads its neutral fill.
    """
    region = NOWHERE
    for step, fill in outputs:
        reader = _Reader(steps, known, rows, cols)
        seen = reader.support(step, fill)
        if reader.used and not every_row_sees(steps, step, rows, cols, seen):
            seen = reader.strict().support(step, fill)
        region = region.join(seen)
    if region.empty:
        return Band()
    lower, upper = region.lower, region.upper
    lower = None if lower is None or lower <= 1 - rows else lower
    upper = None if upper is None or upper >= cols - 1 else upper
    if region.length is None:
        return Band(lower, upper)
    return Band(lower, upper, *region.length)


def known_operand(
    t: TermGraph, number: int, cls: int, axes: tuple[str, ...], batch: Sequence[str]
) -> Known:
    """Return the known facts of operand `number`, a class with named axes."""
    if set(axes) <= set(batch):
        return Known(length=number)
    value = t.program.consts.get(t.leaf_value.get(cls, -1))
    if len(axes) != 2 or set(axes) & set(batch) or value is None or value.size > SCAN_LIMIT:
        return Known()
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return Known()
    array = np.asarray(value)
    return Known(pairs=array if axes == ("m", "n") else array.T) if array.ndim == 2 else Known()


def every_row_sees(
    steps: Sequence[Step], step: int, rows: int, cols: int, seen: MaskRegion
) -> bool:
    """Return True if each row has a column with a score, for all values of the operands.

    The columns tested are the diagonal, the first column and the ends of the range.
    """
    if rows == 0 or cols == 0 or rows > 1 << 22:
        return False
    i = np.arange(rows)
    ends = [0 if e is None else e for e in (seen.lower, seen.upper)]
    found = np.zeros(rows, bool)
    for j in (np.zeros_like(i), *(i + e for e in (0, *ends))):
        j = np.clip(j, 0, cols - 1)
        found |= _MaskPoints(steps, i, j).scored(step)
    return bool(found.all())


class _MaskPoints:
    """Evaluator of a tile program at some pairs (i, j), where index numbers alone decide it."""

    def __init__(self, steps: Sequence[Step], i: np.ndarray, j: np.ndarray) -> None:
        self.steps, self.i, self.j = steps, i, j

    def scored(self, step: int) -> np.ndarray:
        """Return where the value is a contraction, scaled or capped: no fill, no operand added."""
        kind, data, args, _ = self.steps[step]
        none = np.zeros(self.i.shape, bool)
        if kind == "dot":
            return ~none
        if kind != "apply":
            return none
        op, attr = data
        if op == ADD and len(args) == 1:
            return self.scored(args[0])
        if op == MAP and attr[0] in ("convert_element_type", "tanh"):
            return self.scored(args[0])
        if op == MAP and attr[0] == "select_n" and len(args) == 3:
            where = self.value(args[0])
            if where is None:
                return self.scored(args[1]) & self.scored(args[2])
            return np.where(where, self.scored(args[2]), self.scored(args[1]))
        return none

    def value(self, step: int) -> np.ndarray | None:
        """Return the value of a step that depends on index numbers alone, or None."""
        kind, data, args, dtype = self.steps[step]
        if kind == "const" and dtype_kind(dtype) in "iub":
            return np.full(self.i.shape, data, dtype)
        if kind == "index":
            return (self.i if data else self.j).astype(dtype) if dtype_kind(dtype) in "iu" else None
        if kind == "delta":
            return self.i == self.j
        if kind != "apply" or dtype_kind(dtype) not in "iub":
            return None
        made = [x for a in args if (x := self.value(a)) is not None]
        if len(made) < len(args):
            return None
        op, attr = data
        if op == ADD:
            terms = [np.asarray(c).astype(dtype) * x for c, x in zip(attr, made, strict=True)]
            return np.sum(terms, axis=0).astype(dtype)
        if op == MAP and attr[0] == "select_n" and len(made) == 3:
            return np.where(made[0].astype(bool), made[2], made[1])
        if op == MAP and attr[0] == "convert_element_type":
            return made[0].astype(dtype)
        return NUMPY[attr[0]](*made) if op == MAP and attr[0] in NUMPY else None
