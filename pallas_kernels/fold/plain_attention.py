"""Recognition of plain attention in a fold (may import spec.py).

    out = softmax(scale · q kᵀ, with a fill where masked) v        lse = log Σ e^score

The mask is causal, of lengths, or both.

The programs of tile and epilogue are interpreted over symbols, so that every spelling of the same
function is found and no other. A symbol stands for a set of values that one formula describes. An
operation without a rule gives no symbol, and the fold is then not plain attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.pallas_kernels.fold.spec import ExpSums, FoldSpec, WeightedTerm

HALVES = ("bfloat16", "float16")
LEAST_FILL = float(np.finfo(np.float32).min) / 2  # a masked score at most; e^(score - max) is 0


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """The parts of a fold that is plain attention.

    Args:
        scale: of the scores.
        seen: the pairs that are not masked.
        fill: the score of masked pairs.
        query: number of the operand; likewise `key` and `value`.
        results: for each result "out" or "lse".
    """

    scale: float
    seen: VisiblePairs
    fill: float
    query: int
    key: int
    value: int
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VisiblePairs:
    """The symbol of the pairs within bounds: a causal mask, or one of lengths.

    Args:
        upper: the greatest key - query; None for no bound.
        length: number of the operand that, with `extra` added, bounds the keys; None for no bound.
        extra: added to the length.
        inverse: True for all other pairs.
    """

    upper: int | None = None
    length: int | None = None
    extra: int = 0
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """The symbol `scale · dot`, with `fill` for pairs that are not `seen`."""

    scale: float
    seen: VisiblePairs = VisiblePairs()
    fill: float = -math.inf


@dataclass(frozen=True, slots=True)
class Number:
    """The symbol `row·i + column·j + constant + sign·(operand number length)`, of integers."""

    row: int
    column: int
    constant: int
    sign: int = 0
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """The symbol `weighted^w · total^t · e^(top·e)` for a row's results."""

    weighted: int = 0
    total: int = 0
    top: float = 0.0


@dataclass(frozen=True, slots=True)
class Logarithm:
    """The symbol `top·maximum + total·log(total)`."""

    top: float
    total: int = 0


IS_FINITE = object()  # the symbol of "the maximum is finite"
SAME = frozenset("broadcast_in_dim reshape squeeze copy stop_gradient reduce_precision".split())
Symbol = Any  # one of the above, a concrete array, or None for none


@lru_cache(maxsize=256)
def plain_attention(spec: FoldSpec) -> PlainAttention | None:
    """Return the parts of a fold that is plain attention in half precision, else None."""
    if len(spec.contractions) != 1 or len(spec.outputs) != 1 or spec.epilogue is None:
        return None
    (dot,), (sums,) = spec.contractions, spec.outputs
    value = _values(spec, sums) if isinstance(sums, ExpSums) else None
    if value is None or spec.tile.whole is not None:
        return None
    used = {dot.row, dot.col, value}
    dtypes = {spec.operands[k].dtype for k in used}
    if {*range(len(spec.operands))} != used | {*spec.tile.reads} or used & {*spec.tile.reads}:
        return None
    if len(dtypes) > 1 or not dtypes <= {*HALVES} or spec.epilogue.reads or dot.dtype != "float32":
        return None
    scores, results = _scores(spec), _results(spec, value)
    if scores is None or results is None:
        return None
    return PlainAttention(scores.scale, scores.seen, scores.fill, dot.row, dot.col, value, results)


def _values(spec: FoldSpec, sums: ExpSums) -> int | None:
    """Return the operand that probabilities weight, of sums that are those of attention."""
    plain = [t for t in sums.terms if t == WeightedTerm()]
    weighted = [t for t in sums.terms if t.weights is not None and t.factor is None]
    if (len(plain), len(weighted), len(sums.terms), sums.tile) != (1, 1, 2, 0):
        return None
    (term,) = weighted
    assert term.weights is not None
    return term.weights if term.round_to == spec.operands[term.weights].dtype else None


def _scores(spec: FoldSpec) -> Scores | None:
    """Return the symbol of a tile; None where it is more than a scaled dot under a plain mask."""
    reads = [spec.operands[k] for k in spec.tile.reads]
    if any(o.dtype != "int32" or not {*o.axes} <= {*spec.batch} for o in reads):
        return None
    index = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    dot = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    closed = jax.make_jaxpr(spec.tile.fun)((dot,), (index,) * len(reads), index, index)
    lengths = [Number(0, 0, 0, 1, k) for k in spec.tile.reads]
    given = [Scores(1.0), *lengths, Number(1, 0, 0), Number(0, 1, 0)]
    found = interpreted(closed, given, TILE_RULES)
    tile = found[0] if len(found) == 1 else None
    return tile if isinstance(tile, Scores) else None


