"""Profiles of CPUs with other numbers of cores, from the profile of two cores, by stated laws.

Figures of one core that depend on the cores were measured too, on a CPU with AVX-512 (`ONE_CORE`).
No other figure is measured on the CPU it is for: `python -m symjax_rewrite calibrate` measures.
Each law gives the factor of a figure from two cores to `n` cores:

- *compute*: `n` cores do `n / (1 + (n − 1) · COMPUTE_LOSS)` times the work of one core.
- *bandwidth* saturates: `n / (1 + (n − 1) · BANDWIDTH_LOSS)` times that of one core, at most
  `1 / BANDWIDTH_LOSS` times.
- *launch*: a kernel's fixed cost grows by `LAUNCH_GROWTH` of its value per doubling of the cores,
  since more threads are woken and awaited.
- *tasks*: two for each thread, of which XLA has one more than cores.
- *serial*: unchanged, because one thread does the work.

Rates of arithmetic also depend on the width of vectors (`VECTORS`). Imports `profile_paths` only.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from symjax_rewrite.cost.profile_paths import figures, with_value

Profile = TypeVar("Profile")

MEASURED_CORES = 2
MOST_CORES = 1024
COMPUTE_LOSS = 0.02  # 16 cores do 12.3 times the work of one
BANDWIDTH_LOSS = 0.1  # a socket has the bandwidth of 10 cores at most
LAUNCH_GROWTH = 0.25
# Rates of arithmetic, times those of the CPU of the profile, by instruction set: AVX-512 on two
# units of 256 bits, or AVX2 on two; NEON has four units of 128 bits at a lower clock; without AVX2
# there is no fused multiply-add.
VECTORS = {"avx512": 1.0, "avx2": 1.0, "neon": 0.75, "sse": 0.25}
# Measured by `taskset -c 0 python -m symjax_rewrite calibrate`, in processor time: one core reaches
# more of its caches, its memory and its rate of products than the laws leave it.
ONE_CORE = {
    "flops_per_s.float32": 9.8e10,
    "flops_per_s.bfloat16": 9.8e10,
    "flops_per_s.float16": 9.8e10,
    "flops_per_s.float64": 5.3e10,
    "flops_per_s.complex64": 1.7e10,
    "flops_per_s.default": 3.7e10,
    "elementwise_per_s": 5.4e9,
    "folds.fused_steps_per_s": 9e9,
    "bytes_per_s": 5.3e10,
    "memory.cached_step": 6.0,
    "memory.cached_terms": 4.6,
    "memory.fresh_bytes_per_s": 2.7e9,
    "layouts.across_s": 4.6e-10,
    "layouts.result_s": 2.95e-9,
    "layouts.copy_s": 6e-10,
    "scans.steps.moved_bytes_per_s": 2.4e9,
}
MEASURED_ALONE = "measured by `python -m symjax_rewrite calibrate` on one core"
NAMED_THREADS = os.environ.get("PJRT_NPROC", "")  # threads of XLA's CPU client, if set

COMPUTE, BANDWIDTH, LAUNCH, SERIAL = "compute", "bandwidth", "launch", "serial"
TASKS = "tasks"
# The law of a figure follows from its unit; other figures do not depend on the cores.
LAWS_BY_UNIT = {
    "FLOP/s": COMPUTE,
    "steps/s": COMPUTE,
    "bytes/s": BANDWIDTH,
    "s": SERIAL,
    "s/entry": SERIAL,  # of a loop's step, which one thread runs
    "s/element": COMPUTE,
    "s/row": COMPUTE,
    "s/matrix": COMPUTE,
    "s/piece": SERIAL,
    "tasks": TASKS,
}
# The figures for which the unit does not tell.
LAWS_BY_PATH = {
    "launch_s": LAUNCH,
    "folds.block_s": LAUNCH,
    "scans.chunks.chunk_s": LAUNCH,
    "layouts.result_s": BANDWIDTH,
    "layouts.copy_s": BANDWIDTH,
}


def factor(law: str, cores: int) -> float:
    """Return the factor of a rate from two cores to `cores`; for *launch*, of the seconds.

    Example:
        >>> round(factor(COMPUTE, 16), 2), round(factor(BANDWIDTH, 16), 2), factor(LAUNCH, 16)
        (6.28, 3.52, 1.75)
    """
    if law == SERIAL or cores == MEASURED_CORES:
        return 1.0
    if law == LAUNCH:
        return 1 + LAUNCH_GROWTH * math.log2(cores / MEASURED_CORES)
    if law == TASKS:
        return (cores + 1) / (MEASURED_CORES + 1)
    loss = COMPUTE_LOSS if law == COMPUTE else BANDWIDTH_LOSS
    one, measured = (n / (1 + (n - 1) * loss) for n in (cores, MEASURED_CORES))
    return one / measured


def scaled(profile: Profile, cores: int, vectors: str = "avx512") -> Profile:
    """Return the profile of a CPU with other cores; the same object where nothing differs.

    Args:
        profile: of `MEASURED_CORES` cores.
        cores: usable cores.
        vectors: the instruction set, a key of `VECTORS`.
    """
    said: dict[str, str] = {}
    out: Any = profile
    alone = ONE_CORE if cores == 1 else {}
    for path, value, about in figures(profile):
        law, change, here = law_of(path, about["unit"]), 1.0, path in alone
        if here:
            value, said[path] = alone[path], MEASURED_ALONE
        elif law is None or not isinstance(value, float) or not 0 < value < math.inf:
            continue
        else:
            change = factor(law, cores)
        change *= VECTORS[vectors] if law == COMPUTE else 1.0
        if change != 1.0:
            source = "one core" if here else f"{MEASURED_CORES} cores"
            said[path] = f"scaled from {source} by the law of {law}"
        grows = about["unit"].endswith("/s") or law in (LAUNCH, TASKS)
        out = with_value(out, path, value * change if grows else value / change)
    if not said:
        return profile
    return dataclasses.replace(out, name=profile_name(cores, vectors), provenance=said)


def law_of(path: str, unit: str) -> str | None:
    """Return the law of a figure, or None if the figure does not depend on the cores."""
    return LAWS_BY_PATH.get(path) or LAWS_BY_UNIT.get(unit)


def profile_name(cores: int, vectors: str) -> str:
    """Return the name of the profile of a CPU, such as `cpu-16` or `cpu-4-neon`."""
    wide = VECTORS[vectors] == 1.0
    if wide and cores == MEASURED_CORES:
        return "cpu"
    return f"cpu-{cores}" + ("" if wide else f"-{vectors}")


def parsed_name(name: str) -> tuple[int, str] | None:
    """Return the cores and the instruction set of a profile's name, or None.

    Example:
        >>> parsed_name("cpu-16"), parsed_name("cpu-4-neon"), parsed_name("cpu-0")
        ((16, 'avx512'), (4, 'neon'), None)
    """
    match = re.fullmatch(rf"cpu-(\d+)(?:-({'|'.join(VECTORS)}))?", name)
    if not match or not 1 <= int(match[1]) <= MOST_CORES:
        return None
    return int(match[1]), match[2] or "avx512"


def usable_cores() -> int:
    """Return the cores that XLA's threads may use: the least of affinity, cgroup and settings."""
    affinity = getattr(os, "sched_getaffinity", None)
    counts = [len(affinity(0)) if affinity else os.cpu_count() or MEASURED_CORES]
    if (quota := cgroup_cores()) is not None:
        counts.append(quota)
    if NAMED_THREADS.isdigit():
        counts.append(int(NAMED_THREADS))
    return min(max(min(counts), 1), MOST_CORES)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the cores of a container's quota, rounded up; None if it has none."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    if not (quota.isdigit() and period.isdigit() and int(period) > 0):  # "max": no quota
        return None
    return max(1, math.ceil(int(quota) / int(period)))


def instruction_set() -> str:
    """Return the key of `VECTORS` for this CPU, as NumPy has found it; unknown ones are `avx2`."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "neon"
    config: Any = np.show_config(mode="dicts")
    simd = (config or {}).get("SIMD Extensions", {})
    found = {*simd.get("baseline", ()), *simd.get("found", ())}
    if any(name.startswith(("AVX512", "X86_V4")) for name in found):
        return "avx512"
    if not found or found & {"AVX2", "FMA3", "X86_V3"}:
        return "avx2"
    return "sse"
