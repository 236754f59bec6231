"""Backends of kernels: checks of support, and the choice of a backend for a spec.

May import the ground layer and derivatives.py.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
from jax import lax

from symjax_rewrite import jax_internals, jax_kernels
from symjax_rewrite.cost.device_profiles import (
    LEAST_SHARED_BYTES,
    OLDEST_GPU,
    Device,
    known_device,
)
from symjax_rewrite.errors import KernelError
from symjax_rewrite.pallas_kernels.derivatives import by_definition

if TYPE_CHECKING:
    from jax.experimental import pallas as pl

MOST_ELEMENTS = 2**31 - 1  # of an array in a kernel, whose addresses are 32-bit integers
TOO_LARGE = "an array has more than 2^31 elements"
NAMED = "the grid of a kernel needs sizes that are numbers"
LEAST_SIDE = 16  # rows, columns and features of a product's tile
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
    return next((Reason(text) for fails, text in checks if fails), YES)


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


_planned: ContextVar[Device | None] = ContextVar("planned GPU", default=None)


@contextlib.contextmanager
def planning_for(device: Device) -> Iterator[None]:
    """Take kernels inside this context to be for the GPU of a profile."""
    token = _planned.set(device if device.runs_on_gpu else None)
    try:
        yield
    finally:
        _planned.reset(token)


_defers: ContextVar[bool] = ContextVar("kernels are traced late", default=False)


@contextlib.contextmanager
def deferring_kernels(defers: bool) -> Iterator[None]:
    """Trace a kernel that is chosen by platform only where the program is lowered for a GPU."""
    token = _defers.set(defers)
    try:
        yield
    finally:
        _defers.reset(token)


_staged_before: ContextVar[dict[Hashable, Any] | None] = ContextVar("jaxprs", default=None)


@contextlib.contextmanager
def staging_once() -> Iterator[None]:
    """Stage equal kernels of one source line, as of a model's layers, out once in this context."""
    token = _staged_before.set({})
    try:
        yield
    finally:
        _staged_before.reset(token)


