"""Rematerialisation of forward loops inside the backward loops that read their residuals.

Reverse mode stores residuals of every step of a loop for its backward loop. If recomputing them
costs less than writing and reading them, only the carries at the starts of blocks are stored. The
backward loop recomputes the steps of a block in a cache and then runs back over them (Griewank
1992; Chen et al. 2016, "Training deep nets with sublinear memory cost").

    forward: h ← f(h), store r(h) of every step; backward: g ← b(g, r_t)
    → forward: store h of every k-th step; backward, by block: h ← f(h), keep k r(h); g ← b(g, r_t)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.candidates import Replacement
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, aval_size, equation_seconds
from symjax_rewrite.cost.profile_groups import SLOW_MAPS
from symjax_rewrite.ir.dataflow import making, numbers
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.ir.replacement import Read
from symjax_rewrite.loops.changes import part_of
from symjax_rewrite.loops.fusion import Fusion, Surroundings, fused
from symjax_rewrite.loops.loop import Carry, Loop, Source, get, stage
from symjax_rewrite.loops.normalization import clean, normal_loop

FUSED_KINDS = (ELEMENTWISE | VIEWS) - SLOW_MAPS


Carried = list[Any]
Block = Callable[[Carried, Any, Any, int], tuple[Carried, list[Any]]]


@dataclass(slots=True)
class LoopPair:
    """A loop, and its backward loop, which is the only reader of some of its results.

    kept: numbers of the forward loop's stacked results that only the backward loop reads. steps:
    steps per block.
    """

    there: Loop
    back: Loop
    kept: list[int]
    steps: int

    @property
    def blocks(self) -> int:
        """Return the number of full blocks."""
        return self.there.length // self.steps

    @property
    def rest(self) -> int:
        """Return the number of steps after the last full block, in stored order."""
        return self.there.length % self.steps

    def hidden(self) -> dict[int, int]:
        """Return the outer values that only the backward loop reads, by the places in `kept`."""
        results = zip(self.there.makes, self.there.results, strict=True)
        place = {k: n for n, k in enumerate(self.kept)}
        return {v: place[k] for v, (kind, k) in results if kind == "ys" and k in place}


def find_pairs(around: Surroundings, device: Device, reorders: bool) -> list[LoopPair]:
    """Find the pairs of loops whose residuals should be recomputed.

    reorders: True if sums may be rounded in another order.
    """
    found: list[LoopPair] = []
    taken: set[Equation] = set()
    for first, second in backward_loops(around):
        if taken.isdisjoint((first, second)):
            pair = _pair(first, second, around, device, reorders)
            if pair is not None:
                found.append(pair)
                taken |= {first, second}
    return found


def backward_loops(around: Surroundings) -> Iterator[tuple[Equation, Equation]]:
    """Yield the scans, each with a scan of as many steps in the other direction that reads it."""
    equations = around.program.equations
    loops = dict.fromkeys(e for e in equations if e.name == "scan" and not e.eqn.effects)
    for second in loops:
        makers = dict.fromkeys(around.makers.get(v) for v in second.reads)
        for first in (e for e in makers if e is not None and e in loops):
            p, q = first.eqn.params, second.eqn.params
            if p["length"] == q["length"] and p["reverse"] != q["reverse"]:
                yield first, second


def _pair(
    first: Equation, second: Equation, around: Surroundings, device: Device, reorders: bool
) -> LoopPair | None:
    there, back = normal_loop(first), normal_loop(second)
    if there is None or back is None or not isinstance(there.length, int):
        return None
    if there.length < device.loops.least_remade_steps:
        return None
    own = [first, second]
    plain = [(there.copy(), first), (back.copy(), second)]
    there, back, saved = fused_pair(there, back, around, own, reorders)
    kept = _kept(there, back, second, around)
    kept_bytes = sum(aval_bytes(there.body.avals[v]) for v in numbers(there.ys[k] for k in kept))
    kept_bytes *= there.length
    read_s = _read_again(there, back, kept) / device.bytes_per_s
    if not _pays(there, kept, kept_bytes, read_s, device):
        alone = sum(fused(x, around, [e], device)[1] for x, e in plain) if kept else saved
        if not _pays(there, kept, kept_bytes + saved - alone, read_s, device):
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


def _kept(there: Loop, back: Loop, second: Equation, around: Surroundings) -> list[int]:
    """Return the numbers of the forward loop's results that only the backward loop's steps read."""
    read = set(numbers(s.value for s in back.sources.values() if s == Source(s.value)))
    read -= {*numbers([*back.consts.values(), *[c.start for c in back.carries]]), *around.outputs}
    read = {v for v in read if all(u is second for u in around.users.get(v, ()))}
    hidden: dict[int, bool] = {}
    for v, (kind, what) in zip(there.makes, there.results, strict=True):
        if kind in ("ys", "stored", "kept"):
            k = what if kind == "ys" else what[0]
            hidden[k] = hidden.get(k, True) and kind == "ys" and v in read
    return [k for k, is_hidden in hidden.items() if is_hidden]


def _read_again(there: Loop, back: Loop, kept: Sequence[int]) -> float:
    """Return the bytes of all steps' operands that only recomputed steps read in the loop back."""
    used = {v for e in _needed(there, kept) for v in e.reads}
    read = {s.value for s in back.sources.values()}
    again = [v for v, s in there.sources.items() if v in used and s.value not in read]
    return there.length * sum([aval_bytes(there.body.avals[v]) for v in again])


