"""Entry point of scans: the choice of a backend (may import all modules of `scan`).

A scan runs a first-order recurrence along an axis. Coefficients and readouts are never stored for
all steps at once. Examples are moving averages, linear recurrent units and selective state spaces.
A `ScanSpec` describes a scan; `sequential.scan_reference` is its definition.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.pallas_kernels.backend import (
    Backend,
    KernelFamily,
    check_operands,
    triton_backend,
)
from symjax_rewrite.pallas_kernels.scan.cost import seconds_by_kernel, seconds_in_one_pass
from symjax_rewrite.pallas_kernels.scan.sequential import (
    scan_reference,
    scan_sequential,
    supports_sequential,
)
from symjax_rewrite.pallas_kernels.scan.spec import ScanSpec
from symjax_rewrite.pallas_kernels.scan.xla import scan_xla

ONE_PASS = "jax_triton"
SCANS: KernelFamily[ScanSpec] = KernelFamily.of(
    "scan",
    Backend("reference", None, scan_reference),
    Backend("xla", None, scan_xla),
    Backend("sequential", None, scan_sequential, supports_sequential),
    triton_backend("symjax_rewrite.pallas_kernels.scan.triton", "scan_triton"),
    triton_backend("symjax_rewrite.pallas_kernels.scan.one_pass", "scan_one_pass", ONE_PASS),
    on_cuda=("triton",),
    ranked=lambda spec, device: (*(ONE_PASS,) * takes_one_pass(spec, device), "triton"),
)
BACKENDS = SCANS.backends
cuda_backend = SCANS.cuda_backend


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
        >>> from symjax_rewrite.pallas_kernels.named_axes import Operand
        >>> from symjax_rewrite.pallas_kernels.scan.spec import ScanProgram
        >>> average = ScanSpec(  # one decay for all steps
        ...     sizes=(("t", 4),), time="t", state=(), operands=(Operand(()), Operand(("t",))),
        ...     coefficients=ScanProgram(lambda values, t: values, reads=(0, 1)),
        ... )
        >>> scan(average, jnp.float32(0.5), jnp.ones(4))
        (Array([1.   , 1.5  , 1.75 , 1.875], dtype=float32),)
    """
    check_operands(spec.avals, operands, "scan")
    plain = partial(scan_xla, spec)
    elsewhere = partial(plain, tree=False)
    return SCANS.call(spec, operands, backend, plain, elsewhere=elsewhere)


def takes_one_pass(spec: ScanSpec, device: Device) -> bool:
    """Return True if "auto" runs a scan on a GPU in one pass.

    The rate of that kernel must be measured on the device, and its prediction lower.
    """
    is_measured = device.is_measured("scans.one_pass_instructions")
    if not is_measured or not BACKENDS[ONE_PASS].supports(spec):
        return False
    by_chunks, in_one_pass = seconds_by_backend(spec, device).values()
    return in_one_pass < by_chunks


def seconds_by_backend(spec: ScanSpec, device: Device) -> dict[str, float]:
    """Predict the seconds of a scan on the GPU of a profile, by backend."""
    from symjax_rewrite.pallas_kernels.scan import one_pass, triton

    programs, chunks = triton.programs_of(spec)
    return {
        "triton": seconds_by_kernel(spec, device, programs, chunks, triton.parts_bytes(spec)),
        ONE_PASS: seconds_in_one_pass(spec, device, one_pass.programs_of(spec)),
    }


def seconds_on_gpu(spec: ScanSpec, device: Device) -> float:
    """Predict the seconds of a scan on the GPU of a profile, by the backend that "auto" takes."""
    name = ONE_PASS if takes_one_pass(spec, device) else "triton"
    return seconds_by_backend(spec, device)[name]
