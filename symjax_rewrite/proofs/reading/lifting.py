"""Normal forms of the values of a program, read from its index terms.

    CONTRACT(x[i,k], w[k,j]) over k  →  Σ_k x[i,k]·w[k,j]

Every e-class has a value over names of its own, computed once. Where single entries are read
(`Calculus.entries`), a class has a value at every number that one of its indices is.
"""

from __future__ import annotations

import cmath
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import Dim, from_jax
from symjax_rewrite.ir.term import Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.proofs.algebra import functions, reductions
from symjax_rewrite.proofs.algebra.arithmetic import Calculus
from symjax_rewrite.proofs.algebra.forms import ONE, ZERO, Index, Poly, linear, number_of, plain
from symjax_rewrite.proofs.algebra.trigonometry import cosine
from symjax_rewrite.proofs.reading import entries
from symjax_rewrite.proofs.reading.affine_forms import product
from symjax_rewrite.proofs.reading.conditions import Condition
from symjax_rewrite.proofs.reading.selections import selected
from symjax_rewrite.proofs.reading.sorting import SORTS, ordered, taken
from symjax_rewrite.proofs.reading.windows import windowed

HALF = Fraction(1, 2)
INTEGER_MAPS = frozenset("floor ceil round sign rem clz population_count".split())

Read = Callable[["Lifting", list[Index]], Poly | None]


class Value(NamedTuple):
    """The value of a class over names of its axes, and the conditions under which it is defined."""

    p: Poly
    names: list[int]
    conditions: frozenset[Condition]


