"""Block sizes and costs of scans, for the router's model (may import scan/spec.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import jax
import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.loop_facts import StepLoops
from symjax_rewrite.cost.profile_groups import SLOW_MAPS
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.pallas_kernels.scan.spec import (
    ScanSpec,
    result_axes,
    result_shapes,
    wide_order,
)

# Blocks are faster where coefficients are expensive or readouts are sums: over a whole block both
# vectorise and run on all cores. The steps per block are chosen so that the states of a block stay
# in a core's cache. Measured on two CPU cores at states of 16 kB: 2.1 µs per step of a selective
# scan at 8 to 64 steps per block, 4.5 µs for steps that compute their own exponentials. Otherwise a
# plain loop of steps was fastest, at 4096 steps and 256 states: 0.4 ms; blocks 1.2 ms, parallel
# chunks 2.0 ms, `associative_scan` 2.8 ms.
BLOCK_BYTES = 1 << 17
LEAST_STEPS, MOST_STEPS = 8, 64
CHEAP = frozenset(
    "abs add add_any and broadcast_in_dim convert_element_type copy eq ge gt"
    " integer_pow le lt max min mul ne neg not or real imag conj reshape rem select_n sign squeeze"
    " stop_gradient sub xor".split()
)

UNCOUNTED = frozenset("broadcast_in_dim convert_element_type copy reshape squeeze".split())


def state_bytes(spec: ScanSpec) -> int:
    """Return the bytes of one carried state: at least f32."""
    return math.prod(spec.state_shape) * max(4, jnp.dtype(spec.dtype).itemsize)


# On a GPU each step of a loop launches kernels. Blocks are therefore trees of many steps.
TREE_BYTES = 1 << 26


def tree_steps(spec: ScanSpec) -> int:
    """Return the steps per block where blocks are trees."""
    return max(TREE_BYTES // max(state_bytes(spec), 1), 1)


def is_light(spec: ScanSpec) -> bool:
    """Return True if a step is little more than the recurrence: no sum, arithmetic alone."""
    return not any(r.over for r in spec.readouts) and _is_cheap(spec)


def _is_cheap(spec: ScanSpec) -> bool:
    """Return True if coefficients use cheap arithmetic alone."""
    return set(_operations(spec)) <= CHEAP


@lru_cache(maxsize=256)
def _operations(spec: ScanSpec) -> tuple[str, ...]:
    """Return the primitive of every equation of the coefficients' program."""
    entry, program = (1,) * (1 + len(spec.state)), spec.coefficients
    values = tuple(jax.ShapeDtypeStruct(entry, spec.operands[k].dtype) for k in program.reads)
    t = jax.ShapeDtypeStruct(entry, jnp.int32)
    return tuple(_names(jax.make_jaxpr(program.fun)(values, t)))


def _names(closed: ClosedJaxpr) -> Iterator[str]:
    """Yield the primitive of every equation of a jaxpr; for a call, those of its body."""
    for eqn in closed.jaxpr.eqns:
        inner = jax_internals.bodies(eqn)
        for body in inner:
            yield from _names(body)
        if not inner:
            yield eqn.primitive.name


def runs_sequentially(spec: ScanSpec) -> bool:
    """Return True if the `xla` backend runs a scan as one loop over its steps."""
    return spec.length != 0 and all(r.factor is not None for r in spec.readouts if r.over)


def seconds_written(spec: ScanSpec, fused: bool, rates: StepLoops) -> float:
    """Predict the seconds of a loop whose states keep the scan's order of axes.

    Args:
        spec: the scan.
        rates: rates of loops of vectorised steps. Where the innermost axis has few entries the
            compiler unrolls its loop before vectorisation.
        fused: True if the sums are not matrix products, so that one loop with a cheap step remains.
    """
    if fused and _is_cheap(spec):
        return _sequential_seconds(spec, 1, rates)
    axes = [a for a in spec.state if spec.size[a] > 1]
    return _sequential_seconds(spec, spec.size[axes[-1]] if axes else 1, rates)