def _described() -> Any:
    """Return the device that the abstract mesh names, or None."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def gpu_at_hand() -> Gpu:
    """Return the GPU that kernels are for.

    It is the GPU that a program is planned for, else that of the abstract mesh, else the smallest
    local GPU, else the smallest known.
    """
    planned = _planned.get()
    if planned is not None:
        return _gpu_of_profile(planned)
    if (described := _described()) is not None:
        return _gpu_of_profile(known_device(described.device_kind))
    if jax.default_backend() != "gpu":
        return Gpu()
    limits = [astuple(_gpu_of(device)) for device in jax.local_devices()]
    return Gpu(*map(min, zip(*limits, strict=True)))


def has_gpu() -> bool:
    """Return True if this process has a GPU, whatever its programs are planned for."""
    return any(device.platform == "gpu" for device in jax.local_devices())


def _may_lower() -> bool:
    """Return True if Pallas lowers kernels here: from JAX 0.11 on for a GPU that it can name."""
    named = _described() is not None or jax.default_backend() == "gpu"
    return named or not jax_kernels.triton_asks_for_device()


def is_hopper(capability: float) -> bool:
    """Return True for the compute capabilities of Hopper."""
    return 9.0 <= capability < 10.0


def profile_at_hand() -> Device | None:
    """Return the profile that a program is planned for, else that of the device at hand, if any."""
    if (planned := _planned.get()) is not None:
        return planned
    described = _described()
    kinds = {d.device_kind for d in (jax.local_devices() if described is None else [described])}
    return known_device(kinds.pop()) if len(kinds) == 1 else None


def _gpu_of_profile(profile: Device | None) -> Gpu:
    if profile is None or not profile.shared_bytes:
        return Gpu()
    return Gpu(profile.shared_bytes, profile.capability, profile.multiprocessors)


def _gpu_of(device: Any) -> Gpu:
    """Return the limits of a GPU as its driver reports them, else those of its kind."""
    known = _gpu_of_profile(known_device(device.device_kind))
    shared = getattr(device, "shared_memory_per_block_optin", None) or known.shared_bytes
    capability = getattr(device, "compute_capability", None) or known.capability
    count = getattr(device, "core_count", None) or known.multiprocessors
    return Gpu(int(shared), float(capability), int(count))


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


@dataclass(frozen=True, slots=True)
class Backend(Generic[Spec]):
    """A way to run specs: its name, its platform (None for any), `run(spec, *operands)`.

    supports: returns `YES` or the reason against a spec.
    """

    name: str
    platform: str | None
    run: Callable[..., Any]
    supports: Callable[[Spec], Support] = lambda spec: YES


def triton_backend(module: str, run: str, name: str = "triton") -> Backend:
    """Return the backend of a module with `supports` and `run`, which is slow to import."""

    def of_module(found: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(importlib.import_module(module), found)(
            *args, **kwargs
        )

    return Backend(name, "cuda", of_module(run), of_module("supports"))


@dataclass(frozen=True, slots=True)
class KernelFamily(Generic[Spec]):
    """The backends of one kind of spec.

    Args:
        name: in error messages.
        backends: by name.
        on_cuda: the names tried in order where a program is lowered for CUDA.
        ranked: `(spec, device) -> names`, in place of `on_cuda` where the GPU has a profile.
    """

    name: str
    backends: Mapping[str, Backend[Spec]]
    on_cuda: tuple[str, ...]
    ranked: Callable[[Spec, Device], Sequence[str]] | None = None

    @staticmethod
    def of(
        name: str,
        *backends: Backend[Spec],
        on_cuda: tuple[str, ...],
        ranked: Callable[[Spec, Device], Sequence[str]] | None = None,
    ) -> KernelFamily[Spec]:
        return KernelFamily(name, {b.name: b for b in backends}, on_cuda, ranked)

    def cuda_backend(self, spec: Spec) -> Backend[Spec] | Reason:
        """Return the backend that "auto" takes on CUDA, or the reasons why there is none."""
        capability = gpu_at_hand().capability
        if capability < OLDEST_GPU:
            return Reason(f"compute capability {capability} is below {OLDEST_GPU}")
        names, device, reasons = self.on_cuda, profile_at_hand(), []
        if self.ranked is not None and device is not None and device.runs_on_gpu:
            names = self.ranked(spec, device)
        for backend in (self.backends[name] for name in names):
            support = backend.supports(spec)
            if support:
                return backend
            reasons.append(f"{backend.name}: {support}")
        return Reason("; ".join(reasons))

    def cuda_run(self, spec: Spec) -> Callable[..., Any] | Reason:
        """Return the function of the operands that "auto" runs on CUDA, or why there is none."""
        best = self.cuda_backend(spec)
        return best if isinstance(best, Reason) else partial(best.run, spec)

    def call(
        self,
        spec: Spec,
        operands: Sequence[Any],
        backend: str,
        plain: Callable[..., Any],
        *,
        cuda_run: Callable[[Spec], Callable[..., Any] | Reason] | None = None,
        elsewhere: Callable[..., Any] | None = None,
        definition: Callable[..., Any] | None = None,
    ) -> Any:
        """Run a spec by a backend, with the derivatives of its definition.

        Args:
            spec: the spec.
            operands: arrays that fit the spec.
            backend: "auto" takes the kernel where the program is lowered for CUDA and there is one;
                else a name in `backends`.
            plain: runs the operands on any device.
            cuda_run: in place of the method.
            elsewhere: in place of `plain` on other devices where CUDA has a kernel.
            definition: in place of `plain` for derivatives.

        Raises:
            KernelError: the backend does not exist or does not support the spec.
        """
        if backend != "auto":
            run = self._named(backend, spec)
        elif isinstance(kernel := (cuda_run or self.cuda_run)(spec), Reason):
            run = plain
        else:
            key = (cuda_run or self.name, spec)
            run = partial(_by_platform, key, kernel, elsewhere or plain)
        return by_definition(run, definition or plain, *operands)

    def _named(self, name: str, spec: Spec) -> Callable[..., Any]:
        """Return the function of a backend; lowering it for another platform is an error."""
        if name not in self.backends:
            raise KernelError("no such backend", expected=["auto", *self.backends], got=name)
        chosen = self.backends[name]
        support = chosen.supports(spec)
        if not support:
            what = f"the {name} backend does not run this {self.name}"
            raise KernelError(what, got=str(support))
        run, platform = partial(chosen.run, spec), chosen.platform
        if platform is None:
            return run

        def elsewhere(*operands: Any) -> Any:
            leaves, tree = jax.tree.flatten(jax.eval_shape(run, *operands))
            kernel = f"the {name} backend of a {self.name}"
            return jax.tree.unflatten(tree, jax_kernels.absent_kernel(leaves, kernel, platform))

        return partial(lax.platform_dependent, default=elsewhere, **{platform: run})


def _by_platform(
    key: Hashable, kernel: Callable[..., Any], default: Callable[..., Any], *operands: Any
) -> Any:
    """Run a kernel where the program is lowered for CUDA, and the default elsewhere.

    key: equal for equal kernels and defaults.
    """
    closed, tree = _staged(default, operands, ("elsewhere", key))
    plain = partial(jax_internals.eval_jaxpr, closed)
    if _defers.get():
        run = lambda *xs: jax.tree.leaves(kernel(*xs)) if _may_lower() else plain(*xs)  # noqa: E731
    else:
        run, _ = _staged(kernel, operands, ("cuda", key))
    late = partial(jax_kernels.late_kernel, run, plain, closed.out_avals)
    leaves = lax.platform_dependent(*operands, cuda=late, default=plain)
    return jax.tree.unflatten(tree, leaves)


def _staged(fun: Callable[..., Any], operands: Sequence[Any], key: Hashable) -> tuple[Any, Any]:
    """Return the jaxpr of a function, and its output tree; one for equal keys and operands."""
    known = _staged_before.get()
    known = {} if known is None else known
    key = (key, *map(jax.typeof, operands), jax_internals.trace_place())
    if key not in known:
        known[key] = jax_internals.make_jaxpr(fun, *operands)
    return known[key]


def check_operands(wanted: Sequence[Any], operands: Sequence[Any], what: str) -> None:
    """Check that arrays have the shapes and dtypes of a spec's operands.

    Raises:
        KernelError: a shape or a dtype differs.
    """
    expected, given = ([(tuple(x.shape), str(x.dtype)) for x in xs] for xs in (wanted, operands))
    if expected != given:
        raise KernelError(f"the operands do not fit the {what}", expected=expected, got=given)


def bytes_of(arrays: Iterable[Any]) -> int:
    """Return the bytes of arrays or avals."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def cost_estimate(
    flops: int | None, operands: Sequence[Any], results: Sequence[Any], steps: int = 0
) -> pl.CostEstimate | None:
    """Return the cost of a kernel for reports: FLOPs and the bytes of its arrays, each once.

    flops: of products and weighted sums, 2mnk; None where they depend on data. steps: elementwise,
    of a scan.
    """
    if flops is None:
        return None
    from jax.experimental import pallas as pl  # slow to import, so imported on first use

    moved = bytes_of((*operands, *results))
    return pl.CostEstimate(flops=flops, transcendentals=steps, bytes_accessed=moved)


def power_of_two(size: int, least: int = 1) -> int:
    """Return the least power of two not below `size` and `least`, a power of two."""
    return max(least, 1 << max(size - 1, 0).bit_length())