@dataclass(slots=True)
class Lifting:
    """The values of the classes of a term graph.

    solve: returns the value of an output of an equation that is a loop, at indices; None if the
    equation is no loop that was solved. steps: values of the program that are the number of a
    loop's step, with their name. known: by class, a function of its indices that returns its value
    in another way than by its node, or None. values: by class, and the indices that are numbers.
    """

    a: Calculus
    t: TermGraph
    solve: Callable[[Lifting, int, int, list[Index]], Poly | None]
    steps: dict[int, int] = field(default_factory=dict)
    known: dict[int, Read] = field(default_factory=dict)
    values: dict[tuple[int, tuple[int | None, ...]], Value] = field(default_factory=dict)
    _now: list[set[Condition]] = field(default_factory=list)

    def of(self, ref: Ref, at: Sequence[Index]) -> Poly:
        """Return the value of a reference whose axis k reads index expression `at[k]`."""
        read = [at[i] for i in ref.axes]
        each = self.a.entries is not None
        fixed = tuple([i[0] if each and not i[1] else None for i in read])
        found = self.values.get((ref.cls, fixed)) or self._value(ref.cls, fixed)
        to = dict(zip(found.names, read, strict=True))
        for kind, p in found.conditions if self._now else ():
            self.require(kind, self.a.substitute(p, to))
        return self.a.substitute(found.p, to)

    def _value(self, cls: int, fixed: tuple[int | None, ...]) -> Value:
        c = self.t.graph.classes[cls]
        names = [self.a.table.fresh(s) for s in c.sizes]
        at = [plain(n) if k is None else (k, ()) for n, k in zip(names, fixed, strict=True)]
        where, self.a.where = self.a.where, self.t.where(cls)
        with self.apart() as found:
            made = self.known[cls](self, at) if cls in self.known else None
            made = self._node(cls, c.first, c.dtype, at) if made is None else made
        self.a.where = where
        self.values[cls, fixed] = Value(made, names, frozenset(found))
        return self.values[cls, fixed]

    def require(self, kind: str, p: Poly) -> None:
        """Record a condition under which the program is defined."""
        self._now[-1].add(Condition(kind, p))

    @contextlib.contextmanager
    def apart(self) -> Iterator[set[Condition]]:
        """Collect the conditions of values that are read meanwhile, instead of recording them."""
        self._now.append(set())
        yield self._now[-1]
        self._now.pop()

    # ------------------------------------------------------------ nodes

    def _node(self, cls: int, node: Node, dtype: str, here: list[Index]) -> Poly:
        a = self.a
        bound = [a.table.fresh(s) for s in node.bound]
        at = [*here, *map(plain, bound)]
        match node.op:
            case op.LEAF:
                return self._leaf(self.t.leaf_value[cls], dtype, at)
            case op.CONST:
                return self.constant(node.attr[0], dtype)
            case op.IOTA:
                return a.index(at[0])
            case op.DELTA:
                return functions.zero(a, a.sub(a.index(at[0]), a.index(at[1])))
            case op.ADD:
                terms = zip(node.attr, node.args, strict=True)
                return a.add(*[self._times(c, self.of(r, at), dtype) for c, r in terms])
            case op.CONTRACT:
                product = a.product(*[self.of(r, at) for r in node.args])
                return reductions.total(a, product, bound)
            case op.REDUCE:
                return self._reduce(node, self.of(node.args[0], at), bound)
            case op.SLICE:
                return self._slice(node, at)
            case op.CONCAT:
                return self._concat(node, at)
            case op.TAKE:
                return self._take(node, self.t.graph.classes[cls].sizes, at, bound)
            case op.SOLVE:
                return self._linear_solve(node, at, bound)
            case op.MAP:
                kinds = [self._exact_dtype(r.cls) for r in node.args]
                chooses = node.attr[0] == "select_n" and kinds[0] == "bool" and len(kinds) == 3
                if chooses:
                    operands = selected(self, node.args, at)
                else:
                    operands = [self.of(r, at) for r in node.args]
                return self.map(node.attr[0], node.attr[1], operands, kinds, dtype)
        if cls in self.t.made_by:
            made = self._equation(*self.t.made_by[cls], here)
            if made is not None:
                return made
        return self._opaque(cls, node, dtype, here, bound)

    def _equation(self, number: int, output: int, here: list[Index]) -> Poly | None:
        """Return the value of an equation that is no index term; None if it has no laws."""
        eqn = self.t.program.equations[number].eqn
        match eqn.primitive.name:
            case "dim_as_value":
                return self.a.size(from_jax(eqn.params["dim"]))
            case "iota":
                (made,) = self.t.program.equations[number].outvals
                place = entries.place_of(self, made, eqn.params["dimension"], here)
                return None if place is None else self.a.index(place)
            case "pad" | "slice":
                return entries.part(self, number, here)
            case "concatenate":
                return entries.joined(self, number, here)
            case "rev":
                return entries.reversed_entry(self, number, here)
            case name if name in SORTS:
                return ordered(self, number, output, here)
        made = windowed(self, number, here)
        return made if made is not None else self.solve(self, number, output, here)

    def _leaf(self, value: int, dtype: str, at: list[Index]) -> Poly:
        if value in self.steps:
            return self.a.index(plain(self.steps[value]))
        return self.a.leaf("leaf", value, at, **facts_of(dtype))

    def constant(self, value: Any, dtype: str) -> Poly:
        if isinstance(value, complex) or cmath.isfinite(value):
            return self.a.number(value, dtype)
        if value != value:
            return self.a.leaf("nan")
        return self.a.scale(1 if value > 0 else -1, self.a.infinity())

    def _times(self, c: Any, p: Poly, dtype: str) -> Poly:
        return p if c == 1 else self.a.mul(self.a.number(c, dtype), p)

    def _reduce(self, node: Node, p: Poly, bound: list[int]) -> Poly:
        a = self.a
        match node.attr:
            case "max" | "or":
                return reductions.maximum(a, [(tuple(bound), p)])
            case "min" | "and":
                return reductions.minimum(a, [(tuple(bound), p)])
            case "prod":
                for name in bound:
                    p = product(a, p, name, a.size(a.table.sizes[name]))
                return p
        return self._interned(f"reduce_{node.attr}", [(bound, p)], a.is_real(p))

    def _slice(self, node: Node, at: list[Index]) -> Poly:
        (arg,) = node.args
        read: list[Index] = []
        for entry, axis in zip(node.attr, arg.axes, strict=True):
            if isinstance(entry, tuple):
                offset, terms = at[axis]
                start = entry[0] + entry[1] * offset
                read.append(linear(start, [(n, entry[1] * s) for n, s in terms]))
            else:
                read.append(at[axis] if entry is None else (entry, ()))
        return self.of(Ref(arg.cls, tuple(range(len(read)))), read)

    def _concat(self, node: Node, at: list[Index]) -> Poly:
        a, (along, sizes) = self.a, node.attr
        here, start = at[along], 0
        pieces: list[tuple[Poly, Poly]] = []
        for ref, size in zip(node.args, sizes, strict=True):
            inside = functions.positive(a, a.sub(a.size(start + size), a.index(here)))
            if inside != ZERO:
                offset, terms = a.table.size_index(start)
                read = list(at)
                read[along] = linear(here[0] - offset, [*here[1], *((n, -s) for n, s in terms)])
                pieces.append((inside, self.of(ref, read)))
            if inside == ONE:
                break
            start = start + size
        out = pieces.pop()[1]
        for inside, piece in reversed(pieces):
            out = functions.select(a, inside, piece, out)
        return out

    def _take(self, node: Node, sizes: Sequence[Dim], at: list[Index], bound: list[int]) -> Poly:
        """Return an array at chosen indices; out of range they are clipped, or it is filled."""
        a, (mode, fill, windows) = self.a, node.attr
        chosen = [self.of(r, at) for r in node.args[1:]]
        widths = [1 if w is None else sizes[w] for w in windows]
        counts = [a.table.sizes[n] - w + 1 for n, w in zip(bound, widths, strict=True)]
        placed = [ZERO if w is None else a.index(at[w]) for w in windows]
        if mode == "clip":
            chosen = [_clipped(a, p, n) for p, n in zip(chosen, counts, strict=True)]
        if mode == "clip" or all(map(functools.partial(functions.is_within, a), chosen, counts)):
            places = list(map(a.add, chosen, placed))
            found = [functions.as_index(a, p) for p in places]
            read = [i or plain(n) for i, n in zip(found, bound, strict=True)]
            source = self.of(node.args[0], [*at[: node.out], *read])
            return taken(a, source, bound, places)
        source = self.of(node.args[0], at)
        if mode == "fill" and fill[0] == 0 and set(windows) == {None}:
            here = [a.sub(p, a.index(plain(n))) for p, n in zip(chosen, bound, strict=True)]
            tests = [functions.zero(a, p) for p in here]
            return reductions.total(a, a.product(source, *tests), bound)
        key = ("take", mode, str(fill), tuple(w is not None for w in windows))
        places = chosen + [p for p, w in zip(placed, windows, strict=True) if w is not None]
        if mode == "fill" and fill[0] == fill[0]:
            branches = [(bound, source), *[((), p) for p in places]]
            return self._interned(key, branches, a.is_real(source))
        return reductions.taken(a, source, bound, places, key)

    def _linear_solve(self, node: Node, at: list[Index], bound: list[int]) -> Poly:
        a = self.a
        matrix, right = node.args
        column = next(i for i in matrix.axes if i < node.out)
        r, c = (a.table.fresh(node.bound[0]) for _ in range(2))
        there = list(at)
        there[column], there[node.out] = plain(c), plain(r)
        entry = self.of(matrix, there)
        places = [((), a.index(i)) for i in (at[column], at[node.out])]
        inverse = self._interned("inverse", [([r, c], entry), *places], a.is_real(entry))
        return reductions.total(a, a.mul(inverse, self.of(right, at)), bound)

    def _interned(self, key: Any, operands: Sequence[tuple[Any, Poly]], real: bool) -> Poly:
        made = self.a.table.intern("opaque", key, operands, {"real": real}, keeps_bound=True)
        return self.a.of(made)

    def _opaque(
        self, cls: int, node: Node, dtype: str, here: list[Index], bound: list[int]
    ) -> Poly:
        """Return an operation without laws: equal only to itself at equal operands."""
        a = self.a
        at = [*here, *map(plain, bound)]
        operands: list[tuple[list[int], Poly]] = [([], a.index(i)) for i in here]
        for ref in node.args:
            first = min(ref.axes, default=node.out) - node.out
            operands.append((bound[first : first + len(ref.axes)], self.of(ref, at)))
        key, facts = _key_of(self.t, cls, node), facts_of(dtype)
        return a.of(a.table.intern("opaque", key, operands, facts, keeps_bound=True))

    def _exact_dtype(self, cls: int) -> str:
        """Return the dtype of a class, or a narrower one that it was cast from without rounding."""
        c = self.t.graph.classes[cls]
        if c.first.op == op.MAP and c.first.attr[0] == "convert_element_type":
            narrow = self._exact_dtype(c.first.args[0].cls)
            if dtype_kind(narrow) == dtype_kind(c.dtype) == "f" and not _narrows(narrow, c.dtype):
                return narrow
        return c.dtype

    # ------------------------------------------------------------ elementwise functions

    def map(self, name: str, params: Any, ps: list[Poly], dtypes: list[str], dtype: str) -> Poly:
        """Return an elementwise function of polynomials."""
        a, kind = self.a, dtype_kind(dtypes[0]) if dtypes else dtype_kind(dtype)
        if name in _CONDITIONED and kind in "fc":
            self._require_for(name, params, ps)
        if name in _ROWS and (kind in "fc" or name in _ANY_KIND):
            return _ROWS[name](a, *ps)
        if name in _TESTS and kind != "u":
            return _TESTS[name](a, *ps)
        if name in _LOGIC and kind == "b":
            return _LOGIC[name](a, *ps)
        match name:
            case "convert_element_type" | "reduce_precision":
                return self._convert(name, params, ps[0], dtypes[0], dtype)
            case "select_n" if len(ps) == 3 and kind == "b":
                return functions.select(a, ps[0], ps[2], ps[1])
            case "integer_pow" if kind in "fc" or dict(params)["y"] > 0:
                return a.power(ps[0], dict(params)["y"])
            case "eq" | "ne":
                difference = a.sub(ps[0], ps[1])
                if difference or kind not in "fc":
                    same = functions.zero(a, difference)
                else:  # false for NaN
                    number = functions.applied(a, "is_number", (), ps[0], integer=True)
                    same = functions.zero(a, a.sub(number, ONE))
                return same if name == "eq" else a.sub(ONE, same)
        key = (*params, kind) if isinstance(params, tuple) else (params, kind)
        if name == "sign":
            return functions.sign(a, ps[0], key)
        made = functions.applied(a, name, key, *ps, integer=name in INTEGER_MAPS or kind in "iu")
        return made if dtype_kind(dtype) != "b" else functions.zero(a, a.sub(made, ONE))

    def _require_for(self, name: str, params: Any, ps: list[Poly]) -> None:
        for k, kind in _CONDITIONED[name]:
            self.require(kind, ps[k])
        if name == "tan" and self.a.angle_sums:
            self.require("nonzero", cosine(self.a, (*params, "f"), ps[0]))
        if name == "integer_pow" and dict(params)["y"] < 0:
            self.require("nonzero", ps[0])
        if name == "pow" and not functions.is_count(self.a, ps[1]):
            self.require("positive", ps[0])

    def _convert(self, name: str, params: Any, p: Poly, old: str, new: str) -> Poly:
        a, kinds = self.a, dtype_kind(old) + dtype_kind(new)
        if name == "reduce_precision":
            return functions.applied(a, name, params, p)
        if kinds[1] == "b":
            return p if kinds[0] == "b" else a.sub(ONE, functions.zero(a, p))
        if kinds == "cf":
            return functions.applied(a, "real", (), p)
        if kinds[1] in "fc":
            return functions.applied(a, "round", new, p) if _rounds(old, new, p) else p
        if kinds[0] not in "iub":
            return functions.applied(a, "truncate", new, p, integer=True)
        fits = _fits(a, p, old, new)
        return p if fits else functions.applied(a, "wrap", new, p, integer=True)


