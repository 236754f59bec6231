"""Exact evaluation of a step of a loop, to test equations between its states.

Every entry of an input is a variable. A value has up to three descriptions, at random points of a
prime field: itself, its exponential, and its rank among the entries. Sums, products and quotients
follow the field; the exponential of a sum is a product of exponentials; comparisons follow the
ranks, of which some are equal. An equation that holds at these points is taken for an identity
(`prime_field`). The exponential of a variable is a variable of its own, so that an
identity that holds here holds for all exponentials. An operation that has no such description
raises `Undecided`, as does a comparison with a number other than zero and the infinities: random
points need not lie on both sides of the number. Entries that are zero, infinite or NaN are drawn
where they are asked for: few operations have a description of them.

Axes longer than one have two entries here: broadcasts, sums and products along axes are the same
for every length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.loops.prime_field import PRIME, equal, inverse, times

POINTS = 48
RANKS = 3
END = 100  # the rank of infinity
NAN = 2  # beside the ends
FLOATS = ("float32", "float64")


class Undecided(Exception):
    """An operation or a comparison has no exact description."""


def small(shape: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape that stands for a shape."""
    return tuple(1 if n == 1 else 2 for n in shape)


@dataclass(frozen=True, slots=True)
class Points:
    """A value at all points; arrays of [POINTS, *small(shape)].

    value, exponential: residues, or None. rank: an integer, or None. is_entry: True if ranks can be
    compared with those of entries, False if with zero alone. end: -1 and 1 for the infinities,
    `NAN` for no number.
    """

    value: np.ndarray | None
    exponential: np.ndarray | None
    rank: np.ndarray | None
    is_entry: bool
    end: np.ndarray

    def map(self, move: Callable[[np.ndarray], np.ndarray]) -> Points:
        """Return the points with all arrays moved alike."""
        value, exponential, rank = (
            None if x is None else move(x) for x in (self.value, self.exponential, self.rank)
        )
        return Points(value, exponential, rank, self.is_entry, move(self.end))

    def __neg__(self) -> Points:
        exponential = None
        if self.exponential is not None:
            exponential = np.where(self.end == 0, inverse(self.exponential), 0)
        value = None if self.value is None else (PRIME - self.value) % PRIME
        rank = None if self.rank is None else -self.rank
        end = np.where(self.is_nan, self.end, -self.end)
        return Points(value, exponential, rank, self.is_entry and not np.any(rank), end)

    def __add__(self, other: Points) -> Points:
        nan = self.is_nan | other.is_nan
        if np.any((self.end * other.end < 0) & ~nan):
            raise Undecided
        end = np.where(nan, np.int8(NAN), np.sign(self.end + other.end))
        value = _both(np.add, self.value, other.value)
        exponential = _both(times, self.exponential, other.exponential)
        exponential = None if exponential is None else np.where(end < 0, 0, exponential)
        zero = [x for x in (self, other) if x.is_zero]
        if zero:
            kept = other if zero[0] is self else self
            return Points(value, exponential, kept.rank, kept.is_entry, end)
        return Points(value, exponential, None, False, end)

    def __sub__(self, other: Points) -> Points:
        found = self + -other
        if self.is_entry and other.is_entry and self.rank is not None and other.rank is not None:
            rank = self.rank - other.rank
            return Points(found.value, found.exponential, rank, False, found.end)
        return found

    def __mul__(self, other: Points) -> Points:
        nan = self.is_nan | other.is_nan
        value = _both(times, self.value, other.value)
        if value is None or np.any((self.end | other.end != 0) & ~nan):
            raise Undecided
        return Points(value % PRIME, None, None, False, np.where(nan, np.int8(NAN), np.int8(0)))

    def __truediv__(self, other: Points) -> Points:
        if self.value is None or other.value is None:
            raise Undecided
        nothing = (other.value == 0) & (other.end == 0)
        if np.any(nothing & ((self.value != 0) | (self.end != 0))):
            raise Undecided  # the sign of a zero is not known
        end = np.where(nothing, np.int8(NAN), other.end)
        return self * Points(inverse(other.value), None, None, False, end)

    @property
    def is_nan(self) -> np.ndarray:
        """Return True at the points where a value is NaN."""
        return self.end == NAN

    @property
    def is_zero(self) -> bool:
        """Return True for zero at all points."""
        return self.value is not None and not np.any(self.value) and not np.any(self.end)

    def require_finite(self, *others: Points) -> None:
        """Raise `Undecided` if a value is infinite at a point."""
        if any(np.any(x.end) for x in (self, *others)):
            raise Undecided

    def is_equal(self, other: Points) -> bool:
        """Return True if the values agree at all points, themselves or their exponentials."""
        if np.any(self.end != other.end):
            return False
        number = self.end == 0
        for x, y in ((self.value, other.value), (self.exponential, other.exponential)):
            if x is not None and y is not None:
                return equal(x * number, y * number)
        raise Undecided


