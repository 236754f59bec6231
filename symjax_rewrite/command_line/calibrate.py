"""`calibrate`: the figures of a device profile, measured on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def calibrate(argv: Sequence[str]) -> int:
    """Measure this machine and print every figure; return 0."""
    from symjax_rewrite.calibration import command  # imports JAX's timing, which takes a while

    parser = argparse.ArgumentParser(
        prog="symjax-rewrite calibrate", description="Measure this machine's device profile."
    )
    command.add_arguments(parser)
    return command.calibrate(parser.parse_args(argv))