def facts_of(dtype: str) -> dict[str, Any]:
    """Return the facts that hold for all values of a dtype."""
    kind = dtype_kind(dtype)
    return {
        "real": kind != "c",
        "integer": kind in "iub",
        "bit": kind == "b",
        "sign": 1 if kind in "ub" else 0,
        "most": int(np.iinfo(dtype).max) if kind in "iu" else None,
    }


def _clipped(a: Calculus, p: Poly, count: Dim) -> Poly:
    """Return an integer, or the nearest of 0 … count − 1."""
    last = a.size(count - 1)
    return p if functions.is_within(a, p, count) else _clamp(a, ZERO, p, last)


def _rounds(old: str, new: str, p: Poly) -> bool:
    """Return True if a cast to a float dtype rounds, beyond integers up to 2²⁴."""
    if number_of(p) is not None:
        return False
    if dtype_kind(old) in "fc":
        return _narrows(old, new)
    return old != "bool" and jnp.finfo(new).nmant < 23


def _fits(a: Calculus, p: Poly, old: str, new: str) -> bool:
    """Return True if a cast between dtypes of integers keeps all values; sizes fit any of them."""
    to = np.iinfo(new)
    if old == "bool" or functions.as_index(a, p) is not None:
        return True
    if np.iinfo(old).max <= to.max and (np.iinfo(old).min >= to.min or a.sign(p) > 0):
        return True
    low, high = functions.value_range(a, p)
    if low is None or high is None:
        return False
    return not any(isinstance(n, int) and not to.min <= n <= to.max for n in (low, high))


