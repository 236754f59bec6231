"""Programs nobody thought of: each must mean the same after optimisation.

Half are drawn by Hypothesis, which also makes failures small; half are programs of seeds, as
`experiments/fuzz/run.py` runs them by the thousand.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import CHOICES, case
from tests.fuzz.check import TRANSFORMS, Failure, InvalidProgramError, Mode
from tests.fuzz.grammar import program
from tests.fuzz.programs import Program
from tests.fuzz.shrink import script
from tests.fuzz.symbolic import check_named

BLOCKS = 6
PER_BLOCK = 25
FORCED = 15  # programs per block with all thresholds at zero
SECONDS = 60  # per block: fewer programs are tried on a slow machine


class DrawnChooser:
    """Decisions of Hypothesis."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.draw(st.integers(0, len(options) - 1))]


@st.composite
def programs(draw: Any) -> Program:
    """Random well-typed programs."""
    return program(DrawnChooser(draw), lines=5)


pytestmark = pytest.mark.filterwarnings("ignore")  # programs may be unwise

modes = st.builds(
    Mode, st.sampled_from(list(TRANSFORMS)), st.sampled_from(CHOICES), st.integers(0, 99)
)


@settings(max_examples=60, suppress_health_check=list(cast(Any, HealthCheck)))
@given(program=programs(), mode=modes)
def test_drawn_program_means_the_same(program: Program, mode: Mode):
    try:
        outcome = check_named(program, mode)
    except InvalidProgramError:
        outcome = "invalid"
    if isinstance(outcome, Failure):
        raise AssertionError(script(program, mode, outcome))
    event(outcome)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_program_of_a_seed_means_the_same(block: int):
    end = time.monotonic() + SECONDS
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        if time.monotonic() > end:
            break
        made, mode = case(seed)
        try:
            outcome = check_named(made, mode)
        except InvalidProgramError:
            continue
        assert not isinstance(outcome, Failure), script(made, mode, outcome)


@pytest.mark.parametrize("block", range(2))
def test_program_means_the_same_with_every_legal_candidate_taken(block: int):
    for seed in range(block * FORCED, (block + 1) * FORCED):
        made, mode = case(seed)
        mode = dataclasses.replace(mode, choice="forced")
        try:
            outcome = check_named(made, mode)
        except InvalidProgramError:
            continue
        assert not isinstance(outcome, Failure), script(made, mode, outcome)
