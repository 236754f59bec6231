"""Loops that compute trees of affine steps, and the derivatives of such trees.

A backward loop computes the cotangents of b and of a.

    lax.associative_scan(combine, (a, b))  →  for a_t, b_t in a, b: h ← a_t·h + b_t
    its vjp at g                           →  backwards: G ← g_t + a_{t+1}·G; results G, G·h_{t-1}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Replacement
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, shape_of
from symjax_rewrite.ir.dataflow import making, walk
from symjax_rewrite.ir.flat_program import Equation, flatten
from symjax_rewrite.ir.primitives import ELEMENTWISE
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.loops.associative_scan_detection import Prefix, is_read
from symjax_rewrite.loops.associative_scan_gradients import (
    Cotangents,
    Differentiated,
)
from symjax_rewrite.loops.changes import loop_part, part_of
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import Carry, Loop, Source
from symjax_rewrite.loops.motion import Motion
from symjax_rewrite.loops.stepwise_equations import stepped_result
from symjax_rewrite.obstacles import Obstacle

Arrays = list[Array]
Made = tuple[int, bool]  # a value of all steps, and whether it is in reversed order
# Of True at the first step, the carries, and entries of arrays; returns the next carries, results.
# One flag serves all elements: reverse mode would store an array of flags for every step.
Step = Callable[[Array, Arrays, Arrays], tuple[Arrays, Arrays]]


def tree_seconds(equations: Sequence[Equation], device: Device, share: float = 1.0) -> float:
    """Return the predicted seconds of the equations of a tree.

    share: of their results that are arrays of all steps.
    """
    loops, made = device.loops, [aval_bytes(v.aval) for e in equations for v in e.eqn.outvars]
    moved_s = share * loops.tree_share * sum(made) / device.bytes_per_s
    fresh_s = device.page_seconds(share * loops.tree_stored * max(made, default=0.0))
    return moved_s + fresh_s + len(equations) / loops.tree_operations * device.launch_s


def varying_share(around: Surroundings, prefix: Prefix) -> float:
    """Return the share of a tree that varies with the steps, without its derivatives.

    The products of factors that all steps share are no arrays of all steps: half of the tree.
    """
    return 0.5 if _are_shared(around, prefix) else 1.0


def _are_shared(around: Surroundings, prefix: Prefix) -> bool:
    """Return True if the factors are the same at all steps, however they are computed."""

    def operands(place: tuple[int, int]) -> list[tuple[int, int]]:
        """Return what a value varies with along an axis: operands, each with its axis."""
        v, axis = place
        made = around.makers.get(v)
        if made is None:
            return []
        if made.name in ELEMENTWISE:
            return [(u, axis) for u in made.reads if around.program.avals[u].shape]
        axes = made.eqn.params.get("broadcast_dimensions", ())
        if made.name != "broadcast_in_dim" or axis not in axes or not made.reads:
            return []
        k = axes.index(axis)
        return [] if shape_of(made.eqn.invars[0])[k] == 1 else [(made.reads[0], k)]

    places = walk([(prefix.factors, prefix.axis)], operands)
    names = {m.name if (m := around.makers.get(v)) else "" for v, _ in places}
    return names <= ELEMENTWISE | {"broadcast_in_dim"}


def refusal(around: Surroundings, prefix: Prefix) -> str | None:
    """Return the reason why a tree must stay a tree, or None."""
    inner = {v for e in prefix.equations for v in e.outvals} - {prefix.out, prefix.products}
    if any(is_read(around, prefix, v) for v in inner):
        return Obstacle.READER("another equation reads a value inside the tree")
    a, b = (around.program.avals[v] for v in (prefix.factors, prefix.added))
    if a.shape != b.shape or a.dtype != b.dtype:
        return "the factors have another shape or dtype than the terms that are added"
    return None


def as_loop(around: Surroundings, prefix: Prefix) -> tuple[Loop, list[Equation]]:
    """Return a tree as a loop, and the equations that the loop replaces."""
    outs = [prefix.out]
    if prefix.products is not None and is_read(around, prefix, prefix.products):
        outs.append(prefix.products)
    loop = _there(_Tree(around, prefix), outs)
    reversals = [around.makers[v] for v in loop.makes if v not in outs]
    return loop, [*prefix.equations, *reversals]


def as_loops(around: Surroundings, found: list[Differentiated]) -> Iterator[list[Replacement]]:
    """Yield the parts that replace each tree: a forward loop, backward loops, and their readers.

    Values that read the states and that no cotangent needs are computed in the backward loop, which
    has the states as operands. The forward loop then need not store the states for them.
    """
    equations = around.program.equations
    before = set(making(equations, [c.given for d in found for c in d.back]))
    for d in found:
        tree = _Tree(around, d.prefix, [c.given for c in d.back])
        late = [e for e in tree.readers() if e not in before]
        if late or any("a" in c.made for c in d.back):
            tree.states = tree.new_states()
        parts = [loop_part(_there(tree, [d.prefix.out]), Motion())]
        for n, c in enumerate(d.back):
            parts += _back(tree, c, [] if n else late)
        yield parts


def _after(first: Array, h: Array, a: Array, b: Array) -> Array:
    """Return the state after a step: b at the first step, for any factor."""
    return lax.select_n(first, a * h + b, b)


def _there(tree: _Tree, outs: list[int]) -> Loop:
    """Build the forward loop, which also stores the states before every step if needed."""

    def step(first: Array, carried: Arrays, entries: Arrays) -> tuple[Arrays, Arrays]:
        (h, *p), (a, b) = carried, entries
        after = [_after(first, h, a, b), *[lax.select_n(first, a * x, a) for x in p]]
        return after, [*after, h]

    makes = [tree.makes(v) for v in outs]
    if tree.states is not None:
        makes.append([(tree.states, False)])
    return tree.loop(step, tree.steps, makes, tree.equation, len(outs))


def _back(tree: _Tree, c: Cotangents, late: list[Equation]) -> Iterator[Replacement]:
    """Build the backward loop: G ← g + a·G for b, and G times the previous state for a."""
    eqn, reads, makes = c.equations[-1].eqn, [tree.prefix.factors, c.given], []
    for v, others in c.made.values():
        total = tree.new_value(v) if others else v
        makes.append(tree.makes(total))
        if others:
            yield _sum([total, *others], v, eqn)
    if tree.states is not None and (late or "a" in c.made):
        reads.append(tree.states)
    if late:
        reads.append(tree.prefix.added)
        out = tree.makes(tree.prefix.out)
        copies = {v: tree.new_value(v) for v, _ in out}
        makes.append([(copies[v], is_reversed) for v, is_reversed in out])
        yield from (_reading(e, copies) for e in late)

    def step(first: Array, carried: Arrays, entries: Arrays) -> tuple[Arrays, Arrays]:
        a, g, *rest = entries
        g = g + carried[0]
        ys = {"b": g}
        if "a" in c.made:
            ys["a"] = lax.select_n(first, g * rest[0], jnp.zeros_like(g))
        recomputed = [_after(first, rest[0], a, rest[1])] if late else []
        return [a * g], [*[ys[kind] for kind in c.made], *recomputed]

    yield loop_part(tree.loop(step, reads, makes, eqn, back=True), Motion())


def _sum(values: list[int], made: int, eqn: JaxprEqn) -> Replacement:
    return part_of(eqn, values, [made], lambda read: [reduce(lax.add, map(read, values))])


def _reading(e: Equation, copies: dict[int, int]) -> Replacement:
    """Build an equation that reads copies of some values."""
    reads = [copies.get(v, v) if isinstance(v, int) else v for v in e.invals]

    def run(*arrays: Array) -> list[Array]:
        return jax_internals.eval_equation(e.eqn, arrays)

    return Replacement(e.outvals, tuple(reads), run, source=e.eqn)


class _Tree:
    """The loops of one tree.

    backwards: True if the tree is between two reversals, so that its first step is the last entry.
    The loops then read and write in the order of the reversed arrays. states: the value of the
    states before every step, as the loops stack it; None if no backward loop needs it.
    """

    def __init__(self, around: Surroundings, prefix: Prefix, given: Sequence[int] = ()) -> None:
        self.around, self.prefix, self.program = around, prefix, around.program
        self.steps = [prefix.factors, prefix.added]
        self.equation = prefix.equations[-1].eqn
        named = zip((prefix.out, prefix.products), prefix.layouts, strict=False)
        self.layouts = {**dict.fromkeys(given, prefix.layouts[0]), **dict(named)}
        self.states: int | None = None
        self.backwards = all(self._reversal(v) is not None for v in self.steps)

    def new_value(self, like: int) -> int:
        """Return a new value of the program with the axes of another."""
        aval = self.program.avals[like].update(weak_type=False)
        v = self.program.new_value(aval)
        self.layouts[v] = self._layout(like)
        return v

    def new_states(self) -> int:
        """Return a new value for the stacked states."""
        entry = self._entry(self.prefix.added)
        return self.program.new_value(entry.update(shape=(self.prefix.length, *entry.shape)))

    def makes(self, v: int) -> list[Made]:
        """Return a value that a loop computes and its reversals; True if in reversed order."""
        users = self.around.users.get(v, ()) if self.backwards else ()
        reversals = [e.outvals[0] for e in users if self._reverses(e, v)]
        return [(v, self.backwards), *[(u, False) for u in reversals]]

    def readers(self) -> list[Equation]:
        """Return the equations that read the states, if all of them compute step by step."""
        out = [v for v, _ in self.makes(self.prefix.out)]
        own = {*self.prefix.equations, *[self.around.makers[v] for v in out]}
        users = self.around.users
        read = {e: e.invals.index(v) for v in out for e in users.get(v, ()) if e not in own}
        axis = self._axis(self.prefix.out)
        steps = [stepped_result(e.eqn, place, axis) for e, place in read.items()]
        return [*read] if None not in steps and self.around.outputs.isdisjoint(out) else []

    def loop(
        self,
        step: Step,
        reads: Sequence[int],
        makes: Sequence[list[Made]],
        eqn: JaxprEqn,
        carries: int = 1,
        back: bool = False,
    ) -> Loop:
        """Return a loop over the steps of the tree from zeros, in place of an equation.

        step: of arrays whose axes are those of the factors, with size one for the step. reads: the
        values whose entries a step reads. makes: for each result of a step: the values of all
        steps, see `makes`. carries: their number. back: True for the opposite direction.
        """
        entry, length = self._entry(self.prefix.added), self.prefix.length

        def run(first: Array, *values: Array) -> list[Array]:
            plain = [np.argsort(self._layout(v)) for v in reads]
            entries = list(map(lax.transpose, values[carries:], plain))
            after, ys = step(first, list(values[:carries]), entries)
            layouts = [self._layout(made[0][0]) for made in makes]
            return [*after, *map(lax.transpose, ys, layouts)]

        flag = entry.update(shape=(), dtype=np.dtype(bool))
        avals = [flag, *[entry] * carries, *map(self._entry, reads)]
        body = flatten(jax_internals.make_avals_jaxpr(run, avals))
        loop = Loop(eqn, body, length, reverse=self.backwards != back)
        zero = jax_internals.Literal(np.zeros((), entry.dtype), entry.update(shape=()))
        first, *inner = body.inputs
        loop.counters[first] = np.arange(length) == (length - 1 if self.backwards else 0)
        for v, out in zip(inner[:carries], body.outputs, strict=False):
            loop.carries.append(Carry(v, zero, out))
        loop.sources = dict(zip(inner[carries:], map(self._source, reads), strict=True))
        loop.ys = body.outputs[carries:]
        for k, made in enumerate(makes):
            axis = self._axis(made[0][0])
            for v, is_reversed in made:
                loop.makes.append(v)
                kept = ("kept", (k, axis, is_reversed))
                loop.results.append(("ys", k) if v == self.states else kept)
        return loop

    def _entry(self, v: int) -> Any:
        """Return the aval of one entry of a value along the axis of the steps."""
        if v == self.states:
            v = self.prefix.added
        aval, k = self.program.avals[v], self._axis(v)
        return aval.update(shape=(*aval.shape[:k], 1, *aval.shape[k + 1 :]), weak_type=False)

    def _source(self, v: int) -> Source:
        """Return the entries of a value in the order of the loops."""
        if v == self.states:
            return Source(v)
        axis, last = self._axis(v), self.prefix.length - 1
        if not self.backwards:
            return Source(v, axis, kept=True)
        e = self._reversal(v)
        if e is None:
            return Source(v, axis, last, -1, kept=True)
        return Source(e.invals[0], axis, kept=True)

    def _layout(self, v: int) -> tuple[int, ...]:
        return self.layouts.get(v) or tuple(range(len(self.program.avals[self.steps[0]].shape)))

    def _axis(self, v: int) -> int:
        """Return the axis of a value that indexes the steps."""
        return self._layout(v).index(self.prefix.axis)

    def _reversal(self, v: int) -> Equation | None:
        """Return the equation that computes a value by reversing another along the steps' axis."""
        e = self.around.makers.get(v)
        return e if e is not None and self._reverses(e, v) else None

    def _reverses(self, e: Equation, v: int) -> bool:
        return e.name == "rev" and tuple(e.eqn.params["dimensions"]) == (self._axis(v),)
