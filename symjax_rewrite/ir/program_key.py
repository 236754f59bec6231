"""Keys of programs: equal programs are optimised once.

Two programs have equal keys if they have the same equations with the same constants (by identity),
in the same order, from the same source lines, under the same settings of JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.jax_internals import ClosedJaxpr, Jaxpr

MOST_BYTES = 1 << 26  # of the constants of a program that is kept: a cache must not hold weights
_PLAIN = (str, int, bool, bytes, type(None), type, np.dtype)


class _Same:
    """An object that equals itself alone; it is kept, so that no other has its identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


class ProgramKey:
    """A key of a program under the present settings of JAX, equal for equal traces.

    The content is read when two keys with one hash are compared, so a program that is traced once
    is not read.
    """

    __slots__ = ("_closed", "_content", "_hash", "_is_read", "_settings")

    def __init__(self, closed: ClosedJaxpr) -> None:
        self._closed, self._settings = closed, jax_internals.trace_settings()
        self._content, self._is_read = None, False
        names = [e.primitive.name for e in closed.jaxpr.eqns]
        self._hash = hash((*map(jax_internals.kind_of, closed.in_avals), *names))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, ProgramKey) or self._hash != other._hash:
            return self is other
        mine = self.content()
        return mine is not None and mine == other.content()

    def content(self) -> Hashable | None:
        """Return the settings and equations; None if a parameter of an equation has no hash."""
        if not self._is_read:
            content = (self._settings, _KeyBuilder().closed(self._closed))
            self._is_read = True
            with contextlib.suppress(TypeError):
                hash(content)
                self._content = content
        return self._content


def program_key(closed: ClosedJaxpr) -> ProgramKey | None:
    """Return a key that is equal for equal traces of a program; None if it must not be kept."""
    if jax_internals.checks_leaks() or any(map(jax_internals.is_tracer, closed.consts)):
        return None
    if sum(getattr(x, "nbytes", 0) for x in closed.consts) > MOST_BYTES:
        return None
    return ProgramKey(closed)


def _is_scalar(x: Any) -> bool:
    """Return True for a literal that holds its number as an array."""
    is_array = hasattr(type(x), "__array__") and not isinstance(x, jax.Array)
    return is_array and getattr(x, "shape", None) == ()


class _KeyBuilder:
    """Builds the key of one program; a jaxpr that occurs again is read as its number."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}  # by id

    def closed(self, closed: ClosedJaxpr) -> Hashable:
        return (self.jaxpr(closed.jaxpr), *map(_Same, closed.consts))

    def jaxpr(self, jaxpr: Jaxpr) -> Hashable:
        """Return the equations with variables by number, and their source lines."""
        first = len(self.seen)
        if (place := self.seen.setdefault(id(jaxpr), first)) != first:
            return place
        number = {v: n for n, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}

        def atom(v: Any) -> Hashable:
            return (v.aval, self.value(v.val)) if jax_internals.is_literal(v) else number[v]

        rows: list[Hashable] = [*[v.aval for v in number], len(jaxpr.constvars)]
        for e in jaxpr.eqns:
            reads = tuple([atom(v) for v in e.invars])
            for v in e.outvars:
                number[v] = len(number)
            made = tuple([v.aval for v in e.outvars])
            params = tuple([(name, self.value(x)) for name, x in e.params.items()])
            where = (e.ctx, jax_internals.source_key(e))
            rows.append((e.primitive, reads, made, params, frozenset(e.effects), where))
        return (*rows, tuple([atom(v) for v in jaxpr.outvars]))

    def value(self, x: Any) -> Hashable:
        """Return a key of a literal or parameter: numbers bit by bit, arrays by identity."""
        kind = type(x)
        if kind in _PLAIN:
            return kind, x
        if kind in (tuple, list):
            return kind, *[self.value(y) for y in x]
        if isinstance(x, ClosedJaxpr):
            return self.closed(x)
        if isinstance(x, Jaxpr):
            return self.jaxpr(x)
        if isinstance(x, (float, complex, np.generic)) or _is_scalar(x):
            number = np.asarray(x)
            return kind, number.dtype, number.tobytes()
        if kind is dict:
            return kind, *[(self.value(k), self.value(y)) for k, y in x.items()]
        if hasattr(x, "dtype") and hasattr(x, "shape"):
            return _Same(x)
        return kind, x
