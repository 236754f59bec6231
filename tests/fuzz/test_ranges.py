"""Scaled products that are finite as written are finite when optimised, whatever form is taken."""

import pytest

from tests.fuzz.ranges import FAR, FORMS, lost

SEEDS = 6


@pytest.mark.parametrize("dtype", FAR)
@pytest.mark.parametrize("form", FORMS)
def test_finite_values_stay_finite(form: str, dtype: str):
    for seed in range(SEEDS):
        for choice in ("model", "random"):
            assert not lost(form, seed, dtype, choice)
