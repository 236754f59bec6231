"""Device profiles: every figure that a decision depends on, by device.

GPU figures are the vendors' datasheets (dense tensor-core peaks), times the share that large
products and copies reached on an H200. The CPU profile is of two server cores; other CPUs get it
scaled by their cores (`core_scaling`). Two profiles differ by data: no module outside `cost/` tests
which device it has. May import `profile_groups`, `profile_fields`, `core_scaling` and `errors`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from symjax_rewrite.cost import core_scaling
from symjax_rewrite.cost.fusion_facts import FusionFacts
from symjax_rewrite.cost.loop_facts import ChunkedMatrices, LoopFacts, ScanFacts, StepLoops
from symjax_rewrite.cost.profile_fields import (
    DATASHEET,
    FACT,
    NO_SCRIPT,
    fact,
    group,
    quantity,
)
from symjax_rewrite.cost.profile_groups import (
    BandedBlocks,
    ColumnReductionFacts,
    ColumnScanFacts,
    FoldFacts,
    FunctionSteps,
    Margins,
    MemoryFacts,
    NormFacts,
    ProductLayouts,
    SearchBounds,
    SortFacts,
)
from symjax_rewrite.cost.profile_paths import figures, value_of, with_value
from symjax_rewrite.errors import UsageError, choice
from symjax_rewrite.ir.products import HALF, is_half


@dataclass(frozen=True, slots=True)
class Device:
    """One device: rates, facts about how programs run on it, and the margins of decisions."""

    name: str = quantity("name", "in options and reports", FACT)
    flops_per_s: dict[str, float] = quantity(
        "FLOP/s",
        "matmul rate by the operands' dtype; `default` for the rest; `tf32` for float32 at the "
        "default precision, where tensor cores round it",
        DATASHEET,
        hash=False,
    )
    elementwise_per_s: float = quantity("steps/s", "elementwise operations", DATASHEET)
    bytes_per_s: float = quantity("bytes/s", "memory bandwidth", DATASHEET)
    launch_s: float = quantity("s", "fixed cost of one kernel", NO_SCRIPT)
    folds: FoldFacts = group("reductions over pairs")
    platform: str = quantity("name", "as JAX calls the compiler's target", FACT, "cuda")
    call_s: float = quantity("s", "fixed cost of a call, beside its kernels", NO_SCRIPT, 0.0)
    runs_pallas: bool = fact("kernels of `pallas_kernels` run", True)
    half_steps: float = quantity(
        "1", "times the time of an elementwise operation on float32: on half precision", NO_SCRIPT,
        1.0,
    )  # fmt: skip
    double_steps: float = quantity(
        "1", "the same: on float64, of which a vector holds half as many", NO_SCRIPT, 1.0
    )
    slow_across: bool = quantity(
        "yes/no", "Xᵀ Y, both stored by rows, is slower than transposing X first", NO_SCRIPT, False
    )
    shared_bytes: int = quantity("bytes", "shared memory that a block may ask for", DATASHEET, 0)
    capability: float = quantity("version", "compute capability of a GPU", DATASHEET, 0.0)
    multiprocessors: int = quantity("1", "that run programs of a kernel at once", DATASHEET, 1)
    memory_bytes: float = quantity("bytes", "memory; infinite: never short", DATASHEET, math.inf)
    memory: MemoryFacts = group("caches and the allocator", MemoryFacts())
    functions: FunctionSteps = group("elementwise functions", FunctionSteps())
    loops: LoopFacts = group("loops", LoopFacts())
    scans: ScanFacts = group("recurrences", ScanFacts())
    bands: BandedBlocks | None = group("banded products in blocks; None if slower", None)
    layouts: ProductLayouts | None = group("products by layout; None if all are fast", None)
    columns: ColumnReductionFacts | None = group("column by column; None if fast", None)
    column_scans: ColumnScanFacts | None = group("cumulative operations; None if fast", None)
    fusions: FusionFacts | None = group("fused reductions; None if fast", None)
    sorts: SortFacts = group("sorts", SortFacts())
    norms: NormFacts = group("norms before linear layers", NormFacts())
    search: SearchBounds = group("bounds of searches", SearchBounds())
    margins: Margins = group("what decisions ask for", Margins())
    provenance: dict[str, str] = quantity(
        "text", "sources of figures by path, where they differ from those of the fields", FACT,
        default_factory=dict, hash=False, compare=False,
    )  # fmt: skip

    def source_of(self, path: str) -> str:
        """Return where a figure comes from: a script, `datasheet`, `scaled …`, `measured …`.

        Example:
            >>> device_profile("cpu-16").source_of("launch_s")
            'scaled from 2 cores by the law of launch'
        """
        about = next((about for name, _, about in figures(self) if name == path), None)
        if about is None:
            raise UsageError("no such figure of a device profile", got=repr(path))
        said = self.provenance
        return said.get(path) or said.get(path.rpartition(".")[0]) or about["source"]

    def is_measured(self, path: str) -> bool:
        """Return True if a figure was measured on the device itself."""
        return self.source_of(path).startswith("measured")

    def at_ends(self, paths: Sequence[str]) -> Iterator[Device]:
        """Yield the profiles with figures at the ends of their ranges, in all combinations.

        A range is as wide as the source of the figure lets it be in doubt (`Margins.estimate`,
        `Margins.figure`). A fact of all these profiles is a fact of the device.
        """
        doubts = {True: self.margins.figure, False: self.margins.estimate}
        by_path = [(path, doubts[self.is_measured(path)]) for path in paths]
        for signs in itertools.product((-1, 1), repeat=len(paths)):
            device = self
            for (path, doubt), sign in zip(by_path, signs, strict=True):
                device = with_value(device, path, value_of(self, path) * doubt**sign)
            yield device

    @property
    def runs_on_gpu(self) -> bool:
        """Return True for a GPU."""
        return self.platform == "cuda"

    def packing_seconds(self, operand_bytes: float, rows: float = 0.0) -> float:
        """Return the seconds in which a product of matrices copies its operands in blocks.

        rows: the length of its longest axis, times its batch.
        """
        memory = self.memory
        return max(operand_bytes / memory.packed_bytes_per_s, rows * memory.product_row_s)

    def tree_seconds(self, elements: float) -> float:
        """Return the seconds of a cumulative operation along any axis, as XLA computes it."""
        return 0.0 if self.column_scans is None else elements * self.column_scans.tree_s

    def summed_rows_seconds(self, rows: float, width: float, matrix_bytes: float) -> float:
        """Return the seconds of a product with a vector that sums down the rows of a matrix.

        width: elements of a row.
        """
        memory = self.memory
        row_bytes = matrix_bytes / max(rows, 1.0)
        short = min(max(2 - row_bytes / memory.short_row_bytes, 0.0), 1.0)
        uncached = min(max(rows * width / memory.cached_rows - 1, 0.0), 1.0)
        traffic = 2 * short * uncached * matrix_bytes / self.bytes_per_s
        return max(rows * memory.product_row_s, traffic)

    def page_seconds(self, fresh_bytes: float) -> float:
        """Return the seconds of memory pages that every call requests from the system again.

        The allocator keeps a block up to a size and returns a larger one as a whole. The share
        rises from zero to one around that size, so that prices have no jump.
        """
        share = min(max(16 * fresh_bytes / self.memory.kept_bytes - 15.5, 0.0), 1.0)
        return share * fresh_bytes / self.memory.fresh_bytes_per_s

    def spread_seconds(self, written_bytes: float) -> float:
        """Return the seconds of writing the copies of a smaller value, beside fresh memory."""
        return written_bytes / max(self.memory.spread_bytes_per_s, self.bytes_per_s)

    def in_step(self) -> Device:
        """Return the profile of a loop's steps, which a CPU runs without handing out work."""
        if self.loops.steps_are_launches:
            return self
        return replace(self, launch_s=self.loops.step_s)

    def in_one_thread(self) -> Device:
        """Return the profile of loops over small arrays, whose steps no threads share."""
        if not self.loops.entry_s:
            return self
        return replace(self, elementwise_per_s=min(self.elementwise_per_s, 1 / self.loops.entry_s))

    def inlined_seconds(self, launches: float, step_bytes: float) -> float:
        """Return the seconds that a step saves in a loop that is compiled as one kernel.

        launches: kernels of the step, each priced as a step's. step_bytes: what they read and
        write. The share rises from zero to one around the bound, so that prices have no jump.
        """
        bound = self.loops.inlined_bytes
        share = min(max(4.5 - 4 * step_bytes / bound, 0.0), 1.0) if bound else 0.0
        return share * launches * max(self.loops.step_s - self.loops.kernel_operation_s, 0.0)

    def peak(self, dtype: str, precision: object = None) -> float:
        """Return matmul operations per second.

        Args:
            dtype: of the operands; of two dtypes, the dtype both are promoted to.
            precision: as in `jax.lax.dot`; None and "default" permit tensor cores to round float32,
                and an algorithm such as "BF16_BF16_F32_X3" names a dtype and a number of products.
        """
        usual = precision is None
        if not usual:
            if algorithm := _ALGORITHM.search(str(precision)):
                dtype, products = algorithm.groups()
                return self.peak(_MULTIPLIED[dtype]) / int(products or 1)
            usual = str(precision).lower() == "default"
        if dtype == "float32" and usual and "tf32" in self.flops_per_s:
            return self.flops_per_s["tf32"]
        return self.flops_per_s.get(dtype, self.flops_per_s["default"])

    def rounds_operands(self, dtype: str, precision: object = None) -> bool:
        """Return True for half precision, and where tensor cores round operands of a product.

        >>> device_profile("h100").rounds_operands("float32")
        True
        >>> device_profile("h100").rounds_operands("float32", "highest")
        False
        """
        if is_half(dtype) or _ALGORITHM.search(str(precision)):
            return True
        return self.peak(dtype, precision) > self.peak(dtype, "highest")

    def steps_of(self, dtype: str) -> float:
        """Return how many elementwise operations on float32 take the time of one on a dtype."""
        if dtype in HALF:
            return self.half_steps
        return self.double_steps if dtype == "float64" else 1.0


