"""The cycle collector of Python, paused while the library imports its modules and optimises."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cycle collector: with JAX loaded, one collection takes longer than optimisation.

    Neither imports nor the optimiser make garbage in cycles. Their objects therefore move to the
    oldest generation at once, by `freeze` and `unfreeze`. Earlier garbage is collected first.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
