"""Facts about loops and recurrences in a device profile (imports `profile_fields` only)."""

from __future__ import annotations

from dataclasses import dataclass

from symjax_rewrite.cost.profile_fields import (
    BATCHES,
    FACT,
    JUDGED,
    LAWS,
    MATRICES,
    NO_SCRIPT,
    ON_GPU,
    STREAMS,
    TREES,
    TURNS,
    fact,
    quantity,
)


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """Loops, and the values hoisted out of loops."""

    steps_are_launches: bool = fact("each operation of a step is a launch", True)
    cut_sums_are_slow: bool = fact("cut sums read an array of all steps element by element", False)
    packs_small_floats: bool = fact("bfloat16 and float8 are updated in place as bits alone", False)
    hoists_invariants: bool = fact("XLA moves loop-invariant operations out of loops", False)
    product_s: float = quantity("s", "a product of matrices in a step, to begin", LAWS, 3e-6)
    step_s: float = quantity("s", "a step, beside its products", LAWS, 0.0)
    scheduled_s: float = quantity("s", "a step of many kernels, beside them", LAWS, 0.0)
    sequential_kernels: int = quantity(
        "kernels", "that a step runs in order, beside the two of its counter", LAWS, 6
    )
    kernel_operation_s: float = quantity("s", "in a step of a loop that is one kernel", STREAMS, 0)
    inlined_bytes: float = quantity("bytes", "a loop is one kernel if a step moves less", LAWS, 0)
    tree_share: float = quantity(
        "1", "bytes that a tree of steps moves, by those of its operations' results", TREES, 0.55
    )
    tree_stored: float = quantity("1", "values of all steps that a tree stores at once", TREES, 4)
    tree_operations: float = quantity("1", "operations of a tree in the time of a launch", TREES, 6)
    entry_s: float = quantity("s/entry", "an operation in a step, which one thread runs", TREES, 0)
    operations_per_launch: float = quantity("1", "operations in the time of a launch", NO_SCRIPT, 3)
    growth: float = quantity("1", "times its inputs and outputs, written by a loop", JUDGED, 4)
    least_unwritten_bytes: float = quantity("bytes", "fewer are worth no fusion", JUDGED, 1 << 16)
    least_packed: int = quantity("elements", "smaller stacks stay as they are", JUDGED, 1 << 12)
    least_remade_bytes: float = quantity("bytes", "fewer stay in a cache", JUDGED, 6 << 20)
    least_remade_steps: int = quantity("steps", "fewer are one block", JUDGED, 32)
    fused_step: float = quantity("1", "speedup of cheap work in a fused step", NO_SCRIPT, 4.0)
    least_cut_weights: float = quantity("bytes", "smaller weights stay whole", NO_SCRIPT, 3 << 18)
    most_cut_rows: int = quantity("rows", "a product of more stays whole", NO_SCRIPT, 32)
    small_sums: float = quantity("1", "speedup of a step whose sums are short", BATCHES, 1.0)
    serial_s: float = quantity("s/entry", "a sum of a whole row in a step", BATCHES, 0.0)
    serial_row: int = quantity("elements", "shorter rows are summed many at once", BATCHES, 32)
    few_bytes: float = quantity("bytes", "a product of fewer is part of a step", BATCHES, 256)
    batched_s: float = quantity("s", "a program in place of a loop, to begin", BATCHES, 0.0)
    least_cut_steps: int = quantity("steps", "in fewer a product stays whole", JUDGED, 8)


@dataclass(frozen=True, slots=True)
class StepLoops:
    """A scan as a loop of vectorised steps."""

    step_s: float = quantity("s", "calls in every step", TURNS, 0.8e-6)
    narrow_entries: tuple[int, int] = quantity(
        "elements", "innermost axes that are not vectorised",
        TURNS, (9, 31),
    )  # fmt: skip
    narrow_entry_s: float = quantity("s/entry", "arithmetic that is not vectorised", TURNS, 0.6e-9)
    entry_s: float = quantity("s/entry", "arithmetic that is vectorised", TURNS, 0.4e-9)
    narrow_slow_entry_s: float = quantity("s/entry", "the former, transcendental", TURNS, 1.15e-9)
    slow_entry_s: float = quantity("s/entry", "the latter, transcendental", TURNS, 0.55e-9)
    laid_out: float = quantity("1", "factor of steps whose axes are laid out anew", TURNS, 1.1)
    moved_bytes_per_s: float = quantity("bytes/s", "an array laid out anew", TURNS, 5e9)


@dataclass(frozen=True, slots=True)
class ChunkedMatrices:
    """Matrix states: a loop over the steps, and matmuls of chunks of steps."""

    dtypes: tuple[str, ...] = quantity("names", "of states, measured", FACT, ("float32", "float64"))
    cache_bytes: float = quantity("bytes", "larger states leave a cache", MATRICES, 1 << 17)
    cached_entry_s: float = quantity("s/entry", "a step in a cache, f32", MATRICES, 0.085e-9)
    entry_s: float = quantity("s/entry", "a step beyond it, f32", MATRICES, 0.12e-9)
    gradient_step_s: float = quantity("s", "a step's gradient", MATRICES, 0.8e-6)
    gradient_entry_s: float = quantity("s/entry", "a step's gradient, f32", MATRICES, 4e-9)
    flops_per_s: float = quantity("FLOP/s", "in chunks, f32", MATRICES, 8e10)
    narrow_flops_per_s: float = quantity("FLOP/s", "chunks of few keys, f32", MATRICES, 3.5e10)
    narrow: int = quantity("elements", "fewer keys or values are few", MATRICES, 32)
    chunk_s: float = quantity("s", "beside a chunk's products", MATRICES, 5e-6)
    diagonal: float = quantity("1", "times a scalar decay's time", MATRICES, 2.7)
    gradient: float = quantity("1", "times the scan's time", MATRICES, 6.0)


@dataclass(frozen=True, slots=True)
class ScanFacts:
    """Recurrences. steps, chunks: None where scans run as kernels."""

    steps: StepLoops | None = quantity("group", "scans as loops over their steps", FACT, None)
    chunks: ChunkedMatrices | None = quantity("group", "loops of matrix states", FACT, None)
    kernel_instructions: float = quantity(
        "1", "instructions of each GPU kernel of a scan for an elementwise step: 0.93 in SASS of a "
        "selective scan, at a part of the rate of the datasheet",
        ON_GPU, 2.0,
    )  # fmt: skip
    one_pass_instructions: float = quantity(
        "1", "as `kernel_instructions`, of the one kernel by jax-triton: 1.36 in SASS; where "
        "this is measured, `auto` takes that kernel",
        ON_GPU, 1.74,
    )  # fmt: skip
    step_latency_s: float = quantity(
        "s", "a step of a GPU kernel that waits for the step before", ON_GPU, 2.2e-7
    )
    one_pass_step_s: float = quantity("s", "the same of the one kernel", ON_GPU, 5.1e-8)
    one_pass_s: float = quantity("s", "of the one kernel, beside its launch", ON_GPU, 1.86e-5)
    remakes_states: bool = fact("reverse mode in blocks is faster than a loop", False)
    least_remade_bytes: float = quantity("bytes", "states of fewer are kept", JUDGED, 1 << 21)
    growth: float = quantity("1", "largest results of a kernel, per input byte", JUDGED, 2)