def number(value: np.ndarray) -> Points:
    """Return finite numbers without an order."""
    return Points(value % PRIME, None, None, False, np.zeros(value.shape, np.int8))


def _both(join: Callable, x: np.ndarray | None, y: np.ndarray | None) -> np.ndarray | None:
    return None if x is None or y is None else join(x, y) % PRIME


class Sampler:
    """The points: random residues and exponentials, by rank.

    zeros: True if some entries are zero. ends: True if some floats are infinite or NaN.
    """

    def __init__(self, zeros: bool = False, ends: bool = False) -> None:
        self.zeros, self.ends = zeros, ends
        self.draw = np.random.default_rng(0)
        size = (POINTS, 2 * RANKS + 1)
        self.values, self.exponentials = (self.draw.integers(2, PRIME, size) for _ in range(2))
        self.values[:, RANKS], self.exponentials[:, RANKS] = 0, 1
        self.powers: dict[float, np.ndarray] = {}

    def entries(self, shape: Sequence[Any], dtype: Any) -> Any:
        """Return an array whose entries are variables."""
        full = (POINTS, *small(shape))
        if np.dtype(dtype).kind == "b":
            return self.draw.integers(0, 2, full).astype(bool)
        rank = self.draw.integers(1, RANKS + 1, full) * self.draw.choice([-1, 1], full)
        if self.zeros:
            rank = rank * (self.draw.integers(0, 3, full) > 0)
        at = np.arange(POINTS).reshape(-1, *[1] * (len(full) - 1)), rank + RANKS
        found = Points(self.values[at], self.exponentials[at], rank, True, np.zeros(full, np.int8))
        if self.ends and np.issubdtype(dtype, np.inexact):
            end = self.draw.choice(np.array([0, 0, -1, 1, NAN], np.int8), full)
            found = chosen(end == 0, found, _ends(end))
        return found

    def constant(self, value: Any, shape: Sequence[Any] = ()) -> Any:
        """Return a number, or a truth value, of a shape."""
        full, plain = (POINTS, *small(shape)), np.asarray(value)
        if plain.shape:
            raise Undecided
        if plain.dtype.kind == "b":
            return np.full(full, bool(plain))
        x = int(plain) if plain.dtype.kind in "iu" else float(plain)
        if math.isnan(x) or math.isinf(x):
            return _ends(np.full(full, np.int8(NAN if math.isnan(x) else math.copysign(1, x))))
        top, bottom = x.as_integer_ratio()
        residue = np.full(full, top % PRIME * pow(bottom, -1, PRIME) % PRIME, np.int64)
        end = np.zeros(full, np.int8)
        if x == 0:
            return Points(residue, residue + 1, residue, True, end)
        powers = self.powers.setdefault(abs(x), self.draw.integers(2, PRIME, POINTS))
        power = np.broadcast_to(powers.reshape(-1, *[1] * (len(full) - 1)), full)
        return Points(residue, power if x > 0 else inverse(power), None, False, end)


def _ends(end: np.ndarray) -> Points:
    """Return infinities, or NaN."""
    zero = np.zeros(end.shape, np.int64)
    return Points(zero, zero, END * end.astype(np.int64), True, end)


