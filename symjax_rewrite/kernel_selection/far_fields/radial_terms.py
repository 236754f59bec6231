"""Tiles of folds as polynomials in differences of coordinates, times powers of squared distances.

    Σ coefficient · rows[i] · columns[j] · Π_d (x[i,d] - y[j,d])^k · Π (|x_i - y_j|² + shift)^power

The form holds for points of cells that are *apart*: i ≠ j, and |x_i - y_j|² is above a threshold,
so that `where(r2 > 0, ..)`, `maximum(r2, 1e-30)` and masks of the diagonal need no case.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from symjax_rewrite.ir.step_program import run
from symjax_rewrite.ir.term import ADD, MAP
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.pairwise_terms import At
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW
from symjax_rewrite.pallas_kernels.fold.spec import Band, Sums

MOST_TERMS = 16  # limit on terms of one polynomial
MOST_PARTS = 8  # limit on elements of the batch axes
DTYPES = ("float32", "float64")


class NoFarFieldError(Exception):
    """The tile has no known expansion; the message is the reason."""


class Vector(NamedTuple):
    """A vector over the rows or columns: an operand of the fold at one element of batch axes."""

    operand: int
    at: tuple[tuple[str, int], ...]


class Monomial(NamedTuple):
    """Factors of a term: sources by row and column, differences by dimension, radial powers."""

    rows: tuple[Vector, ...] = ()
    columns: tuple[Vector, ...] = ()
    differences: tuple[int, ...] = ()  # the dimensions, sorted, each as often as its power
    radials: tuple[tuple[float, Fraction], ...] = ()  # (shift, power)

    def times(self, other: Monomial) -> Monomial:
        powers: Counter[float] = Counter()
        for shift, power in (*self.radials, *other.radials):
            powers[shift] += power  # pyright: ignore[reportArgumentType]
        return Monomial(
            tuple(sorted((*self.rows, *other.rows))),
            tuple(sorted((*self.columns, *other.columns))),
            tuple(sorted((*self.differences, *other.differences))),
            tuple(sorted((s, Fraction(p)) for s, p in powers.items() if p)),
        )


Polynomial = Mapping[Monomial, float]
ONE = Monomial()


@dataclass(frozen=True, slots=True)
class FarForm:
    """A fold's sums in the form above.

    points: the row and the column coordinate of each dimension. sums: polynomials, by output, term
    and element of the batch. above: a number that squared distances of points of cells apart must
    exceed. same: rows and columns are the same points.
    """

    points: tuple[tuple[Vector, Vector], ...]
    sums: tuple[tuple[tuple[Polynomial, ...], ...], ...]
    above: float
    same: bool


def far_form(route: FoldRoute) -> FarForm:
    """Return the form of a fold's sums.

    Raises:
        NoFarFieldError: the fold has another form.
    """
    spec = route.spec
    if spec.named or spec.contractions or spec.band != Band() or spec.tile.whole:
        raise NoFarFieldError("sizes, products or masks that no expansion is known for")
    if not all(isinstance(o, Sums) for o in spec.outputs):
        raise NoFarFieldError("not a sum")
    parts = list(itertools.product(*(range(n) for n in spec.batch_shape)))
    if len(parts) > MOST_PARTS:
        raise NoFarFieldError("too many batch elements")
    reader = _TileReader(route)
    sums = []
    tiles = [reader.tiles(dict(zip(spec.batch, part, strict=True))) for part in parts]
    for output in spec.outputs:
        assert isinstance(output, Sums)
        made = []
        for term in output.terms:
            if term.round_to is not None:
                raise NoFarFieldError("weights in half precision")
            factor = [t[term.factor] if term.factor is not None else {ONE: 1.0} for t in tiles]
            made.append(
                tuple(_times(t[output.tile], f) for t, f in zip(tiles, factor, strict=True))
            )
        sums.append(tuple(made))
    return reader.finish(tuple(sums))


def _plus(*terms: tuple[float, Polynomial]) -> Polynomial:
    out: Counter[Monomial] = Counter()
    for scale, polynomial in terms:
        for monomial, c in polynomial.items():
            out[monomial] += scale * c  # pyright: ignore[reportArgumentType]
    kept = {m: float(c) for m, c in out.items() if c}
    if len(kept) > MOST_TERMS:
        raise NoFarFieldError("too many terms")
    return kept


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    products = ((x * y, {m.times(n): 1.0}) for m, x in a.items() for n, y in b.items())
    return _plus(*products)


def _number(value: Any) -> float | None:
    """Return the value of a constant polynomial, else None."""
    if isinstance(value, bool) or not isinstance(value, Mapping):
        return None
    return value.get(ONE, 0.0) if set(value) <= {ONE} else None


class _Index(NamedTuple):
    """The number of the row or of the column."""

    of_row: bool


@dataclass(slots=True)
class _TileReader:
    """Evaluation of a tile's steps on polynomials, for one fold."""

    route: FoldRoute
    points: dict[tuple[Vector, Vector], int] = field(default_factory=dict)
    radius: frozenset[int] | None = None  # the dimensions of the distances
    above: float = 0.0
    diagonal: bool = False
    part: dict[str, int] = field(default_factory=dict)
    known: dict[Any, Vector] = field(default_factory=dict)  # by class and place

    def tiles(self, part: dict[str, int]) -> list[Polynomial]:
        """Return the polynomial of each tile at an element of the batch."""
        self.part = part
        roots = self.route.spec.tile.key[1]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
        handlers = {
            "value": self._value, "const": self._const, "apply": self._apply,
            "index": lambda of_row, args, dtype: _Index(of_row),
            "delta": self._diagonal, "diagonal": self._diagonal,
        }  # fmt: skip
        steps = self.route.steps
        unknown = {s.kind for s in steps} - set(handlers)
        if unknown or any(s.dtype not in (*DTYPES, "bool", "int32") for s in steps):
            raise NoFarFieldError("a tile of operations that no expansion is known for")
        made = run(steps, handlers)
        out = [made[r] for r in roots]
        if not all(isinstance(p, Mapping) for p in out):
            raise NoFarFieldError("not a sum of numbers")
        return out

    def finish(self, sums: tuple[tuple[tuple[Polynomial, ...], ...], ...]) -> FarForm:
        dims = frozenset(range(len(self.points)))
        if self.radius is None:
            raise NoFarFieldError("the term reads no distance of points")
        if not all(p for output in sums for term in output for p in term):
            raise NoFarFieldError("the term is zero between distinct points")
        if self.radius != dims or len(dims) > 3:
            raise NoFarFieldError("the term reads coordinates that the distance does not")
        same = all(self._place(a, ROW) == self._place(b, COLUMN) for a, b in self.points)
        if self.diagonal and not same:
            raise NoFarFieldError("the diagonal is masked, and rows and columns are other points")
        return FarForm(tuple(self.points), sums, self.above, same)

    def _place(self, source: Vector, axis: str) -> tuple:
        """Return the class and the place of a coordinate, apart from its row or column."""
        cls, axes = self.route.inputs[source.operand]
        at = dict(source.at)
        return cls, tuple("point" if a == axis else at.get(a, a) for a in axes)

    def _value(self, number: int, args: list[Any], dtype: str) -> Any:
        operand = self.route.spec.tile.reads[number]
        cls, axes = self.route.inputs[operand]
        names = self.route.spec.operands[operand].axes
        at = tuple((a, self.part[a]) for a in names if a in self.part)
        held = dict(at)
        place = (cls, tuple(a.place if isinstance(a, At) else held.get(a, a) for a in axes))
        source = self.known.setdefault(place, Vector(operand, at))
        if {ROW, COLUMN} <= {*names} or len(names) - len(at) > 1 or dtype not in DTYPES:
            raise NoFarFieldError("a term that is stored for every pair")
        if COLUMN in names:
            return {Monomial(columns=(source,)): 1.0}
        return {Monomial(rows=(source,)): 1.0}

    def _const(self, value: Any, args: list[Any], dtype: str) -> Any:
        if dtype == "bool":
            return bool(value)
        return {ONE: float(value)} if value else {}

    def _diagonal(self, data: Any, args: list[Any], dtype: str) -> Any:
        self.diagonal = True
        return {} if dtype != "bool" else False

    def _apply(self, data: Any, args: list[Any], dtype: str) -> Any:
        op, attr = data
        if op == MAP:
            return self._mapped(attr[0], dict(attr[1]), args, dtype)
        if not all(isinstance(a, Mapping) for a in args):
            raise NoFarFieldError("arithmetic on indices or tests")
        if op == ADD:
            return self._differences(_plus(*zip(map(float, attr), args, strict=True)))
        product: Polynomial = {ONE: 1.0}
        for a in args:
            product = _times(product, a)
        return product

    def _differences(self, p: Polynomial) -> Polynomial:
        """Return a sum with `x[i] - y[j]` as one factor."""
        rows = [m for m in p if m == Monomial(rows=m.rows) and len(m.rows) == 1]
        for m in rows:
            for n in p:
                opposed = n == Monomial(columns=n.columns) and p[n] == -p[m]
                if opposed and len(n.columns) == 1:
                    rest = {k: c for k, c in p.items() if k not in (m, n)}
                    dim = self._dimension(m.rows[0], n.columns[0])
                    return self._differences(
                        _plus((1.0, rest), (p[m], {Monomial(differences=(dim,)): 1.0}))
                    )
        return p

    def _dimension(self, row: Vector, column: Vector) -> int:
        return self.points.setdefault((row, column), len(self.points))

    def _mapped(self, name: str, params: dict[str, Any], args: list[Any], dtype: str) -> Any:
        if name == "select_n" and isinstance(args[0], bool) and len(args) == 3:
            return args[1 + args[0]]
        if name == "convert_element_type" and isinstance(args[0], (bool, _Index)):
            return _converted(args[0], dtype)
        if name in _LOGIC and all(isinstance(a, bool) for a in args):
            return _LOGIC[name](*args)
        if name in _ORDER and all(isinstance(a, _Index) for a in args):
            return self._compared_places(name, *args)
        if not all(isinstance(a, Mapping) for a in args):
            raise NoFarFieldError("an operation on indices or tests")
        if name in _ORDER:
            return self._compared(name, *args)
        if name == "max":
            return self._larger(*args)
        return self._power_map(name, params, args)

    def _power_map(self, name: str, params: dict[str, Any], args: list[Any]) -> Polynomial:
        """Return a power, a quotient or a cast."""
        first = args[0]
        match name:
            case "convert_element_type" | "copy":
                return first
            case "sqrt":
                return self._power(first, Fraction(1, 2))
            case "rsqrt":
                return self._power(first, Fraction(-1, 2))
            case "reciprocal":
                return self._power(first, Fraction(-1))
            case "square":
                return _times(first, first)
            case "neg":
                return _plus((-1.0, first))
            case "div":
                return _times(first, self._power(args[1], Fraction(-1)))
            case "integer_pow":
                return self._power(first, Fraction(params["y"]))
            case "pow":
                exponent = _number(args[1])
                if exponent is not None and (2 * exponent).is_integer():
                    return self._power(first, Fraction(exponent))
        raise NoFarFieldError(f"no expansion of {name} is known")

    def _power(self, p: Polynomial, power: Fraction) -> Polynomial:
        if power.denominator == 1 and 0 <= power <= 3:
            out: Polynomial = {ONE: 1.0}
            for _ in range(int(power)):
                out = _times(out, p)
            return out
        scale, monomial = self._radial(p)
        raised = tuple((shift, q * power) for shift, q in monomial.radials)
        return {Monomial(radials=raised): scale ** float(power)}

    def _radial(self, p: Polynomial) -> tuple[float, Monomial]:
        """Return a positive polynomial as a number times powers of shifted squared distances."""
        if len(p) == 1:
            ((monomial, scale),) = p.items()
            if monomial == Monomial(radials=monomial.radials) and scale > 0:
                return scale, monomial
        squares = {m.differences[0]: c for m, c in p.items() if m == _square(m.differences[:1])}
        shift = p.get(ONE, 0.0)
        scales = set(squares.values())
        if len(squares) + (ONE in p) != len(p) or len(scales) != 1 or min(*scales, 1) <= 0:
            raise NoFarFieldError("a power of something else than a squared distance")
        if shift < 0:
            raise NoFarFieldError("a distance with a negative shift")
        if self.radius not in (None, frozenset(squares)):
            raise NoFarFieldError("distances of different dimensions")
        self.radius = frozenset(squares)
        (scale,) = scales
        return scale, Monomial(radials=((shift / scale, Fraction(1)),))

    def _reach(self, p: Polynomial, limit: float) -> None:
        """Note the squared distance above which a growing polynomial exceeds a limit."""
        scale, monomial = self._radial(p)
        if len(monomial.radials) != 1:
            raise NoFarFieldError("a comparison of something else than a distance")
        ((shift, power),) = monomial.radials
        if power <= 0:
            raise NoFarFieldError("a comparison of a term that falls with the distance")
        least = (limit / scale) ** float(1 / power) - shift if limit > 0 else 0.0
        self.above = max(self.above, least)

    def _compared(self, name: str, a: Polynomial, b: Polynomial) -> bool:
        """Return the test's value for distances above a threshold."""
        if (limit := _number(b)) is not None:
            self._reach(a, limit)
            return _ORDER[name](1, 0)
        if (limit := _number(a)) is not None:
            self._reach(b, limit)
            return _ORDER[name](0, 1)
        raise NoFarFieldError("a comparison of two terms")

    def _compared_places(self, name: str, a: _Index, b: _Index) -> bool:
        if name not in ("eq", "ne") or a.of_row == b.of_row:
            raise NoFarFieldError("a mask by place")
        self.diagonal = True
        return name == "ne"

    def _larger(self, a: Polynomial, b: Polynomial) -> Polynomial:
        for value, limit in ((a, _number(b)), (b, _number(a))):
            if limit is not None:
                self._reach(value, limit)
                return value
        raise NoFarFieldError("a maximum of two terms")


def _square(dims: Sequence[int]) -> Monomial | None:
    return Monomial(differences=(dims[0], dims[0])) if dims else None


def _converted(value: Any, dtype: str) -> Any:
    if isinstance(value, _Index):
        if dtype != "int32":
            raise NoFarFieldError("arithmetic on indices")
        return value
    if dtype == "bool":
        return value
    return {ONE: 1.0} if value else {}


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("gt", "ge", "lt", "le", "eq", "ne")
}
_LOGIC: dict[str, Callable[..., bool]] = {
    "and": operator.and_, "or": operator.or_, "not": operator.not_
}  # fmt: skip
