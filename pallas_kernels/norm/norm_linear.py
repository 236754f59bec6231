"""A norm and a linear layer in one pass: the door to every backend (may import all of `norm_*`).

    Σ_k (x·r·γ)·W = r · Σ_k x·(γ·W)

The row scale leaves the contraction and its statistics ride along (the moments monoid), so x is
read once and the normalised x is never written. What is computed is a `NormSpec`; `norm_xla` is
its definition, `norm_layer` writes the specs of whole layers and of their gradients.
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
    """Return whether the Triton backend runs a spec; Pallas is imported here, on first use."""
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
    """Whether a program lowered for CUDA runs the group as one kernel, or why not."""
    found = first_on_cuda([BACKENDS["triton"]], group)
    return found if isinstance(found, Reason) else YES


def norm_linear(spec: NormSpec, *operands: Any, backend: str = "auto") -> Any:
    """Run a matmul with sums: a group of one.

    Args:
        spec: what to compute.
        operands: one array per operand of the spec.
        backend: as for `norm_linears`.

    Returns:
        The result, [m, n].

    Raises:
        KernelError: as of `norm_linears`.

    Example:
        >>> import jax.numpy as jnp
        >>> from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
        >>> spec = forward(NormLinear(1, 4, 2, eps=0.0))
        >>> norm_linear(spec, jnp.array([[3.0, 4.0, 0.0, 0.0]]), jnp.ones((4, 2)))
        Array([[2.8, 2.8]], dtype=float32)
    """
    return norm_linears(NormGroup((spec,)), *operands, backend=backend)[0]


def norm_linears(group: NormGroup, *operands: Any, backend: str = "auto") -> tuple[Any, ...]:
    """Run matmuls with sums of one x, in one kernel where there is one.

    Args:
        group: what to compute.
        operands: one array per operand of the group.
        backend: "auto" takes the kernel where the program is lowered for CUDA; else a name of
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
