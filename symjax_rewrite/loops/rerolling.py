"""Rerolling: unrolled loops are written as loops again.

A step has the equations of the first unrolled step. It receives the array entries that the steps
read, and the carries of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.flat_program import Equation, Value, flatten
from symjax_rewrite.ir.primitives import VIEWS
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import Carry, Loop, Source
from symjax_rewrite.loops.unrolled_detection import (
    MIN_STEPS,
    Family,
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
    position = {id(e): k for k, e in enumerate(program.equations)}
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
                    taken[position[id(e)]] = 1
                yield found


class Writer:
    """Writes the equations read by a `StepReader` as a loop."""

    def __init__(self, reader: StepReader, joined: list[Joined]) -> None:
        self.reader, self.joined = reader, joined
        self.avals = reader.around.program.avals
        self.inputs: dict[tuple, tuple[Any, Any]] = {}  # inputs of a step: aval and outer value
        self.ys: list[tuple[Family, int, int | None]] = []  # with the axis to add

    def write(self) -> Unrolled:
        """Return the loop.

        Raises:
            NotEqualError: results are read in a way that no loop computes.
        """
        r = self.reader
        results, blocks = self._results()
        for f in r.order:
            for key, aval, what in self._given(f):
                self.inputs.setdefault(key, (aval, what))
        body = flatten(
            jax_internals.make_avals_jaxpr(self._step, [a for a, _ in self.inputs.values()])
        )
        loop = Loop(r.region[-1].equations[-1].eqn, body, r.steps)
        place: dict[tuple, int] = {}
        for (key, (_, what)), v in zip(self.inputs.items(), body.inputs, strict=True):
            if key[0] == "same":
                loop.consts[v] = what
            elif key[0] == "source":
                loop.sources[v] = what
            elif key[0] == "count":
                loop.counters[v] = what
            else:
                place.setdefault(key[1][:2], len(loop.carries))
                loop.carries.append(Carry(v, what, body.outputs[len(loop.carries)]))
        loop.ys = list(body.outputs[len(loop.carries) :])
        for v, kind, what in results:
            loop.makes.append(v)
            loop.results.append((kind, place[what] if kind == "final" else what))
        loop.outside_bytes = self._bytes(loop)
        own = [e for f in r.order if id(f) not in r.prepared for e in f.equations]
        return Unrolled(loop, [*own, *[e for j in self.joined for e in j.tree]], blocks)

    def _given(self, f: Family) -> Iterator[tuple[tuple, Any, Any]]:
        """Yield the inputs of a step that a family reads: key, aval, and outer value."""
        given: list[tuple] = [("source", f.entry)] if f.entry else f.operands
        for kind, *what in given:
            if kind == "source":
                yield ("source", what[0]), self._entry_aval(what[0]), what[0]
            elif kind == "carry":
                family, o, start = self.reader.carries[what[0]]
                yield ("carry", what[0]), self.avals[family.equations[0].outvals[o]], start
            elif kind == "count":
                yield ("count", what[0], str(what[2].aval)), what[2].aval, what[1]
            elif kind == "same" and isinstance(what[0], int):
                yield ("same", what[0]), self.avals[what[0]], what[0]

    def _entry_aval(self, source: Source) -> Any:
        aval, k = self.avals[source.value], source.axis  # pyright: ignore
        return aval.update(shape=(*aval.shape[:k], *(1,) * source.kept, *aval.shape[k + 1 :]))

    def _step(self, *given: Any) -> list[Any]:
        """Run one step; return the next carries and the stacked values."""
        env: dict[tuple, Any] = dict(zip(self.inputs, given, strict=True))
        made: dict[tuple[int, int], Any] = {}
        for f in self.reader.order:
            eqn = f.equations[0].eqn
            if f.entry is not None:
                outs = [_sliced(eqn, f.entry.axis, env["source", f.entry])]
            else:
                outs = jax_internals.eval_equation(
                    eqn, [_value(op, env, made) for op in f.operands]
                )
            made.update(((id(f), o), x) for o, x in enumerate(outs))
        carried = [made[key[1][:2]] for key in self.inputs if key[0] == "carry"]
        stacked = [(made[id(f), o], axis) for f, o, axis in self.ys]
        return carried + [x if k is None else lax.expand_dims(x, (k,)) for x, k in stacked]

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
        carried = {key[:2] for key in self.reader.carries}
        last = self.reader.steps - 1
        for f, o, steps in self._read_apart():
            for t in steps:
                kind: tuple[str, Any] = ("at", (len(self.ys), t))
                if t == last and (id(f), o) in carried:
                    kind = ("final", (id(f), o))
                results.append((f.equations[t].outvals[o], kind[0], kind[1]))
            if any(r[1:] == ("at", (len(self.ys), t)) for r in results for t in steps):
                self.ys.append((f, o, None))
        return results, blocks

    def _read_apart(self) -> Iterator[tuple[Family, int, list[int]]]:
        """Yield results that are read elsewhere step by step, with the steps."""
        r, around = self.reader, self.reader.around
        own = {id(e) for f in r.order for e in f.equations}
        free = set(r.prepared)
        for f in r.order:
            if f.entry is not None or self._is_view(f, free):
                free.add(id(f))
            if id(f) in free:
                continue
            for o in range(len(f.equations[0].outvals)):
                inside = {id(e) for j in self.joined if j.result == (f, o) for e in j.tree} | own
                steps = [
                    t
                    for t, e in enumerate(f.equations)
                    if e.outvals[o] in around.outputs
                    or any(id(u) not in inside for u in around.users.get(e.outvals[o], ()))
                ]
                if len(steps) > MAX_APART:
                    raise NotEqualError(0)
                yield f, o, steps

    @staticmethod
    def _is_view(f: Family, free: set[int]) -> bool:
        """Return True if a family only reads values that the program has outside its steps too."""
        if f.equations[0].name not in VIEWS:
            return False
        return all(
            kind in ("same", "source") or (kind == "step" and id(what[0]) in free)
            for kind, *what in f.operands
        )

    @staticmethod
    def _bytes(loop: Loop) -> float:
        """Return the bytes of the operands and results of the loop."""
        avals = loop.body.avals
        ys = [v for v in loop.ys if isinstance(v, int)]
        once = [*loop.consts, *[c.inner for c in loop.carries for _ in range(2)]]
        total = loop.length * sum(aval_bytes(avals[v]) for v in (*loop.sources, *ys))
        return total + sum(aval_bytes(avals[v]) for v in once)


def _value(operand: tuple, env: dict[tuple, Any], made: dict[tuple[int, int], Any]) -> Any:
    """Return an operand in a step."""
    kind, *what = operand
    if kind == "step":
        return made[id(what[0]), what[1]]
    if kind == "count":
        return env["count", what[0], str(what[2].aval)]
    if kind == "same" and not isinstance(what[0], int):
        return what[0].val
    return env[kind, what[0]]


def _sliced(eqn: jax_internals.JaxprEqn, axis: int, entry: Any) -> Any:
    """Return a slice that moves along an axis, from that axis's entry."""
    p = eqn.params
    starts, limits = list(p["start_indices"]), list(p["limit_indices"])
    starts[axis], limits[axis] = 0, 1
    if all(s == 0 for s in starts) and tuple(limits) == entry.shape:
        return entry
    return lax.slice(entry, starts, limits, p["strides"])


def joined_with(block: int, j: Joined) -> tuple[list[int], Callable[[Callable], list[Any]]]:
    """Return the other operands of a concatenation with a block of results, and its writer."""
    steps = len(j.result[0].equations)
    others = [v for k, v in enumerate(j.operands) if not j.first <= k < j.first + steps]
    reads = [block, *[v for v in others if isinstance(v, int)]]

    def run(read: Callable[[Value], Any]) -> list[Any]:
        parts = [read(v) if isinstance(v, int) else v.val for v in others]
        parts = [lax.expand_dims(x, (j.axis,)) for x in parts] if j.is_new else parts
        return [lax.concatenate([*parts[: j.first], read(block), *parts[j.first :]], j.axis)]

    return reads, run
