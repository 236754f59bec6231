"""Planted bugs are caught: a fuzzer that sees nothing wrong may just not look."""

import pytest

from tests.fuzz.check import Failure
from tests.fuzz.mutations import MUTATIONS, hunt, once

PROGRAMS = 300  # within so many programs each must be seen; most are within ten

pytestmark = pytest.mark.filterwarnings("ignore")  # programs may be unwise


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_caught(name: str) -> None:
    caught = hunt(name, range(PROGRAMS))
    assert caught is not None, f"{PROGRAMS} programs did not show it"
    assert not isinstance(once(name, caught.seed), Failure), "it fails without the bug"
