"""The gradient of a scan, with rematerialised states (imports spec.py and xla.py).

A first pass keeps one state per block. A second pass visits the blocks from the end. For each block
it recomputes the states and pulls the cotangents back. No array has the size of all states. The
recurrence of the cotangents is a scan too (Chen et al. 2016, "Training deep nets with sublinear
memory cost").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.derivatives import two_modes
from symjax_rewrite.pallas_kernels.fold.tile import accumulator
from symjax_rewrite.pallas_kernels.scan.block import (
    ScanSource,
    advance,
    carried,
    in_tree,
    inner_order,
    placed,
    start_state,
    without_ones,
)
from symjax_rewrite.pallas_kernels.scan.cost import span_steps, tree_steps
from symjax_rewrite.pallas_kernels.scan.scan import scan
from symjax_rewrite.pallas_kernels.scan.spec import KINDS, ScanSpec, readout_axes
from symjax_rewrite.pallas_kernels.scan.xla import by_device, scan_blocks, walk

Array = Any


def _run(spec: ScanSpec, backend: str, *operands: Any) -> tuple[Any, ...]:
    return scan(spec, *operands, backend=backend)


def _run_forward(spec: ScanSpec, backend: str, *operands: Any) -> tuple[Any, Any]:
    return _run(spec, backend, *operands), operands


def _run_backward(spec: ScanSpec, backend: str, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    del backend
    return scan_backward(spec, kept, cotangents)


_differentiable = jax.custom_vjp(_run, nondiff_argnums=(0, 1))
_differentiable.defvjp(_run_forward, _run_backward)


def differentiable_scan(spec: ScanSpec, backend: str, *operands: Any) -> tuple[Any, ...]:
    """Run `scan(spec, *operands, backend=backend)`, with a gradient in linear memory.

    Forward mode differentiates `scan` itself.
    """
    return two_modes(
        partial(_run, spec, backend), partial(_differentiable, spec, backend), *operands
    )


def scan_backward(
    spec: ScanSpec,
    operands: tuple[Any, ...],
    cotangents: Sequence[Any],
    tree: bool | None = None,
) -> tuple[Any, ...]:
    """Return the cotangents of a scan's operands; None for operands that are not floats.

    cotangents: one per result of the scan.
    tree: as in `xla.scan_xla`.
    """
    count = len(operands)

    def run(tree: bool) -> Any:
        return lambda *xs: _backward(spec, xs[:count], xs[count:], tree)

    arguments = (*operands, *cotangents)
    return by_device(run, *arguments) if tree is None else run(tree)(*arguments)


def _backward(
    spec: ScanSpec, operands: tuple[Any, ...], cotangents: Sequence[Any], tree: bool
) -> tuple[Any, ...]:
    """Compute `scan_backward`, with tree-shaped blocks or without."""
    steps = tree_steps(spec) if tree else span_steps(spec)
    shapes = [x.shape for x in operands]
    spec, operands = without_ones(spec, operands)
    order = inner_order(spec)
    quiet = replace(spec, readouts=(), last=False)
    _, starts = scan_blocks(quiet, operands, steps, keep=True, tree=tree, order=order)
    source = ScanSource.of(spec, operands, order)
    outputs = [
        x.reshape([spec.size[a] for a in readout_axes(spec, r)])
        for r, x in zip(spec.readouts, cotangents, strict=False)
    ]
    g = jnp.zeros([spec.size[a] for a in order], carried(spec))
    if spec.last:
        last = cotangents[-1].reshape(spec.state_shape).astype(g.dtype)
        g = g + placed(last, spec.state, order)
    smooth = [jnp.issubdtype(x.dtype, jnp.inexact) for x in operands]
    bars = [
        None
        if not s
        else jnp.zeros(x.shape, x.dtype)
        if fixed is None
        else jnp.zeros(fixed.shape, accumulator(x.dtype))
        for x, fixed, s in zip(operands, source.fixed, smooth, strict=True)
    ]

    def block(carry: Any, first: Any, count: int, h: Array) -> tuple[Any, None]:
        g, bars = carry
        given = [_cut(x, r, spec, first, count) for r, x in enumerate(outputs)]
        g, new = _pull(source, first, count, h, (g, given), smooth, tree)
        return (g, _gather(spec, bars, new, first)), None

    (g, bars), _ = walk(spec.length, steps, not spec.reverse, block, (g, bars), starts)
    return _returned(source, bars, g, shapes)


def _cut(x: Array, readout: int, spec: ScanSpec, first: Any, count: int) -> Array:
    axis = readout_axes(spec, spec.readouts[readout]).index(spec.time)
    return lax.dynamic_slice_in_dim(x, first, count, axis)


def _pull(
    source: ScanSource,
    first: Any,
    count: int,
    h: Array,
    cotangents: Any,
    smooth: list[bool],
    tree: bool,
) -> tuple[Array, list[Any]]:
    """Return cotangents of the state before a block and of the block's slice of each operand."""
    pieces = source.pieces(first, count)

    def run(smooth_pieces: list[Any], h: Array) -> tuple[Array, list[Array]]:
        merged = [p if q is None else q for p, q in zip(pieces, smooth_pieces, strict=True)]
        return advance(source.arranged(merged, first, count), h, in_tree if tree else _states)

    chosen = [p if s else None for p, s in zip(pieces, smooth, strict=True)]
    _, pull = jax.vjp(run, chosen, h)
    bars, g = pull(cotangents)
    return g, bars