def compared(test: Callable, x: Points, y: Points) -> np.ndarray:
    """Return a comparison by the ranks; NaN differs from all."""
    if x.rank is None or y.rank is None:
        raise Undecided
    if not (x.is_entry and y.is_entry) and not (x.is_zero or y.is_zero):
        raise Undecided
    return np.where(x.is_nan | y.is_nan, test(0, np.nan), test(x.rank, y.rank))


def chosen(test: np.ndarray, x: Any, y: Any) -> Any:
    """Return x where a test holds, else y."""
    if isinstance(x, np.ndarray):
        return np.where(test, x, y)
    parts = [
        None if a is None or b is None else np.where(test, a, b)
        for a, b in ((x.value, y.value), (x.exponential, y.exponential), (x.rank, y.rank))
    ]
    entry = x.is_entry and y.is_entry
    both = entry or (not x.is_entry and not y.is_entry)
    value, exponential, rank = parts
    return Points(value, exponential, rank if both else None, entry, np.where(test, x.end, y.end))


def exponential(x: Points) -> Points:
    """Return exp(x)."""
    if x.exponential is None or np.any(x.end > 0):
        raise Undecided
    return number(np.where(x.end < 0, 0, x.exponential))


def logarithm(x: Points) -> Points:
    """Return log(x) of a finite x."""
    x.require_finite()
    if x.value is None or np.any(x.value % PRIME == 0):
        raise Undecided
    return Points(None, x.value, None, False, x.end)


def run_exactly(equations: Sequence[Equation], env: dict[int, Any], sampler: Sampler) -> None:
    """Run equations on points, with operands and results in `env`."""
    for e in equations:
        operands = [
            env[v] if isinstance(v, int) else sampler.constant(v.val, np.shape(v.val))
            for v in e.invals
        ]
        env[e.outvals[0]] = _run(e, operands)


def _run(e: Equation, operands: list[Any]) -> Any:
    aval: Any = e.eqn.outvars[0].aval
    dtype = aval.dtype
    if np.issubdtype(dtype, np.inexact) and str(dtype) not in FLOATS:
        raise Undecided
    if e.name in _SHAPES:
        move = _SHAPES[e.name](e)
        return move(operands[0]) if isinstance(operands[0], np.ndarray) else operands[0].map(move)
    if e.name == "reduce_sum":
        axes = tuple(k + 1 for k in e.eqn.params["axes"])
        return number(_finite(operands[0]).sum(axes))
    if e.name == "dot_general":
        return number(_dot(e, *map(_finite, operands)))
    if e.name in _COMPARISONS and e.reads[:1] == e.reads[1:2]:
        test = _COMPARISONS[e.name]
        return np.where(operands[0].is_nan, test(0, np.nan), test(0, 0))
    if e.name == "integer_pow":
        return _power(operands[0], e.eqn.params["y"])
    if e.name == "convert_element_type":
        return _converted(operands[0], dtype)
    is_integer = np.issubdtype(dtype, np.integer)
    if e.name not in _ELEMENTWISE or (is_integer and e.name == "div"):
        raise Undecided
    ndim = max(_ndim(x) for x in operands)
    found = _ELEMENTWISE[e.name](*[_of_ndim(x, ndim) for x in operands])
    if is_integer and e.name in ("add", "sub", "neg", "mul", "abs"):
        return number(_finite(found))  # integers wrap: differences do not tell the order
    return found


def _finite(x: Any) -> np.ndarray:
    if not isinstance(x, Points) or x.value is None:
        raise Undecided
    x.require_finite()
    return x.value


def _power(x: Points, power: int) -> Points:
    if power < 1:
        raise Undecided
    return math.prod([x] * (power - 1), start=x)