def _narrows(old: str, new: str) -> bool:
    """Return True if a float dtype has fewer digits or a smaller range than another."""
    wide, narrow = jnp.finfo(old), jnp.finfo(new)
    return narrow.nmant < wide.nmant or narrow.maxexp < wide.maxexp


def _key_of(t: TermGraph, cls: int, node: Node) -> Any:
    """Return a key of an operation that is equal for equal operations."""
    if node.op != op.NATIVE:
        return (node.op, node.attr)
    key, output = node.attr
    if not isinstance(key, int):
        return ("native", key, output)
    eqn = t.program.equations[key].eqn
    if eqn.effects or any(body.consts for body in jax_internals.bodies(eqn)):
        return ("native", key, output)
    return ("native", eqn.primitive.name, str(eqn.params), output)


def _div(a: Calculus, p: Poly, q: Poly) -> Poly:
    return a.mul(p, a.power(q, -1))


def _half(a: Calculus, p: Poly, c: int, q: Poly) -> Poly:
    """Return (p + c·q)/2."""
    return a.scale(HALF, a.add(p, a.scale(c, q)))


def _exp_of_negative(a: Calculus, p: Poly) -> Poly:
    return functions.exp(a, a.scale(-1, p))


def _clamp(a: Calculus, low: Poly, x: Poly, high: Poly) -> Poly:
    inner = reductions.maximum(a, [((), low), ((), x)])
    return reductions.minimum(a, [((), inner), ((), high)])


