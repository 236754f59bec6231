"""Folds: the door to every backend (may import all of `fold_*`).

A fold reduces a pairwise term along one axis and never makes the term whole: attention and its
gradients, cross-entropy over a vocabulary, N-body forces, nearest neighbours. What it computes is
a `FoldSpec`; `fold_reference` is its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from symjax_rewrite.errors import KernelError
from symjax_rewrite.pallas_kernels import fold_library as _library
from symjax_rewrite.pallas_kernels import fold_reference as _reference
from symjax_rewrite.pallas_kernels import fold_triton as _triton
from symjax_rewrite.pallas_kernels import fold_xla as _xla
from symjax_rewrite.pallas_kernels.fold_spec import FoldSpec
from symjax_rewrite.pallas_kernels.support import Reason, Support

OLDEST_GPU = 8.0  # compute capability


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run folds: whether it can, and how; `platform` is where, None for anywhere."""

    name: str
    platform: str | None
    supports: Callable[[FoldSpec], Support]
    run: Callable[..., tuple[Any, ...]]


BACKENDS = {
    b.name: b
    for b in (
        Backend("reference", None, _reference.supports, _reference.fold_reference),
        Backend("xla", None, _xla.supports, _xla.fold_xla),
        Backend("triton", "cuda", _triton.supports, _triton.fold_triton),
        Backend("library", "cuda", _library.supports, _library.fold_library),
    )
}
CUDA_ORDER = ("library", "triton")  # the first that supports a fold runs it on CUDA


def fold(spec: FoldSpec, *operands: Any, backend: str = "auto") -> tuple[Any, ...]:
    """Run a fold.

    Args:
        spec: what to compute.
        operands: one array per operand of the spec.
        backend: "auto" takes the best for the device the program is lowered for; else a name of
            `BACKENDS`.

    Returns:
        What the epilogue returns; without one, per output the tuple of its results, each
        [batch.., m, ..].

    Raises:
        KernelError: the backend asked for does not exist or does not support the fold.

    Example:
        >>> import jax.numpy as jnp
        >>> from symjax_rewrite.pallas_kernels.fold_spec import Extremum, Operand, Tile
        >>> distance = Tile(lambda dots, values, i, j: abs(values[0] - values[1]), reads=(0, 1))
        >>> spec = FoldSpec(
        ...     sizes=(("m", 2), ("n", 3)), batch=(), row="m", col="n",
        ...     operands=(Operand(("m",)), Operand(("n",))), contractions=(),
        ...     tile=distance, outputs=(Extremum("min"),),
        ... )
        >>> fold(spec, jnp.array([0.0, 10.0]), jnp.array([1.0, 4.0, 8.0]))
        ((Array([1., 2.], dtype=float32),),)
    """
    _check_operands(spec, operands)
    if backend != "auto":
        return _named(spec, backend).run(spec, *operands)
    best = cuda_backend(spec)
    if isinstance(best, Reason):
        return _xla.fold_xla(spec, *operands)
    return lax.platform_dependent(
        *operands,
        cuda=lambda *xs: best.run(spec, *xs),
        default=lambda *xs: _xla.fold_xla(spec, *xs),
    )


def cuda_backend(spec: FoldSpec) -> Backend | Reason:
    """The backend that "auto" takes where a program is lowered for CUDA, or why there is none."""
    capability = oldest_capability()
    if capability is not None and capability < OLDEST_GPU:
        return Reason(f"compute capability {capability} is below {OLDEST_GPU}")
    reasons = []
    for name in CUDA_ORDER:
        support = BACKENDS[name].supports(spec)
        if support:
            return BACKENDS[name]
        reasons.append(f"{name}: {support}")
    return Reason("; ".join(reasons))


def oldest_capability() -> float | None:
    """The least compute capability of the GPUs at hand; None without any."""
    if jax.default_backend() != "gpu":
        return None
    found = [getattr(d, "compute_capability", None) for d in jax.local_devices()]
    return min((float(c) for c in found if c), default=None)


def _named(spec: FoldSpec, name: str) -> Backend:
    if name not in BACKENDS:
        raise KernelError("no such backend", expected=["auto", *BACKENDS], got=name)
    backend = BACKENDS[name]
    support = backend.supports(spec)
    if not support:
        raise KernelError(f"the {name} backend does not run this fold", got=str(support))
    return backend


def _check_operands(spec: FoldSpec, operands: tuple[Any, ...]) -> None:
    wanted = [(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)]
    given = [(tuple(x.shape), str(x.dtype)) for x in operands]
    if wanted != given:
        raise KernelError("the operands do not fit the fold", expected=wanted, got=given)
