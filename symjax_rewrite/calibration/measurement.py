"""Measurements of figures: programs with amounts of work, and the figure that their times give."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from symjax_rewrite.calibration.timing import LineFit, fitted_line, sampled, spread
from symjax_rewrite.cost.core_scaling import usable_cores
from symjax_rewrite.cost.device_profiles import Device

ROUNDS, SAMPLE_S = 9, 4e-3


@dataclass(frozen=True, slots=True)
class Case:
    """One program of a measurement.

    amount: of work, in the unit that the figure is per. function: of the arguments. arguments:
    arrays. less: a program of the same arguments whose seconds are subtracted. donates: True if the
    first argument is updated in place.
    """

    amount: float
    function: Callable[..., Any]
    arguments: Sequence[Any]
    less: Callable[..., Any] | None = None
    donates: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one figure.

    path: of the figure in the profile. cases: programs for a device, whose figures measured before
    are the measured ones. figure: the value that the fitted line gives; no figure if it is not
    positive. wide: True if the figure is of 64 bits.
    """

    path: str
    cases: Callable[[Device], Sequence[Case]]
    figure: Callable[[LineFit, Device], float]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured figure. residual: of the fit.

    spread: of the samples, median of the cases; infinite if noise makes the figure negative.
    """

    value: float
    residual: float
    spread: float


Sampler = Callable[[Mapping[str, Callable[[], object]], int, float], dict[str, list[float]]]


def slope(fit: LineFit, device: Device) -> float:
    """Return seconds per unit of work."""
    return fit.slope


def rate(fit: LineFit, device: Device) -> float:
    """Return units of work per second."""
    return 1 / fit.slope if fit.slope > 0 else 0.0


def lowest(fit: LineFit, device: Device) -> float:
    """Return seconds per unit of work of the case where they are fewest."""
    return min(seconds / amount for amount, seconds in fit.points)


def sampler_of(device: Device) -> Sampler:
    """Return `timing.sampled`; on one core by processor time, whatever else runs."""
    alone = usable_cores() == 1 and not device.runs_on_gpu
    return functools.partial(sampled, clock=time.process_time if alone else time.perf_counter)


def read(one: Measurement, device: Device, sampler: Sampler | None = None) -> Reading:
    """Run the programs of a measurement and return the figure.

    Args:
        one: the figures and the programs that measure them.
        device: the profile so far.
        sampler: times programs in turn; default: `sampler_of` the device.
    """
    sampler = sampler or sampler_of(device)
    with jax.enable_x64(one.wide):
        cases = one.cases(device)
        calls: dict[str, Callable[[], object]] = {}
        for k, case in enumerate(cases):
            calls[f"{k}"] = _call(case.function, case)
            if case.less is not None:
                calls[f"{k} less"] = _call(case.less, case)
        found = sampler(calls, ROUNDS, SAMPLE_S)
    least = {name: min(seconds) for name, seconds in found.items()}
    seconds = [least[f"{k}"] - least.get(f"{k} less", 0.0) for k in range(len(cases))]
    fit = fitted_line([case.amount for case in cases], seconds)
    value = one.figure(fit, device)
    is_resolved = 0 < value < math.inf
    spreads = statistics.median(map(spread, found.values())) if is_resolved else math.inf
    return Reading(value, fit.residual, spreads)


@dataclass(slots=True)
class _InPlace:
    """A program that updates its first argument, which is handed from call to call."""

    compiled: Callable[..., Any]
    held: Any
    others: list[Any] = field(default_factory=list)

    def __call__(self) -> None:
        self.held = jax.block_until_ready(self.compiled(self.held, *self.others))


def _call(function: Callable[..., Any], case: Case) -> Callable[[], object]:
    arguments = list(case.arguments)
    jitted = jax.jit(function, donate_argnums=(0,) if case.donates else ())
    compiled = jitted.lower(*arguments).compile()
    if case.donates:
        first, *others = arguments
        return _InPlace(compiled, jax.numpy.array(first, copy=True), others)
    return lambda: jax.block_until_ready(compiled(*arguments))
