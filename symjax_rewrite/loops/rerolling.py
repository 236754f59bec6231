"""Rerolling: unrolled loops are written as loops again.

A step has the equations of the first unrolled step. It receives the array entries that the steps
read, and the carries of the step before.

    h = f(h, x[0]); h = f(h, x[1]); …; h = f(h, x[n-1])  →  for x_t in x: h ← f(h, x_t)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Replacement
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.flat_program import Equation, flatten
from symjax_rewrite.ir.primitives import VIEWS
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import Carry, Loop
from symjax_rewrite.loops.unrolled_detection import (
    MIN_STEPS,
    Family,
    Input,
    Joined,
    NotEqualError,
    StepReader,
    kinds_of,
    may_repeat,
    natural_start,
    runs_of,
)

MAX_READ = 32  # parts of runs that are tried in one program
MAX_APART = 2  # steps whose results may be read separately


@dataclass(slots=True)
class Unrolled:
    """An unrolled loop.

    loop: the loop, not yet normalised. own: equations that it replaces. blocks: for results that
    are concatenated with other values: the value that the loop computes, and its position.
    """

    loop: Loop
    own: list[Equation]
    blocks: list[tuple[int, Joined]]


def find_unrolled(around: Surroundings) -> Iterator[Unrolled]:
    """Yield the unrolled loops of a program whose steps have carries."""
    program = around.program
    if not may_repeat(program):
        return
    kinds = kinds_of(program)
    taken = bytearray(len(kinds))
    position = {e: k for k, e in enumerate(program.equations)}
    tries = 0
    for *run, distance in runs_of(program, kinds):
        pending = [run]
        while pending and tries < MAX_READ:
            low, high = pending.pop()
            while low < high and taken[low]:
                low += 1
            while low < high and taken[high - 1]:
                high -= 1
            if high - low < MIN_STEPS * distance or any(taken[low:high]):
                continue
            tries += 1
            low = natural_start(around, position, low, high, distance)
            steps = (high - low) // distance
            reader = StepReader(around, kinds, position, low, distance, steps)
            try:
                found = Writer(reader, reader.read()).write()
            except NotEqualError as error:
                if error.step:
                    cut = low + error.step * distance
                    pending += [[cut, high], [low, cut]]
                continue
            if found.loop.carries:
                for e in found.own:
                    taken[position[e]] = 1
                yield found


class Writer:
    """Writes the equations read by a `StepReader` as a loop."""

    def __init__(self, reader: StepReader, joined: list[Joined]) -> None:
        self.reader, self.joined, self.avals = reader, joined, reader.avals
        given = [op for f in reader.order for op in (f.entry, *f.operands)]
        self.inputs = {x.name: x for x in given if isinstance(x, Input)}  # of a step
        self.ys: list[tuple[Family, int, int | None]] = []  # with the axis to add

    def write(self) -> Unrolled:
        """Return the loop.

        Raises:
            NotEqualError: results are read in a way that no loop computes.
        """
        r = self.reader
        results, blocks = self._results()
        avals = [x.aval for x in self.inputs.values()]
        body = flatten(jax_internals.make_avals_jaxpr(self._step, avals))
        loop = Loop(r.region[-1].equations[-1].eqn, body, r.steps)
        tables: dict[str, dict] = {
            "same": loop.consts,
            "source": loop.sources,
            "count": loop.counters,
        }
        place: dict[tuple, int] = {}
        for (kind, key), v in zip(self.inputs, body.inputs, strict=True):
            outer = self.inputs[kind, key].outer
            if kind == "carry":
                place.setdefault(key[:2], len(loop.carries))
                loop.carries.append(Carry(v, outer, body.outputs[len(loop.carries)]))
            else:
                tables[kind][v] = outer
        loop.ys = list(body.outputs[len(loop.carries) :])
        for v, kind, what in results:
            loop.makes.append(v)
            loop.results.append((kind, place[what] if kind == "final" else what))
        loop.outside_bytes = self._bytes(loop)
        own = [e for f in r.order if f not in r.prepared for e in f.equations]
        return Unrolled(loop, [*own, *[e for j in self.joined for e in j.tree]], blocks)

    def _carried(self) -> list[tuple[Family, int]]:
        """Return the results of families that are carried, in the order of the inputs."""
        return [key[:2] for kind, key in self.inputs if kind == "carry"]

    def _step(self, *given: Any) -> list[Any]:
        """Run one step; return the next carries and the stacked values."""
        env: dict[Any, Any] = dict(zip(self.inputs, given, strict=True))
        for f in self.reader.order:
            eqn = f.equations[0].eqn
            if f.entry is not None:
                outs = [_sliced(eqn, f.entry.outer.axis, env[f.entry.name])]
            else:
                outs = jax_internals.eval_equation(eqn, [_value(op, env) for op in f.operands])
            env.update(((f, o), x) for o, x in enumerate(outs))
        stacked = [(env[f, o], axis) for f, o, axis in self.ys]
        ys = [x if k is None else lax.expand_dims(x, (k,)) for x, k in stacked]
        return [*[env[result] for result in self._carried()], *ys]

    def _results(self) -> tuple[list[tuple[int, str, Any]], list[tuple[int, Joined]]]:
        """Return the results of the loop as (value, kind, place), and the concatenated blocks."""
        results: list[tuple[int, str, Any]] = []
        blocks = []
        for j in self.joined:
            (out,) = j.root.outvals
            if len(j.operands) > self.reader.steps:
                aval, n = self.avals[out], self.reader.steps
                shape = (*aval.shape[: j.axis], n, *aval.shape[j.axis + 1 :])
                out = self.reader.around.program.new_value(aval.update(shape=shape))
                blocks.append((out, j))
            results.append((out, "kept", (len(self.ys), j.axis, j.is_reversed)))
            self.ys.append((*j.result, j.axis if j.is_new else None))
        carried = self._carried()
        last = self.reader.steps - 1
        for f, o, steps in self._read_apart():
            finals = [t for t in steps if t == last and (f, o) in carried]
            results += [(f.equations[t].outvals[o], "final", (f, o)) for t in finals]
            at = [t for t in steps if t not in finals]
            results += [(f.equations[t].outvals[o], "at", (len(self.ys), t)) for t in at]
            if at:
                self.ys.append((f, o, None))
        return results, blocks

    def _read_apart(self) -> Iterator[tuple[Family, int, list[int]]]:
        """Yield results that are read elsewhere step by step, with the steps."""
        r, around = self.reader, self.reader.around
        own = {e for f in r.order for e in f.equations}
        free = set(r.prepared)
        for f in r.order:
            if f.entry is not None or self._is_view(f, free):
                free.add(f)
            for o in range(len(f.equations[0].outvals)) if f not in free else ():
                inside = own.union(*[j.tree for j in self.joined if j.result == (f, o)])
                steps = [
                    t
                    for t, e in enumerate(f.equations)
                    if e.outvals[o] in around.outputs
                    or not inside.issuperset(around.users.get(e.outvals[o], ()))
                ]
                if len(steps) > MAX_APART:
                    raise NotEqualError(0)
                yield f, o, steps

    @staticmethod
    def _is_view(f: Family, free: set[Family]) -> bool:
        """Return True if a family only reads values that the program has outside its steps too."""
        return f.equations[0].name in VIEWS and all(
            op[0] in ("same", "source") or op[0] in free
            for op in f.operands
            if isinstance(op, tuple)
        )

    @staticmethod
    def _bytes(loop: Loop) -> float:
        """Return the bytes of the operands and results of the loop."""
        avals = loop.body.avals
        ys = [v for v in loop.ys if isinstance(v, int)]
        once = [*loop.consts, *[c.inner for c in loop.carries for _ in range(2)]]
        total = loop.length * sum(aval_bytes(avals[v]) for v in (*loop.sources, *ys))
        return total + sum(aval_bytes(avals[v]) for v in once)


def _value(operand: Any, env: dict[Any, Any]) -> Any:
    """Return an operand in a step."""
    if isinstance(operand, Input):
        return env[operand.name]
    return env[operand] if isinstance(operand, tuple) else operand.val


def _sliced(eqn: jax_internals.JaxprEqn, axis: int, entry: Any) -> Any:
    """Return a slice that moves along an axis, from that axis's entry."""
    p = eqn.params
    starts, limits = list(p["start_indices"]), list(p["limit_indices"])
    starts[axis], limits[axis] = 0, 1
    if all(s == 0 for s in starts) and tuple(limits) == entry.shape:
        return entry
    return lax.slice(entry, starts, limits, p["strides"])


def joined_part(block: int, j: Joined) -> Replacement:
    """Return the concatenation of a block of results with its other operands."""
    steps = len(j.result[0].equations)
    others = [v for k, v in enumerate(j.operands) if not j.first <= k < j.first + steps]

    def fun(made: Any, *parts: Any) -> Any:
        parts = tuple(lax.expand_dims(x, (j.axis,)) if j.is_new else x for x in parts)
        return lax.concatenate([*parts[: j.first], made, *parts[j.first :]], j.axis)

    return Replacement(j.root.outvals, (block, *others), fun, source=j.root.eqn)
