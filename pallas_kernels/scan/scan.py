"""Entry point of scans: the choice of a backend (may import all modules of `scan`).

A scan runs a first-order recurrence along an axis. Coefficients and readouts are never stored for
all steps at once. Examples are moving averages, linear recurrent units and selective state spaces.
A `ScanSpec` describes a scan; `reference.scan_reference` is its definition.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jax import lax

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.pallas_kernels.backend import (
    Backend,
    Reason,
    Support,
    check_operands,
    first_on_cuda,
    run_named,
)
from symjax_rewrite.pallas_kernels.derivatives import by_definition
from symjax_rewrite.pallas_kernels.scan import reference as _reference
from symjax_rewrite.pallas_kernels.scan import sequential as _turns
from symjax_rewrite.pallas_kernels.scan import xla as _xla
from symjax_rewrite.pallas_kernels.scan.cost import seconds_by_kernel
from symjax_rewrite.pallas_kernels.scan.spec import ScanSpec


def _triton_supports(spec: Any) -> Support:
    """Return `YES`, or the reason against the Triton backend; Pallas is imported on first use."""
    from symjax_rewrite.pallas_kernels.scan import triton

    return triton.supports(spec)


def _triton_run(*args: Any, **kwargs: Any) -> Any:
    """Run a spec by the Triton backend."""
    from symjax_rewrite.pallas_kernels.scan import triton

    return triton.scan_triton(*args, **kwargs)


BACKENDS = {
    b.name: b
    for b in (
        Backend("reference", None, _reference.supports, _reference.scan_reference),
        Backend("xla", None, _xla.supports, _xla.scan_xla),
        Backend("turns", None, _turns.supports, _turns.scan_turns),
        Backend("triton", "cuda", _triton_supports, _triton_run),
    )
}


def scan(spec: ScanSpec, *operands: Any, backend: str = "auto") -> tuple[Any, ...]:
    """Run a scan.

    Args:
        spec: the scan.
        operands: one array per operand of the spec.
        backend: "auto" takes the best for the device the program is lowered for; else a name of
            `BACKENDS`.

    Returns:
        One array per readout, then the last state if the spec asks for it.

    Raises:
        KernelError: the backend asked for does not exist or does not support the scan.

    Example:
        >>> import jax.numpy as jnp
        >>> from symjax_rewrite.pallas_kernels.scan.spec import plain
        >>> average = plain(4, (), (), ("t",))  # one decay for all steps
        >>> scan(average, jnp.float32(0.5), jnp.ones(4))
        (Array([1.   , 1.5  , 1.75 , 1.875], dtype=float32),)
    """
    check_operands(
        [(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)], operands, "scan"
    )
    streamed = partial(_xla.scan_xla, spec)
    if backend != "auto":
        run = run_named(BACKENDS, backend, spec, "scan")
    elif isinstance(best := cuda_backend(spec), Reason):
        run = streamed
    else:
        kernel, default = partial(best.run, spec), partial(streamed, tree=False)
        run = partial(lax.platform_dependent, cuda=kernel, default=default)
    return by_definition(run, streamed, *operands)


def seconds_on_gpu(spec: ScanSpec, device: Device) -> float:
    """Predict the seconds of a scan as kernels on the GPU of a profile."""
    from symjax_rewrite.pallas_kernels.scan import triton

    programs, chunks = triton.programs_of(spec)
    return seconds_by_kernel(spec, device, programs, chunks)


def cuda_backend(spec: ScanSpec) -> Backend[ScanSpec] | Reason:
    """Return the backend that "auto" takes on CUDA, or the reason why there is none."""
    return first_on_cuda([BACKENDS["triton"]], spec)
