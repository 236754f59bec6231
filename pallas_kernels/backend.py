"""Backends of kernels: checks of support, and the choice of a backend for a spec.

May import the ground layer alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
from jax import lax

from symjax_rewrite import jax_kernels
from symjax_rewrite.cost.device_profiles import (
    LEAST_SHARED_BYTES,
    OLDEST_GPU,
    Device,
    known_device,
)
from symjax_rewrite.errors import KernelError, UsageError

if TYPE_CHECKING:
    from jax.experimental import pallas as pl

MOST_ELEMENTS = 2**31 - 1  # of an array in a kernel, whose addresses are 32-bit integers
Spec = TypeVar("Spec")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Yes:
    """The answer that a backend runs a spec."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a backend does not run a spec.

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
    """Return `YES`, or the text of the first check whose condition holds."""
    for fails, text in checks:
        if fails:
            return Reason(text)
    return YES


@dataclass(frozen=True, slots=True)
class Backend(Generic[Spec]):
    """A way to run specs: a test of support, a function, and a platform (None for any)."""

    name: str
    platform: str | None
    supports: Callable[[Spec], Support]
    run: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Gpu:
    """The limits that kernels must fit: the smallest of the GPUs a program may be compiled for.

    shared_bytes: shared memory that one block may ask for.
    capability: compute capability.
    multiprocessors: their number.
    """

    shared_bytes: int = LEAST_SHARED_BYTES
    capability: float = OLDEST_GPU
    multiprocessors: int = 132

    @property
    def reads_products_from_memory(self) -> bool:
        """Return True if matmul instructions read shared memory while the loop fills it."""
        return 9 <= self.capability < 12


_planned: ContextVar[Gpu | None] = ContextVar("planned GPU", default=None)


@contextlib.contextmanager
def planning_for(device: Device) -> Iterator[None]:
    """Take kernels inside this context to be for the GPU of a profile."""
    gpu = Gpu(device.shared_bytes, device.capability, device.multiprocessors)
    token = _planned.set(gpu if device.runs_on_gpu else None)
    try:
        yield
    finally:
        _planned.reset(token)


def gpu_at_hand() -> Gpu:
    """Return the GPU that kernels are for.

    It is the GPU that a program is planned for, else that of the abstract mesh, else the smallest
    local GPU, else the smallest known.
    """
    planned = _planned.get()
    if planned is not None:
        return planned
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return _gpu_of_kind(described.device_kind)
    if jax.default_backend() != "gpu":
        return Gpu()
    return _least([_gpu_of(device) for device in jax.local_devices()])


def _gpu_of_kind(kind: str) -> Gpu:
    profile = known_device(kind)
    if profile is None or not profile.shared_bytes:
        return Gpu()
    return Gpu(profile.shared_bytes, profile.capability, profile.multiprocessors)


def _gpu_of(device: Any) -> Gpu:
    """Return the limits of a GPU as its driver reports them, else those of its kind."""
    known = _gpu_of_kind(device.device_kind)
    shared = getattr(device, "shared_memory_per_block_optin", None) or known.shared_bytes
    capability = getattr(device, "compute_capability", None) or known.capability
    count = getattr(device, "core_count", None) or known.multiprocessors
    return Gpu(int(shared), float(capability), int(count))


def _least(gpus: Sequence[Gpu]) -> Gpu:
    return Gpu(*(min(each) for each in zip(*map(astuple, gpus), strict=True)))


def too_large(shapes: Iterable[Sequence[int]]) -> bool:
    """Return True if an array of one of these shapes has more elements than a kernel addresses."""
    return any(math.prod(shape) > MOST_ELEMENTS for shape in shapes)


def accepted(found: Found | Reason) -> Found:
    """Return a result that is not a `Reason`.

    Raises:
        KernelError: the result is a `Reason`.
    """
    if isinstance(found, Reason):
        raise KernelError("no kernel here", got=str(found))
    return found


def first_on_cuda(backends: Sequence[Backend[Spec]], spec: Spec) -> Backend[Spec] | Reason:
    """Return the first backend that runs a spec on CUDA, or the reasons why none does."""
    capability = gpu_at_hand().capability
    if capability < OLDEST_GPU:
        return Reason(f"compute capability {capability} is below {OLDEST_GPU}")
    reasons = []
    for backend in backends:
        support = backend.supports(spec)
        if support:
            return backend
        reasons.append(f"{backend.name}: {support}")
    return Reason("; ".join(reasons))


def run_named(
    backends: Mapping[str, Backend[Spec]], name: str, spec: Spec, what: str
) -> Callable[..., Any]:
    """Return the function that runs a spec by a named backend.

    Raises:
        KernelError: the backend does not exist or does not support the spec. Lowering for another
            platform than the backend's raises it too.
    """
    if name not in backends:
        raise KernelError("no such backend", expected=["auto", *backends], got=name)
    support = backends[name].supports(spec)
    if not support:
        raise KernelError(f"the {name} backend does not run this {what}", got=str(support))
    run, platform = partial(backends[name].run, spec), backends[name].platform
    if platform is None:
        return run

    def elsewhere(*operands: Any) -> Any:
        leaves, tree = jax.tree.flatten(jax.eval_shape(run, *operands))
        kernel = f"the {name} backend of a {what}"
        return jax.tree.unflatten(tree, jax_kernels.absent_kernel(leaves, kernel, platform))

    return partial(lax.platform_dependent, default=elsewhere, **{platform: run})


def check_operands(
    wanted: Sequence[tuple[tuple[int, ...], str]], operands: Sequence[Any], what: str
) -> None:
    """Check that arrays have the shapes and dtypes of a spec's operands.

    Raises:
        KernelError: a shape or a dtype differs.
    """
    given = [(tuple(x.shape), str(x.dtype)) for x in operands]
    if list(wanted) != given:
        raise KernelError(f"the operands do not fit the {what}", expected=list(wanted), got=given)


def cost_estimate(
    flops: int | None, operands: Sequence[Any], results: Sequence[Any]
) -> pl.CostEstimate | None:
    """Return the cost of a kernel for reports: its FLOPs and the bytes of its arrays, each once.

    Args:
        flops: FLOPs of products and weighted sums, 2mnk; None where they depend on data.
        operands: arrays that the kernel reads.
        results: arrays or avals that the kernel writes.
    """
    if flops is None:
        return None
    from jax.experimental import pallas as pl  # slow to import, so imported on first use

    moved = sum(x.size * x.dtype.itemsize for x in (*operands, *results))
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved)


def checker(what: str) -> Callable[[bool, str, object], None]:
    """Return `check(holds, complaint, got)`, which raises a UsageError unless `holds` is true."""

    def check(holds: bool, complaint: str, got: object) -> None:
        if not holds:
            raise UsageError(f"not a {what}: {complaint}", got=got)

    return check
