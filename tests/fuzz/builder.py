"""A random program being written, line by line.

Operands of a wanted shape are taken from what is there or become new inputs. Shapes of results
come from JAX itself, so whoever writes a line need not know its promotion rules; a line that JAX
refuses is not written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from tests.fuzz.programs import Input, Node, Program, Step

FLOAT = ("float32", "bfloat16", "float16")
MAX_ELEMENTS = 1 << 17


class TooLargeError(Exception):
    """An operand would be too large to compute with in milliseconds."""


class Chooser(Protocol):
    """The source of decisions: `random.Random` or Hypothesis."""

    def integer(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        ...

    def choice(self, options: Sequence[Any]) -> Any:
        """One of the options."""
        ...


class RandomChooser:
    """Decisions of a `random.Random`."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def choice(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options)


REFUSALS = (TypeError, ValueError, IndexError, ZeroDivisionError, NotImplementedError)
NO_ARRAY = AttributeError  # the sum of no parts is Python's 0, which has no methods

_shapes: dict[tuple, tuple | None] = {}


def result_of(text: str, avals: tuple, bodies: tuple[Program, ...]) -> tuple | None:
    """Shape, dtype and weak type of a line's value; None where JAX refuses it."""
    key = (text, avals, bodies)
    if key not in _shapes:
        space: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax}
        names = {f"body{k}": f"body{k}" for k in range(len(bodies))}
        for k, body in enumerate(bodies):
            exec(body.source(f"body{k}"), space)
        args = [f"a{k}" for k in range(len(avals))]
        line = text.format(*args, **names)
        fun = eval(f"lambda {', '.join(args)}: {line}", space)
        specs = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals]
        try:
            out = jax.make_jaxpr(fun)(*specs).out_avals
        except (*REFUSALS, NO_ARRAY):
            out = []
        good = len(out) == 1 and out[0].size <= MAX_ELEMENTS
        _shapes[key] = (tuple(out[0].shape), str(out[0].dtype), out[0].weak_type) if good else None
    return _shapes[key]


class Builder:
    """A program being written."""

    def __init__(
        self,
        r: Chooser,
        sizes: Sequence[int],
        dtype: str,
        depth: int = 0,
        special: bool = False,
    ) -> None:
        self.r, self.sizes, self.dtype, self.depth = r, sizes, dtype, depth
        self.special = special
        self.nodes: list[Node] = []
        self.weak: list[bool] = []

    def chance(self, percent: int) -> bool:
        """True in that many of a hundred cases."""
        return self.r.integer(0, 99) >= 100 - percent

    @property
    def integral(self) -> bool:
        """True if the program's own dtype is an integer type."""
        return self.dtype.startswith(("int", "uint"))

    def size(self) -> int:
        """One of the program's sizes."""
        return self.r.choice(self.sizes)

    def new(self, shape: Sequence[int], dtype: str | None = None, kind: str | None = None) -> int:
        """A new input."""
        dtype = dtype or self.dtype
        if math.prod(shape) > MAX_ELEMENTS:
            raise TooLargeError
        if kind is None and dtype in FLOAT:
            kinds = ("normal", "normal", "normal", "ints", "positive", "offset", "small")
            kind = self.r.choice((*kinds, "special", "special") if self.special else kinds)
        self.nodes.append(Input(tuple(shape), dtype, kind or "normal"))
        self.weak.append(kind == "python")
        return len(self.nodes) - 1

    def having(self, test: Callable[[Node], bool]) -> list[int]:
        """Values that pass a test, the latest first."""
        return [k for k in range(len(self.nodes) - 1, -1, -1) if test(self.nodes[k])]

    def get(self, shape: Sequence[int], dtype: str | None = None, fresh: int = 35) -> int:
        """A value of this shape and dtype, new in `fresh` of a hundred cases."""
        want = (tuple(shape), dtype or self.dtype)
        found = self.having(lambda n: (n.shape, n.dtype) == want)
        if not found or self.chance(fresh):
            return self.new(*want)
        return self.r.choice(found)

    def ranked(self, low: int, high: int, dtype: str | None = None) -> int:
        """A value with a rank in this range; recent ones are likelier."""
        dtype = dtype or self.dtype
        found = self.having(lambda n: low <= len(n.shape) <= high and n.dtype == dtype)
        if not found or self.chance(15):
            return self.new([self.size() for _ in range(self.r.integer(low, high))], dtype)
        return found[0] if self.chance(50) else self.r.choice(found)

    def step(self, text: str, *args: int, bodies: tuple[Program, ...] = ()) -> int:
        """A line; the first operand where JAX refuses it."""
        avals = tuple((self.nodes[a].shape, self.nodes[a].dtype, self.weak[a]) for a in args)
        got = result_of(text, avals, bodies)
        if got is None:
            return args[0] if args else self.new(())
        self.nodes.append(Step(text, args, got[0], got[1], bodies))
        self.weak.append(got[2])
        return len(self.nodes) - 1

    def shape(self, k: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self.nodes[k].shape

    def number(self) -> str:
        """A factor, as it is written."""
        if self.integral:
            return self.r.choice(("2", "-1", "3", "0", "1", "-2", "1000003"))
        return self.r.choice(
            ("2.0", "-1.0", "0.5", "3", "(1 / 3)", "0.0", "1.0", "-0.25", "1e-3", "100.0",
             "jnp.float32(2.5)")
        )  # fmt: skip