def _converted(x: Any, dtype: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x if np.dtype(dtype).kind == "b" else number(x.astype(np.int64))
    if not np.issubdtype(dtype, np.inexact):
        raise Undecided
    return x


def _ndim(x: Any) -> int:
    return x.ndim if isinstance(x, np.ndarray) else x.end.ndim


def _of_ndim(x: Any, ndim: int) -> Any:
    def move(a: np.ndarray) -> np.ndarray:
        return a.reshape(len(a), *[1] * (ndim - a.ndim), *a.shape[1:])

    return move(x) if isinstance(x, np.ndarray) else x.map(move)


def _broadcast(e: Equation) -> Callable[[np.ndarray], np.ndarray]:
    shape, dims = small(e.eqn.params["shape"]), e.eqn.params["broadcast_dimensions"]

    def move(x: np.ndarray) -> np.ndarray:
        spread = [1] * len(shape)
        for size, k in zip(x.shape[1:], dims, strict=True):
            spread[k] = size
        return np.broadcast_to(x.reshape(len(x), *spread), (len(x), *shape))

    return move


def _reshape(e: Equation) -> Callable[[np.ndarray], np.ndarray]:
    before, after = shape_of(e.eqn.invars[0]), shape_of(e.eqn.outvars[0])
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        raise Undecided
    return lambda x: x.reshape(len(x), *small(after))


def _transpose(e: Equation) -> Callable[[np.ndarray], np.ndarray]:
    order = (0, *[k + 1 for k in e.eqn.params["permutation"]])
    return lambda x: x.transpose(order)


def _dot(e: Equation, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    (left, right), (left_batch, right_batch) = e.eqn.params["dimension_numbers"]
    free = [
        [k for k in range(a.ndim - 1) if k not in used]
        for a, used in ((x, (*left, *left_batch)), (y, (*right, *right_batch)))
    ]
    x = x.transpose([0, *[k + 1 for k in (*left_batch, *free[0], *left)]])
    y = y.transpose([0, *[k + 1 for k in (*right_batch, *free[1], *right)]])
    batch = 1 + len(left_batch)
    x = x.reshape(
        *x.shape[: batch + len(free[0])], *[1] * len(free[1]), *x.shape[batch + len(free[0]) :]
    )
    y = y.reshape(*y.shape[:batch], *[1] * len(free[0]), *y.shape[batch:])
    return times(x, y).sum(tuple(range(batch + len(free[0]) + len(free[1]), x.ndim)))


_SHAPES: dict[str, Callable[[Equation], Callable[[np.ndarray], np.ndarray]]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
}
_COMPARISONS: dict[str, Callable] = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def _logical(join: Callable) -> Callable[..., np.ndarray]:
    def joined(*operands: Any) -> np.ndarray:
        if not all(isinstance(x, np.ndarray) for x in operands):
            raise Undecided
        return join(*operands)

    return joined


def _selected(test: Any, *cases: Any) -> Any:
    if len(cases) != 2 or not isinstance(test, np.ndarray) or test.dtype != bool:
        raise Undecided
    return chosen(test, cases[1], cases[0])


def one_like(x: Points) -> Points:
    """Return ones."""
    return number(np.ones(x.end.shape, np.int64))


def greatest(x: Points, y: Points) -> Points:
    """Return the larger values; NaN where one is."""
    return chosen(compared(np.greater_equal, x, y) | x.is_nan, x, y)


def least(x: Points, y: Points) -> Points:
    """Return the smaller values; NaN where one is."""
    return chosen(compared(np.less_equal, x, y) | x.is_nan, x, y)


def _absolute(x: Points) -> Points:
    if x.rank is None:
        raise Undecided
    found = chosen(x.rank >= 0, x, -x)
    return Points(found.value, found.exponential, None, False, found.end)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "add_any": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "square": lambda x: x * x,
    "exp": exponential,
    "log": logarithm,
    "log1p": lambda x: logarithm(one_like(x) + x),
    "expm1": lambda x: exponential(x) - one_like(x),
    "max": greatest,
    "min": least,
    "abs": _absolute,
    "is_finite": lambda x: x.end == 0,
    "select_n": _selected,
    "and": _logical(np.logical_and),
    "or": _logical(np.logical_or),
    "not": _logical(np.logical_not),
    "copy": lambda x: x,
    **{name: lambda x, y, test=test: compared(test, x, y) for name, test in _COMPARISONS.items()},
}
