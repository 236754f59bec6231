"""Flat programs: a closed jaxpr as a list of equations over numbered values.

Nested `jit` without sharding or donation is inlined, and so are custom_jvp/custom_vjp bodies:
rewrites preserve values, and derivatives are taken of the original program (see `api`). Equations
of literals alone are literals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.indexing_primitives import ROWS
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.literal_folding import FOLDABLE, folded

T = TypeVar("T")
Value = int | jax_internals.Literal  # a numbered value, or a literal


def bits(literal: jax_internals.Literal) -> bytes:
    """Return the bits of a literal's number, with the sign of zero and the payload of NaN."""
    return np.asarray(literal.val).tobytes()


def value_key(v: Value) -> object:
    """Return a key that is equal for values known to be equal."""
    return v if isinstance(v, int) else (bits(v), v.aval)


@dataclass(eq=False, slots=True, init=False)
class Equation:
    """One equation: the JAX equation it came from, and the values it reads and makes.

    name: of its primitive. reads: the numbers of the values it reads, without literals. same_as:
    for an equation that chooses an implementation by platform, the values of one implementation, by
    which the result is analysed; the equation itself is emitted. calls: the calls in whose inlined
    bodies it stands, the outermost first.
    """

    eqn: JaxprEqn
    invals: tuple[Value, ...]
    outvals: tuple[int, ...]
    same_as: tuple[Value, ...] = ()
    calls: tuple[JaxprEqn, ...] = ()
    name: str = field(init=False)
    reads: tuple[int, ...] = field(init=False)

    def __init__(
        self,
        eqn: JaxprEqn,
        invals: tuple[Value, ...],
        outvals: tuple[int, ...],
        same_as: tuple[Value, ...] = (),
        calls: tuple[JaxprEqn, ...] = (),
    ) -> None:
        self.eqn, self.invals, self.outvals = eqn, invals, outvals
        self.same_as, self.calls = same_as, calls
        self.name = eqn.primitive.name
        self.reads = tuple([v for v in invals if type(v) is int])

    def where(self) -> str:
        """Return the user's source line of the equation."""
        return jax_internals.source_line(self.eqn, *reversed(self.calls))


