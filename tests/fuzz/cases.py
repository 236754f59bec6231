"""The case of a seed: a program and a way to try it."""

from __future__ import annotations

import dataclasses
import random

from tests.fuzz.builder import RandomChooser
from tests.fuzz.check import TRANSFORMS, Mode
from tests.fuzz.edges import far_products, low_rank_readout, quantised
from tests.fuzz.grammar import SIMPLE, program
from tests.fuzz.programs import Program

# `value` leaves the program as it is: what grad and vmap make of it are programs too.
WEIGHTS = {"value": 6, "in_grad": 3, "in_vmap": 2, "in_jvp": 1, "in_second": 1}
CHOICES = ("random", "random", "random", "wide", "wide", "model", "always")
NUMERICS = {"reassoc": 84, "cancels": 6, "finite": 4, "exact": 6}
LARGE_PERCENT = 15
COMPILED_PERCENT = 2
SYMBOLIC_PERCENT = 8  # of those that are not transformed; most refuse
KERNELS_PERCENT = 40
SWARM_PERCENT = 2  # of each, drawn apart, so that the other seeds stay the programs they were
SWARMS = {
    "solves": (low_rank_readout, low_rank_readout, *SIMPLE),
    "centred": (far_products, far_products, *SIMPLE),
    "quantised": (quantised, quantised, *SIMPLE),
}


def case(seed: int) -> tuple[Program, Mode]:
    """The program and mode of a seed; the same in every process."""
    rng = random.Random(seed)
    large = rng.randrange(100) < LARGE_PERCENT
    weights = [WEIGHTS.get(t, 1) for t in TRANSFORMS]
    transform = rng.choices(list(TRANSFORMS), weights)[0]
    choice = "model" if large and rng.random() < 0.5 else rng.choice(CHOICES)
    compiled = not large and rng.randrange(100) < COMPILED_PERCENT
    kernels = "always" if rng.randrange(100) < KERNELS_PERCENT else "auto"
    numerics = rng.choices(list(NUMERICS), list(NUMERICS.values()))[0]
    special = numerics == "exact" and rng.random() < 0.5
    mode = Mode(transform, choice, seed, numerics, compiled, kernels)
    drawn = [n for n in SWARMS if random.Random(f"{n} {seed}").randrange(100) < SWARM_PERCENT]
    swarm = SWARMS[drawn[0]] if drawn else None
    made = program(RandomChooser(rng), large=large, special=special, swarm=swarm)
    symbolic = mode.transform == "value" and rng.randrange(100) < SYMBOLIC_PERCENT
    return made, dataclasses.replace(mode, symbolic=symbolic)
