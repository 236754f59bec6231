"""Figures of elementwise kernels: steps, half precision, launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.calibration.measurement import Case, Measurement, rate, slope
from symjax_rewrite.calibration.timing import LineFit
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import SLOW_STEPS

ELEMENTS = 1 << 18
ROWS, SIDE = 8, 64
LIGHT_STEPS = 8  # of `tiles`: a negation too
DEPTHS = (2, 4, 6, 8)


def repeated(function: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    """Return a function applied so many times."""

    def run(x: Any) -> Any:
        for _ in range(times):
            x = function(x)
        return x

    return run


def wave(x: jax.Array) -> jax.Array:
    """Return a transcendental function of each kind: three slow operations."""
    return jnp.tanh(jnp.sin(jnp.exp(-x)))


def chains(device: Device, dtype: str = "float32") -> Sequence[Case]:
    """Return chains of transcendental functions; the amount is steps, as the cost model counts."""
    x = jnp.linspace(0.1, 0.9, ELEMENTS, dtype=dtype)
    return [Case(3 * SLOW_STEPS * k * ELEMENTS, repeated(wave, k), (x,)) for k in DEPTHS]


def half_chains(device: Device) -> Sequence[Case]:
    """Return the same chains in bfloat16."""
    return chains(device, "bfloat16")


def times_single(fit: LineFit, device: Device) -> float:
    """Return how many steps of float32 a step takes."""
    return max(slope(fit, device) * device.elementwise_per_s, 1.0)


def small_products(device: Device) -> Sequence[Case]:
    """Return chains of small products; the amount is kernels."""
    x, w = jnp.full((ROWS, SIDE), 0.1), jnp.full((SIDE, SIDE), 0.01)
    chain = lambda x, w, k: repeated(lambda y: y @ w, k)(x)  # noqa: E731
    return [Case(k, functools.partial(chain, k=k), (x, w)) for k in (8, 16, 32, 64)]


def beside_products(fit: LineFit, device: Device) -> float:
    """Return the seconds of a kernel beside its arithmetic."""
    return slope(fit, device) - 2 * ROWS * SIDE * SIDE / device.peak("float32")


def tiles(device: Device) -> Sequence[Case]:
    """Return sums over pairs of a term of light steps and an exponential; the amount is steps."""
    cases = []
    for n in (256, 512, 768):
        x = jnp.linspace(0.0, 1.0, n)

        def tile(x: jax.Array) -> jax.Array:
            t = jnp.maximum(x[:, None] - x, 0.1) * 0.3 + x
            return jnp.sum(jnp.exp(-t) * jnp.minimum(t, 0.9), axis=1)

        cases.append(Case((LIGHT_STEPS + SLOW_STEPS) * n * n, tile, (x,)))
    return cases


MEASUREMENTS = (
    Measurement("launch_s", small_products, beside_products),
    Measurement("elementwise_per_s", chains, rate),
    Measurement("half_steps", half_chains, times_single),
    Measurement("folds.fused_steps_per_s", tiles, rate),
)
