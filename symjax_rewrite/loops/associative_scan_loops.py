"""Conversion of differentiated trees of affine steps into a forward loop and backward loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.dataflow import making
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.loops.associative_scan_detection import is_reversal, reversal
from symjax_rewrite.loops.associative_scan_gradients import Cotangents, Differentiated
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import Read
from symjax_rewrite.loops.stepwise_equations import stepped_result


class LoopPart(NamedTuple):
    """A replacement of some values: the values it reads, the values it computes, and how."""

    reads: list[int]
    makes: list[int]
    run: Callable[[Read], list[Any]]


def as_loops(
    around: Surroundings, found: list[Differentiated]
) -> Iterator[tuple[Differentiated, LoopPart]]:
    """Convert trees to loops.

    Values that read the states and that no cotangent needs are computed in the backward loop, which
    has the states as operands. The forward loop then need not store the states for them.
    """
    before = making(around.program.equations, [c.given for d in found for c in d.back])
    for d in found:
        yield from ((d, part) for part in _Loops(around, d, set(before)).parts())


class _Loops:
    """The loops of one tree.

    backwards: True if the tree is between two reversals, so that its first step is the last entry.
    states: the value of the states before every step, if the backward loops need it.
    """

    def __init__(self, around: Surroundings, d: Differentiated, before: set[Equation]) -> None:
        self.around, self.d, self.prefix = around, d, d.prefix
        self.program = around.program
        self.layouts = dict.fromkeys(
            (d.prefix.out, *(c.given for c in d.back)), d.prefix.layouts[0]
        )
        steps = (d.prefix.factors, d.prefix.added)
        self.backwards = all(reversal(around, v, self._axis(v)) is not None for v in steps)
        self.factors, self.added = map(self._source, steps)
        self.late = list(self._late(before))
        self.states: int | None = None
        if self.late or any(kind == "a" for c in d.back for kind, _, _ in c.made):
            aval = self.program.avals[d.prefix.added]
            shape = tuple(aval.shape[k] for k in self._steps_first(d.prefix.added))
            self.states = self.program.new_value(aval.update(shape=shape, weak_type=False))

    def parts(self) -> Iterator[LoopPart]:
        """Yield the forward loop, the backward loops, and the equations that read their results."""
        yield self._there()
        for n, c in enumerate(self.d.back):
            yield from self._back(c, self.late if n == 0 else [])

    def _layout(self, v: int) -> tuple[int, ...]:
        return self.layouts.get(v) or tuple(range(len(self.program.avals[v].shape)))

    def _axis(self, v: int) -> int:
        """Return the axis of a value that indexes the steps."""
        return self._layout(v).index(self.prefix.axis)

    def _steps_first(self, v: int) -> list[int]:
        """Return the axis order of a value: the steps first, the rest as in the factors."""
        layout = self._layout(v)
        rest = [layout.index(k) for k in range(len(layout)) if k != self.prefix.axis]
        return [self._axis(v), *rest]

    def _source(self, v: int) -> int:
        """Return the operand of the reversal that computes a value, if the loops run backwards."""
        e = reversal(self.around, v, self._axis(v)) if self.backwards else None
        source = v if e is None else e.invals[0]
        return source if isinstance(source, int) else v

    def _reversed(self, v: int) -> list[int]:
        """Return the reversals of a value, if the loops run backwards."""
        users = self.around.users.get(v, ()) if self.backwards else ()
        return [e.outvals[0] for e in users if is_reversal(e, self._axis(v))]

    def _late(self, before: set[Equation]) -> Iterator[Equation]:
        """Yield the step-by-step equations that read the states and that no cotangent needs."""
        out, again = self.prefix.out, self._reversed(self.prefix.out)
        own = {id(e) for e in self.prefix.equations} | {id(self.around.makers[v]) for v in again}
        read = {
            id(e): (e, e.invals.index(v))
            for v in (out, *again)
            for e in self.around.users.get(v, ())
            if id(e) not in own
        }
        steps = [stepped_result(e.eqn, place, self._axis(out)) for e, place in read.values()]
        if None not in steps and self.around.outputs.isdisjoint((out, *again)):
            yield from (e for e, _ in read.values() if e not in before)

    def _makes(self, v: int) -> list[int]:
        """Return a value of the tree that a loop computes, and its reversals."""
        return [v, *self._reversed(v)]

    def _made(self, v: int, ys: Any) -> list[Any]:
        """Return the arrays for `_makes(v)` from the stacked results of all steps."""
        array = lax.transpose(ys, np.argsort(self._steps_first(v)))
        whole = lax.rev(array, (self._axis(v),)) if self.backwards else array
        return [whole, *[array] * len(self._reversed(v))]

    def _scan(self, step: Callable, xs: list[Any], reverse: bool, e: Equation) -> list[Any]:
        """Run steps from zero; `step` receives True at the first step."""
        length = self.prefix.length
        first = np.arange(length) == (length - 1 if self.backwards else 0)
        start = jnp.zeros(xs[0].shape[1:], xs[0].dtype)

        def turn(carry: Any, given: list[Any]) -> tuple[Any, list[Any]]:
            return step(lax.broadcast(given[0], start.shape), carry, *given[1:])

        with jax_internals.equation_scope(e.eqn):
            return lax.scan(turn, start, [first, *xs], reverse=reverse)[1]

    def _read(self, read: Read, v: int) -> Any:
        """Return the array of a value of the tree, with the steps first."""
        source = self._source(v)
        array = lax.transpose(read(source), self._steps_first(v))
        return lax.rev(array, (0,)) if self.backwards and source == v else array

    def _there(self) -> LoopPart:
        """Build the forward loop: h ← a·h + b, where the first state is b for any factor."""
        tree, keeps = self.prefix, self.states is not None

        def step(first: Any, h: Any, a: Any, b: Any) -> tuple[Any, list[Any]]:
            after = _after(first, h, a, b)
            return after, [after, *[h] * keeps]

        def run(read: Read) -> list[Any]:
            xs = [self._read(read, v) for v in (tree.factors, tree.added)]
            h, *states = self._scan(step, xs, self.backwards, tree.equations[-1])
            return [*self._made(tree.out, h), *states]

        makes = self._makes(tree.out)
        if self.states is not None:
            makes.append(self.states)
        return LoopPart([self.factors, self.added], makes, run)

    def _back(self, c: Cotangents, late: list[Equation]) -> Iterator[LoopPart]:
        """Build the backward loops: G ← g + a·G for b, and G times the previous state for a."""
        tree, made = self.prefix, {}
        for kind, v, others in c.made:
            made[kind] = self.program.new_value(self.program.avals[v]) if others else v
            if others:
                yield _sum((made[kind], *others), v)
        copies = {v: self.program.new_value(self.program.avals[v]) for v in self._makes(tree.out)}
        yield from (_reading(e, copies) for e in late)
        states = self.states if late or "a" in made else None

        def step(first: Any, carry: Any, a: Any, g: Any, *rest: Any) -> tuple[Any, list[Any]]:
            g = g + carry
            ys = {"b": g}
            if "a" in made:
                ys["a"] = lax.select_n(first, g * rest[0], jnp.zeros_like(g))
            outs = [ys[kind] for kind in made]
            return a * g, [*outs, _after(first, rest[0], a, rest[1])] if late else outs

        def run(read: Read) -> list[Any]:
            xs = [self._read(read, v) for v in (tree.factors, c.given)]
            if states is not None:
                xs.append(read(states))
            if late:
                xs.append(self._read(read, tree.added))
            ys = self._scan(step, xs, not self.backwards, c.equations[-1])
            values = [*made.values(), *[tree.out] * bool(late)]
            return [x for v, y in zip(values, ys, strict=True) for x in self._made(v, y)]

        reads = [self.factors, self._source(c.given)]
        if states is not None:
            reads.append(states)
        if late:
            reads.append(self.added)
        makes = [u for v in made.values() for u in self._makes(v)]
        yield LoopPart(reads, [*makes, *list(copies.values()) * bool(late)], run)


def _after(first: Any, h: Any, a: Any, b: Any) -> Any:
    """Return the state after a step."""
    return lax.select_n(first, a * h + b, b)


def _sum(values: tuple[int, ...], made: int) -> LoopPart:
    return LoopPart(
        list(values), [made], lambda read: [functools.reduce(lax.add, map(read, values))]
    )


def _reading(e: Equation, copies: dict[int, int]) -> LoopPart:
    """Build an equation that reads copies of some values."""
    reads = [copies.get(v, v) if isinstance(v, int) else v for v in e.invals]
    needs = [v for v in reads if isinstance(v, int)]

    def run(read: Read) -> list[Any]:
        return list(jax_internals.eval_equation(e.eqn, [read(v) for v in reads]))

    return LoopPart(needs, list(e.outvals), run)
