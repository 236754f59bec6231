"""Entry point of folds: the choice of a backend (may import all modules of `fold`).

A fold reduces a pairwise term along one axis without storing the whole term. Examples are attention
and its gradients, cross-entropy over a vocabulary, N-body forces and nearest neighbours. A
`FoldSpec` describes a fold. `reference.fold_reference` is the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jax import lax

from symjax_rewrite.pallas_kernels.backend import (
    Backend,
    Reason,
    Support,
    check_operands,
    first_on_cuda,
    run_named,
)
from symjax_rewrite.pallas_kernels.derivatives import by_definition
from symjax_rewrite.pallas_kernels.fold import cudnn as _library
from symjax_rewrite.pallas_kernels.fold import reference as _reference
from symjax_rewrite.pallas_kernels.fold import xla as _xla
from symjax_rewrite.pallas_kernels.fold.spec import Band, FoldSpec, one_way


def _triton_supports(spec: Any) -> Support:
    """Return `YES` or the reason why not for the Triton backend; import Pallas on first use."""
    from symjax_rewrite.pallas_kernels.fold import triton

    return triton.supports(spec)


def _triton_run(*args: Any, **kwargs: Any) -> Any:
    """Run a spec by the Triton backend."""
    from symjax_rewrite.pallas_kernels.fold import triton

    return triton.fold_triton(*args, **kwargs)


BACKENDS = {
    b.name: b
    for b in (
        Backend("reference", None, _reference.supports, _reference.fold_reference),
        Backend("xla", None, _xla.supports, _xla.fold_xla),
        Backend("triton", "cuda", _triton_supports, _triton_run),
        Backend("library", "cuda", _library.supports, _library.fold_library),
    )
}
CUDA_ORDER = ("library", "triton")  # the first that supports a fold runs it on CUDA


def fold(spec: FoldSpec, *operands: Any, backend: str = "auto") -> tuple[Any, ...]:
    """Run a fold.

    Args:
        spec: the fold.
        operands: one array per operand of the spec.
        backend: "auto" takes the best for the device the program is lowered for; else a name of
            `BACKENDS`.

    Returns:
        The results of the epilogue; without an epilogue a tuple of results per output, each
        [batch.., m, ..].

    Raises:
        KernelError: the backend asked for does not exist or does not support the fold.

    Example:
        >>> import jax.numpy as jnp
        >>> from symjax_rewrite.pallas_kernels.fold.spec import Extremum, Operand, Tile
        >>> distance = Tile(lambda dots, values, i, j: abs(values[0] - values[1]), reads=(0, 1))
        >>> spec = FoldSpec(
        ...     sizes=(("m", 2), ("n", 3)), batch=(), row="m", col="n",
        ...     operands=(Operand(("m",)), Operand(("n",))), contractions=(),
        ...     tile=distance, outputs=(Extremum("min"),),
        ... )
        >>> fold(spec, jnp.array([0.0, 10.0]), jnp.array([1.0, 4.0, 8.0]))
        ((Array([1., 2.], dtype=float32),),)
    """
    check_operands(
        [(spec.shape(k), o.dtype) for k, o in enumerate(spec.operands)], operands, "fold"
    )
    streamed = partial(_xla.fold_xla, spec)
    if backend != "auto":
        run = run_named(BACKENDS, backend, spec, "fold")
    elif isinstance(on_cuda := _on_cuda(spec), Reason):
        run = streamed
    else:
        run = partial(lax.platform_dependent, cuda=on_cuda, default=streamed)
    # Reverse mode does not support loops of data-dependent length; a band changes no value.
    definition = partial(_xla.fold_xla, replace(spec, band=Band()))
    return by_definition(run, definition, *operands)


def _on_cuda(spec: FoldSpec) -> Callable[..., Any] | Reason:
    """Return the function that runs a fold on CUDA, or why there is none; row sums run apart."""
    parts = one_way(spec)
    runs = []
    for _, part in parts:
        best = cuda_backend(part)
        if isinstance(best, Reason):
            return best
        runs.append(partial(best.run, part))

    def run(*operands: Any) -> tuple[Any, ...]:
        made: dict[int, Any] = {}
        for (numbers, _), each in zip(parts, runs, strict=True):
            made.update(zip(numbers, each(*operands), strict=True))
        return tuple(made[n] for n in range(len(made)))

    return run if len(parts) > 1 else runs[0]


def cuda_backend(spec: FoldSpec) -> Backend[FoldSpec] | Reason:
    """Return the backend that "auto" takes on CUDA, or the reason why there is none."""
    return first_on_cuda([BACKENDS[name] for name in CUDA_ORDER], spec)