def _pays(there: Loop, kept: list[int], kept_bytes: float, read_s: float, device: Device) -> bool:
    """Return True if recomputing results takes no longer than writing and reading them.

    Where each operation of a step is a launch, a recomputed step is one launch at least, beside
    what a step costs itself. read_s: of operands that are read again.
    """
    loops, memory = device.loops, device.memory
    if not kept_bytes or kept_bytes < loops.least_remade_bytes:
        return False
    moved = (1 + memory.passes_of_write) * kept_bytes / device.bytes_per_s
    if kept_bytes >= memory.kept_bytes:
        moved += kept_bytes / memory.fresh_bytes_per_s
    step = device.launch_s / loops.operations_per_launch
    if loops.steps_are_launches:
        step = device.launch_s + loops.step_s
    for e in _needed(there, kept):
        own = equation_seconds(e.eqn, device)
        step += own / loops.fused_step if e.name in FUSED_KINDS else own
        elements = sum(aval_size(v.aval) for v in e.eqn.outvars)
        step += elements * device.functions.of(e.name) / device.folds.fused_steps_per_s
    return margins.pays(moved, read_s + there.length * step, "remake", device, kept_bytes)


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


def pair_parts(program: Program, pair: LoopPair) -> list[Replacement]:
    """Return the parts for a loop with checkpoints per block, and for its backward loop."""
    there, back, hidden = pair.there, pair.back, pair.hidden()
    avals = [there.body.avals[c.inner] for c in there.carries]
    stacked = [a.update(shape=(pair.blocks, *a.shape)) for a in avals]
    starts = [program.new_value(a) for a in [*stacked, *(avals if pair.rest else [])]]
    makes = [*[v for v in there.makes if v not in hidden], *starts]
    first = there.outer_values()
    second = [v for v in (*first, *back.outer_values(), *starts) if v not in hidden]
    return [
        part_of(there.eqn, first, makes, lambda read: _run_there(pair, read)),
        part_of(back.eqn, second, back.makes, lambda read: _run_back(pair, starts, read)),
    ]


def _run_there(pair: LoopPair, read: Read) -> list[Any]:
    """Return the forward loop's results that others read, then the carries at block starts."""
    loop, hidden = pair.there, pair.hidden()
    public = [k for k in range(len(loop.ys)) if k not in pair.kept]
    known, own = loop.constants(read), [loop.ys[k] for k in public]

    def block(carry: Carried, _: Any, xs: Any, count: int) -> tuple[Carried, list[Any]]:
        return _stage(loop, count, own, known, xs, carry)

    carry = loop.starts(read)
    carry, ys, starts = _in_blocks(pair, loop, carry, loop.stacks(read), (None, None), block)
    stacked: list[Any] = [None] * len(loop.ys)
    for k, y in zip(public, ys, strict=True):
        stacked[k] = y
    results = zip(loop.makes, loop.results, strict=True)
    others = replace(loop, results=[r for v, r in results if v not in hidden])
    return [*others.finish(carry, stacked, read), *starts]


