"""What the doors of all kernels share: whether a backend can run a spec, and which one does.

May import the ground layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
from jax.experimental import pallas as pl

from symjax_rewrite.errors import KernelError, UsageError

OLDEST_GPU = 8.0  # compute capability
Spec = TypeVar("Spec")


@dataclass(frozen=True, slots=True)
class Yes:
    """The backend runs it."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Reason:
    """The backend does not run it, and why.

    Example:
        >>> bool(Reason("head size above 256")), str(Reason("head size above 256"))
        (False, 'head size above 256')
    """

    text: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.text


Support = Yes | Reason
YES = Yes()


def first_reason(*checks: tuple[bool, str]) -> Support:
    """`YES` unless a check's condition holds: then its text."""
    for fails, text in checks:
        if fails:
            return Reason(text)
    return YES


@dataclass(frozen=True, slots=True)
class Backend(Generic[Spec]):
    """A way to run specs: whether it can, and how; `platform` is where, None for anywhere."""

    name: str
    platform: str | None
    supports: Callable[[Spec], Support]
    run: Callable[..., Any]


def oldest_capability() -> float | None:
    """The least compute capability of the GPUs at hand; None without any."""
    if jax.default_backend() != "gpu":
        return None
    found = [getattr(d, "compute_capability", None) for d in jax.local_devices()]
    return min((float(c) for c in found if c), default=None)


def first_on_cuda(backends: Sequence[Backend[Spec]], spec: Spec) -> Backend[Spec] | Reason:
    """The first that runs a spec where a program is lowered for CUDA, or why none does."""
    capability = oldest_capability()
    if capability is not None and capability < OLDEST_GPU:
        return Reason(f"compute capability {capability} is below {OLDEST_GPU}")
    reasons = []
    for backend in backends:
        support = backend.supports(spec)
        if support:
            return backend
        reasons.append(f"{backend.name}: {support}")
    return Reason("; ".join(reasons))


def named_backend(
    backends: Mapping[str, Backend[Spec]], name: str, spec: Spec, what: str
) -> Backend[Spec]:
    """The backend asked for by name.

    Raises:
        KernelError: it does not exist, or does not support the spec.
    """
    if name not in backends:
        raise KernelError("no such backend", expected=["auto", *backends], got=name)
    support = backends[name].supports(spec)
    if not support:
        raise KernelError(f"the {name} backend does not run this {what}", got=str(support))
    return backends[name]


def check_operands(
    wanted: Sequence[tuple[tuple[int, ...], str]], operands: Sequence[Any], what: str
) -> None:
    """That arrays have the shapes and dtypes of a spec's operands.

    Raises:
        KernelError: they do not.
    """
    given = [(tuple(x.shape), str(x.dtype)) for x in operands]
    if list(wanted) != given:
        raise KernelError(f"the operands do not fit the {what}", expected=list(wanted), got=given)


def cost_estimate(
    flops: int | None, operands: Sequence[Any], results: Sequence[Any]
) -> pl.CostEstimate | None:
    """Return what a kernel costs, for reports: its FLOPs, and the bytes of its arrays, each once.

    Args:
        flops: of products and weighted sums, 2mnk; None where data decide.
        operands: arrays that it reads.
        results: arrays or avals that it writes.
    """
    if flops is None:
        return None
    moved = sum(x.size * x.dtype.itemsize for x in (*operands, *results))
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved)


def checker(what: str) -> Callable[[bool, str, object], None]:
    """`check(holds, complaint, got)`: a UsageError that it is no `what`, unless it holds."""

    def check(holds: bool, complaint: str, got: object) -> None:
        if not holds:
            raise UsageError(f"not a {what}: {complaint}", got=got)

    return check