def seconds_transposed(spec: ScanSpec, rates: StepLoops) -> float:
    """Predict the seconds of that loop with the longest axis innermost, layout changes included."""
    axes = [a for a in wide_order(spec) if spec.size[a] > 1]
    moved = 0
    given = [(o.axes, o.dtype) for o in spec.operands]
    made = zip(result_axes(spec), result_shapes(spec), strict=True)
    for names, dtype in (*given, *((names, dtype) for names, (_, dtype) in made)):
        inner = [a for a in names if a in axes]
        if inner != [a for a in axes if a in inner]:
            moved += 2 * math.prod(spec.size[a] for a in names) * jnp.dtype(dtype).itemsize
    width = spec.size[axes[-1]] if axes else 1
    steps = rates.laid_out * _sequential_seconds(spec, width, rates)
    return steps + moved / rates.moved_bytes_per_s


def _sequential_seconds(spec: ScanSpec, width: int, rates: StepLoops) -> float:
    """Predict the seconds of a loop whose innermost axis has `width` entries."""
    narrow, wide = rates.narrow_entry_s, rates.entry_s
    if not _is_cheap(spec):
        narrow, wide = rates.narrow_slow_entry_s, rates.slow_entry_s
    first, last = rates.narrow_entries
    rate = narrow if first <= width <= last else wide
    return spec.length * (rates.step_s + rate * math.prod(spec.state_shape))


def seconds_by_kernel(
    spec: ScanSpec, device: Device, programs: int, chunks: int, parts_bytes: int = 0
) -> float:
    """Predict the seconds of a scan as GPU kernels.

    Args:
        spec: the scan.
        device: a GPU.
        programs: that run at once, chunks included.
        chunks: parts that time is cut into; more than one takes two kernels.
        parts_bytes: moved for sums that another kernel completes.
    """
    kernels = 1 + (chunks > 1)
    work, read_s = _seconds_busy(spec, device, programs, kernels * device.scans.kernel_instructions)
    waited = kernels * -(-spec.length // chunks) * device.scans.step_latency_s
    adding = parts_bytes / device.bytes_per_s + (parts_bytes > 0) * device.launch_s
    return max(work, read_s, waited) + kernels * device.launch_s + adding


def seconds_in_one_pass(spec: ScanSpec, device: Device, programs: int) -> float:
    """Predict the seconds of a scan as one kernel with a tree along time; `programs` at once."""
    scans = device.scans
    busy = _seconds_busy(spec, device, programs, scans.one_pass_instructions)
    return max(*busy, spec.length * scans.one_pass_step_s) + scans.one_pass_s + device.launch_s


def _seconds_busy(
    spec: ScanSpec, device: Device, programs: int, instructions: float
) -> tuple[float, float]:
    """Return the seconds of arithmetic, and of reads and writes, of kernels.

    instructions: for a step of arithmetic on one element of a state.
    """
    idle = max(device.multiprocessors / max(programs, 1), 1.0)
    moved = sum(x.size * x.dtype.itemsize for x in spec.avals)
    moved += sum(math.prod(s) * jnp.dtype(d).itemsize for s, d in result_shapes(spec))
    work = idle * elementwise_steps(spec) * instructions / device.elementwise_per_s
    return work, idle * moved / device.bytes_per_s


def elementwise_steps(spec: ScanSpec) -> int:
    """Return the elementwise steps of a scan that computes its coefficients once."""
    names = [n for n in _operations(spec) if n not in UNCOUNTED]
    steps = sum(4 if n in SLOW_MAPS else 1 for n in names) + 2 * (1 + len(spec.readouts))
    return spec.length * math.prod(spec.state_shape) * steps


def block_steps(spec: ScanSpec) -> int:
    """Return the steps per block of the `xla` backend."""
    if is_light(spec):
        return 1
    return steps_in_cache(spec)


def steps_in_cache(spec: ScanSpec) -> int:
    """Return the number of steps whose states stay in a core's cache."""
    return min(max(BLOCK_BYTES // max(state_bytes(spec), 1), LEAST_STEPS), MOST_STEPS)


def span_steps(spec: ScanSpec) -> int:
    """Return the steps per state that is kept for a gradient.

    A block holds about eight arrays of this many states. At √(length/8) steps the kept states and
    the block have equal size.
    """
    return max(steps_in_cache(spec), math.isqrt(spec.length // 8))


def sums_flops(spec: ScanSpec) -> int:
    """Return the FLOPs of the readouts that are sums over a state's axes, 2mnk."""
    sums = sum(bool(r.over) for r in spec.readouts)
    return 2 * spec.length * math.prod(spec.state_shape) * sums


def states_bytes(spec: ScanSpec) -> int:
    """Return the bytes of all states, which a program without the scan stores."""
    return spec.length * state_bytes(spec)
