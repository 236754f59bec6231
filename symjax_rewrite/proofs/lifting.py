"""Normal forms of the values of a program, read from its index terms.

Every e-class has a value over names of its own, computed once. May import `ir` and the normal forms
of this folder.
"""

from __future__ import annotations

import cmath
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import from_jax
from symjax_rewrite.ir.term import Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.proofs import functions, reductions
from symjax_rewrite.proofs.arithmetic import Calculus
from symjax_rewrite.proofs.conditions import Condition
from symjax_rewrite.proofs.forms import ONE, Atom, Index, Poly, atom_reads, linear, plain

HALF = Fraction(1, 2)
INTEGER_MAPS = frozenset("floor ceil round sign rem clz population_count".split())

Solve = Callable[["Lifting", int, int, list[int]], Poly | None]


@dataclass(slots=True)
class Lifting:
    """The values of the classes of a term graph.

    solve: returns the value of an output of an equation that is a loop, over some names; None if
    the equation is no loop that was solved. steps: values of the program that are the number of a
    loop's step, with their name. known: by class, a function of its axes that returns its value in
    another way than by its node, or None. values, conditions: by class.
    """

    a: Calculus
    t: TermGraph
    solve: Solve
    steps: dict[int, int] = field(default_factory=dict)
    known: dict[int, Callable[[Lifting, list[Index]], Poly | None]] = field(default_factory=dict)
    values: dict[int, Poly] = field(default_factory=dict)
    names: dict[int, list[int]] = field(default_factory=dict)
    conditions: dict[int, frozenset[Condition]] = field(default_factory=dict)
    _now: list[set[Condition]] = field(default_factory=list)

    def of(self, ref: Ref, at: Sequence[Index]) -> Poly:
        """Return the value of a reference whose axis k reads index expression `at[k]`."""
        p = self.value(ref.cls)
        if self._now:
            self._now[-1] |= self.conditions[ref.cls]
        mine = self.names[ref.cls]
        return self.a.substitute(p, {n: at[i] for n, i in zip(mine, ref.axes, strict=True)})

    def value(self, cls: int) -> Poly:
        """Return the value of a class over `names[cls]`."""
        if cls not in self.values:
            c = self.t.graph.classes[cls]
            names = self.names[cls] = [self.a.table.fresh(s) for s in c.sizes]
            self._now.append(set())
            where, self.a.where = self.a.where, self.t.where(cls)
            at = [plain(n) for n in names]
            made = self.known[cls](self, at) if cls in self.known else None
            made = self._node(cls, c.first, c.dtype, names) if made is None else made
            self.a.where = where
            self.conditions[cls] = frozenset(self._now.pop())
            self.values[cls] = made
        return self.values[cls]

    def require(self, kind: str, p: Poly) -> None:
        """Record a condition under which the program is defined."""
        self._now[-1].add(Condition(kind, p))

    @contextlib.contextmanager
    def apart(self) -> Iterator[set[Condition]]:
        """Collect the conditions of what is read meanwhile, instead of recording them."""
        self._now.append(set())
        yield self._now[-1]
        self._now.pop()

    # ------------------------------------------------------------ nodes

    def _node(self, cls: int, node: Node, dtype: str, names: list[int]) -> Poly:
        a = self.a
        bound = [a.table.fresh(s) for s in node.bound]
        at = [plain(n) for n in (*names, *bound)]
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
                parts = [self._times(c, self.of(r, at), dtype) for c, r in _terms(node)]
                return a.add(*parts)
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
                return self._take(node, at, bound)
            case op.SOLVE:
                return self._linear_solve(node, names, bound)
            case op.MAP:
                operands = [self.of(r, at) for r in node.args]
                kinds = [self.t.graph.classes[r.cls].dtype for r in node.args]
                return self.map(node.attr[0], node.attr[1], operands, kinds, dtype)
        made = self.solve(self, *self.t.made_by[cls], names) if cls in self.t.made_by else None
        return self._opaque(cls, node, dtype, names, bound) if made is None else made

    def _leaf(self, value: int, dtype: str, at: list[Index]) -> Poly:
        if value in self.steps:
            return self.a.index(plain(self.steps[value]))
        return self.a.of(Atom(leaf(self.a, value, dtype, len(at)), tuple(at)))

    def constant(self, value: Any, dtype: str) -> Poly:
        if isinstance(value, complex) or cmath.isfinite(value):
            return self.a.number(value, dtype)
        if value != value:
            return self.a.of(Atom(self.a.table.leaf("nan", None, 0), ()))
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
        return self._interned(f"reduce_{node.attr}", [(bound, p)], a.is_real(p))

    def _slice(self, node: Node, at: list[Index]) -> Poly:
        (arg,) = node.args
        read: list[Index] = []
        for entry, axis in zip(node.attr, arg.axes, strict=True):
            if isinstance(entry, tuple):
                ((name, _),) = at[axis][1]
                read.append(linear(entry[0], [(name, entry[1])]))
            else:
                read.append(at[axis] if entry is None else (entry, ()))
        return self.of(Ref(arg.cls, tuple(range(len(read)))), read)

    def _concat(self, node: Node, at: list[Index]) -> Poly:
        a, (along, sizes) = self.a, node.attr
        here = a.index(at[along])
        ((name, _),) = at[along][1]
        end = sum(sizes, start=0)
        out: Poly | None = None
        for ref, size in reversed(list(zip(node.args, sizes, strict=True))):
            start = end - size
            offset, terms = a.table.size_index(start)
            read = list(at)
            read[along] = linear(-offset, [(name, 1), *((n, -s) for n, s in terms)])
            piece = self.of(ref, read)
            before_end = functions.positive(a, a.sub(a.size(end), here))
            out = piece if out is None else functions.select(a, before_end, piece, out)
            end = start
        assert out is not None
        return out

    def _take(self, node: Node, at: list[Index], bound: list[int]) -> Poly:
        a, (mode, fill, windows) = self.a, node.attr
        chosen = [self.of(r, at) for r in node.args[1:]]
        read = dict(enumerate(at))
        for k, (p, window) in enumerate(zip(chosen, windows, strict=True)):
            index = functions.as_index(a, p)
            if index is not None and window is not None:
                index = linear(index[0], [*index[1], *at[window][1]])
            ends = None if index is None else a.table.index_range(index)
            if index is None or ends is None or not self._inside(ends, bound[k]):
                break
            read[node.out + k] = index
        else:
            return self.of(node.args[0], [read[k] for k in range(len(read))])
        source = self.of(node.args[0], at)
        placed = [a.index(at[w]) for w in windows if w is not None]
        key = ("take", mode, str(fill), tuple(w is not None for w in windows))
        places = [((), p) for p in (*chosen, *placed)]
        if mode == "fill" and str(fill[0]) != "nan":
            return self._interned(key, [(bound, source), *places], a.is_real(source))
        return self._taken(key, source, bound, places)

    def _taken(
        self, key: Any, p: Poly, bound: list[int], places: list[tuple[tuple[()], Poly]]
    ) -> Poly:
        """Return p at chosen indices: a function of inputs at these indices."""
        a, out = self.a, []
        for mono, c in p:
            made = a.constant(c)
            for atom, e in mono:
                form = a.form(atom)
                if not any(atom_reads(atom, n) for n in bound):
                    made = a.mul(made, a.term(1, {atom: e}))
                    continue
                if form.kind in ("leaf", "index", "opaque", "recurrence"):
                    q = self._interned(key, [(bound, a.of(atom)), *places], form.real)
                else:
                    branches = [(n, self._taken(key, q, bound, places)) for n, q in a.opened(atom)]
                    q = a.builders[form.kind](a, form, branches)
                made = a.mul(made, a.power(q, e))
            out.append(made)
        return a.add(*out)

    def _inside(self, ends: tuple[Any, Any], name: int) -> bool:
        facts, size = self.a.facts, self.a.table.sizes[name]
        return facts.nonnegative(ends[0]) and facts.nonnegative(size - 1 - ends[1])

    def _linear_solve(self, node: Node, names: list[int], bound: list[int]) -> Poly:
        a = self.a
        matrix, right = node.args
        at = [plain(n) for n in (*names, *bound)]
        row = bound[0]
        column = next(names[i] for i in matrix.axes if i < node.out)
        r, c = (a.table.fresh(node.bound[0]) for _ in range(2))
        to = {row: plain(r), column: plain(c)}
        entry = a.substitute(self.of(matrix, at), to)
        places = [((), a.index(plain(n))) for n in (column, row)]
        inverse = self._interned("inverse", [([r, c], entry), *places], a.is_real(entry))
        return reductions.total(a, a.mul(inverse, self.of(right, at)), bound)

    def _interned(self, key: Any, operands: Sequence[tuple[Any, Poly]], real: bool) -> Poly:
        facts = {"real": real}
        made = self.a.table.intern("opaque", key, operands, facts, keeps_bound=True)
        return self.a.of(made)

    def _opaque(self, cls: int, node: Node, dtype: str, names: list[int], bound: list[int]) -> Poly:
        """Return an operation without laws: equal only to itself at equal operands."""
        a = self.a
        key, kind = _key_of(self.t, cls, node), dtype_kind(dtype)
        equation = (
            self.t.program.equations[self.t.made_by[cls][0]] if cls in self.t.made_by else None
        )
        if equation is not None and equation.name == "dim_as_value":
            return a.size(from_jax(equation.eqn.params["dim"]))
        at = [plain(n) for n in (*names, *bound)]
        operands: list[tuple[list[int], Poly]] = [([], a.index(plain(n))) for n in names]
        start = node.out
        for ref in node.args:
            mine = bound[min(ref.axes, default=start) - node.out :][: len(ref.axes)]
            operands.append((sorted(mine), self.of(ref, at)))
        facts: dict[str, Any] = {"real": kind != "c", "integer": kind in "iub", "bit": kind == "b"}
        facts["sign"] = 1 if kind in "ub" else 0
        return a.of(a.table.intern("opaque", key, operands, facts, keeps_bound=True))

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
        made = functions.applied(a, name, key, *ps, integer=name in INTEGER_MAPS or kind in "iu")
        return made if dtype_kind(dtype) != "b" else functions.zero(a, a.sub(made, ONE))

    def _require_for(self, name: str, params: Any, ps: list[Poly]) -> None:
        for k, kind in _CONDITIONED[name]:
            self.require(kind, ps[k])
        if name == "integer_pow" and dict(params)["y"] < 0:
            self.require("nonzero", ps[0])
        if name == "pow" and not (len(ps[1]) == 1 and not ps[1][0][0] and ps[1][0][1] == 2):
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
        is_whole = kinds[0] in "iub" and (kinds[1] == "i" or a.sign(p) > 0)
        return p if is_whole else functions.applied(a, "truncate", new, p, integer=True)


