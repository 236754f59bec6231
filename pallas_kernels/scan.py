"""Scans: the door to every backend (may import all of `scan_*`).

A scan runs a first-order recurrence along an axis, with coefficients and readouts that are never
made for all steps at once: moving averages, linear recurrent units, selective state spaces. What
it computes is a `ScanSpec`; `scan_reference` is its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import lax

from symjax_rewrite.errors import KernelError
from symjax_rewrite.pallas_kernels import scan_reference as _reference
from symjax_rewrite.pallas_kernels import scan_triton as _triton
from symjax_rewrite.pallas_kernels import scan_xla as _xla
from symjax_rewrite.pallas_kernels.fold import OLDEST_GPU, oldest_capability
from symjax_rewrite.pallas_kernels.scan_spec import ScanSpec
from symjax_rewrite.pallas_kernels.support import Reason, Support


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run scans: whether it can, and how; `platform` is where, None for anywhere."""

    name: str
    platform: str | None
    supports: Callable[[ScanSpec], Support]
    run: Callable[..., tuple[Any, ...]]


BACKENDS = {
    b.name: b
    for b in (
        Backend("reference", None, _reference.supports, _reference.scan_reference),
        Backend("xla", None, _xla.supports, _xla.scan_xla),
        Backend("triton", "cuda", _triton.supports, _triton.scan_triton),
    )
}


def scan(spec: ScanSpec, *operands: Any, backend: str = "auto") -> tuple[Any, ...]:
    """Run a scan.

    Args:
        spec: what to compute.
        operands: one array per operand of the spec.
        backend: "auto" takes the best for the device the program is lowered for; else a name of
            `BACKENDS`.

    Returns:
        One array per readout, then the last state if the spec asks for it.

    Raises:
        KernelError: the backend asked for does not exist or does not support the scan.

    Example:
        >>> import jax.numpy as jnp
        >>> from symjax_rewrite.pallas_kernels.scan_spec import plain
        >>> average = plain(4, (), (), ("t",))  # one decay for all steps
        >>> scan(average, jnp.float32(0.5), jnp.ones(4))
        (Array([1.   , 1.5  , 1.75 , 1.875], dtype=float32),)
    """
    _check_operands(spec, operands)
    if backend != "auto":
        return _named(spec, backend).run(spec, *operands)
    best = cuda_backend(spec)
    if isinstance(best, Reason):
        return _xla.scan_xla(spec, *operands)
    return lax.platform_dependent(
        *operands,
        cuda=lambda *xs: best.run(spec, *xs),
        default=lambda *xs: _xla.scan_xla(spec, *xs, tree=False),
    )


def cuda_backend(spec: ScanSpec) -> Backend | Reason:
    """The backend that "auto" takes where a program is lowered for CUDA, or why there is none."""
    capability = oldest_capability()
    if capability is not None and capability < OLDEST_GPU:
        return Reason(f"compute capability {capability} is below {OLDEST_GPU}")
    support = BACKENDS["triton"].supports(spec)
    return BACKENDS["triton"] if support else Reason(f"triton: {support}")


def _named(spec: ScanSpec, name: str) -> Backend:
    if name not in BACKENDS:
        raise KernelError("no such backend", expected=["auto", *BACKENDS], got=name)
    backend = BACKENDS[name]
    support = backend.supports(spec)
    if not support:
        raise KernelError(f"the {name} backend does not run this scan", got=str(support))
    return backend


def _check_operands(spec: ScanSpec, operands: tuple[Any, ...]) -> None:
    wanted = [(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]
    given = [(tuple(x.shape), str(x.dtype)) for x in operands]
    if wanted != given:
        raise KernelError("the operands do not fit the scan", expected=wanted, got=given)
