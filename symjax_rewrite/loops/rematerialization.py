"""Rematerialisation of forward loops inside the backward loops that read their residuals.

Reverse mode stores residuals of every step of a loop for its backward loop. If recomputing them
costs less than writing and reading them, only the carries at the starts of blocks are stored. The
backward loop recomputes the steps of a block in a cache and then runs back over them (Griewank
1992; Chen et al. 2016, "Training deep nets with sublinear memory cost").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, equation_seconds
from symjax_rewrite.cost.term_cost import SLOW_MAPS
from symjax_rewrite.ir.dataflow import making
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.loops.fusion import Fusion, Surroundings, fuse
from symjax_rewrite.loops.loop import Carry, Loop, Read, Source, read_loop, read_starts, stage
from symjax_rewrite.loops.normalization import clean

FUSED_KINDS = (ELEMENTWISE | VIEWS) - SLOW_MAPS


@dataclass(slots=True)
class LoopPair:
    """A loop, and its backward loop, which is the only reader of some of its results.

    kept: numbers of the forward loop's stacked results that only the backward loop reads. steps:
    steps per block. starts: program values that hold the carries at the starts of blocks, then the
    carry at the start of the remaining steps.
    """

    there: Loop
    back: Loop
    kept: list[int]
    steps: int
    starts: list[int] = field(default_factory=list)

    def keeps(self, result: tuple[str, Any]) -> bool:
        """Return True if only the backward loop reads a result of the forward loop."""
        return result[0] == "ys" and result[1] in self.kept

    @property
    def blocks(self) -> int:
        """Return the number of full blocks."""
        return self.there.length // self.steps

    @property
    def rest(self) -> int:
        """Return the number of steps after the last full block, in stored order."""
        return self.there.length % self.steps


def find_pairs(around: Surroundings, device: Device, reorders: bool) -> list[LoopPair]:
    """Find the pairs of loops whose residuals should be recomputed.

    Args:
        around: the program that contains the loops.
        device: the device that runs the program.
        reorders: True if sums may be rounded in another order.
    """
    program = around.program
    loops = {id(e): e for e in program.equations if e.name == "scan" and not e.eqn.effects}
    found: list[LoopPair] = []
    taken: set[int] = set()
    for e in loops.values():
        for first in _before(e, around):
            if id(first) in loops and not {id(e), id(first)} & taken:
                pair = _pair(first, e, around, device, reorders)
                if pair is not None:
                    found.append(pair)
                    taken |= {id(e), id(first)}
    return found


def _before(e: Equation, around: Surroundings) -> list[Equation]:
    """Return the equations that compute the stacked operands of a loop."""
    makers = (around.makers.get(v) for v in e.invals if isinstance(v, int))
    return list({id(m): m for m in makers if m is not None}.values())


def _pair(
    first: Equation, second: Equation, around: Surroundings, device: Device, reorders: bool
) -> LoopPair | None:
    if first.eqn.params["length"] != second.eqn.params["length"]:
        return None
    if first.eqn.params["reverse"] == second.eqn.params["reverse"]:
        return None
    there, back = read_loop(first), read_loop(second)
    if there is None or back is None or not isinstance(there.length, int):
        return None
    if there.length < device.loops.least_remade_steps:
        return None
    there, back, saved = fused_pair(clean(there), clean(back), around, [first, second], reorders)
    read = _numbers(s.value for s in back.sources.values() if s == Source(s.value))
    others = _numbers([*back.consts.values(), *[c.start for c in back.carries]])
    makes: dict[int, list[tuple[str, int]]] = {}
    for v, (kind, what) in zip(there.makes, there.results, strict=True):
        if kind in ("ys", "stored", "kept"):
            makes.setdefault(what if kind == "ys" else what[0], []).append((kind, v))
    kept = [
        k
        for k, made in makes.items()
        if all(
            kind == "ys"
            and v in read
            and v not in others
            and v not in around.outputs
            and all(u is second for u in around.users.get(v, ()))
            for kind, v in made
        )
    ]
    kept_bytes = sum(around.bytes(makes[k][0][1]) for k in kept)
    if not _pays(there, kept, kept_bytes, device):
        alone = sum(_fused_alone(e, around, device) for e in (first, second)) if kept else saved
        if not _pays(there, kept, kept_bytes + saved - alone, device):
            return None
    return LoopPair(there, back, kept, _block(there, kept_bytes))


def fused_pair(
    there: Loop, back: Loop, around: Surroundings, own: list[Equation], reorders: bool
) -> tuple[Loop, Loop, float]:
    """Return both loops with their private equations fused, and the bytes no longer written.

    Values that both loops read are computed in each of them.
    """
    last = Fusion(back, around, own, reorders=reorders)
    saved = last.run()
    saved += Fusion(there, around, own, last.taken, reorders).run()
    return clean(there), clean(back), saved


def _fused_alone(e: Equation, around: Surroundings, device: Device) -> float:
    """Return the bytes that a loop on its own need not write after fusion."""
    loop = read_loop(e)
    return 0.0 if loop is None else fuse(clean(loop), around, [e], device)


def _pays(there: Loop, kept: list[int], kept_bytes: float, device: Device) -> bool:
    """Return True if recomputing results takes no longer than writing and reading them."""
    loops, memory = device.loops, device.memory
    if kept_bytes < loops.least_remade_bytes:
        return False
    moved = (1 + memory.passes_of_write) * kept_bytes / device.bytes_per_s
    if kept_bytes >= memory.kept_bytes:
        moved += kept_bytes / memory.fresh_bytes_per_s
    step = device.launch_s / loops.operations_per_launch
    for e in _needed(there, kept):
        own = equation_seconds(e.eqn, device)
        step += own / loops.fused_step if e.name in FUSED_KINDS else own
    return margins.pays(moved, there.length * step, "remake", device)


def _numbers(values: Iterable[Value]) -> set[int]:
    return {v for v in values if isinstance(v, int)}


def _needed(loop: Loop, kept: Sequence[int]) -> list[Equation]:
    """Return the equations of a body that carries and some results need."""
    ends = [*[loop.ys[k] for k in kept], *[c.out for c in loop.carries]]
    return making(loop.body.equations, ends)


def _block(there: Loop, kept_bytes: float) -> int:
    """Return the steps per block: all starts and the residuals of one block have equal bytes."""
    length = there.length
    start = sum(aval_bytes(there.body.avals[c.inner]) for c in there.carries)
    wanted = math.sqrt(length * max(start, 1.0) / (kept_bytes / length))
    best = int(min(max(wanted, 8.0), length / 2))
    even = [n for n in range(max(best // 2, 2), 2 * best + 1) if length % n == 0]
    return min(even, key=lambda n: abs(math.log(n / best)), default=best)


def run_there(pair: LoopPair, read: Read) -> list[Any]:
    """Return the forward loop's results that others read, then the carries at block starts."""
    loop = pair.there
    public = [k for k in range(len(loop.ys)) if k not in pair.kept]
    known, steps = loop.constants(read), loop.stacks(read)
    carry = read_starts(loop, read)

    def block(carry: Sequence[Any], xs: dict[int, Any], count: int) -> tuple[list[Any], Any]:
        return _stage(loop, count, [loop.ys[k] for k in public], known, xs, carry)

    def turn(carry: list[Any], xs: dict[int, Any]) -> tuple[list[Any], Any]:
        after, ys = block(carry, xs, pair.steps)
        return after, (carry, ys)

    whole, rest = _split(pair, steps)
    ys_rest: Any = []
    starts_rest = carry
    if pair.rest and loop.reverse:
        carry, ys_rest = block(carry, rest, pair.rest)
    carry, (starts, ys) = lax.scan(turn, carry, whole, length=pair.blocks, reverse=loop.reverse)
    if pair.rest and not loop.reverse:
        starts_rest = carry
        carry, ys_rest = block(carry, rest, pair.rest)
    stacked: list[Any] = [None] * len(loop.ys)
    for k, y in zip(public, _joined(pair, ys, ys_rest), strict=True):
        stacked[k] = y
    others = replace(loop, results=[r for r in loop.results if not pair.keeps(r)])
    given = others.finish(list(carry), stacked, read)
    return [*given, *starts, *(starts_rest if pair.rest else [])]


