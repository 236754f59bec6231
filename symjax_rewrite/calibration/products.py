"""Figures of matrix products: rates by dtype, and the extra time of layouts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.calibration.measurement import Case, Measurement, lowest, rate, slope
from symjax_rewrite.cost.device_profiles import Device

SECONDS = (1e-3, 2e-3, 4e-3, 6e-3)  # of the products, by the rate of the profile
MOST_SIDE, LEAST_SIDE = 8192, 64


def square_products(device: Device, dtype: str, key: str) -> list[Case]:
    """Return products of square matrices; the amount is FLOPs."""
    precision = lax.Precision.HIGHEST if key == "float32" else None
    cases = []
    for seconds in SECONDS:
        side = round((seconds * device.flops_per_s[key] / 2) ** (1 / 3) / 16) * 16
        side = min(max(side, LEAST_SIDE), MOST_SIDE)
        x = jnp.ones((side, side), dtype)
        product = functools.partial(jnp.matmul, precision=precision)
        cases.append(Case(2.0 * side**3, product, (x, x)))
    return cases


def products_of(key: str, dtype: str = "", wide: bool = False) -> Measurement:
    """Return the measurement of `flops_per_s` for the key of a dtype."""
    cases = functools.partial(square_products, dtype=dtype or key, key=key)
    return Measurement(f"flops_per_s.{key}", cases, rate, wide)


def products_across(device: Device) -> Sequence[Case]:
    """Return `Xᵀ Y`, X stored by rows, less `Z Y` with Z = Xᵀ in memory; elements of X.

    No side is a power of two: rows that share a cache set are far slower, and they are rare.
    """
    cases = []
    for rows, free, columns in ((50_000, 100, 10), (100_000, 18, 18), (2000, 2000, 60)):
        x, z, y = jnp.ones((rows, free)), jnp.ones((free, rows)), jnp.ones((rows, columns))
        across = lambda x, z, y: lax.dot_general(x, y, (((0,), (0,)), ((), ())))  # noqa: E731
        cases.append(Case(rows * free, across, (x, z, y), less=lambda x, z, y: z @ y))
    return cases


def transposed_results(device: Device) -> Sequence[Case]:
    """Return products whose result is transposed, less those whose result is not."""
    cases = []
    for n in (512, 1024, 1536):
        x, y = jnp.ones((n, 8)), jnp.ones((8, n))
        transposed = lambda x, y: lax.optimization_barrier(x @ y).T + 1.0  # noqa: E731
        plain = lambda x, y: lax.optimization_barrier(x @ y) + 1.0  # noqa: E731
        cases.append(Case(n * n, transposed, (x, y), less=plain))
    return cases


def copied_operands(device: Device) -> Sequence[Case]:
    """Return products in batches along a middle axis, less those along the first; elements."""
    cases = []
    for rows, batches, summed in ((100, 100, 100), (512, 16, 512), (1000, 20, 300)):
        x, z = jnp.ones((rows, batches, summed)), jnp.ones((batches, rows, summed))
        y = jnp.ones((batches, summed, 8))
        across = lambda x, z, y: jnp.einsum("abc,bck->bak", x, y)  # noqa: E731
        first = lambda x, z, y: jnp.einsum("bac,bck->bak", z, y)  # noqa: E731
        cases.append(Case(x.size, across, (x, z, y), less=first))
    return cases


MEASUREMENTS = (
    products_of("float32"),
    products_of("tf32", "float32"),
    products_of("bfloat16"),
    products_of("float16"),
    products_of("float64", wide=True),
    products_of("complex64"),
    products_of("default", "int32"),
    Measurement("layouts.across_s", products_across, lowest),
    Measurement("layouts.result_s", transposed_results, slope),
    Measurement("layouts.copy_s", copied_operands, slope),
)