def _states(spec: ScanSpec, count: int, a: Array, b: Array, h: Array) -> tuple[Array, Array, Array]:
    """Compute the results of `sequential`; the gradient keeps only the states after each step."""
    after, last = _in_turn(spec, count, a, b, h)
    return _before(spec, after, h), after, last


def _before(spec: ScanSpec, after: Array, h: Array) -> Array:
    """Return the states before each step, from the states after each step and the first state."""
    return jnp.concatenate([after[1:], h[None]] if spec.reverse else [h[None], after[:-1]])


def _row(x: Array, t: Array | int) -> Array:
    """Return step `t` of an array with one row per step, or with one row for all steps."""
    return x[0] if x.shape[0] == 1 else lax.dynamic_index_in_dim(x, t, keepdims=False)


def _run_in_turn(spec: ScanSpec, count: int, a: Array, b: Array, h: Array) -> tuple[Array, Array]:
    """Return states after each step, written over `b`, and the last state."""
    step = KINDS[spec.kind].step

    def turn(carry: tuple[Array, Array], t: Array) -> tuple[Any, None]:
        h, rows = carry
        h = step(_row(a, t), h, _row(rows, t))
        return (h, lax.dynamic_update_index_in_dim(rows, h, t, 0)), None

    start = (h, jnp.broadcast_to(b, (count, *h.shape)))
    (h, rows), _ = lax.scan(turn, start, jnp.arange(count), reverse=spec.reverse)
    return rows, h


def _in_turn_forward(spec: ScanSpec, count: int, a: Array, b: Array, h: Array) -> tuple[Any, Any]:
    after, last = _run_in_turn(spec, count, a, b, h)
    return (after, last), (a, b, h, after)


def _in_turn_backward(spec: ScanSpec, count: int, kept: Any, cotangents: Any) -> tuple[Array, ...]:
    """Return cotangents of `a`, `b` and the first state; cotangents of states overwrite `given`."""
    a, b, h, after = kept
    given, last = cotangents
    step, before = KINDS[spec.kind].step, _before(spec, after, h)
    first, end, later = (count - 1, 0, -1) if spec.reverse else (0, count - 1, 1)

    def back(g: Array, t: Array | int) -> Array:
        _, pull = jax.vjp(lambda h: step(_row(a, t), h, _row(b, t)), _row(before, t))
        return pull(g)[0]

    def turn(carry: tuple[Array, Array], t: Array) -> tuple[Any, None]:
        g, rows = carry
        g = _row(rows, t) + back(g, t + later)
        return (g, lax.dynamic_update_index_in_dim(rows, g, t, 0)), None

    g = given[end] + last
    start = (g, lax.dynamic_update_index_in_dim(given, g, end, 0))
    others = jnp.arange(1, count) if spec.reverse else jnp.arange(count - 1)
    (g, rows), _ = lax.scan(turn, start, others, reverse=not spec.reverse)
    _, pull = jax.vjp(lambda a, b: step(a, before, b), a, b)
    return (*pull(rows), back(g, first))


_in_turn = jax.custom_vjp(_run_in_turn, nondiff_argnums=(0, 1))
_in_turn.defvjp(_in_turn_forward, _in_turn_backward)


def _gather(spec: ScanSpec, bars: list[Any], new: list[Any], first: Any) -> list[Any]:
    """Write cotangents of operands with a time axis at their steps; add up the others."""
    out = []
    for bar, x, operand in zip(bars, new, spec.operands, strict=True):
        if bar is None:
            out.append(None)
        elif spec.time in operand.axes:
            place = operand.axes.index(spec.time)
            out.append(lax.dynamic_update_slice_in_dim(bar, x, first, place))
        else:
            out.append(bar + x.astype(bar.dtype))
    return out


def _returned(
    source: ScanSource, bars: list[Any], g: Array, shapes: Sequence[Any]
) -> tuple[Any, ...]:
    """Return the cotangents in the operands' shapes and dtypes, with the initial state's added."""
    spec, out = source.spec, []
    for k, (bar, operand, x) in enumerate(zip(bars, spec.operands, source.operands, strict=True)):
        if bar is None:
            out.append(None)
            continue
        if spec.time not in operand.axes:
            axes = (spec.time, *source.order)
            lay = lambda v, operand=operand, axes=axes: placed(v, operand.axes, axes)  # noqa: E731
            bar = jax.linear_transpose(lay, jax.ShapeDtypeStruct(x.shape, bar.dtype))(bar)[0]
        if k == spec.start:
            lay = lambda v, k=k: start_state(  # noqa: E731
                spec, [v if n == k else y for n, y in enumerate(source.operands)], source.order
            )
            bar = bar + jax.vjp(lay, x)[1](g)[0].astype(bar.dtype)
        out.append(bar.astype(x.dtype).reshape(shapes[k]))
    return tuple(out)