def _joined(pair: LoopPair, ys: Sequence[Any], ys_rest: Sequence[Any]) -> list[Any]:
    """Concatenate the results of blocks and of the remaining steps."""
    ys = [lax.reshape(y, (pair.blocks * pair.steps, *y.shape[2:])) for y in ys]
    if pair.rest:
        ys = [jnp.concatenate([y, z]) for y, z in zip(ys, ys_rest, strict=True)]
    return list(ys)


def run_back(pair: LoopPair, read: Read) -> list[Any]:
    """Return the backward loop's results; the residuals are recomputed block by block."""
    there, back = pair.there, pair.back
    place = {k: n for n, k in enumerate(pair.kept)}
    results = zip(there.makes, there.results, strict=True)
    numbers = {v: place[r[1]] for v, r in results if pair.keeps(r)}
    again = {
        v: numbers[s.value]
        for v, s in back.sources.items()
        if isinstance(s.value, int) and s.value in numbers
    }
    known_there, known_back = there.constants(read), back.constants(read)
    own = replace(back, sources={v: s for v, s in back.sources.items() if v not in again})
    kept = [there.ys[k] for k in pair.kept]

    def block(carry: Sequence[Any], start: Any, xs: Any, count: int) -> tuple[list[Any], Any]:
        _, values = _stage(there, count, kept, known_there, xs[0], start)
        steps = {**xs[1], **{v: values[n] for v, n in again.items()}}
        return _stage(back, count, back.ys, known_back, steps, carry)

    def turn(carry: list[Any], given: Any) -> tuple[list[Any], Any]:
        start, xs = given
        return block(carry, start, xs, pair.steps)

    xs_there, xs_back = (_split(pair, x.stacks(read)) for x in (there, own))
    whole, rest = zip(xs_there, xs_back, strict=True)
    starts = [read(v) for v in pair.starts]
    first, last = starts[: len(there.carries)], starts[len(there.carries) :]
    carry = read_starts(back, read)
    ys_rest: Any = []
    if pair.rest and back.reverse:
        carry, ys_rest = block(carry, last, rest, pair.rest)
    carry, ys = lax.scan(turn, carry, (first, whole), length=pair.blocks, reverse=back.reverse)
    if pair.rest and not back.reverse:
        carry, ys_rest = block(carry, last, rest, pair.rest)
    return back.finish(list(carry), _joined(pair, ys, ys_rest), read)


