"""Scans as Pallas-Triton kernels (may import spec.py and triton_kernel.py).

A program holds the states of one block of lanes in registers and loops over time. Coefficients are
computed where they are used, a readout's sum stays in registers, and every operand is read once.
Where the states are too few to fill the device, time is cut into chunks, in two kernels. The first
computes the map of each chunk, from the state before to the state after, as an element of the
kind's monoid. The second composes the maps of earlier chunks and runs its chunk from there
(Blelloch 1990). The coefficients are then computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from symjax_rewrite.pallas_kernels import triton_programs
from symjax_rewrite.pallas_kernels.backend import (
    Reason,
    Support,
    cost_estimate,
    first_reason,
    gpu_at_hand,
    too_large,
)
from symjax_rewrite.pallas_kernels.scan import cost as scan_cost
from symjax_rewrite.pallas_kernels.scan.block import carried, without_ones
from symjax_rewrite.pallas_kernels.scan.spec import (
    ScanProgram,
    ScanSpec,
    readout_axes,
    result_shapes,
)
from symjax_rewrite.pallas_kernels.scan.triton_kernel import Body, ScanTiling, Sweep, power_of_two
from symjax_rewrite.pallas_kernels.scan.xla import smaller

Array = Any
DTYPES = frozenset({"float32", "bfloat16", "float16", "int32"})
MOST_HELD = 256  # the most elements along a state's summed axis in a program
TILE = 256  # elements of state per program: eight per thread of one warp


def supports(spec: ScanSpec) -> Support:
    """Return `YES` if this backend runs the scan on a GPU of compute capability 8.0 or newer."""
    spec = without_ones(spec)
    if 0 in spec.size.values():
        return Reason("an axis is empty")
    dtypes = {o.dtype for o in spec.operands} | {spec.dtype}
    dtypes |= {r.dtype for r in spec.readouts if r.dtype}
    held = {a for r in spec.readouts for a in r.over}
    arrays = [spec.shape(k) for k in range(len(spec.operands))]
    arrays += [shape for shape, _ in result_shapes(spec)]
    arrays.append((triton_cut(spec).chunks, *spec.state_shape))
    foreign = unlowered(spec)
    return first_reason(
        (bool(foreign), f"Triton lowers no {', '.join(foreign)}"),
        (not dtypes <= DTYPES, f"dtypes {sorted(dtypes - DTYPES)} are not supported"),
        (len(held) > 1, "readouts sum over more than one axis"),
        (any(spec.size[a] > MOST_HELD for a in held), f"a sum over more than {MOST_HELD}"),
        (too_large(arrays), "an array has more than 2^31 elements"),
    )


@lru_cache(maxsize=256)
def unlowered(spec: ScanSpec) -> tuple[str, ...]:
    """Return the operations of a scan's programs that Pallas-Triton cannot lower."""
    state, t = jax.ShapeDtypeStruct((16, 16), carried(spec)), jax.ShapeDtypeStruct((), jnp.int32)

    def values(program: ScanProgram) -> tuple[Any, ...]:
        return tuple(jax.ShapeDtypeStruct((16, 16), spec.operands[k].dtype) for k in program.reads)

    c = spec.coefficients
    programs: list[Any] = [(c.fun, (values(c), t))]
    for r in spec.readouts:
        states = (state, state)
        made = state
        if r.program is not None:
            programs.append((r.program.fun, (states, values(r.program), t)))
            made = jax.eval_shape(r.program.fun, states, values(r.program), t)
        if r.finish is not None:
            programs.append((r.finish.fun, (made, values(r.finish), t)))
    return triton_programs.unlowered(*programs)


def triton_cut(spec: ScanSpec) -> ScanTiling:
    """Return the tiling of a scan, with chunks where lanes alone leave most of the device idle."""
    sweep = Sweep.of(spec, ScanTiling(1))
    lanes = spec.size[sweep.lane] if sweep.lane else 1
    rows = min(max(TILE // sweep.held_size, 1), power_of_two(lanes))
    programs = math.prod(spec.size[a] for a in sweep.outer) * pl.cdiv(lanes, rows)
    wanted = pl.cdiv(8 * gpu_at_hand().multiprocessors, programs)
    chunks = 1
    while chunks < wanted and spec.length // (2 * chunks) >= 64 and chunks < 64:
        chunks *= 2
    return ScanTiling(rows, chunks)


def programs_of(spec: ScanSpec) -> tuple[int, int]:
    """Return the programs of a scan's kernel, and the chunks that time is cut into."""
    spec = without_ones(spec)
    grid = Sweep.of(spec, triton_cut(spec)).grid
    return math.prod(grid), grid[1]


def scan_triton(
    spec: ScanSpec, *operands: Any, cut: ScanTiling | None = None, interpret: bool = False
) -> tuple[Any, ...]:
    """Run a scan as one kernel, or as two where time is cut into chunks.

    Args:
        spec: a scan that `supports` accepts.
        operands: one array per operand of the spec.
        cut: the tiling; chosen from the sizes if left out.
        interpret: run in Pallas' interpreter, on any device.

    Returns:
        The results of `reference.scan_reference`.
    """
    shapes = result_shapes(spec)
    spec, operands = smaller(spec, operands)
    cut = cut or triton_cut(spec)
    sweep = Sweep.of(spec, cut)
    reads = [sweep.block(o.axes) for o in spec.operands]
    options = {
        "grid": sweep.grid,
        "compiler_params": plgpu.CompilerParams(num_warps=cut.warps, num_stages=1),
        "interpret": interpret,
    }
    maps: Sequence[Array] = ()
    if sweep.grid[1] > 1:
        one = jax.ShapeDtypeStruct((sweep.grid[1], *spec.state_shape), carried(spec))
        block = sweep.block(("chunk", *spec.state))
        maps = pl.pallas_call(
            lambda *refs: Body.of(sweep).summarise(*refs),
            in_specs=reads,
            out_specs=[block, block],
            out_shape=[one, one],
            cost_estimate=cost_estimate(0, operands, [one, one]),
            name="scan_maps",
            **options,
        )(*operands)
        reads = [*reads, block, block]
    axes = [readout_axes(spec, r) for r in spec.readouts] + [spec.state] * spec.last
    written = [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in result_shapes(spec)]
    results = pl.pallas_call(
        lambda *refs: Body.of(sweep).run(*refs),
        in_specs=reads,
        out_specs=[sweep.block(a) for a in axes],
        out_shape=written,
        cost_estimate=cost_estimate(scan_cost.sums_flops(spec), [*operands, *maps], written),
        name="scan",
        **options,
    )(*operands, *maps)
    return tuple(x.reshape(shape) for x, (shape, _) in zip(results, shapes, strict=True))
