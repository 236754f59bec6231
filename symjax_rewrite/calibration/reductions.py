"""Figures of reductions by XLA's own routines, in elementwise steps per element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite.calibration.measurement import Case, Measurement, slope
from symjax_rewrite.calibration.timing import LineFit
from symjax_rewrite.cost.device_profiles import Device

COLUMNS, KEYS = 1024, 512


def normal(*shape: int) -> jax.Array:
    """Return normally distributed float32 values, the same in every run."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def steps(fit: LineFit, device: Device) -> float:
    """Return elementwise steps of a loop that stays in cache, per unit of work."""
    return slope(fit, device) * device.folds.fused_steps_per_s


def over_rows(function: Any, *rows: int) -> list[Case]:
    """Return a function of rows of `COLUMNS` elements; the amount is elements."""
    return [Case(n * COLUMNS, function, (normal(n, COLUMNS),)) for n in rows]


def argmaxima(device: Device) -> Sequence[Case]:
    """Return the place of the largest element of rows; the amount is elements."""
    return over_rows(lambda x: jnp.argmax(x, -1), 128, 256, 384)


def sorts(device: Device) -> Sequence[Case]:
    """Return sorted rows; the amount is elements times the doublings of a row and three."""
    levels = math.log2(COLUMNS) + 3
    found = over_rows(lambda x: jnp.sort(x, -1), 8, 16, 24)
    return [dataclasses.replace(case, amount=case.amount * levels) for case in found]


def largest_of_each_row(device: Device) -> Sequence[Case]:
    """Return a top-1 of long rows; the amount is elements."""
    return [
        Case(n * 4, lambda x: lax.top_k(x, 1), (normal(4, n),)) for n in (1 << 15, 1 << 16, 3 << 15)
    ]


def many_places(device: Device) -> Sequence[Case]:
    """Return a top-k of the same rows for several k; the amount is places times doublings."""
    x = normal(16, 16 * COLUMNS)
    each = 16 * math.log2(x.shape[1])
    return [Case(each * k, lambda x, k=k: lax.top_k(x, k), (x,)) for k in (16, 64, 128, 256)]


def keyed_sums(device: Device) -> Sequence[Case]:
    """Return sums of every row by the key of the column; the amount is elements."""
    key = jnp.asarray(np.random.default_rng(1).integers(0, KEYS, COLUMNS), jnp.int32)
    by_key = jax.vmap(lambda row: jax.ops.segment_sum(row, key, KEYS))
    return over_rows(by_key, 32, 64, 96)


def lookups(device: Device) -> Sequence[Case]:
    """Return elements of a table at given places; the amount is elements."""
    cases, table = [], normal(1 << 14)
    for n in (256, 512, 768):
        places = np.random.default_rng(2).integers(0, 1 << 14, (n, COLUMNS))
        taken = lambda table, places: table[places] + 1.0  # noqa: E731
        cases.append(Case(n * COLUMNS, taken, (table, jnp.asarray(places, jnp.int32))))
    return cases


MEASUREMENTS = (
    Measurement("folds.argmax", argmaxima, steps),
    Measurement("folds.sort", sorts, steps),
    Measurement("folds.top_k", largest_of_each_row, steps),
    Measurement("folds.top_k_place", many_places, steps),
    Measurement("folds.keyed", keyed_sums, steps),
    Measurement("folds.lookup", lookups, steps),
)