_ALGORITHM = re.compile(r"\b(BF16|F16|TF32)_\w+?_\w+?(?:_X(\d))?$")
_MULTIPLIED = {"BF16": "bfloat16", "F16": "float16", "TF32": "float32"}
# Shared memory of a block by compute capability (CUDA C++ Programming Guide, technical
# specifications). The least value among the GPUs that Pallas-Triton compiles for is the default.
SHARED_BYTES = {
    7.0: 98_304, 7.5: 65_536, 8.0: 166_912, 8.6: 101_376, 8.9: 101_376, 9.0: 232_448,
    10.0: 232_448, 12.0: 101_376,
}  # fmt: skip
LEAST_SHARED_BYTES = 101_376
OLDEST_GPU = 8.0  # compute capability that Pallas-Triton compiles for
# Reached by JAX's programs on an H200 (`experiments/on_gpu`): 705 of 989 TFLOP/s by a product in
# bfloat16, 331 of 494 in TF32, 3.1 of 4.8 TB/s by elementwise work. Other GPUs are assumed to reach
# the same shares.
PRODUCT_SHARE, TF32_SHARE, COPY_SHARE = 705 / 989, 331 / 494, 3.11 / 4.8
# Of the rate of a library's products, by the products of attention in Triton beside its elementwise
# work: on an H200; and from 230 / 1.4 of an A100 (Dao 2023, FlashAttention-2: 1.3 to 1.5 times as
# fast as Triton), whose matmuls need no such care.
FOLD_SHARE, OLDER_FOLD_SHARE = 0.67, 1.0
# The same of cuDNN, on an H200, and from 230 TFLOP/s published on an A100; and of Mosaic.
LIBRARY_SHARE, OLDER_LIBRARY_SHARE, MOSAIC_SHARE = 0.93, 1.62, 0.82
ON_H200 = (
    *("launch_s", "bytes_per_s", "flops_per_s.bfloat16", "flops_per_s.tf32", "loops.step_s"),
    *("folds.kernel_share", "folds.library_share"),
    *("folds.single_steps", "folds.kernel_bytes"),
    *("norms.kernel_share", "norms.scaled_share", "norms.drawn", "norms.kernel_s"),
    *("scans.kernel_instructions", "scans.step_latency_s"),
    *("scans.one_pass_instructions", "scans.one_pass_step_s", "scans.one_pass_s"),
)
# The fit to folds of eight programs has 0.40 and 4.9 µs in place of 0.2 and 8 µs. With it folds
# would be taken that took 1.1 to 1.8 times as long as XLA, whose kernels beat their predictions.
CAUTIOUS = "judged, by programs on an H200"
# What stands in no datasheet was measured on an H200 (`experiments/on_gpu`), and is an estimate for
# other GPUs until `python -m symjax_rewrite calibrate` measures it there.
GPU_SOURCES = {
    "flops_per_s": f"{DATASHEET}, times the share that products reached on an H200",
    "bytes_per_s": f"{DATASHEET}, times the share that elementwise work reached on an H200",
    "folds.kernel_share": "published, of an A100",
    "folds.library_share": "published, of an A100",
    "folds.mosaic_share": "of the forward pass alone, on an H200",
    "folds.single_share": CAUTIOUS,
    "folds.kernel_s": CAUTIOUS,
    "folds.block_s": "estimate",
}
GPU_SOURCES |= {
    path: "estimate, from an H200"
    for path in ON_H200
    if path not in GPU_SOURCES and path.rpartition(".")[0] not in GPU_SOURCES
}
H200_SOURCES = dict.fromkeys(ON_H200, "measured")


