"""Scans streamed by lax loops: any device, linear memory (may import spec.py and block.py).

Time is cut into blocks. Coefficients and readouts are computed for all steps of a block at once,
where they vectorise and run on every core. The recurrence goes step by step, on values still in
the cache. Where a step is little more than the recurrence, a block is one step.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.scan.block import (
    ScanSource,
    advance,
    empty_results,
    in_tree,
    inner_order,
    last_state,
    sequential,
    start_state,
    without_ones,
    write_steps,
)
from symjax_rewrite.pallas_kernels.scan.cost import block_steps, runs_sequentially, tree_steps
from symjax_rewrite.pallas_kernels.scan.sequential import scan_sequential
from symjax_rewrite.pallas_kernels.scan.spec import ScanSpec, result_shapes, summing_totals

Array = Any


@summing_totals
def scan_xla(
    spec: ScanSpec, *operands: Any, steps: int | None = None, tree: bool | None = None
) -> tuple[Any, ...]:
    """Run a scan, streamed.

    steps: steps per block; chosen from the size of a state if left out.
    tree: True if the maps of a block's steps are composed in a tree; if left out, True where the
    program is lowered for a GPU.
    """
    if spec.named:
        return scan_sequential(spec, *operands)

    def run(tree: bool) -> Any:
        if not tree and steps is None and runs_sequentially(spec):
            return lambda *xs: scan_sequential(spec, *xs)
        chosen = steps or (tree_steps(spec) if tree else block_steps(spec))
        return lambda *xs: scan_blocks(spec, xs, chosen, keep=False, tree=tree)[0]

    if tree is not None:
        return run(tree)(*operands)
    return by_device(run, *operands)


def by_device(run: Any, *operands: Any) -> Any:
    """Return `run(tree)(*operands)`, with `tree` true on a GPU alone."""
    return lax.platform_dependent(*operands, cuda=run(True), default=run(False))


def scan_blocks(
    spec: ScanSpec,
    operands: tuple[Any, ...],
    steps: int,
    keep: bool,
    tree: bool = False,
    order: tuple[str, ...] | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """Run a scan in blocks of `steps`; with `keep` return the states at the start of blocks too.

    These states have the structure that `walk` returns. They belong to the scan without axes of
    size 1, and their axes have the inner `order`.
    """
    shapes = [shape for shape, _ in result_shapes(spec)]
    spec, operands = without_ones(spec, operands)
    order = order or inner_order(spec)
    source = ScanSource.of(spec, operands, order)
    states = in_tree if tree else sequential

    def block(carry: Any, first: Any, count: int, x: Any) -> Any:
        del x
        h, results = carry
        after, made = advance(source.steps(first, count), h, states)
        return (after, write_steps(spec, results, made, first)), h if keep else None

    start = (start_state(spec, operands, order), empty_results(spec))
    (h, results), starts = walk(spec.length, steps, spec.reverse, block, start, (None, None))
    results = [*results, *[last_state(spec, order, h)] * spec.last]
    made = tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))
    return made, starts


def walk(
    length: int, steps: int, reverse: bool, block: Any, carry: Any, xs: tuple[Any, Any]
) -> tuple[Any, tuple[Any, Any]]:
    """Run a function over blocks of time in order, the last and shorter block apart.

    Args:
        block: `block(carry, first, count, x) -> (carry, y)`.
        carry: the carry of the first block.
        xs: the `x` of the blocks: stacked for blocks of full size, and one for the shorter block.

    Returns:
        The last carry, and the `y` structured like `xs`.
    """
    steps = max(1, min(steps, length))
    blocks, rest = divmod(length, steps)
    ys: Any = None
    y_rest: Any = None

    def turn(numbered: Any, x: Any) -> Any:
        first, carry = numbered
        carry, y = block(carry, first, steps, x)
        return (first + (-steps if reverse else steps), carry), y

    if rest and reverse:
        carry, y_rest = block(carry, blocks * steps, rest, xs[1])
    if blocks:
        start = jnp.int32((blocks - 1) * steps if reverse else 0)
        (_, carry), ys = lax.scan(turn, (start, carry), xs[0], length=blocks, reverse=reverse)
    if rest and not reverse:
        carry, y_rest = block(carry, blocks * steps, rest, xs[1])
    return carry, (ys, y_rest)