def leaf(a: Calculus, value: int, dtype: str, slots: int) -> int:
    """Return the form of an input of the program."""
    kind = dtype_kind(dtype)
    facts = {"real": kind != "c", "integer": kind in "iub", "bit": kind == "b"}
    return a.table.leaf("leaf", value, slots, sign=1 if kind in "ub" else 0, **facts)


def _terms(node: Node) -> list[tuple[Any, Ref]]:
    return list(zip(node.attr, node.args, strict=True))


def _rounds(old: str, new: str, p: Poly) -> bool:
    """Return True if a cast to a float dtype rounds, beyond integers up to 2²⁴."""
    if all(not mono for mono, _ in p):
        return False
    kept = jnp.finfo(new).nmant
    return jnp.finfo(old).nmant > kept if dtype_kind(old) in "fc" else (old != "bool" and kept < 23)


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


def _log1p(a: Calculus, p: Poly) -> Poly:
    return functions.log(a, a.add(ONE, p))


def _exp2(a: Calculus, p: Poly) -> Poly:
    return functions.exp(a, a.mul(a.prime_log(2), p))


def _both(*kinds: str) -> tuple[tuple[int, str], ...]:
    return tuple(enumerate(kinds))


def _half(a: Calculus, c: Fraction, p: Poly, q: Poly) -> Poly:
    return a.scale(HALF, a.add(p, a.scale(c, q)))