def _gpu(
    name: str,
    capability: float,
    multiprocessors: int,
    gib: int,
    half: float,
    single: float,
    gb_per_s: float,
    tf32: float | None = None,
    fp8: float | None = None,
) -> Device:
    """Return the profile of a GPU from its datasheet: peaks in TFLOP/s, dense."""
    peaks = {"bfloat16": half, "float16": half, "float32": single, "default": single / 2}
    peaks |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), fp8 or half)
    if tf32:
        peaks["tf32"] = TF32_SHARE / PRODUCT_SHARE * tf32
    steps = single * 1e12 / 2
    return Device(
        name,
        {dtype: PRODUCT_SHARE * peak * 1e12 for dtype, peak in peaks.items()},
        elementwise_per_s=steps,
        bytes_per_s=COPY_SHARE * gb_per_s * 1e9,
        launch_s=1.63e-6,
        folds=FoldFacts(
            fused_steps_per_s=steps,
            single_share=0.2,
            single_steps=0.15,
            kernel_s=8e-6,
            kernel_bytes=1.38,
            kernel_share=FOLD_SHARE if capability >= 9 else OLDER_FOLD_SHARE,
            library_share=LIBRARY_SHARE if capability >= 9 else OLDER_LIBRARY_SHARE,
            mosaic_share=MOSAIC_SHARE,
            block_s=15e-6,
            least_pairs=1 << 16,  # fewer take less than a launch; the price decides about others
        ),
        runs_pallas=capability >= OLDEST_GPU,
        shared_bytes=SHARED_BYTES[capability],
        capability=capability,
        multiprocessors=multiprocessors,
        memory_bytes=gib * 2.0**30,
        loops=LoopFacts(step_s=8e-6),
        norms=NormFacts(kernel_share=0.38, scaled_share=0.13, drawn=1.3, kernel_s=1.78e-5),
        provenance=GPU_SOURCES | (H200_SOURCES if name == "h200" else {}),
    )


