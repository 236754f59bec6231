"""Make a failing program small: cut lines, outputs and bodies while it fails in the same way."""

from __future__ import annotations

import dataclasses

from tests.fuzz.check import Failure, InvalidProgramError, Mode
from tests.fuzz.programs import Program, smaller
from tests.fuzz.symbolic import check_named

SEEDS = 4  # a smaller program makes other random choices: so many are tried


def fails(program: Program, mode: Mode, kind: str) -> tuple[Mode, Failure] | None:
    """The failure of this kind that the program has, and the mode that shows it."""
    count = SEEDS if mode.choice in ("random", "wide") else 1
    for seed in range(mode.seed, mode.seed + count):
        trial = dataclasses.replace(mode, seed=seed)
        try:
            found = check_named(program, trial)
        except (InvalidProgramError, AssertionError, RecursionError):
            return None
        if isinstance(found, Failure) and found.kind == kind:
            return trial, found
    return None


def shrink(
    program: Program, mode: Mode, failure: Failure, checks: int = 400
) -> tuple[Program, Mode, Failure]:
    """The smallest program found within so many checks, and how it fails."""
    left = checks
    if mode.transform != "value":
        plain = dataclasses.replace(mode, transform="value")
        found = fails(program, plain, failure.kind)
        if found:
            mode, failure = found
    progress = True
    while progress and left > 0:
        progress = False
        for candidate in smaller(program):
            left -= 1
            if left <= 0:
                break
            found = fails(candidate, mode, failure.kind)
            if found:
                program, (mode, failure) = candidate, found
                progress = True
                break
    return program, mode, failure


def script(program: Program, mode: Mode, failure: Failure) -> str:
    """The program as Python, with what went wrong above it."""
    head = [f"# {failure.kind}: {line}" for line in failure.message.splitlines()[:3]]
    return "\n".join([*head, f"# {mode}", program.source()])
