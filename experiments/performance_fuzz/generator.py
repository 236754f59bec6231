"""The program of a seed: blocks in a row, then loops, batches and gradients, at realistic sizes."""

from __future__ import annotations

import math
import random
from typing import Any

import jax
from performance_fuzz import features, pairs, reductions
from performance_fuzz.builder import Builder
from performance_fuzz.program import LOOPS, Program, Wrap

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.reports.program_cost import memory

LEAST_ELEMENTS, MOST_ELEMENTS, MOST_FEATURES = 1e3, 1e8, 4096
MOST_BYTES = 2 << 30  # of all live values, as if nothing were fused
SECONDS = (0.003, 0.01, 0.03, 0.1)  # that a program may take, by a rough estimate
FLOPS_PER_S, ELEMENTS_PER_S = 6e10, 2e9
SLOW = {"sort": 60.0, "top_k": 60.0, "scatter-add": 8.0, "gather": 4.0, "exp": 3.0, "tanh": 3.0}


def generate(seed: int) -> Program:
    """Return the program of a seed; the same in every process."""
    return fitted(compose(seed), random.Random(f"seconds {seed}").choice(SECONDS))


def compose(seed: int) -> Program:
    """Return the program of a seed before its sizes are fitted to time and memory."""
    b = Builder(random.Random(f"performance {seed}"))
    elements = b.number(LEAST_ELEMENTS, MOST_ELEMENTS)
    d = b.size("d", 1, min(MOST_FEATURES, elements))
    b.sizes["n"] = max(elements // b.sizes[d], 1)
    value = x = b.given("x", ("n", d))
    for _ in range(b.pick(0, 1, 1, 2, 2, 3)):
        table = pairs.BLOCKS if b.chance(0.25) else features.BLOCKS
        value = _add(b, b.pick(*table), value)
    loops = _loop(b, x, value) if value != x and b.chance(0.25) else None
    if loops is not None:
        value, wraps = loops
    else:
        wraps = []
        if value == x or b.chance(0.65):
            value = _add(b, b.pick(*reductions.BLOCKS), value)
    wraps = _wrapped(b, wraps, x, value)
    family = " ".join((*b.used, *(w.kind for w in wraps)))
    sizes = tuple(b.sizes.items())
    return Program(sizes, tuple(b.inputs), tuple(b.lines), value, tuple(wraps), family).pruned()


def _add(b: Builder, block: features.Block, x: str) -> str:
    b.used.append(block.__name__)
    return block(b, x)


def _loop(b: Builder, x: str, value: str) -> tuple[str, list[Wrap]] | None:
    """Make the block the body of a loop whose carry is the first input."""
    n, d = b.shape[x]
    shape = b.shape[value]
    if len(shape) != 2 or shape[0] != n:
        return None
    if shape != (n, d):
        value = b.let(f"{value} @ {b.weight(shape[1], d)}", n, d)
    if b.chance(0.5):
        value = b.let(b.pick(f"jnp.tanh({value})", f"0.5 * {x} + 0.5 * {value}"), n, d)
    kind = b.pick(*LOOPS)
    return value, [Wrap(kind, (x,), b.size("T", 2, 64))]


def _wrapped(b: Builder, wraps: list[Wrap], x: str, value: str) -> list[Wrap]:
    """Add batches and gradients."""
    others = [i.name for i in b.inputs if i.name != x and i.kind in ("normal", "weight")]
    if b.chance(0.2):
        over = [x, *(name for name in others if b.chance(0.2))]
        if others and b.chance(0.3):
            over = [b.pick(*others)]
        wraps.append(Wrap("vmap", tuple(over), b.size("b", 2, 128)))
    if b.chance(0.4) and all(w.kind != "while" for w in wraps):
        over = [name for name in (x, *others) if b.chance(0.6)] or [x]
        wraps.insert(
            b.pick(0, len(wraps)) if not _loops(wraps) else len(wraps), Wrap("grad", tuple(over))
        )
    return wraps


def _loops(wraps: list[Wrap]) -> bool:
    return any(w.kind in LOOPS for w in wraps)


def fitted(program: Program, seconds: float) -> Program:
    """Return the program with its largest sizes halved until it is fast and small enough."""
    while True:
        over = excess(program, seconds)
        name, value = max(program.sizes, key=lambda item: item[1])
        if over <= 1 or value < 2:
            return program
        shift = max(1, min(int(math.log2(over) / 3), 4))
        program = program.with_size(name, max(value >> shift, 1))


def excess(program: Program, seconds: float) -> float:
    """Return how many times too slow or too large a program is, by a rough estimate."""
    try:
        closed = jax.make_jaxpr(program.function())(*program.specs())
    except OverflowError:  # a size beyond 32 bits
        return 1e6
    trips = max((program.size(w.size) for w in program.wraps if w.kind in LOOPS), default=1)
    held = memory(flatten(closed))
    assert held is not None
    return max(estimated_seconds(closed.jaxpr, trips) / seconds, held[0] / MOST_BYTES)


def estimated_seconds(jaxpr: Any, trips: int = 1) -> float:
    """Return a rough time of a jaxpr; `trips` is the trip count of its `while` loops."""
    total = 0.0
    for e in jaxpr.eqns:
        name = e.primitive.name
        size = sum(v.aval.size for v in e.outvars if hasattr(v.aval, "size"))
        if inner := jax_internals.bodies(e):
            times = e.params["length"] if name == "scan" else trips if name == "while" else 1
            total += times * sum(estimated_seconds(body.jaxpr, trips) for body in inner)
        elif name == "dot_general":
            (contracted, _), _ = e.params["dimension_numbers"]
            summed = math.prod(e.invars[0].aval.shape[i] for i in contracted)
            total += 2 * size * summed / FLOPS_PER_S + 2e-6
        else:
            size = max([size, *(v.aval.size for v in e.invars if hasattr(v.aval, "size"))])
            total += size * SLOW.get(name, 1.0) / ELEMENTS_PER_S
    return total
