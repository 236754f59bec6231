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

ELEMENTS = 1 << 18
ROWS, SIDE = 8, 64
LIGHT_STEPS = 8  # of `tiles`: a negation too


def repeated(function: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    """Return a function applied so many times."""

    def run(x: Any) -> Any:
        for _ in range(times):
            x = function(x)
        return x

    return run


def kernels(device: Device, dtype: str = "float32") -> Sequence[Case]:
    """Return loops whose step is a kernel of one operation; the amount is operations."""
    x = jnp.linspace(0.1, 0.9, ELEMENTS, dtype=dtype)

    def run(x: jax.Array, y: jax.Array, k: int) -> jax.Array:
        return jax.lax.fori_loop(0, k, lambda _, x: x + y, x)

    return [Case(k * ELEMENTS, functools.partial(run, k=k), (x, x)) for k in (8, 16, 32, 64)]


def half_kernels(device: Device) -> Sequence[Case]:
    """Return the same loops in bfloat16."""
    return kernels(device, "bfloat16")


FUNCTIONS: dict[str, tuple[Callable[[jax.Array], jax.Array], ...]] = {
    "root": (jnp.sqrt, lambda x: 1 / (1 + x)),
    "short": (jnp.exp, jnp.tanh),
    "long": (jnp.expm1, jnp.log1p),
    "periodic": (jnp.sin, jnp.cos),
    "power": (lambda x: jnp.power(x, x), lambda x: jnp.power(x, -1.5)),
    "scalar": (jnp.arctan, jnp.cbrt),
}


def functions(device: Device, kind: str) -> Sequence[Case]:
    """Return sums of functions of a kind at several points; the amount is functions."""
    x = jnp.linspace(0.1, 3.0, 4 * ELEMENTS)

    def run(x: jax.Array, times: int) -> jax.Array:
        points = [x + 0.01 * k for k in range(times)]
        return functools.reduce(jnp.add, [f(y) for y in points for f in FUNCTIONS[kind]])

    return [Case(2 * k * x.size, functools.partial(run, times=k), (x,)) for k in (1, 2, 3, 4)]


def in_steps(fit: LineFit, device: Device) -> float:
    """Return how many steps of a loop that stays in cache one takes."""
    return slope(fit, device) * device.folds.fused_steps_per_s


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
    steps = LIGHT_STEPS * device.folds.chained + device.functions.short
    cases = []
    for n in (256, 512, 768):
        x = jnp.linspace(0.0, 1.0, n)

        def tile(x: jax.Array) -> jax.Array:
            t = jnp.maximum(x[:, None] - x, 0.1) * 0.3 + x
            return jnp.sum(jnp.exp(-t) * jnp.minimum(t, 0.9), axis=1)

        cases.append(Case(steps * n * n, tile, (x,)))
    return cases


MEASUREMENTS = (
    Measurement("launch_s", small_products, beside_products),
    Measurement("elementwise_per_s", kernels, rate),
    Measurement("half_steps", half_kernels, times_single),
    Measurement("folds.fused_steps_per_s", tiles, rate),
    *(
        Measurement(f"functions.{kind}", functools.partial(functions, kind=kind), in_steps)
        for kind in FUNCTIONS
    ),
)
