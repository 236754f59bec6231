"""Whole programs as written and by `sym_optimize`: those of other experiments, and random ones."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from on_gpu import measuring
from performance_fuzz import generator

from symjax_rewrite import sym_optimize

SEEDS = range(500_000, 500_096)
# Of `gpu_choices`, by words in the names: one width of attention, and everything else.
LEFT_OUT = (
    *("d = 64", "d = 256", "full, with gradient", "by hand, causal, forward"),
    "L16384 D2048 N16, with gradient",
)
LOOPS = ("Selective scan, f32", "Recurrent layers, B4 T1024, bf16")


def cases(dry: bool) -> Iterator[measuring.Case | measuring.Later]:
    """The programs of `gpu_choices`, then random ones."""
    chosen = [] if dry else [*layers()]
    yield from chosen
    for seed in SEEDS[:2] if dry else SEEDS:
        yield measuring.Later(f"seed {seed}", functools.partial(random_case, seed))


def layers() -> Iterator[measuring.Case]:
    """Attention, norms, scans and recurrent layers, whose choices `gpu_choices` predicts."""
    groups = importlib.import_module("gpu_choices.run").GROUPS
    for title, made in groups.items():
        for name, (fun, specs) in made():
            if not any(words in name for words in LEFT_OUT):
                loops = title in LOOPS
                operands = functools.partial(drawn, specs, loops)
                yield case(f"{title}: {name}", fun, operands, calls=2 if loops else 8)


def drawn(specs: list[Any], decaying: bool, seed: int) -> list[Any]:
    """Return small normal values; of a recurrence, steps above and decays below zero."""
    values = measuring.draw([(x.shape, jnp.float32) for x in specs], seed)
    values = [0.5 * x for x in values]
    if decaying:
        values = [jnp.abs(x) if x.ndim > 2 else -jnp.abs(x) for x in values]
    return [x.astype(spec.dtype) for x, spec in zip(values, specs, strict=True)]


def random_case(seed: int) -> measuring.Case:
    """The program of a seed of `performance_fuzz`."""
    program = generator.generate(seed)
    specs = program.specs()

    def operands(seed: int) -> list[Any]:
        return program.arguments(seed)

    made = case(f"seed {seed}", program.function(), operands)
    made.facts["family"] = program.family
    made.facts["specs"] = [f"{x.dtype}{list(x.shape)}" for x in specs]
    return made


def case(name: str, fun: Any, operands: Any, calls: int = measuring.CALLS) -> measuring.Case:
    """One program, as written and as chosen, whose values are compared with each other."""
    return measuring.Case(
        name,
        {"kind": "program"},
        operands,
        {"xla": fun, "auto": sym_optimize(fun)},
        "xla",
        calls=calls,
        unrolled=2,
        most_copies=2,
    )
