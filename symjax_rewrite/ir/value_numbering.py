"""Global value numbering: equal numbers for values that are computed in the same way.

Two results of loops get one number if the slices of the loops that compute them are the same
equations, regardless of the other values of the loops. Carries are named in the order in which a
slice reads them, so that a program that JAX derives again can be recognised in a larger program.

    a = sin(x); b = sin(y) with y = x  →  a and b have one number
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.dataflow import makers_of, numbers, postorder
from symjax_rewrite.ir.flat_program import Equation, Program, Value, bits, flatten

LARGEST_CONSTANT = 1 << 12  # bytes of a constant that is compared by its contents


class ValueNumbers:
    """Numbers of values of one or several programs."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._depth = 0

    def named(self, *key: Hashable) -> int:
        """Return the number of a key, a new one for a new key."""
        return self._known.setdefault(key, len(self._known))

    def of(self, program: Program, inputs: Sequence[int]) -> dict[int, int]:
        """Return the number of every value of a program, given those of its inputs."""
        env = dict(zip(program.inputs, inputs, strict=True))
        env.update((v, self._constant(x)) for v, x in program.consts.items())
        for e in program.equations:
            self._run(e, env)
        return env

    def read(self, v: Value, env: dict[int, int]) -> int:
        """Return the number of a value or a literal."""
        if isinstance(v, int):
            return env[v]
        return self.named("literal", bits(v), jax_internals.kind_of(v.aval))

    def _constant(self, x: Any) -> int:
        if not isinstance(x, (np.ndarray, np.generic)) or x.nbytes > LARGEST_CONSTANT:
            return self.named("object", id(x))
        return self.named("constant", x.tobytes(), str(x.dtype), x.shape)

    def _run(self, e: Equation, env: dict[int, int]) -> None:
        args = tuple([self.read(v, env) for v in e.invals])
        if e.eqn.effects:
            keys: list[tuple] = [("effect", id(e), k) for k in range(len(e.outvals))]
        elif e.name == "scan":
            keys = _Slices(self, e, args).keys()
        else:
            params = tuple((k, _comparable(x)) for k, x in sorted(e.eqn.params.items()))
            avals = [jax_internals.kind_of(v.aval) for v in e.eqn.outvars]
            keys = [(e.name, params, args, k, aval) for k, aval in enumerate(avals)]
        env.update((v, self.named(*key)) for v, key in zip(e.outvals, keys, strict=True))

    def _within(self) -> int:
        """Return the depth of a loop, by which the names of its carries differ from others'."""
        self._depth += 1
        return self._depth


class _Slices:
    """The results of one loop, each as the slice of the loop that computes it."""

    def __init__(self, numbering: ValueNumbers, e: Equation, args: Sequence[int]) -> None:
        self.all, self.params, self.args = numbering, e.eqn.params, args
        self.body = flatten(self.params["jaxpr"])
        self.makers = makers_of(self.body.equations)
        self.consts, self.carries = jax_internals.scan_counts(e.eqn)

    def keys(self) -> list[tuple]:
        """Return the key of every result."""
        self.depth = self.all._within()
        found = [self._key(k) for k in range(len(self.body.outputs))]
        self.all._depth -= 1
        return found

    def _key(self, k: int) -> tuple:
        first, last = self.consts, self.consts + self.carries
        carried = {v: n for n, v in enumerate(self.body.inputs[first:last])}
        env = dict(zip(self.body.inputs[:first], self.args[:first], strict=True))
        for v, arg in zip(self.body.inputs[last:], self.args[last:], strict=True):
            env[v] = self.all.named("entry", arg, self.depth)
        env.update((v, self.all._constant(x)) for v, x in self.body.consts.items())
        order = [k] if k < self.carries else []
        env.update((self.body.inputs[first + c], self._carry(n)) for n, c in enumerate(order))
        root = None if order else self._term(self.body.outputs[k], env, carried, order)
        updates: list[tuple] = []
        while len(updates) < len(order):
            c = order[len(updates)]
            made = self._term(self.body.outputs[c], env, carried, order)
            updates.append((self.args[first + c], made))
        return "scan", self.params["length"], self.params["reverse"], root, tuple(updates)

    def _carry(self, number: int) -> int:
        return self.all.named("carry", self.depth, number)

    def _term(
        self, root: Value, env: dict[int, int], carried: dict[int, int], order: list[int]
    ) -> int:
        """Return the number of a value of a step; append the carries that it is first to read."""
        operands = lambda v: numbers(self.makers[v].invals) if v in self.makers else []  # noqa: E731
        for v in postorder(numbers([root]), operands, env):
            if v in carried:
                env[v] = self._carry(len(order))
                order.append(carried[v])
            elif v not in env:
                self.all._run(self.makers[v], env)
        return self.all.read(root, env)


def _comparable(x: Any) -> Hashable:
    """Return a parameter of an equation in a form that compares by contents."""
    if hasattr(x, "jaxpr") or hasattr(x, "eqns"):
        return str(x), tuple(id(c) for c in getattr(x, "consts", ()))
    if isinstance(x, (tuple, list)):
        return tuple([_comparable(y) for y in x])
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return x
