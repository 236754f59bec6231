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

from symjax_rewrite.pallas_kernels.backend import (
    Backend,
    KernelFamily,
    Reason,
    check_operands,
    triton_backend,
)
from symjax_rewrite.pallas_kernels.fold import cudnn, xla
from symjax_rewrite.pallas_kernels.fold.cost import by_rate
from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.spec import Band, FoldSpec, one_way

FOLDS: KernelFamily[FoldSpec] = KernelFamily.of(
    "fold",
    Backend("reference", None, fold_reference),
    Backend("xla", None, xla.fold_xla, xla.supports),
    triton_backend("symjax_rewrite.pallas_kernels.fold.triton", "fold_triton"),
    triton_backend("symjax_rewrite.pallas_kernels.fold.mosaic", "fold_mosaic", "mosaic"),
    Backend("library", "cuda", cudnn.fold_library, cudnn.supports),
    on_cuda=("library", "triton"),
    ranked=lambda spec, device: by_rate(device),
)
BACKENDS = FOLDS.backends
cuda_backend = FOLDS.cuda_backend


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
    check_operands(spec.avals, operands, "fold")
    # Reverse mode does not support loops of data-dependent length; a band changes no value.
    definition = partial(xla.fold_xla, replace(spec, band=Band()))
    plain = partial(xla.fold_xla, spec)
    return FOLDS.call(spec, operands, backend, plain, cuda_run=_cuda_run, definition=definition)


def _cuda_run(spec: FoldSpec) -> Callable[..., Any] | Reason:
    """Return the function that runs a fold on CUDA, or why there is none; row sums run apart."""
    parts = one_way(spec)
    runs = []
    for _, part in parts:
        run = FOLDS.cuda_run(part)
        if isinstance(run, Reason):
            return run
        runs.append(run)

    def run_all(*operands: Any) -> tuple[Any, ...]:
        made: dict[int, Any] = {}
        for (numbers, _), run in zip(parts, runs, strict=True):
            made.update(zip(numbers, run(*operands), strict=True))
        return tuple(made[n] for n in range(len(made)))

    return run_all if len(parts) > 1 else runs[0]