def _sinh(a: Calculus, p: Poly) -> Poly:
    up, down = functions.exp(a, p), functions.exp(a, a.scale(-1, p))
    return a.scale(HALF, a.sub(up, down))


def _cosh(a: Calculus, p: Poly) -> Poly:
    up, down = functions.exp(a, p), functions.exp(a, a.scale(-1, p))
    return a.scale(HALF, a.add(up, down))


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
}
_ANY_KIND = frozenset("max min clamp abs".split())
_ROWS: dict[str, Callable[..., Poly]] = {
    "exp": functions.exp,
    "exp2": _exp2,
    "expm1": lambda a, p: a.sub(functions.exp(a, p), ONE),
    "log": functions.log,
    "log1p": _log1p,
    "log2": lambda a, p: _div(a, functions.log(a, p), a.prime_log(2)),
    "sqrt": lambda a, p: a.power(p, HALF),
    "rsqrt": lambda a, p: a.power(p, -HALF),
    "reciprocal": lambda a, p: a.power(p, -1),
    "div": _div,
    "pow": functions.pow_of,
    "logistic": functions.logistic,
    "tanh": functions.tanh,
    "sinh": _sinh,
    "cosh": _cosh,
    "abs": functions.absolute,
    "erfc": lambda a, p: a.sub(ONE, functions.applied(a, "erf", ((), "f"), p)),
    "erf": lambda a, p: functions.applied(a, "erf", ((), "f"), p),
    "max": lambda a, p, q: reductions.maximum(a, [((), p), ((), q)]),
    "min": lambda a, p, q: reductions.minimum(a, [((), p), ((), q)]),
    "clamp": _clamp,
    "conj": functions.conjugate,
    "real": lambda a, p: _half(a, Fraction(1), p, functions.conjugate(a, p)),
    "complex": lambda a, p, q: a.add(p, a.mul(a.imaginary(), q)),
    "imag": lambda a, p: a.mul(
        a.power(a.imaginary(), -1), _half(a, Fraction(-1), p, functions.conjugate(a, p))
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