def _results(spec: FoldSpec, value: int) -> tuple[str, ...] | None:
    """Return the name of each result of the epilogue; None where one is no result of attention."""
    (sums,), epilogue = spec.outputs, spec.epilogue
    assert epilogue is not None and isinstance(sums, ExpSums)
    of_terms = [Power(total=1) if t.weights is None else Power(weighted=1) for t in sums.terms]
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    closed = jax.make_jaxpr(epilogue.fun)(((one,) * (1 + len(of_terms)),), ())
    found = interpreted(closed, [Logarithm(1.0), *of_terms], EPILOGUE_RULES)
    lead = {*spec.batch, spec.row}
    wanted = {
        Power(1, -1): ("out", spec.operands[value].dtype, {*lead, *spec.features(value)}),
        Logarithm(1.0, 1): ("lse", "float32", lead),
    }
    out = []
    for symbol, aval, axes in zip(found, closed.out_avals, epilogue.axes, strict=True):
        known = wanted.get(symbol) if isinstance(symbol, (Power, Logarithm)) else None
        if known is None or known[1:] != (str(aval.dtype), set(axes)):
            return None
        out.append(known[0])
    return tuple(out)


Rules = dict[str, Callable[..., Symbol]]


def interpreted(closed: ClosedJaxpr, inputs: Sequence[Symbol], rules: Rules) -> list[Symbol]:
    """Return the symbols of a program's results."""
    env: dict[Any, Symbol] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    env |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(atom: Any) -> Symbol:
        return np.asarray(atom.val) if jax_internals.is_literal(atom) else env[atom]

    for eqn in closed.jaxpr.eqns:
        made = _applied(eqn, [read(a) for a in eqn.invars], rules)
        env |= dict(zip(eqn.outvars, made, strict=True))
    return [read(a) for a in closed.jaxpr.outvars]


def _applied(eqn: JaxprEqn, args: list[Symbol], rules: Rules) -> list[Symbol]:
    """Return the symbols of an equation's results."""
    name = eqn.primitive.name
    if any(a is None for a in args):
        return [None] * len(eqn.outvars)
    if name in jax_internals.CALLS:
        return interpreted(jax_internals.bodies(eqn)[0], args, rules)
    if all(isinstance(a, (np.ndarray, jax.Array)) for a in args):
        with jax.ensure_compile_time_eval():
            return jax_internals.eval_equation(eqn, args)
    if name in SAME:
        return [args[0]]
    if name == "convert_element_type" and name not in rules:
        return [converted(args[0], str(eqn.params["new_dtype"]))]
    rule = rules.get(name)
    return [rule(*args, **eqn.params) if rule else None] * len(eqn.outvars)


def converted(x: Symbol, dtype: str) -> Symbol:
    """Return the symbol of a cast: scores stay f32, integers wide, results floats."""
    kinds = {Scores: ("float32",), Number: ("int32", "int64")}
    kinds |= dict.fromkeys((Power, Logarithm), ("float32", *HALVES))
    return x if dtype in kinds.get(type(x), ()) else None


def known_number(x: Symbol) -> float | None:
    """Return the value of a concrete number, else None."""
    concrete = isinstance(x, (np.ndarray, jax.Array)) and x.size == 1
    return float(np.asarray(x, np.float64).reshape(())) if concrete else None


def scaled(x: Symbol, factor: float) -> Symbol:
    """Return the symbol of a value times a number."""
    match x:
        case Scores(scale, seen) if seen == VisiblePairs() and math.isfinite(factor):
            return Scores(scale * factor)
        case Number() if factor.is_integer():
            n = int(factor)
            return Number(n * x.row, n * x.column, n * x.constant, n * x.sign, x.length)
        case Logarithm(top, total) if (factor * total).is_integer():
            return Logarithm(factor * top, int(factor * total))
        case Power() if factor == 1:
            return x
    return None


