"""Figures of memory: bandwidth, caches, pages of fresh memory, transposed copies."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from symjax_rewrite.calibration.measurement import Case, Measurement, rate
from symjax_rewrite.calibration.timing import LineFit
from symjax_rewrite.cost.device_profiles import Device

MIB = 1 << 20
BEYOND_CACHES = (64 * MIB, 96 * MIB, 128 * MIB, 192 * MIB)  # bytes
WITHIN_CACHES = (MIB, 2 * MIB, 3 * MIB, 4 * MIB)


def floats(count: int) -> jnp.ndarray:
    """Return float32 ones that fill so many bytes."""
    return jnp.ones(count // 4, jnp.float32)


def updates_in_place(device: Device) -> Sequence[Case]:
    """Return `x + 1` in place; the amount is bytes read and written."""
    return [Case(2 * n, lambda x: x + 1.0, (floats(n),), donates=True) for n in BEYOND_CACHES]


def cached_products(device: Device) -> Sequence[Case]:
    """Return products of a matrix in a cache and a vector; the amount is bytes."""
    cases = []
    for n in WITHIN_CACHES:
        x = floats(n).reshape(-1, 512)
        cases.append(Case(n, lambda x, v: x @ v, (x, jnp.ones(512))))
    return cases


def times_bandwidth(fit: LineFit, device: Device) -> float:
    """Return bytes per second as a factor of the bandwidth of memory."""
    return max(rate(fit, device) / device.bytes_per_s, 1.0)


def cached_additions(device: Device) -> Sequence[Case]:
    """Return `x + y` of arrays in a cache; the amount is bytes read and written."""
    return [Case(3 * n, lambda x, y: x + y, (floats(n), floats(n))) for n in WITHIN_CACHES]


def fresh_results(device: Device) -> Sequence[Case]:
    """Return `x + 1` into memory that the system gives anew, less a sum; bytes written."""
    kept = device.memory.kept_bytes
    sizes = [int(kept + n) for n in (8 * MIB, 16 * MIB, 24 * MIB)] if kept < 1 << 30 else []
    return [Case(n, lambda x: x + 1.0, (floats(n),), less=jnp.sum) for n in sizes]


def transposed_arrays(device: Device) -> Sequence[Case]:
    """Return arrays (long, 16) laid out anew as (16, long); the amount is bytes."""
    cases = []
    for n in (4 * MIB, 8 * MIB, 16 * MIB):
        x = floats(n).reshape(-1, 16)
        cases.append(Case(2 * n, lambda x: x.T + 1.0, (x,)))
    return cases


MEASUREMENTS = (
    Measurement("bytes_per_s", updates_in_place, rate),
    Measurement("memory.cached_step", cached_products, times_bandwidth),
    Measurement("memory.cached_terms", cached_additions, times_bandwidth),
    Measurement("memory.fresh_bytes_per_s", fresh_results, rate),
    Measurement("scans.steps.moved_bytes_per_s", transposed_arrays, rate),
)
