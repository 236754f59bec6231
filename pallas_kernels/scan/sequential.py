"""Scans as one loop over steps: the definition, and a backend laid out to vectorise.

A compiler vectorises the innermost loop, but unrolls a short innermost loop first: with 16 entries
innermost an exponential took three times as long as with 32 or more. The backend therefore has the
longest axis of a state innermost. Its sums over the other axes are matrix products: a plain sum
would be fused with the recurrence, and compute every exponential again, one entry at a time.

May import spec.py and block.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.backend import YES, Reason, Support
from symjax_rewrite.pallas_kernels.scan.block import (
    ScanSource,
    Steps,
    empty_results,
    laid_out,
    last_state,
    sequential,
    start_state,
    without_ones,
)
from symjax_rewrite.pallas_kernels.scan.spec import (
    ScanSpec,
    result_shapes,
    summing_totals,
    wide_order,
)

Array = Any


@summing_totals
def scan_reference(spec: ScanSpec, *operands: Any) -> tuple[Any, ...]:
    """Compute a scan by its definition, one step after the other.

    Returns:
        The readouts in order, then the last state if the spec asks for it.
    """
    if spec.length == 0:
        start = start_state(spec, operands, spec.state)
        return (*empty_results(spec), *[last_state(spec, spec.state, start)] * spec.last)
    return _loop(spec, operands, spec.state, dots=False)


def supports_sequential(spec: ScanSpec) -> Support:
    """Return `YES` for every scan with at least one step."""
    return YES if spec.length else Reason("there are no steps")


@summing_totals
def scan_sequential(spec: ScanSpec, *operands: Any) -> tuple[Any, ...]:
    """Run a scan with at least one step, as `scan_reference`, with the longest axis innermost."""
    shapes = [shape for shape, _ in result_shapes(spec)]
    spec, operands = without_ones(spec, operands)
    results = _loop(spec, operands, wide_order(spec), dots=True)
    return tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))


def _loop(
    spec: ScanSpec, operands: Sequence[Array], order: tuple[str, ...], dots: bool
) -> tuple[Array, ...]:
    """Run a scan as one loop over its steps, a state's axes in `order`; `dots` as in `read_out`."""
    axes = (spec.time, *order)
    fixed = ScanSource.of(spec, operands, order).fixed
    given = [
        lax.transpose(x, [o.axes.index(a) for a in axes if a in o.axes]) if f is None else None
        for x, o, f in zip(operands, spec.operands, fixed, strict=True)
    ]

    def step(h: Array, xs: Any) -> tuple[Array, list[Array]]:
        t, moving = xs
        values = (
            lax.expand_dims(x, (0, *(k for k, a in enumerate(axes) if a not in o.axes)))
            if f is None
            else f
            for x, o, f in zip(moving, spec.operands, fixed, strict=True)
        )
        steps = Steps(spec, order, tuple(values), t.reshape((1,) * len(axes)))
        before, after, last = sequential(spec, 1, *steps.coefficients(), h)
        made = (steps.read_out(r, before, after, dots) for r in spec.readouts)
        return last, [lax.squeeze(x, (0,)) for x in made]

    start = start_state(spec, operands, order)
    times = jnp.arange(spec.length, dtype=jnp.int32)
    length = spec.length if isinstance(spec.length, int) else None  # else taken from the operands
    h, made = lax.scan(step, start, (times, given), length=length, reverse=spec.reverse)
    results = [laid_out(spec, r, order, x) for r, x in zip(spec.readouts, made, strict=True)]
    return (*results, *[last_state(spec, order, h)] * spec.last)
