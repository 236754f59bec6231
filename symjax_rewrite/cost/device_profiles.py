"""Device profiles: every figure that a decision depends on, by device.

GPU figures are the vendors' datasheets (dense tensor-core peaks). The CPU profile is a round figure
for two server cores. It is the same on every machine, so that every process and host of a program
chooses alike; `tune=True` measures instead. Two profiles differ by data: no module outside `cost/`
tests which device it has. May import `profile_groups` and `errors`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from symjax_rewrite.cost.profile_groups import (
    DATASHEET,
    FACT,
    NO_SCRIPT,
    BandedBlocks,
    ChunkedMatrices,
    FoldFacts,
    LoopFacts,
    Margins,
    MemoryFacts,
    NormFacts,
    ScanFacts,
    SearchBounds,
    SortFacts,
    StepLoops,
    fact,
    group,
    quantity,
)
from symjax_rewrite.errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """One device: rates, facts about how programs run on it, and the margins of decisions."""

    name: str = quantity("name", "in options and reports", FACT)
    flops_per_s: dict[str, float] = quantity(
        "FLOP/s", "matmul peak by dtype; `default` for the rest", DATASHEET, hash=False
    )
    elementwise_per_s: float = quantity("steps/s", "elementwise operations", DATASHEET)
    bytes_per_s: float = quantity("bytes/s", "memory bandwidth", DATASHEET)
    launch_s: float = quantity("s", "fixed cost of one kernel", NO_SCRIPT)
    folds: FoldFacts = group("reductions over pairs")
    platform: str = quantity("name", "as JAX calls the compiler's target", FACT, "cuda")
    runs_pallas: bool = fact("kernels of `pallas_kernels` run", True)
    slow_across: bool = quantity(
        "yes/no", "Xᵀ Y, both stored by rows, is slower than transposing X first", NO_SCRIPT, False
    )
    shared_bytes: int = quantity("bytes", "shared memory that a block may ask for", DATASHEET, 0)
    capability: float = quantity("version", "compute capability of a GPU", DATASHEET, 0.0)
    memory: MemoryFacts = group("caches and the allocator", MemoryFacts())
    loops: LoopFacts = group("loops", LoopFacts())
    scans: ScanFacts = group("recurrences", ScanFacts())
    bands: BandedBlocks | None = group("banded products in blocks; None if slower", None)
    sorts: SortFacts = group("sorts", SortFacts())
    norms: NormFacts = group("norms before linear layers", NormFacts())
    search: SearchBounds = group("bounds of searches", SearchBounds())
    margins: Margins = group("what decisions ask for", Margins())

    def peak(self, dtype: str) -> float:
        """Return matmul operations per second at a dtype."""
        return self.flops_per_s.get(dtype, self.flops_per_s["default"])


# Shared memory of a block by compute capability (CUDA C++ Programming Guide, technical
# specifications). The least value among the GPUs that Pallas-Triton compiles for is the default.
SHARED_BYTES = {7.5: 65_536, 8.0: 166_912, 8.9: 101_376, 9.0: 232_448}
LEAST_SHARED_BYTES = 101_376


def _gpu(
    name: str, capability: float, half: float, single: float, gb: float, fp8: float | None = None
) -> Device:
    flops = {"bfloat16": half, "float16": half, "float32": single, "default": single / 2}
    eight = dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), fp8 or half)
    return Device(
        name,
        flops | eight,
        elementwise_per_s=single / 2,
        bytes_per_s=gb * 1e9,
        launch_s=3e-6,
        folds=FoldFacts(fused_steps_per_s=single / 2),
        shared_bytes=SHARED_BYTES[capability],
        capability=capability,
    )


CPU = Device(
    "cpu",
    {"float32": 2e11, "float64": 1e11, "complex64": 5e10, "default": 2e10},
    elementwise_per_s=4e9,
    bytes_per_s=2e10,
    launch_s=1.5e-6,
    folds=FoldFacts(
        fused_steps_per_s=16e9,
        streams=True,
        writes_blocks=False,
        single_rows=False,
        reads_places=True,
        block_s=40e-6,  # late interaction of 32 × 64 with 128 × 300 tokens
        short_sum=60,
    ),
    platform="cpu",
    runs_pallas=False,
    slow_across=jax.__version_info__ < (0, 11),  # 1.05 to 3 times; even on 0.12
    memory=MemoryFacts(
        cached_terms=3.0,
        kept_bytes=32 << 20,
        constant_bytes=1 << 28,
        fresh_bytes_per_s=2e9,
        passes_of_write=2.0,
    ),
    loops=LoopFacts(steps_are_launches=False, cut_sums_are_slow=True, packs_small_floats=True),
    scans=ScanFacts(steps=StepLoops(), chunks=ChunkedMatrices(), remakes_states=True),
    bands=BandedBlocks(),
    sorts=SortFacts(selects=True),
    norms=NormFacts(cut_share=None),
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
    """Return the profile of a named device, or of the kind `jax.devices()[0].device_kind`.

    Raises:
        UsageError: the name is no key of `DEVICES`.
    """
    if name is None:
        return known_device(kind) or DEVICES["a100"]
    if name not in DEVICES:
        raise UsageError("unknown device", expected=sorted(DEVICES), got=repr(name))
    return DEVICES[name]


def known_device(kind: str) -> Device | None:
    """Return the profile of the device kind JAX reports, or None."""
    low = kind.lower()
    return next((profile for key, profile in DEVICES.items() if key in low), None)
