"""The command `calibrate`: measures the figures of a device profile on this machine.

python -m symjax_rewrite calibrate --save my_server.json
SYMJAX_DEVICE=my_server.json python train.py
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from symjax_rewrite.calibration import elementwise, loops, measurement, memory, products, reductions
from symjax_rewrite.calibration.machine_load import taken_cores
from symjax_rewrite.calibration.measurement import Measurement, Reading
from symjax_rewrite.calibration.progress import Progress
from symjax_rewrite.cost.core_scaling import instruction_set, usable_cores
from symjax_rewrite.cost.device_profiles import DEVICES, Device, device_profile, nearest_gpu
from symjax_rewrite.cost.profile_file import write_profile
from symjax_rewrite.cost.profile_paths import figures, has, is_number, value_of, with_value
from symjax_rewrite.errors import CalibrationError, UsageError
from symjax_rewrite.text_tables import aligned

# In order: a measurement reads the figures before it as measured.
MEASUREMENTS: tuple[Measurement, ...] = (
    *products.MEASUREMENTS,
    *elementwise.MEASUREMENTS,
    *memory.MEASUREMENTS,
    *reductions.MEASUREMENTS,
    *loops.MEASUREMENTS,
)
MOST_SPREAD = 0.15  # of samples, relative to their median
TRIES = 3  # of a measurement whose samples spread more
MOST_NOISY = 0.25  # share of the figures that may be left out as too noisy
MOST_TAKEN = 0.2  # share of the usable cores that other programs may keep busy
REMEDY = "end other programs and try again; --force measures all the same"
Read = Callable[[Measurement, Device], Reading]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--save", metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--only", default="", help="figures whose path has this text")
    parser.add_argument("--force", action="store_true", help="on a busy or noisy machine too")


def calibrate(options: argparse.Namespace) -> int:
    """Measure this machine, print every figure and write the profile; return the exit code.

    Args:
        options: `save`, a path or None; `only`, text in the paths of figures; `force`, True to
            measure on a machine that is busy or noisy.

    Raises:
        CalibrationError: other programs use the cores, or times spread too much. UsageError: no
            figure has the text of `only`. OSError: the file cannot be written.
    """
    place = jax.devices()[0]
    device = device_profile(None, place)
    chosen = applicable(device, options.only)
    base = device if is_named(device) else nearest_gpu(place)
    file = Path(options.save) if options.save else None
    if file is not None and not file.parent.is_dir():
        raise UsageError("cannot save", expected="a file in an existing folder", got=str(file))
    if not options.force:
        check_load(taken_cores())
    most = math.inf if options.force else MOST_SPREAD
    readings = measured(device, chosen, most)
    print(table(device, readings, most))
    if file is not None:
        good = {path: r for path, r in readings.items() if is_steady(r, most)}
        write_profile(file, record(base, device, good, file.stem))
        print(f"\nwritten: {file}")
        print(f"use it: SYMJAX_DEVICE={file}, or sym_optimize(device={str(file)!r})")
    return 0


def is_steady(reading: Reading, most_spread: float) -> bool:
    """Return True for a figure that noise does not hide."""
    return math.isfinite(reading.spread) and reading.spread <= most_spread


def check_load(taken: float | None) -> None:
    """Raise a CalibrationError if other programs keep too many of the usable cores busy."""
    cores = usable_cores()
    if taken is not None and taken > MOST_TAKEN * cores:
        raise CalibrationError(
            "this machine is busy",
            expected=f"other programs on at most {MOST_TAKEN:.0%} of {cores} cores",
            got=f"{taken:.1f} cores in use",
            remedy=REMEDY,
        )


def is_named(device: Device) -> bool:
    """Return True if the profile can be selected by its name."""
    return device.name in DEVICES or not device.runs_on_gpu


def applicable(device: Device, text: str = "") -> list[Measurement]:
    """Return the measurements of figures that the profile has.

    Raises:
        UsageError: there is none with this text in its path.
    """
    mine = [m for m in MEASUREMENTS if has(device, m.path)]
    chosen = [m for m in mine if text in m.path]
    if not chosen:
        expected = ", ".join(m.path for m in mine)
        raise UsageError(
            "no measured figure has this text in its path", expected=expected, got=text
        )
    return chosen


def measured(
    device: Device,
    chosen: Sequence[Measurement],
    most_spread: float = MOST_SPREAD,
    read: Read = measurement.read,
) -> dict[str, Reading]:
    """Return the reading of every figure, by path; noisy ones were tried again.

    Raises:
        CalibrationError: too many figures are noisy.
    """
    shown = Progress("calibrating")
    out: dict[str, Reading] = {}
    for k, one in enumerate(chosen):
        shown.show(k, len(chosen), one.path)
        reading = out[one.path] = _steadiest(one, device, most_spread, read)
        if is_steady(reading, most_spread):
            device = with_value(device, one.path, reading.value)
    shown.close()
    noisy = {path: r.spread for path, r in out.items() if not is_steady(r, most_spread)}
    if math.isfinite(most_spread) and len(noisy) > MOST_NOISY * len(out):
        worst = max(noisy, key=noisy.__getitem__)
        raise CalibrationError(
            f"this machine is too noisy: {len(noisy)} of {len(out)} figures are not steady",
            expected=f"samples that spread by at most {most_spread:.0%}",
            got=f"{noisy[worst]:.0%} for {worst}",
            remedy=REMEDY,
        )
    return out


def _steadiest(one: Measurement, device: Device, most: float, read: Read) -> Reading:
    """Return the first reading that is steady enough, else the steadiest of a few."""
    found: list[Reading] = []
    while len(found) < TRIES and not any(is_steady(r, most) for r in found):
        found.append(read(one, device))
    return min(found, key=lambda r: r.spread)


def table(device: Device, readings: dict[str, Reading], most_spread: float) -> str:
    """Return every figure with its unit, both values, the fit's residual and the spread."""
    units = {path: about["unit"] for path, _, about in figures(device)}
    rows = [("figure", "unit", "shipped", "measured", "residual", "spread", "")]
    for path, r in readings.items():
        shipped = f"{value_of(device, path):.3g}"
        note = "" if is_steady(r, most_spread) else "noisy: the shipped value stays"
        cells = (f"{r.value:.3g}", f"{r.residual:.0%}", f"{r.spread:.0%}", note)
        rows.append((path, units[path], shipped, *cells))
    return "\n".join(aligned(rows))


def record(base: Device, device: Device, readings: dict[str, Reading], name: str) -> dict[str, Any]:
    """Return the content of a profile file.

    Args:
        base: the shipped profile that the file builds on.
        device: the profile that was calibrated; where it differs from the base, so does the file.
        readings: by path.
        name: of the profile.
    """
    units = {path: about["unit"] for path, _, about in figures(base)}
    held: dict[str, dict[str, Any]] = {
        path: {"unit": units[path], "value": value}
        for path, value, _ in figures(device)
        if is_number(value) and has(base, path) and value != value_of(base, path)
    }
    for path, r in readings.items():
        about = {"residual": round(r.residual, 4), "spread": round(r.spread, 4)}
        held[path] = {"unit": units[path], "value": r.value, **about}
    return {"name": name, "base": base.name, "made": _machine(), "figures": held}


def _machine() -> dict[str, Any]:
    """Return the machine and versions that the figures were measured on."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "cores": usable_cores(),
        "instruction_set": instruction_set(),
        "machine": platform.platform(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
    }
