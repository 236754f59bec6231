"""Figures of loops: a trip, and the entries of its state."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.calibration.measurement import Case, Measurement, slope
from symjax_rewrite.calibration.timing import LineFit
from symjax_rewrite.cost.device_profiles import Device

TRIPS = 128
WIDE, NARROW = 256, 16  # innermost axes that are vectorised, and that are not
ENTRIES = (2048, 4096, 8192, 16384)
STATE = 1024  # entries; XLA compiles loops over less than a kilobyte as one kernel


def affine_loop(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, is_slow: bool
) -> Any:
    """Run `h ← a·h + (dt·x) b` and give `h·c`, for every row of x; slow: a is an exponential."""

    def step(h: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = given
        decay = jnp.exp(-dt[:, None] * a) if is_slow else a
        h = decay * h + (dt * x)[:, None] * b
        return h, jnp.sum(h * c, -1)

    return lax.scan(step, jnp.zeros(a.shape), (x, dt, b, c))[1]


def loop_case(amount: float, trips: int, rows: int, width: int, is_slow: bool = False) -> Case:
    """Return a loop over states of some rows and width."""
    shapes = ((trips, rows), (trips, rows), (rows, width), (trips, width), (trips, width))
    arguments = [jnp.full(s, 0.5) for s in shapes]
    return Case(amount, functools.partial(affine_loop, is_slow=is_slow), arguments)


def trips(device: Device) -> Sequence[Case]:
    """Return loops over a small state; the amount is trips."""
    return [loop_case(n, n, STATE // WIDE, WIDE) for n in (128, 256, 384, 512)]


def states(device: Device, width: int, is_slow: bool) -> Sequence[Case]:
    """Return loops over states of several sizes; the amount is entries of all trips."""
    return [loop_case(n * TRIPS, TRIPS, n // width, width, is_slow) for n in ENTRIES]


def entries(path: str, width: int, is_slow: bool) -> Measurement:
    """Return the measurement of the seconds of an entry."""
    return Measurement(path, functools.partial(states, width=width, is_slow=is_slow), slope)


def beside_entries(fit: LineFit, device: Device) -> float:
    """Return the seconds of a trip beside the arithmetic of its state."""
    steps = device.scans.steps
    arithmetic = STATE * steps.entry_s if steps else 0.0
    return slope(fit, device) - arithmetic


MEASUREMENTS = (
    entries("scans.steps.entry_s", WIDE, is_slow=False),
    entries("scans.steps.slow_entry_s", WIDE, is_slow=True),
    entries("scans.steps.narrow_entry_s", NARROW, is_slow=False),
    entries("scans.steps.narrow_slow_entry_s", NARROW, is_slow=True),
    Measurement("scans.steps.step_s", trips, beside_entries),
)
