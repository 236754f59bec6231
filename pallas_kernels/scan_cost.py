"""How scans are cut, and what they cost, for the router's model (may import the spec)."""

from __future__ import annotations

import math

import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.scan_spec import ScanSpec, result_shapes

# Steps per block are taken so that what a block holds of states stays in a core's cache. Measured
# on two CPU cores at states of 16 kB: 2.1 µs per step from 8 to 64 steps, against 4.5 µs for
# steps that compute their own coefficients.
BLOCK_BYTES = 1 << 17
LEAST_STEPS, MOST_STEPS = 8, 64


def state_bytes(spec: ScanSpec) -> int:
    """Bytes of one state as it is carried: at least f32."""
    return math.prod(spec.state_shape) * max(4, jnp.dtype(spec.dtype).itemsize)


def block_steps(spec: ScanSpec) -> int:
    """Steps per block of the `xla` backend."""
    return min(max(BLOCK_BYTES // max(state_bytes(spec), 1), LEAST_STEPS), MOST_STEPS)


def span_steps(spec: ScanSpec) -> int:
    """Steps per state that is kept for a gradient.

    A block holds some eight arrays of so many states: at √(length/8) kept and held are balanced.
    """
    return max(block_steps(spec), math.isqrt(spec.length // 8))


def flops(spec: ScanSpec) -> int:
    """A multiplication and an addition per element of a state and step, and per sum over it."""
    elements = spec.length * math.prod(spec.state_shape)
    return 2 * elements * (1 + sum(bool(r.over) for r in spec.readouts))


def bytes_moved(spec: ScanSpec) -> int:
    """Bytes of all operands and results, each once."""
    read = sum(
        math.prod(spec.shape(k)) * jnp.dtype(o.dtype).itemsize for k, o in enumerate(spec.operands)
    )
    written = (math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in result_shapes(spec))
    return read + sum(written)


def states_bytes(spec: ScanSpec) -> int:
    """Bytes of all states made whole: what a program without the scan holds."""
    return spec.length * state_bytes(spec)


def block_bytes(spec: ScanSpec) -> int:
    """Bytes of one block of states of the `xla` backend: it holds a few of these."""
    return block_steps(spec) * state_bytes(spec)