CPU = Device(
    "cpu",
    {
        "float32": 1e11,
        "bfloat16": 1e11,
        "float16": 1e11,
        "float64": 5e10,
        "complex64": 2.5e10,
        "default": 2e10,
    },
    elementwise_per_s=4e9,
    bytes_per_s=2e10,
    launch_s=1.5e-6,
    call_s=3e-5,
    folds=FoldFacts(
        fused_steps_per_s=16e9,
        product_share=1.4,
        batch_share=1.9 if jax.__version_info__ >= (0, 11) else 1.0,
        streams=True,
        writes_blocks=False,
        single_rows=False,
        reads_places=True,
        streams_products=True,
        streams_batches=jax.__version_info__ >= (0, 11),
        square_features=6,
        library_rows=4096,
        library_columns=640,
        calls_go_on=jax.__version_info__ >= (0, 11),
        library_heads=jax.__version_info__ >= (0, 11),
        batch_terms=2 if jax.__version_info__ < (0, 11) else 1,
        head_features=16 if jax.__version_info__ < (0, 11) else 0,
        head_columns=1900,
        least_head_columns=384,
        library_features=5 if jax.__version_info__ < (0, 11) else math.inf,
        library_shifted=2 if jax.__version_info__ < (0, 11) else math.inf,
        transposed_bytes_per_s=2e9,
        piece_s=3e-9,
        block_s=5e-6,
        threaded_pairs=1 << 16,
        chained=0.35,
        looped=0.22,
        held_sum=3,
        stored_tile=4,
        down_tile=20,
        row_sum=48,
        features_at_once=8,
        argmax=36,
        argmax_passes=16,
        least_pairs=1 << 13,
        lanes=16,
    ),
    functions=FunctionSteps(
        root=1, short=3, long=8, periodic=55, power=50, scalar=110, unrolled=14, unrolled_row=32
    ),
    platform="cpu",
    runs_pallas=False,
    half_steps=2.0,
    double_steps=2.4,
    slow_across=jax.__version_info__ < (0, 11),  # 1.05 to 3 times; even on 0.12
    memory=MemoryFacts(
        cached_terms=3.0,
        kept_bytes=32 << 20,
        scratch_bytes=8 << 20 if jax.__version_info__ < (0, 11) else math.inf,
        packed_bytes_per_s=1.5e10,
        product_row_s=3e-9,
        cached_rows=1 << 21,
        constant_bytes=1 << 28,
        fresh_bytes_per_s=2e9,
        spread_bytes_per_s=4e10,
        passes_of_write=2.0,
        beside=0.02,
    ),
    loops=LoopFacts(
        product_s=0.4e-6,
        step_s=0.1e-6,
        scheduled_s=0.35e-6 if jax.__version_info__ < (0, 11) else 0.0,
        kernel_operation_s=2e-9,
        entry_s=0.25e-9,
        small_sums=3.0,
        serial_s=0.5e-9,
        batched_s=2e-4,
        inlined_bytes=1024 if jax.__version_info__ < (0, 12) else math.inf,
        steps_are_launches=False,
        cut_sums_are_slow=True,
        hoists_invariants=True,
        packs_small_floats=True,
    ),
    scans=ScanFacts(steps=StepLoops(), chunks=ChunkedMatrices(), remakes_states=True),
    bands=BandedBlocks(),
    layouts=ProductLayouts(long_sum=4096 if jax.__version_info__ < (0, 11) else 64),
    columns=ColumnReductionFacts() if jax.__version_info__ < (0, 11, 1) else None,
    column_scans=ColumnScanFacts(),
    fusions=(
        FusionFacts(
            repeats_pieces=True,
            square_repeats=4.0,
            batch_pages=0.3,
            repeated_s=2e-8,
            sums_are_products=True,
            sorts_parts=True,
        )
        if jax.__version_info__ < (0, 11)
        else FusionFacts(tasks=6.0)
    ),
    sorts=SortFacts(selects=True),
    norms=NormFacts(cut_share=None),
    margins=Margins(dominating=1.25, remake=1.5, share_of_program=0.03),
)
DEVICES: dict[str, Device] = {
    "cpu": CPU,
    "b200": _gpu("b200", 10.0, 148, 180, 2250, 75, 8000, 1125, 4500),
    "h200": _gpu("h200", 9.0, 132, 141, 989, 67, 4800, 494, 1979),
    "h100": _gpu("h100", 9.0, 132, 80, 989, 67, 3350, 494, 1979),
    "a100": _gpu("a100", 8.0, 108, 80, 312, 19.5, 2039, 156),
    "l40s": _gpu("l40s", 8.9, 142, 48, 362, 91.6, 864, 183, 733),
    "a10": _gpu("a10", 8.6, 72, 24, 125, 31.2, 600, 62.5),
    "l4": _gpu("l4", 8.9, 58, 24, 121, 30.3, 300, 60, 242),
    "5090": _gpu("5090", 12.0, 170, 32, 209, 105, 1792, 105, 419),
    "4090": _gpu("4090", 8.9, 128, 24, 165, 82.6, 1008, 82.6, 330),
    "3090": _gpu("3090", 8.6, 82, 24, 71, 35.6, 936, 35.6),
    "v100": _gpu("v100", 7.0, 80, 16, 125, 15.7, 900),
    "t4": _gpu("t4", 7.5, 40, 16, 65, 8.1, 320),
}


