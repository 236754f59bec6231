"""Tables of tests: products of which half is drawn."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def half_swept(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Draw half of the pairs: every row and every column is met; the rest is swept.

    The draw has no period (the parity of a row's binary digits), so that each end of the support
    range, which takes the pairs in turn, meets every row and column too.
    """
    return [
        pytest.param(row, column, marks=[pytest.mark.sweep] * ((i.bit_count() + j) % 2))
        for (i, row), (j, column) in product(enumerate(rows), enumerate(columns))
    ]
