"""Predicted seconds have no jump between neighbouring sizes. Prices only: nothing is compiled.

Sizes are swept on a logarithmic grid. Where prices change fastest between two sizes of the grid,
the interval is halved until its ends are neighbours; a step between these is a jump. A price that
grows with the third power of a size changes by three times the relative step at most.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from symjax_rewrite.cost.device_profiles import Device, device_profile
from symjax_rewrite.cost.near_margins import AGAINST_WRITTEN
from symjax_rewrite.optimizer import Optimiser
from symjax_rewrite.options import Options
from symjax_rewrite.reports.program_cost import program_traffic, traffic
from symjax_rewrite.rules import packs

LEAST, MOST, PER_OCTAVE = 16, 8192, 1
LARGEST_JUMP = 1.06
INTERVALS = 2  # that are halved, of each sweep
F32 = jnp.float32


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T / 8) @ v


def nearest(x: Any, y: Any) -> Any:
    return jnp.argmin(jnp.sum(x**2, 1)[:, None] - 2 * x @ y.T + jnp.sum(y**2, 1), 1)


def chain(a: Any, b: Any, c: Any) -> Any:
    return a @ b @ c


def lora(x: Any, W: Any, A: Any, B: Any) -> Any:
    return x @ (W + A @ B)


def norm(x: Any, g: Any, W: Any) -> Any:
    return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g) @ W


def scan(a: Any, x: Any) -> Any:
    step = lambda h, t: ((h := t[0] * h + t[1]), h)  # noqa: E731
    return lax.scan(step, jnp.zeros(x.shape[1:]), (a, x))[1]


def hoisting(h: Any, A: Any, B: Any, x: Any) -> Any:
    return lax.scan(lambda h, t: (jnp.tanh(h @ jnp.tanh(A @ B)) + t, None), h, x)[0]


def ends(x: Any) -> Any:
    return jnp.sort(x, -1)[:, :4]


def banded(M: Any, x: Any) -> Any:
    return jnp.tril(M) @ x


def oriented(x: Any, y: Any) -> Any:
    return x.T @ y


Shapes = Callable[[int], tuple[tuple[int, ...], ...]]
FAMILIES: dict[Callable[..., Any], Shapes] = {
    attention: lambda n: ((n, 64),) * 3,
    nearest: lambda n: ((n, 16), (4096, 16)),
    chain: lambda n: ((n, 256), (256, 256), (256, 8)),
    lora: lambda n: ((n, 512), (512, 512), (512, 8), (8, 512)),
    norm: lambda n: ((n, 512), (512,), (512, 512)),
    scan: lambda n: ((256, n, 16),) * 2,
    hoisting: lambda n: ((8, n), (n, n), (n, n), (32, 8, n)),
    ends: lambda n: ((64, n),),
    banded: lambda n: ((n, n), (n, 64)),
    oriented: lambda n: ((n, 64), (n, 8)),
}
# The largest jump of a family on GPUs where the kernel itself is launched in another way.
KERNEL_CUTS = {
    scan: (2.0, "time is cut into chunks below some number of lanes"),
}
LAYOUT_CUTS = {  # on CPUs, where a form has its operands in another order
    scan: (2.6, "the longest axis of a state is innermost; rows of 2 KiB share places in a cache"),
}


class Price(NamedTuple):
    """Seconds as written, and with every candidate taken; the candidates."""

    written: float
    rewritten: float
    names: frozenset[str]

    @property
    def best(self) -> float:
        return min(self.written, self.rewritten)


def opened(device: Device) -> Device:
    """The profile by which no candidate is refused for its price."""
    kinds = dict.fromkeys(AGAINST_WRITTEN, 0.0)
    free = {"faster": math.inf, "larger": math.inf, "share_of_program": -1e9, "share_of_loop": -1e9}
    margins = dataclasses.replace(device.margins, **kinds, **free)
    return dataclasses.replace(device, margins=margins)


def pricing(fun: Callable[..., Any], shapes: Shapes, device: Device) -> Callable[[int], Price]:
    """The price of a family at a size."""
    optimiser = Optimiser(Options(rules=packs.default), packs.default, opened(device))

    @functools.cache
    def price(n: int) -> Price:
        closed = jax.jit(fun).trace(*[jax.ShapeDtypeStruct(s, F32) for s in shapes(n)]).jaxpr
        written = traffic(closed, device, {}).seconds
        result = optimiser.run(closed)
        rewritten = written
        if result.program is not None:
            rewritten = program_traffic(result.program, device, {}).seconds
        assert written is not None and rewritten is not None
        names = {u.name for u in result.routes if u.taken} | result.rules.keys()
        return Price(written, rewritten, frozenset(names))

    return price


def change(a: Price, b: Price) -> float:
    """The largest factor between two prices of the same programs, or of the best of each."""
    pairs = [(a.written, b.written), (a.best, b.best)]
    if a.names == b.names:
        pairs.append((a.rewritten, b.rewritten))
    return max(abs(math.log(x / y)) for x, y in pairs)


def jumps(price: Callable[[int], Price]) -> list[tuple[int, float]]:
    """The sizes before a jump, each with its factor."""
    octaves = math.log2(MOST / LEAST)
    count = int(PER_OCTAVE * octaves)
    grid = sorted({round(LEAST * 2 ** (k / PER_OCTAVE)) for k in range(count + 1)})

    def slope(interval: tuple[int, int]) -> float:
        a, b = interval
        return change(price(a), price(b)) / math.log(b / a)

    found = []
    steep = sorted(itertools.pairwise(grid), key=slope, reverse=True)
    for a, b in steep[:INTERVALS]:
        while b - a > 1:
            middle = min(max(round(math.sqrt(a * b)), a + 1), b - 1)
            a, b = max((a, middle), (middle, b), key=slope)
        factor = math.exp(change(price(a), price(b)) - 3 * math.log(b / a))
        if factor > LARGEST_JUMP:
            found.append((a, factor))
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "profile",
    [
        "cpu",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("cpu-16", "h100")),
        *(pytest.param(n, marks=pytest.mark.sweep) for n in ("cpu-1", "l4")),
    ],
)
def test_predicted_seconds_are_continuous(profile: str, family: Callable[..., Any]) -> None:
    device = device_profile(profile)
    most = LARGEST_JUMP
    cuts = KERNEL_CUTS if device.runs_on_gpu else LAYOUT_CUTS
    if family in cuts:
        most = cuts[family][0]
    found = jumps(pricing(family, FAMILIES[family], device))
    assert [(n, round(factor, 2)) for n, factor in found if factor > most] == []


@pytest.mark.parametrize("at", [40, 777, 5000])
def test_a_threshold_is_found(at: int) -> None:
    def price(n: int) -> Price:
        seconds = 1e-9 * n**2 * (1.0 if n < at else 1.5)
        return Price(1e-6 * n**2, seconds, frozenset({"fold"}))

    ((found, factor),) = jumps(price)
    assert found == at - 1 and factor == pytest.approx(1.5, rel=0.06)


def test_a_withheld_gain_is_found() -> None:
    def price(n: int) -> Price:
        taken = n >= 1000
        return Price(1.0, 0.3 if taken else 1.0, frozenset({"fold"} if taken else ()))

    ((found, factor),) = jumps(price)
    assert found == 999 and factor == pytest.approx(1 / 0.3, rel=0.01)


def test_smooth_prices_have_no_jump() -> None:
    assert jumps(lambda n: Price(1e-9 * n**3, 1e-6 + 1e-8 * n**2, frozenset({"fold"}))) == []
