"""Scans streamed by lax loops: any device, memory linear (may import the spec and `scan_block`).

Time is cut into blocks. Coefficients and readouts of a block are computed for all its steps at
once, where they vectorise and run on every core; only the recurrence itself goes step by step, on
values that still lie in the cache.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.scan_block import (
    Source,
    empty_results,
    inner_order,
    last_state,
    start_state,
    without_ones,
    write_steps,
)
from symjax_rewrite.pallas_kernels.scan_cost import block_steps
from symjax_rewrite.pallas_kernels.scan_reference import advance
from symjax_rewrite.pallas_kernels.scan_spec import ScanSpec, result_shapes
from symjax_rewrite.pallas_kernels.support import YES, Support

Array = Any


def supports(spec: ScanSpec) -> Support:
    """Every scan, on every device."""
    del spec
    return YES


def scan_xla(spec: ScanSpec, *operands: Any, steps: int | None = None) -> tuple[Any, ...]:
    """A scan, streamed.

    Args:
        spec: the scan.
        operands: one array per operand of the spec.
        steps: per block; chosen from the size of a state if left out.

    Returns:
        The same as `scan_reference`.
    """
    shapes = [shape for shape, _ in result_shapes(spec)]
    spec = without_ones(spec)
    operands = tuple(x.reshape(spec.shape(k)) for k, x in enumerate(operands))
    order = inner_order(spec)
    source = Source.of(spec, operands, order)
    h = start_state(spec, operands, order)
    results = empty_results(spec)
    steps = max(1, min(steps or block_steps(spec), spec.length))
    blocks, rest = divmod(spec.length, steps)

    def block(first: Any, count: int, h: Array, results: list[Array]) -> tuple[Array, list[Array]]:
        h, made = advance(source.steps(first, count), h)
        return h, write_steps(spec, results, made, first)

    def turn(number: Any, carry: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        number = blocks - 1 - number if spec.reverse else number
        return block(jnp.int32(number) * steps, steps, *carry)

    if rest and spec.reverse:
        h, results = block(blocks * steps, rest, h, results)
    if blocks:
        h, results = lax.fori_loop(0, blocks, turn, (h, results))
    if rest and not spec.reverse:
        h, results = block(blocks * steps, rest, h, results)
    results = [*results, *[last_state(spec, order, h)] * spec.last]
    return tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))
