"""Device profiles: what a floating-point operation, a byte and a launch cost (imports ground only).

GPU figures are the vendors' datasheets (dense tensor-core peaks). The CPU profile is a round
figure for two server cores and is the same on every machine, so that every process and host of a
program chooses alike; `tune=True` measures instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from symjax_rewrite.errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    name: how it is called in options and reports.
    flops_per_s: matmul peak by dtype; `default` for the rest.
    elementwise_per_s: elementwise operations per second.
    bytes_per_s: memory bandwidth.
    launch_s: fixed cost of one kernel.
    slow_across: whether Xᵀ Y, with both stored by rows, is slower than transposing X first.
    shared_bytes: shared memory that one block of a GPU kernel may ask for.
    capability: of a GPU, its compute capability.
    """

    name: str
    flops_per_s: dict[str, float] = field(hash=False)
    elementwise_per_s: float
    bytes_per_s: float
    launch_s: float
    slow_across: bool = False
    shared_bytes: int = 0
    capability: float = 0.0

    def peak(self, dtype: str) -> float:
        """Matmul operations per second at a dtype."""
        return self.flops_per_s.get(dtype, self.flops_per_s["default"])


# shared memory of a block by compute capability (CUDA C++ Programming Guide, technical
# specifications); the least of those that Pallas-Triton compiles for stands for any other
SHARED_BYTES = {7.5: 65_536, 8.0: 166_912, 8.9: 101_376, 9.0: 232_448}
LEAST_SHARED_BYTES = 101_376


def _gpu(
    name: str, capability: float, half: float, single: float, gb: float, fp8: float | None = None
) -> Device:
    flops = {"bfloat16": half, "float16": half, "float32": single, "default": single / 2}
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        flops[dtype] = fp8 or half
    shared = SHARED_BYTES[capability]
    return Device(
        name, flops, single / 2, gb * 1e9, 3e-6, shared_bytes=shared, capability=capability
    )


CPU = Device(
    "cpu",
    {"float32": 2e11, "float64": 1e11, "complex64": 5e10, "default": 2e10},
    4e9,
    2e10,
    1.5e-6,
    slow_across=jax.__version_info__ < (0, 11),  # 1.05 to 3 times; even on 0.12
)
DEVICES: dict[str, Device] = {
    "cpu": CPU,
    "h200": _gpu("h200", 9.0, 989e12, 67e12, 4800, 1979e12),
    "h100": _gpu("h100", 9.0, 989e12, 67e12, 3350, 1979e12),
    "a100": _gpu("a100", 8.0, 312e12, 19.5e12, 2039),
    "l4": _gpu("l4", 8.9, 121e12, 30.3e12, 300, 242e12),
    "t4": _gpu("t4", 7.5, 65e12, 8.1e12, 320),
}


def device_profile(name: str | None, kind: str = "cpu") -> Device:
    """The profile of a named device, or of the device kind JAX reports.

    Args:
        name: a key of `DEVICES`, or None to go by `kind`.
        kind: `jax.devices()[0].device_kind`.

    Raises:
        UsageError: the name is unknown.
    """
    if name is not None:
        if name not in DEVICES:
            raise UsageError("unknown device", expected=sorted(DEVICES), got=repr(name))
        return DEVICES[name]
    return known_device(kind) or DEVICES["a100"]


def known_device(kind: str) -> Device | None:
    """The profile of the device kind JAX reports, if there is one."""
    low = kind.lower()
    return next((profile for key, profile in DEVICES.items() if key in low), None)
