"""Entry point of a norm with a linear layer: the choice of a backend (may import all of `norm`).

    Σ_k (x·r·γ)·W = r · Σ_k x·(γ·W)

The row scale leaves the contraction, and the loop of the contraction also sums the statistics (the
moments monoid). So x is read once, and the normalised x is not stored. A `NormSpec` describes the
computation; `xla.norm_xla` is its definition; layer.py builds the specs of layers and gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jax import lax

from symjax_rewrite.pallas_kernels.backend import (
    YES,
    Backend,
    Reason,
    Support,
    check_operands,
    first_on_cuda,
    run_named,
)
from symjax_rewrite.pallas_kernels.derivatives import by_definition
from symjax_rewrite.pallas_kernels.norm import xla as _xla
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec


def _triton_supports(spec: Any) -> Support:
    """Return `YES`, or the reason against the Triton backend; Pallas is imported on first use."""
    from symjax_rewrite.pallas_kernels.norm import triton

    return triton.supports(spec)


def _triton_run(*args: Any, **kwargs: Any) -> Any:
    """Run a spec by the Triton backend."""
    from symjax_rewrite.pallas_kernels.norm import triton

    return triton.group_triton(*args, **kwargs)


BACKENDS = {
    b.name: b
    for b in (
        Backend("xla", None, _xla.supports, _xla.group_xla),
        Backend("triton", "cuda", _triton_supports, _triton_run),
    )
}


def supports(group: NormGroup) -> Support:
    """Return `YES` if a program lowered for CUDA runs the group as one kernel, else the reason."""
    found = first_on_cuda([BACKENDS["triton"]], group)
    return found if isinstance(found, Reason) else YES


def norm_linear(spec: NormSpec, *operands: Any, backend: str = "auto") -> Any:
    """Run one matmul with sums.

    Args:
        spec: the matmul.
        operands: one array per operand of the spec.
        backend: as for `norm_linears`.

    Returns:
        The result, [m, n].

    Raises:
        KernelError: as in `norm_linears`.

    Example:
        >>> import jax.numpy as jnp
        >>> from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
        >>> spec = forward(NormLinear(1, 4, 2, eps=0.0))
        >>> norm_linear(spec, jnp.array([[3.0, 4.0, 0.0, 0.0]]), jnp.ones((4, 2)))
        Array([[2.8, 2.8]], dtype=float32)
    """
    return norm_linears(NormGroup((spec,)), *operands, backend=backend)[0]


def norm_linears(group: NormGroup, *operands: Any, backend: str = "auto") -> tuple[Any, ...]:
    """Run several matmuls with sums of one x, in one kernel on CUDA.

    Args:
        group: the matmuls.
        operands: one array per operand of the group.
        backend: "auto" takes the kernel where the program is lowered for CUDA; else a name in
            `BACKENDS`.

    Returns:
        The result of every member, [m, n].

    Raises:
        KernelError: the operands do not fit, or the backend asked for does not exist or does not
            support the group.
    """
    check_operands(group.shapes, operands, "matmul")
    plain = partial(_xla.group_xla, group)
    if backend != "auto":
        run = run_named(BACKENDS, backend, group, "matmul")
    elif not supports(group):
        run = plain
    else:
        kernel = partial(_triton_run, group)
        run = partial(lax.platform_dependent, cuda=kernel, default=plain)
    return by_definition(run, plain, *operands)