def device_profile(name: str | None, device: Any = None) -> Device:
    """Return the profile of a named device, or of a device of JAX.

    Args:
        name: a key of `DEVICES`, or `cpu-N` for a CPU of N cores (`cpu-N-neon`, `-avx2`, `-sse`);
            `cpu` has two. None selects by `device`.
        device: of `jax.devices()`; None for the CPU of two cores.

    Returns:
        The profile. A GPU of an unknown kind gets the profile of the nearest known compute
        capability not above its own, its rates scaled by the number of multiprocessors. A CPU gets
        the profile of its usable cores; in a program of several processes the one of two cores,
        since all processes must choose alike.

    Raises:
        UsageError: no profile has the name.
    """
    if name is not None:
        return _named(name)
    if device is None:
        return DEVICES["cpu"]
    if device.platform == "cpu":
        many = jax.process_count() > 1
        return DEVICES["cpu"] if many else _scaled_cpu(*_this_cpu())
    return known_device(device.device_kind) or _estimated(device)


def _named(name: str) -> Device:
    if name in DEVICES:
        return DEVICES[name]
    if parsed := core_scaling.parsed_name(name):
        return _scaled_cpu(*parsed)
    known = (*sorted(DEVICES), "cpu-N for N cores", "the path of a profile, FILE.json")
    raise UsageError("unknown device", **choice(name, known))


