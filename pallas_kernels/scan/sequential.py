"""Scans as one loop over steps, states laid out to vectorise (imports spec.py and block.py).

A compiler vectorises the innermost loop, but unrolls a short innermost loop first: with 16 entries
innermost an exponential took three times as long as with 32 or more. The longest axis of a state is
therefore innermost. Sums over the other axes are matrix products: a plain sum would be fused with
the recurrence, and compute every exponential again, one entry at a time.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.backend import YES, Reason, Support
from symjax_rewrite.pallas_kernels.scan.block import (
    ScanSource,
    Steps,
    laid_out,
    last_state,
    placed,
    sequential,
    start_state,
    without_ones,
)
from symjax_rewrite.pallas_kernels.scan.spec import ScanSpec, result_shapes, wide_order

Array = Any


def supports(spec: ScanSpec) -> Support:
    """Return `YES` for every scan with at least one step."""
    return YES if spec.length else Reason("there are no steps")


def scan_turns(spec: ScanSpec, *operands: Any) -> tuple[Any, ...]:
    """Run a scan as one loop over its steps.

    Args:
        spec: the scan, with at least one step.
        operands: one array per operand of the spec.

    Returns:
        The results of `reference.scan_reference`.
    """
    shapes = [shape for shape, _ in result_shapes(spec)]
    spec = without_ones(spec)
    order = wide_order(spec)
    operands = tuple(x.reshape(spec.shape(k)) for k, x in enumerate(operands))
    fixed = ScanSource.of(spec, operands, order).fixed
    axes = (spec.time, *order)
    given = [
        lax.squeeze(placed(x, o.axes, axes), _lacking(o.axes, axes)) if f is None else None
        for x, o, f in zip(operands, spec.operands, fixed, strict=True)
    ]

    def step(h: Array, xs: Any) -> tuple[Array, list[Array]]:
        t, moving = xs
        values = (
            lax.expand_dims(x, (0, *(k for k in _lacking(o.axes, axes)))) if f is None else f
            for x, o, f in zip(moving, spec.operands, fixed, strict=True)
        )
        steps = Steps(spec, order, tuple(values), t.reshape((1,) * len(axes)))
        a, b = steps.coefficients()
        before, after, last = sequential(spec, 1, a, b, h)
        return last, [
            lax.squeeze(steps.read_out(r, before, after, dots=True), (0,)) for r in spec.readouts
        ]

    start = start_state(spec, operands, order)
    times = jnp.arange(spec.length, dtype=jnp.int32)
    h, made = lax.scan(step, start, (times, given), length=spec.length, reverse=spec.reverse)
    results = [laid_out(spec, r, order, x) for r, x in zip(spec.readouts, made, strict=True)]
    results += [last_state(spec, order, h)] * spec.last
    return tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))


def _lacking(axes: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[int, ...]:
    """Return the places in `wanted` of the axes that `axes` lacks."""
    return tuple(k for k, a in enumerate(wanted) if a not in axes)
