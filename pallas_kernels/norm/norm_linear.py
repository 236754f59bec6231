"""Entry point of a norm with a linear layer: the choice of a backend (may import all of `norm`).

    Σ_k (x·r·γ)·W = r · Σ_k x·(γ·W)

The row scale leaves the contraction, and the loop of the contraction also sums the statistics (the
moments monoid). So x is read once, and the normalised x is not stored. A `NormSpec` describes the
computation; `xla.norm_xla` is its definition; layer.py builds the specs of layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from symjax_rewrite.pallas_kernels.backend import (
    Backend,
    KernelFamily,
    check_operands,
    triton_backend,
)
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec
from symjax_rewrite.pallas_kernels.norm.xla import group_xla

NORMS: KernelFamily[NormGroup] = KernelFamily.of(
    "matmul",
    Backend("xla", None, group_xla),
    triton_backend("symjax_rewrite.pallas_kernels.norm.triton", "group_triton"),
    on_cuda=("triton",),
)
BACKENDS = NORMS.backends
cuda_backend = NORMS.cuda_backend


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
    check_operands(group.avals, operands, "matmul")
    return NORMS.call(group, operands, backend, partial(group_xla, group))