@functools.cache
def _scaled_cpu(cores: int, vectors: str) -> Device:
    return core_scaling.scaled(DEVICES["cpu"], cores, vectors)


@functools.cache
def _this_cpu() -> tuple[int, str]:
    return core_scaling.usable_cores(), core_scaling.instruction_set()


def known_device(kind: str) -> Device | None:
    """Return the profile of a device kind as JAX reports it, or None.

    Example:
        >>> [known_device(k).name for k in ("NVIDIA L40S", "NVIDIA GeForce RTX 4090", "Tesla T4")]
        ['l40s', '4090', 't4']
    """
    words = re.split(r"[^a-z0-9]+", kind.lower())
    return next((profile for key, profile in DEVICES.items() if key in words), None)


def nearest_gpu(device: Any) -> Device:
    """Return the profile of the nearest compute capability that is not above a GPU's own."""
    gpus = sorted((d for d in DEVICES.values() if d.capability), key=lambda d: d.capability)
    older = [d for d in gpus if d.capability <= _capability(device)] or gpus[:1]
    return older[-1]


def _capability(device: Any) -> float:
    return float(getattr(device, "compute_capability", None) or OLDEST_GPU)


def _estimated(device: Any) -> Device:
    """Return a profile for a GPU that no profile names."""
    like, capability = nearest_gpu(device), _capability(device)
    count = int(getattr(device, "core_count", None) or like.multiprocessors)
    scale = count / like.multiprocessors
    steps = scale * like.elementwise_per_s
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    return replace(
        like,
        name=device.device_kind,
        flops_per_s={dtype: scale * rate for dtype, rate in like.flops_per_s.items()},
        elementwise_per_s=steps,
        bytes_per_s=scale * like.bytes_per_s,
        folds=replace(like.folds, fused_steps_per_s=steps),
        runs_pallas=capability >= OLDEST_GPU,
        capability=capability,
        multiprocessors=count,
        memory_bytes=float((stats or {}).get("bytes_limit", like.memory_bytes)),
    )
