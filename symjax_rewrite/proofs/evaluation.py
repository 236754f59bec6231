"""Values of normal forms, by which every application of a law is checked at random inputs.

    exp(x[i]) at i = 0, 2, 4  →  [1.6, 0.2, 3.1], for the x that was drawn

Operations without laws are uninterpreted functions: a law that holds for every function holds for
the function that this module chooses.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from symjax_rewrite.ir.sizes import value
from symjax_rewrite.proofs.algebra.arithmetic import Calculus, Law
from symjax_rewrite.proofs.algebra.forms import Atom, Form, Index, Poly, names_of
from symjax_rewrite.proofs.algebra.functions import EVEN, ODD

MOST_ELEMENTS = 1 << 21  # of an array over indices
POINTS = 5  # values tried of each index of a law
MOST_STEPS = 64  # of a loop that is run
TOLERANCE = 1e-7

Env = dict[int, np.ndarray]
Bound = Sequence[tuple[int, int]]  # names and their sizes
Operands = Sequence[tuple[Bound, Poly]]


class TooLargeError(Exception):
    """A law at these sizes needs too large arrays (internal)."""


@dataclass(slots=True)
class Evaluation:
    """Values of normal forms at one choice of sizes and inputs.

    shapes: of inputs and of the carries of loops, by number. dims: the named sizes. inputs: arrays
    by number; those not given are drawn. carried: the carries of the iterations that are at work,
    by form: their own axes in reverse, then those of the indices around.
    """

    a: Calculus
    shapes: Callable[[int], tuple[int, ...]]
    dims: Mapping[str, int]
    draw: np.random.Generator
    inputs: dict[int, np.ndarray] = field(default_factory=dict)
    carried: dict[int, np.ndarray] = field(default_factory=dict)

    def size(self, dim: Any) -> int:
        """Return a size as a number."""
        return int(value(dim, self.dims))

    def poly(self, p: Poly, env: Env, depth: int) -> np.ndarray:
        """Return a polynomial at index arrays of `depth` axes; where a test is 0, a term is 0."""
        out: Any = np.zeros(())
        for mono, c in p:
            term: Any = np.float64(c)
            guard: Any = 1
            for atom, e in mono:
                base = self.atom(atom, env, depth)
                term = term * (base if e == 1 else self._power(base, e))
                guard = guard * base if self.a.form(atom).bit and e > 0 else guard
            out = out + (term if isinstance(guard, int) else np.where(guard == 0, 0.0, term))
        return out

    def _power(self, base: np.ndarray, e: Any) -> np.ndarray:
        return base ** (int(e) if e == int(e) and e > 0 else float(e))

    def atom(self, atom: Atom, env: Env, depth: int) -> np.ndarray:
        """Return an atom at index arrays."""
        form = self.a.form(atom)
        match form.kind:
            case "leaf":
                at = tuple(self.index(i, env) for i in atom.at)
                return self._clipped(self._leaf(form), at)
            case "carry":
                return self._carry(atom.form, [self.index(i, env) for i in atom.at])
            case "index":
                return self.index(atom.at[0], env).astype(np.float64)
            case "size":
                return np.asarray(self.dims[form.attr])
            case "prime":
                return np.asarray(float(form.attr))
            case "symbol":
                name = form.attr
                return np.asarray(math.pi if name == "pi" else math.log(int(name[4:])))
            case "imaginary":
                return np.asarray(1j)
            case "infinity" | "nan":
                return np.asarray(np.inf if form.kind == "infinity" else 0.37)
        mine = {k: self.index(i, env) for k, i in enumerate(atom.at)}
        operands = []
        for codes, p in form.branches:
            sizes = [self.size(self.a.table.dim(code)) for code in codes]
            operands.append((list(enumerate(sizes, form.slots)), p))
        out = self.applied(form.kind, form.attr, operands, mine, depth)
        return self._typed(form, np.real(out)) if form.kind == "opaque" and form.integer else out

    def _typed(self, form: Form, out: np.ndarray) -> np.ndarray:
        """Return numbers as bits or integers of a form, within its bounds."""
        if form.bit:
            return (out > 0).astype(np.float64)
        whole = np.abs(np.rint(2 * out)) if form.sign else np.rint(2 * out)
        return whole if form.most is None else np.minimum(whole, self.size(form.most))

    def index(self, index: Index, env: Env) -> np.ndarray:
        """Return the values of an index expression."""
        out: Any = np.int64(index[0])
        for name, stride in index[1]:
            if name < 0:
                sizes = self.a.table.monomials[-1 - name]
                out = out + stride * math.prod(self.dims[n] ** e for n, e in sizes)
            else:
                out = out + stride * env[name]
        return np.asarray(out)

    def _leaf(self, form: Form) -> np.ndarray:
        if form.attr not in self.inputs:
            self.inputs[form.attr] = self._drawn(form, self.shapes(form.attr))
        return self.inputs[form.attr]

    def _drawn(self, form: Form, shape: tuple[int, ...]) -> np.ndarray:
        if form.bit or form.integer:
            return self.draw.integers(0, 2 if form.bit else 4, shape).astype(np.float64)
        out = self.draw.normal(size=shape)
        return out if form.real else out + 1j * self.draw.normal(size=shape)

    def _clipped(self, array: np.ndarray, at: tuple[np.ndarray, ...]) -> np.ndarray:
        """Return entries; out of range the nearest, as such entries are multiplied by zero."""
        inside = [np.clip(i, 0, max(n - 1, 0)) for i, n in zip(at, array.shape, strict=True)]
        return array[tuple(inside)] if at else array

    # ------------------------------------------------------------ operations

    def applied(self, kind: str, attr: Any, operands: Operands, env: Env, depth: int) -> np.ndarray:
        """Return an operation at its operands."""
        if kind == "sum":
            return self._over(operands[0], env, depth, lambda x: np.sum(x, axis=0))
        if kind == "max":
            return self._maximum(operands, env, depth)
        if kind == "argmax":
            return np.argmax(self._table(operands[0], env, depth), axis=0)
        if kind in ("sorted", "order"):
            return self._ordered(kind, operands, env, depth)
        if kind == "recurrence":
            return self._recurrence(operands, env, depth)
        if kind == "iteration":
            return self._iteration(attr, operands, env, depth)
        if kind == "take":
            (names, p), *places = operands
            chosen = [np.rint(self.poly(q, env, depth)).astype(int) for _, q in places]
            inside = {n: np.clip(i, 0, k - 1) for (n, k), i in zip(names, chosen, strict=True)}
            return self.poly(p, {**env, **inside}, depth)
        if kind == "square":
            return self.applied("map", attr, operands, env, depth) ** 2
        if kind in _INTERPRETED or kind == "map":
            values = [self.poly(p, env, depth) for _, p in operands]
            return self._function(kind, attr, values)
        return self._uninterpreted(f"{kind}{attr}", operands, env, depth)

    def _function(self, kind: str, attr: Any, values: list[np.ndarray]) -> np.ndarray:
        if kind == "power":
            return self._power(np.asarray(values[0]), 1 if attr is None else attr)
        if kind != "map":
            return _INTERPRETED[kind](*values)
        name, x = attr[0], values[0] if values else np.zeros(())
        if name in _NUMPY:
            return _NUMPY[name](*values)
        weight = _weight(str(attr))
        if name in ODD | EVEN:
            return np.sin(weight * x) if name in ODD else np.cos(weight * x)
        total = sum((weight + k) * v for k, v in enumerate(values))
        return np.cos(np.asarray(total) + weight)

    def _bound(self, names: Bound, env: Env, depth: int) -> tuple[Env, int]:
        """Return index arrays in which each bound name has an axis of its own, in front."""
        if math.prod(size for _, size in names) > MOST_ELEMENTS:
            raise TooLargeError
        out = dict(env)
        for n, size in names:
            out[n] = np.arange(size).reshape((size, *[1] * depth))
            depth += 1
        return out, depth

    def _table(self, operand: tuple[Bound, Poly], env: Env, depth: int) -> np.ndarray:
        """Return a polynomial with its bound names as leading axes, the last one first."""
        names, p = operand
        inner, deep = self._bound(names, env, depth)
        out = self.poly(p, inner, deep)
        lead = (*[size for _, size in reversed(names)], *[1] * depth)
        shape = np.broadcast_shapes(np.shape(out), lead)
        if math.prod(shape) > 8 * MOST_ELEMENTS:
            raise TooLargeError
        return np.broadcast_to(out, shape)

    def _over(
        self, operand: tuple[Bound, Poly], env: Env, depth: int,
        reduce: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:  # fmt: skip
        out = self._table(operand, env, depth)
        for _ in operand[0]:
            out = reduce(out)
        return out

    def _maximum(self, operands: Operands, env: Env, depth: int) -> np.ndarray:
        parts = [self._over(o, env, depth, lambda x: np.max(x, axis=0)) for o in operands]
        return functools.reduce(np.maximum, parts)

    def _ordered(self, kind: str, operands: Operands, env: Env, depth: int) -> np.ndarray:
        """Return an entry of sorted values, or its place before they are sorted."""
        table, at = self._table(operands[0], env, depth), self.poly(operands[1][1], env, depth)
        if kind == "sorted":
            made = np.sort(table, axis=0)
        else:
            made = np.argsort(table, axis=0, kind="stable")
        shape = np.broadcast_shapes(made.shape[1:], np.shape(at))
        chosen = np.broadcast_to(np.clip(np.rint(at).astype(int), 0, len(made) - 1), shape)
        whole = np.broadcast_to(made.reshape((len(made), *made.shape[1:])), (len(made), *shape))
        return np.take_along_axis(whole, chosen[None], axis=0)[0]

    def _recurrence(self, operands: Operands, env: Env, depth: int) -> np.ndarray:
        (_, start), (_, place) = operands[2:]
        steps = operands[0][0][0][1]
        at = self.poly(place, env, depth)
        h = self.poly(start, env, depth)
        out = np.where(at == 0, h, 0)
        for k in range(steps):
            factor, shift = (
                self.poly(p, {**env, names[0][0]: np.asarray(k)}, depth)
                for names, p in operands[:2]
            )
            h = factor * h + shift
            out = np.where(at == k + 1, h, out)
        return out

    def _iteration(self, attr: Any, operands: Operands, env: Env, depth: int) -> np.ndarray:
        """Return carries at a step and indices, after as many steps as the loop has at most."""
        _, which, carries = attr
        count = 2 * len(carries)
        time, *at = [self.poly(p, env, depth) for _, p in operands[count:]]
        length = operands[1][0][0][1]
        if length > MOST_STEPS:
            raise TooLargeError
        state = [self._table(start, env, depth) for start in operands[:count:2]]
        before, out = dict(self.carried), np.zeros(())
        for step in range(length + 1):
            self.carried |= zip(carries, state, strict=True)
            here = self._carry(carries[which], [np.rint(i).astype(int) for i in at])
            out = np.where(time == step, here, out)
            if step < length:
                state = [
                    self._table((names[1:], p), {**env, names[0][0]: np.asarray(step)}, depth)
                    for names, p in operands[1:count:2]
                ]
        self.carried = before
        return out

    def _carry(self, form: int, at: Sequence[np.ndarray]) -> np.ndarray:
        """Return a carry at indices; outside the iteration, of a fixed pseudo-random value."""
        array = self.carried.get(form)
        if array is None:
            facts = self.a.table.forms[form]
            out = np.cos(1.0 + form + sum((1.3 + k) * i for k, i in enumerate(at)))
            return self._typed(facts, out) if facts.integer else out
        around = array.shape[len(at) :]
        grid = [
            np.arange(n).reshape((n, *[1] * (len(around) - 1 - k))) for k, n in enumerate(around)
        ]
        inside = [np.clip(i, 0, n - 1) for i, n in zip(reversed(at), array.shape, strict=False)]
        return array[(*inside, *grid)]

    def _uninterpreted(self, key: str, operands: Operands, env: Env, depth: int) -> np.ndarray:
        """Return a fixed pseudo-random function of all entries of the operands."""
        weight, total = _weight(key), np.zeros(())
        for k, (names, p) in enumerate(operands):
            inner, deep = self._bound(names, env, depth)
            out = self.poly(p, inner, deep)
            for j, (n, _) in enumerate(names):
                out = out * np.cos(weight + j + inner[n])
            for _ in names:
                out = np.sum(out, axis=0) if np.ndim(out) else out
            total = total + (weight + k) * np.nan_to_num(np.asarray(out), posinf=9.0, neginf=-9.0)
        return total


def _weight(key: str) -> float:
    return 0.5 + (zlib.crc32(key.encode()) % 1000) / 1000


_INTERPRETED: dict[str, Callable[..., Any]] = {
    "power": lambda x: x,
    "exp": np.exp,
    "log": np.log,
    "abs": np.abs,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "positive": lambda x: (np.real(x) > 0).astype(np.float64),
    "zero": lambda x: (np.abs(x) <= 1e-12).astype(np.float64),
    "mask": lambda c: np.where(c != 0, 0.0, -np.inf),
    "mul": np.multiply,
    "add": np.add,
    "select": lambda test, yes, no: np.where(test != 0, yes, no),
    "same": lambda x: x,
}
_NUMPY: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (np.sin, np.cos, np.tan, np.tanh, np.floor, np.ceil, np.sign)},
    "erf": np.vectorize(math.erf, otypes=[float]),
    "conj": np.conj,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "pow": lambda x, e: np.power(np.asarray(x, np.result_type(x, np.float64)), e),
    "is_number": lambda x: np.ones(np.shape(x)),
}


# ---------------------------------------------------------------- laws


def law_error(law: Law, evaluation: Evaluation) -> float | None:
    """Return the largest relative difference of the sides of a law; None if it has no value here.

    Raises:
        TooLargeError: the sizes are too large.
    """
    read = [n for names, p in law.before.operands for n in names_of(p) if n not in names]
    env, depth = sampled(evaluation, list(dict.fromkeys([*read, *names_of(law.after)])))
    sizes = evaluation.a.table.sizes
    operands = [
        ([(n, evaluation.size(sizes[n])) for n in names], p) for names, p in law.before.operands
    ]
    with np.errstate(all="ignore"):
        left = evaluation.applied(law.before.name, law.before.attr, operands, env, depth)
        right = evaluation.poly(law.after, env, depth)
        return relative_difference(left, right)


def sampled(evaluation: Evaluation, names: Sequence[int]) -> tuple[Env, int]:
    """Return some values of each index, each along an axis of its own."""
    env: Env = {}
    depth = 0
    for n in names:
        size = evaluation.size(evaluation.a.table.sizes[n])
        values = np.arange(size)
        if size > POINTS:
            values = np.sort(evaluation.draw.choice(size, POINTS, replace=False))
        env[n] = values.reshape((len(values), *[1] * depth))
        depth += 1
    return env, depth


def relative_difference(left: np.ndarray, right: np.ndarray) -> float | None:
    """Return the largest difference where the left side is finite, relative to its size."""
    left, right = np.broadcast_arrays(left, right)
    finite = np.isfinite(left)
    if not finite.any():
        return None
    x, y = left[finite], right[finite]
    if not np.isfinite(y).all():
        return math.inf
    size = max(1.0, float(np.max(np.abs(x))))
    return float(np.max(np.abs(x - y))) / size