def _split(pair: LoopPair, steps: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the stacked operands by blocks, and those of the steps after the last full block."""
    whole = pair.blocks * pair.steps
    blocks = {
        v: lax.reshape(x[:whole], (pair.blocks, pair.steps, *x.shape[1:])) for v, x in steps.items()
    }
    return blocks, {v: x[whole:] for v, x in steps.items()}


def _stage(
    loop: Loop,
    count: int,
    ys: Sequence[Value],
    known: dict[int, Any],
    steps: dict[int, Any],
    carry: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Stage some steps of a loop; return the carries after them, and stacked results."""
    carries = [Carry(c.inner, c.inner, c.out) for c in loop.carries]
    inner = replace(loop, length=count, ys=list(ys), carries=carries)
    values = {c.inner: x for c, x in zip(loop.carries, carry, strict=True)}
    return stage(inner, known, steps, lambda v: values[v] if isinstance(v, int) else v.val)


def start_avals(pair: LoopPair) -> list[Any]:
    """Return the avals of the carries at block starts, which `run_there` returns last."""
    avals = [pair.there.body.avals[c.inner] for c in pair.there.carries]
    stacked = [a.update(shape=(pair.blocks, *a.shape)) for a in avals]
    return [*stacked, *(avals if pair.rest else [])]