@dataclass(slots=True)
class Program:
    """A flat program: values are numbered; inputs and constants come first.

    saved: values that differ between implementations for several platforms. has_rules: True if
    calls with custom derivatives are not inlined.
    """

    closed: ClosedJaxpr
    avals: list[Any] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    equations: list[Equation] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    has_rules: bool = False
    _found: tuple[list[Equation], int, dict[Any, Any]] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def once(self, find: Callable[[list[Equation]], T]) -> T:
        """Return what a function finds in the equations; again if some were added or replaced."""
        known, equations = self._found, self.equations
        if known is None or known[0] is not equations or known[1] != len(equations):
            known = self._found = (equations, len(equations), {})
        found = known[2]
        if find not in found:
            found[find] = find(equations)
        return found[find]

    def new_value(self, aval: Any) -> int:
        """Return a new value of this aval."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def copy(self) -> Program:
        """Return the same program with shared equations, for changes of its own."""
        lists = {k: [*getattr(self, k)] for k in ("avals", "inputs", "equations", "outputs")}
        return replace(self, consts={**self.consts}, saved={*self.saved}, **lists)


_flattened: ContextVar[dict[tuple, Program] | None] = ContextVar("flat programs", default=None)


@contextlib.contextmanager
def flattening_once() -> Iterator[None]:
    """Number the values of equal jaxprs once in this context: a body is read and then optimised."""
    token = _flattened.set({})
    try:
        yield
    finally:
        _flattened.reset(token)


def flatten(closed: ClosedJaxpr, has_rules: bool = False) -> Program:
    """Number the values of a jaxpr and inline its calls where permitted.

    has_rules: True to keep calls with custom derivatives, for a program that is differentiated.
    """
    known = _flattened.get()
    key = (id(closed.jaxpr), has_rules, *map(id, closed.consts))
    if known is not None and key in known:
        return known[key].copy()
    program = Program(closed, has_rules=has_rules)
    program.inputs = [program.new_value(var.aval) for var in closed.jaxpr.invars]
    program.outputs = inline(program, closed, program.inputs)
    if known is not None:
        known[key] = program.copy()  # it holds the jaxpr, so that no other has its place
    return program


def inline(
    program: Program, closed: ClosedJaxpr, given: Sequence[Value], calls: tuple[JaxprEqn, ...] = ()
) -> list[Value]:
    """Append the equations of a jaxpr to a program, at given values; return its results."""
    jaxpr = closed.jaxpr
    env: dict[Any, Value] = dict(zip(jaxpr.invars, given, strict=True))
    for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
        number = env[var] = program.new_value(var.aval)
        program.consts[number] = const

    literal, avals, keeps = jax_internals.Literal, program.avals, RULED if program.has_rules else ()
    scoped = bool(calls and calls[-1].source_info.name_stack.stack)
    for eqn in jaxpr.eqns:
        if scoped:
            eqn = jax_internals.below(eqn, calls[-1])
        name = eqn.primitive.name
        body = _body(eqn) if name in BODIES else None
        if body is not None and name not in keeps:
            taken = eqn.invars[len(eqn.invars) - len(body.jaxpr.invars) :]
            inner = [a if isinstance(a, literal) else env[a] for a in taken]
            results = inline(program, body, inner, (*calls, eqn))
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        invals = tuple([a if isinstance(a, literal) else env[a] for a in eqn.invars])
        if name in FOLDABLE and type(invals[0]) is not int:
            numbers = [v for v in invals if isinstance(v, literal)]
            number = folded(eqn, numbers) if len(numbers) == len(invals) else None
            if number is not None:
                env[eqn.outvars[0]] = number
                continue
        first = len(avals)
        for var in eqn.outvars:
            env[var] = len(avals)
            avals.append(var.aval)
        outvals = (first,) if len(avals) == first + 1 else tuple(range(first, len(avals)))
        same_as: tuple[Value, ...] = ()
        if name == "cond" and jax_internals.platform_branches(eqn):
            same_as = _one_implementation(program, eqn, invals)
            if len(outvals) > 1:
                program.saved.update(outvals)
        program.equations.append(Equation(eqn, invals, outvals, same_as, calls))
    return [a if isinstance(a, literal) else env[a] for a in jaxpr.outvars]


def append(program: Program, fun: Callable[..., Any], given: Sequence[Value]) -> list[Value]:
    """Append the equations of a function of some values to a program; return its results."""
    avals = [program.avals[v] if isinstance(v, int) else v.aval for v in given]
    return inline(program, jax_internals.make_avals_jaxpr(fun, avals), given)


def _body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the program that may stand in place of a call or a choice by platform, or None."""
    return inlinable_body(eqn) if eqn.primitive.name in CALLS else _only_branch(eqn)


def _only_branch(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the implementation that XLA uses if the others are for kernel compilers, or None."""
    branches = jax_internals.platform_branches(eqn)
    names = eqn.params["branches_platforms"] if branches else ()
    rest = [k for k, name in enumerate(names) if name != ("mosaic",)]
    return branches[rest[0]] if len(rest) == 1 and names[rest[0]] is None else None


def _one_implementation(
    program: Program, eqn: JaxprEqn, invals: tuple[Value, ...]
) -> tuple[Value, ...]:
    """Inline one of the equal implementations for several platforms: one of known operations.

    Implementations that differentiation made are excluded: their residuals differ, and come from
    outside if the backward pass is the body of a loop.
    """
    branches = jax_internals.platform_branches(eqn)
    if len(eqn.outvars) != 1:
        return ()
    stack = str(eqn.source_info.name_stack)
    if "transpose" in stack or any(isinstance(v, int) and v in program.saved for v in invals):
        return ()
    if "jvp" in stack and len({jax_internals.read_inputs(b) for b in branches}) > 1:
        return ()
    default = jax_internals.read_inputs(branches[-1])
    for body in branches:
        extra = zip(invals[1:], jax_internals.read_inputs(body), default, strict=True)
        if any(mine and not its and v in program.inputs for v, mine, its in extra):
            continue
        if body.consts or not all(e.primitive.name in ROWS for e in body.jaxpr.eqns):
            continue
        return tuple(inline(program, body, invals[1:], (eqn,)))
    return ()


RULED = frozenset({"custom_jvp_call", "custom_vjp_call", "sym_call"})
CALLS = RULED | {"jit", jax_internals.CLOSED_CALL}
BODIES = CALLS | {"cond"}


def inlinable_body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the body of a call equation that may be inlined, else None."""
    name = eqn.primitive.name
    if name == "jit":
        is_open = jax_internals.jit_equation_is_plain(eqn) and not jax_internals.is_sealed(eqn)
        return eqn.params["jaxpr"] if is_open else None
    is_call = name in RULED or name == jax_internals.CLOSED_CALL
    return eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr") if is_call else None
