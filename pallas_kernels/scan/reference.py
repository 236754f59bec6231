"""The definition of a scan in plain JAX, step by step (may import spec.py and block.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.backend import YES, Support
from symjax_rewrite.pallas_kernels.scan.block import (
    ScanSource,
    Steps,
    empty_results,
    laid_out,
    last_state,
    sequential,
    start_state,
)
from symjax_rewrite.pallas_kernels.scan.spec import ScanSpec, readout_axes

Array = Any


def supports(spec: ScanSpec) -> Support:
    """Return `YES`: the definition runs every scan."""
    del spec
    return YES


def scan_reference(spec: ScanSpec, *operands: Any) -> tuple[Any, ...]:
    """Compute a scan by its definition, one step after the other.

    Args:
        spec: the scan.
        operands: one array per operand of the spec.

    Returns:
        The readouts in order, then the last state if the spec asks for it.
    """
    order = spec.state
    start = start_state(spec, operands, order)
    if spec.length == 0:
        return (*empty_results(spec), *[last_state(spec, order, start)] * spec.last)

    source = ScanSource.of(spec, operands, order)

    def step(h: Array, t: Array) -> tuple[Array, list[Array]]:
        h, made = advance(source.steps(t, 1), h)
        return h, [lax.squeeze(x, (_time(spec, k),)) for k, x in enumerate(made)]

    times = jnp.arange(spec.length, dtype=jnp.int32)
    h, made = lax.scan(step, start, times, reverse=spec.reverse)
    results = [jnp.moveaxis(x, 0, _time(spec, k)) for k, x in enumerate(made)]
    return (*results, *[last_state(spec, order, h)] * spec.last)


def _time(spec: ScanSpec, readout: int) -> int:
    return readout_axes(spec, spec.readouts[readout]).index(spec.time)


def advance(
    steps: Steps, h: Array, states: Callable[..., tuple[Array, Array, Array]] = sequential
) -> tuple[Array, list[Array]]:
    """Return the state after some steps, and their readouts in the layout of the results.

    Args:
        steps: the steps with their operands.
        h: the state before.
        states: a function that computes states: `sequential`, `in_tree`, or an equivalent one.
    """
    spec, order = steps.spec, steps.order
    a, b = steps.coefficients()
    before, after, last = states(spec, steps.shape[0], a, b, h)
    made = [laid_out(spec, r, order, steps.read_out(r, before, after)) for r in spec.readouts]
    return last, made