def _or(a: Calculus, p: Poly, q: Poly) -> Poly:
    return a.sub(a.add(p, q), a.mul(p, q))


_CONDITIONED: dict[str, tuple[tuple[int, str], ...]] = {
    "div": ((1, "nonzero"),),
    "reciprocal": ((0, "nonzero"),),
    "log": ((0, "positive"),),
    "log2": ((0, "positive"),),
    "sqrt": ((0, "nonnegative"),),
    "rsqrt": ((0, "positive"),),
    "integer_pow": (),
    "pow": (),
    "tan": (),
}
_ANY_KIND = frozenset("max min clamp abs".split())
_ROWS: dict[str, Callable[..., Poly]] = {
    "exp": functions.exp,
    "exp2": lambda a, p: functions.exp(a, a.mul(a.prime_log(2), p)),
    "expm1": lambda a, p: a.sub(functions.exp(a, p), ONE),
    "log": functions.log,
    "log1p": lambda a, p: functions.log(a, a.add(ONE, p)),
    "log2": lambda a, p: _div(a, functions.log(a, p), a.prime_log(2)),
    "sqrt": lambda a, p: a.power(p, HALF),
    "rsqrt": lambda a, p: a.power(p, -HALF),
    "reciprocal": lambda a, p: a.power(p, -1),
    "div": _div,
    "pow": functions.pow_of,
    "atan2": functions.angle_of,
    "atan": functions.arctangent,
    "logistic": functions.logistic,
    "tanh": functions.tanh,
    "sinh": lambda a, p: _half(a, functions.exp(a, p), -1, _exp_of_negative(a, p)),
    "cosh": lambda a, p: _half(a, functions.exp(a, p), 1, _exp_of_negative(a, p)),
    "abs": functions.absolute,
    "erfc": lambda a, p: a.sub(ONE, functions.applied(a, "erf", ((), "f"), p)),
    "erf": lambda a, p: functions.applied(a, "erf", ((), "f"), p),
    "max": lambda a, p, q: reductions.maximum(a, [((), p), ((), q)]),
    "min": lambda a, p, q: reductions.minimum(a, [((), p), ((), q)]),
    "clamp": _clamp,
    "conj": functions.conjugate,
    "real": lambda a, p: _half(a, p, 1, functions.conjugate(a, p)),
    "complex": lambda a, p, q: a.add(p, a.mul(a.imaginary(), q)),
    "imag": lambda a, p: a.mul(
        a.power(a.imaginary(), -1), _half(a, p, -1, functions.conjugate(a, p))
    ),
}
_TESTS: dict[str, Callable[..., Poly]] = {
    "gt": lambda a, p, q: functions.positive(a, a.sub(p, q)),
    "lt": lambda a, p, q: functions.positive(a, a.sub(q, p)),
    "ge": lambda a, p, q: a.sub(ONE, functions.positive(a, a.sub(q, p))),
    "le": lambda a, p, q: a.sub(ONE, functions.positive(a, a.sub(p, q))),
}
_LOGIC: dict[str, Callable[..., Poly]] = {
    "and": lambda a, p, q: a.mul(p, q),
    "or": _or,
    "not": lambda a, p: a.sub(ONE, p),
    "xor": lambda a, p, q: a.sub(a.add(p, q), a.scale(2, a.mul(p, q))),
}
