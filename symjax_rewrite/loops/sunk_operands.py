"""Operands of loops and of remat that a step can compute itself.

JAX moves loop-invariant values out of the loops that it differentiates, and users compute masks
before a loop. The body then reads an array of all pairs, which may have been a causal mask. Such an
array is computed in the body again, from its own operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.dataflow import makers_of, numbers, postorder
from symjax_rewrite.ir.flat_program import Equation, Program, Value
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.loops.loop import get, run_equations, scanned
from symjax_rewrite.loops.program_partition import FUSED

LEAST_RATIO = 8  # bytes of an operand per byte that it is made of
MAX_DEPTH = 40  # equations followed in a row


class Sinkable:
    """The values of a program that can be computed from far fewer bytes, without functions."""

    def __init__(self, program: Program, least_bytes: float) -> None:
        self.program, self.least_bytes = program, least_bytes
        self.costs: dict[int, float] = {}

    @functools.cached_property
    def makers(self) -> dict[int, Equation]:
        """Return the equation that makes each value."""
        return self.program.once(makers_of)

    def _bytes(self, v: int) -> float:
        return aval_bytes(self.program.avals[v])

    def _maker(self, v: int) -> Equation | None:
        e = self.makers.get(v)
        return e if e is not None and e.name in FUSED and not e.eqn.effects else None

    def _cost(self, v: int, depth: int = 0) -> float:
        """Return the fewest bytes from which a value can be computed."""
        if v not in self.costs:
            e = self._maker(v) if depth < MAX_DEPTH else None
            made = float("inf")
            if e is not None:
                made = sum(self._cost(u, depth + 1) for u in dict.fromkeys(e.reads))
            self.costs[v] = min(self._bytes(v), made)
        return self.costs[v]

    def has(self, v: Value) -> bool:
        """Return True if a value is large, and made of little."""
        if not isinstance(v, int) or self._maker(v) is None:
            return False
        size = self._bytes(v)
        return size >= max(self.least_bytes, 1) and LEAST_RATIO * self._cost(v) <= size

    def making(self, values: Sequence[int]) -> tuple[list[int], list[Equation]]:
        """Return the values of which some values are made, and the equations, in order."""

        def operands(v: int) -> list[int]:
            e = self._maker(v)
            return numbers(e.reads) if e is not None and self._cost(v) < self._bytes(v) else []

        made_here = [v for v in postorder(values, operands) if self._cost(v) < self._bytes(v)]
        equations = list(dict.fromkeys(self.makers[v] for v in made_here))
        made = {v for e in equations for v in e.outvals}
        leaves = dict.fromkeys(v for e in equations for v in e.reads if v not in made)
        return list(leaves), equations


def with_sunk_operands(e: Equation, sinkable: Sinkable) -> Equation | None:
    """Return a scan or remat that computes some of its operands itself, or None if it has none."""
    is_scan = e.name == "scan"
    if not is_scan and e.name != jax_internals.REMAT:
        return None
    fixed, count = jax_internals.scan_counts(e.eqn) if is_scan else (len(e.invals), 0)
    sunk = {v for v in numbers(e.invals[:fixed]) if sinkable.has(v)}
    if not sunk:
        return None
    leaves, equations = sinkable.making(sorted(sunk))
    moving = numbers(e.invals[fixed:])
    given = tuple(dict.fromkeys([*leaves, *(v for v in e.reads if v not in sunk), *moving]))

    def body(arrays: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        env = dict(zip(given, arrays, strict=True))
        run_equations(equations, env)
        known = [get(env, v) for v in e.invals[:fixed]]
        return jax_internals.eval_jaxpr(_body(e), *known, *moved)

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(given, arrays, strict=True))
        if not is_scan:
            return _remat(e, lambda *inside: body(inside, ()), arrays)

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = body(arrays, [*carry, *xs])
            return outs[:count], outs[count:]

        args = [get(env, v) for v in e.invals[fixed:]]
        return scanned(e, step, args[:count], args[count:])

    closed = jax_internals.make_avals_jaxpr(run, [sinkable.program.avals[v] for v in given])
    return _one_equation(closed, given, e)


def _body(e: Equation) -> ClosedJaxpr:
    (spot,) = jax_internals.optimisable_bodies(e.eqn)
    return spot.body


def _remat(e: Equation, body: Callable[..., list[Any]], args: Sequence[Any]) -> list[Any]:
    """Run a remat with another body."""
    closed = jax_internals.make_avals_jaxpr(body, [jax.typeof(x) for x in args])
    params = {**e.eqn.params, "jaxpr": closed.jaxpr}
    return jax_internals.eval_equation(e.eqn, args, params)


def _one_equation(closed: ClosedJaxpr, given: Sequence[int], e: Equation) -> Equation | None:
    """Return a program of one equation at given values; None if it has other equations."""
    jaxpr = closed.jaxpr
    if len(jaxpr.eqns) != 1 or closed.consts or jaxpr.outvars != jaxpr.eqns[0].outvars:
        return None
    (eqn,), place = jaxpr.eqns, dict(zip(jaxpr.invars, given, strict=True))
    read = [v if jax_internals.is_literal(v) else place[v] for v in eqn.invars]
    return Equation(eqn, tuple(read), e.outvals, calls=e.calls)
