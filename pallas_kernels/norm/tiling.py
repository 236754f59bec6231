"""How the Triton kernel is cut: a table per device (may import the spec).

`norm_tune` writes the table from measurements; rows without one say so.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec

TABLE = Path(__file__).with_name("norm_blocks.json")


@dataclass(frozen=True, slots=True)
class NormBlocks:
    """Rows, outputs and k per step of one program, its warps, and the depth of its pipeline."""

    rows: int
    outputs: int
    step: int
    warps: int
    stages: int


@functools.cache
def table() -> dict[str, Any]:
    """The table as stored: per device a list of rows; the first that fits is taken."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def devices() -> tuple[str, ...]:
    """Devices the table has rows for."""
    return tuple(table())


def device_here() -> str:
    """The device of the table that is at hand; the H200 where none is."""
    kind = jax.devices()[0].device_kind.lower() if jax.default_backend() == "gpu" else ""
    return next((name for name in table() if name in kind), "h200")


def norm_blocks(group: NormGroup, device: str | None = None) -> NormBlocks:
    """The cut for a group: the first row of the device's table whose limits hold.

    device: one of `devices()`; by default the one at hand. A row's limits are `rows`, `outputs`
    (of all members together, at most) and `weights` (bytes of one element of a member's products
    times their number, at most).
    """
    held = max(_held(s) for s in group.members)
    outputs = sum(s.outputs for s in group.members)
    device = device_here() if device is None else device
    for row in table()[device]:
        limits = row["limits"]
        fits = group.first.rows <= limits["rows"] and outputs <= limits["outputs"]
        if fits and held <= limits["weights"]:
            return _clipped(group, NormBlocks(**row["blocks"]))
    return _clipped(group, NormBlocks(**table()[device][-1]["blocks"]))


def _held(spec: NormSpec) -> int:
    size = jnp.dtype(spec.factor).itemsize + 4 * (spec.gain is not None)
    return size * len(spec.weights)


def _clipped(group: NormGroup, blocks: NormBlocks) -> NormBlocks:
    outputs = max(s.outputs for s in group.members)
    least = {"rows": group.first.rows, "outputs": outputs, "step": group.first.width}
    return replace(
        blocks, **{k: min(getattr(blocks, k), power_of_two(v)) for k, v in least.items()}
    )


def power_of_two(size: int) -> int:
    """The least power of two that is no less than `size`, and at least 16 (what a dot needs)."""
    return max(16, 1 << max(size - 1, 0).bit_length())


def as_row(blocks: NormBlocks) -> dict[str, int]:
    """The cut as the table stores it."""
    return {f.name: getattr(blocks, f.name) for f in fields(blocks)}
