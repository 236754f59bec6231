"""`calibrate`: the figures of a device profile, measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from symjax_rewrite.command_line.main import command_parser


def calibrate(argv: Sequence[str]) -> int:
    """Measure this machine and print every figure; return 0."""
    from symjax_rewrite.calibration import command  # imports JAX's timing, which takes a while

    parser = command_parser("calibrate", json=False)
    command.add_arguments(parser)
    return command.calibrate(parser.parse_args(argv))