def _multiplied(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    if isinstance(x, Power) and isinstance(y, Power):
        return Power(x.weighted + y.weighted, x.total + y.total, x.top + y.top)
    factor = known_number(y) if known_number(x) is None else known_number(x)
    return None if factor is None else scaled(x if known_number(x) is None else y, factor)


def _inverse(x: Symbol) -> Symbol:
    return Power(-x.weighted, -x.total, -x.top) if isinstance(x, Power) else None


def _divided(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    divisor, dividend = known_number(y), known_number(x)
    if divisor:
        return None if isinstance(x, Number) else scaled(x, 1 / divisor)
    if dividend is not None:
        return _inverse(y) if dividend == 1 else None
    return _multiplied(x, _inverse(y)) if isinstance(y, Power) else None


def _added(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    match _numbered(x), _numbered(y):
        case Number() as a, Number() as b if not (a.sign and b.sign):
            length = a.length if a.sign else b.length
            constant, sign = a.constant + b.constant, a.sign + b.sign
            return Number(a.row + b.row, a.column + b.column, constant, sign, length)
    zero = [s for s in (x, y) if known_number(s) == 0]
    if zero:
        return y if zero[0] is x else x
    if isinstance(x, Logarithm) and isinstance(y, Logarithm):
        return Logarithm(x.top + y.top, x.total + y.total)
    return None


def _numbered(x: Symbol) -> Symbol:
    known = known_number(x)
    whole = known is not None and known.is_integer()
    return Number(0, 0, int(known)) if whole and known is not None else x


def _negated(x: Symbol, **_: Any) -> Symbol:
    return scaled(x, -1.0)


def _subtracted(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    known = known_number(y)
    return _added(x, np.asarray(-known) if known is not None else _negated(y))


def _not_above(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    """Return the pairs with x ≤ y."""
    match _subtracted(y, x):
        case Number(1, -1, slack, 0):
            return VisiblePairs(slack)
        case Number(-1, 1, slack, 0):  # -slack ≤ key - query
            return VisiblePairs(-slack - 1, inverse=True)
        case Number(0, -1, slack, 1, length):
            return VisiblePairs(length=length, extra=slack + 1)
        case Number(0, 1, slack, -1, length):  # length - slack ≤ key
            return VisiblePairs(length=length, extra=-slack, inverse=True)
    return None


def _less(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    return _complement(_not_above(y, x))


def _complement(x: Symbol, **_: Any) -> Symbol:
    return replace(x, inverse=not x.inverse) if isinstance(x, VisiblePairs) else None


def _and(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    match known_number(x), known_number(y):
        case 1.0, _:
            return y
        case _, 1.0:
            return x
    if x == y or not (isinstance(x, VisiblePairs) and isinstance(y, VisiblePairs)):
        return x if x == y else None
    uppers = [z.upper for z in (x, y) if z.upper is not None]
    counted = [z for z in (x, y) if z.length is not None]
    if x.inverse or y.inverse or len(uppers) > 1 or len(counted) > 1:
        return None
    return replace(counted[0] if counted else x, upper=uppers[0] if uppers else None)


def _or(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    return _complement(_and(_inverted(x), _inverted(y)))


def _inverted(x: Symbol) -> Symbol:
    known = known_number(x)
    return _complement(x) if known is None else np.asarray(1.0 - known)


def _chosen(condition: Symbol, *values: Symbol, **_: Any) -> Symbol:
    """Return `where(condition, values[1], values[0])`."""
    if condition is IS_FINITE:  # the shift is the maximum but where the row has no plain result
        return values[1] if known_number(values[0]) == 0 and values[1] == Logarithm(1.0) else None
    if not isinstance(condition, VisiblePairs):
        return None
    outside, inside = values[::-1] if condition.inverse else values
    kept = replace(condition, inverse=False)
    known = tuple(map(known_number, (outside, inside)))
    if isinstance(inside, Scores):
        return None if known[0] is None else _masked(inside, kept, known[0])
    truth = all(str(getattr(v, "dtype", "")) == "bool" for v in values)
    if truth and known in ((0.0, 1.0), (1.0, 0.0)):
        return kept if known == (0.0, 1.0) else _complement(kept)
    return None


def _masked(scores: Scores, seen: VisiblePairs, fill: float) -> Symbol:
    """Return scores with a fill outside of `seen`, if all masked pairs have the same fill."""
    alike = scores.seen == VisiblePairs() or scores.fill == fill
    both = _and(scores.seen, seen) if alike and fill <= LEAST_FILL else None
    return None if both is None else Scores(scores.scale, both, fill)


def _largest(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    """Return `max`, of which -inf is the unit."""
    if known_number(x) == -math.inf:
        return y
    return x if known_number(y) == -math.inf else None


def _magnitude(x: Symbol, **_: Any) -> Symbol:
    if isinstance(x, Power) and not x.weighted:
        return x  # a product of positive factors
    return abs if x == Logarithm(1.0) else None  # read by `_is_below_infinity` alone


def _is_below_infinity(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    return IS_FINITE if x is abs and known_number(y) == math.inf else None


def _exponential(x: Symbol, **_: Any) -> Symbol:
    return Power(0, x.total, x.top) if isinstance(x, Logarithm) else None


def _logarithm(x: Symbol, **_: Any) -> Symbol:
    return Logarithm(x.top, 1) if isinstance(x, Power) and x == Power(0, 1, x.top) else None


def _raised(x: Symbol, *, y: int, **_: Any) -> Symbol:
    return _inverse(x) if y == -1 else None


ARITHMETIC: Rules = {
    "mul": _multiplied, "div": _divided, "add": _added, "sub": _subtracted, "neg": _negated,
}  # fmt: skip
TILE_RULES: Rules = ARITHMETIC | {
    "le": _not_above, "lt": _less,
    "ge": lambda x, y, **_: _not_above(y, x), "gt": lambda x, y, **_: _less(y, x),
    "and": _and, "or": _or, "not": _complement, "select_n": _chosen,
}  # fmt: skip
EPILOGUE_RULES: Rules = ARITHMETIC | {
    "max": _largest, "exp": _exponential, "log": _logarithm, "integer_pow": _raised,
    "abs": _magnitude, "lt": _is_below_infinity, "select_n": _chosen,
    "is_finite": lambda x, **_: IS_FINITE if x == Logarithm(1.0) else None,
}  # fmt: skip