def _run_back(pair: LoopPair, starts: Sequence[int], read: Read) -> list[Any]:
    """Return the backward loop's results; the residuals are recomputed block by block."""
    there, back, hidden = pair.there, pair.back, pair.hidden()
    read_by = {v: s.value for v, s in back.sources.items() if isinstance(s.value, int)}
    recomputed = {v: hidden[outer] for v, outer in read_by.items() if outer in hidden}
    known_there, known_back = there.constants(read), back.constants(read)
    own = replace(back, sources={v: s for v, s in back.sources.items() if v not in recomputed})
    kept = [there.ys[k] for k in pair.kept]

    def block(carry: Carried, start: Any, xs: Any, count: int) -> tuple[Carried, list[Any]]:
        _, values = _stage(there, count, kept, known_there, xs[0], start)
        steps = {**xs[1], **{v: values[n] for v, n in recomputed.items()}}
        return _stage(back, count, back.ys, known_back, steps, carry)

    n = len(there.carries)
    given = [read(v) for v in starts[:n]], [read(v) for v in starts[n:]]
    steps = there.stacks(read), own.stacks(read)
    carry, ys, _ = _in_blocks(pair, back, back.starts(read), steps, given, block)
    return back.finish(carry, ys, read)


def _in_blocks(
    pair: LoopPair, loop: Loop, carry: Carried, steps: Any, starts: tuple[Any, Any], block: Block
) -> tuple[Carried, list[Any], Carried]:
    """Run all blocks of one loop of a pair and the remaining steps.

    carry: before the first step. steps: the stacked operands. starts: given to `block`: an entry
    for each full block, and a value for the remaining steps. block: of carries, an entry of
    `starts`, operands, and the number of steps.

    Returns:
        The carries after the last step, the stacked results, and of the forward loop the carries
        before each block and before the remaining steps.
    """
    count, late, keeps = pair.blocks * pair.steps, [], loop is pair.there
    shape = (pair.blocks, pair.steps)
    whole = jax.tree.map(lambda x: lax.reshape(x[:count], (*shape, *x.shape[1:])), steps)
    rest = jax.tree.map(lambda x: x[count:], steps)

    def turn(carry: Carried, given: Any) -> tuple[Carried, Any]:
        start, xs = given
        after, ys = block(carry, start, xs, pair.steps)
        return after, (carry if keeps else [], ys)

    before: Carried = []
    if pair.rest and loop.reverse:
        before = carry
        carry, late = block(carry, starts[1], rest, pair.rest)
    carry, (carries, ys) = lax.scan(
        turn, carry, (starts[0], whole), length=pair.blocks, reverse=loop.reverse
    )
    if pair.rest and not loop.reverse:
        before = carry
        carry, late = block(carry, starts[1], rest, pair.rest)
    ys = [lax.reshape(y, (count, *y.shape[2:])) for y in ys]
    if pair.rest:
        ys = [jnp.concatenate([y, z]) for y, z in zip(ys, late, strict=True)]
    return carry, ys, [*carries, *before]


def _stage(
    loop: Loop,
    count: int,
    ys: Sequence[Any],
    known: dict[int, Any],
    steps: dict[int, Any],
    carry: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Stage some steps of a loop; return the carries after them, and stacked results."""
    carries = [Carry(c.inner, c.inner, c.out) for c in loop.carries]
    inner = replace(loop, length=count, ys=list(ys), carries=carries)
    values = {c.inner: x for c, x in zip(loop.carries, carry, strict=True)}
    return stage(inner, known, steps, partial(get, values))
