"""Block sizes of the Triton kernel: a table per device (may import spec.py).

`experiments/on_gpu/measure.py` measures the blocks (part `norms`), and `fit` gives rows of the
table. Rows without a measurement have `measured_s` null.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.backend import LEAST_SIDE, power_of_two
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec

TABLE = Path(__file__).with_name("norm_blocks.json")


@dataclass(frozen=True, slots=True)
class NormBlocks:
    """Rows, outputs and k per step of one program, its warps, and the depth of its pipeline.

    splits: the parts of k; each has its own programs, and a second kernel adds their sums.
    scaled_before: an earlier kernel multiplies the weights by γ.
    """

    rows: int
    outputs: int
    step: int
    warps: int
    stages: int
    splits: int = 1
    scaled_before: bool = False


@functools.cache
def table() -> dict[str, Any]:
    """Return the table as stored: per device a list of rows; the first that fits is used."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def devices() -> tuple[str, ...]:
    """Return the devices of the table."""
    return tuple(table())


def device_here() -> str:
    """Return the table's name of the local GPU; the H200 if the table has none for it."""
    kind = jax.devices()[0].device_kind.lower() if jax.default_backend() == "gpu" else ""
    return next((name for name in table() if name in kind), "h200")


def norm_blocks(group: NormGroup, device: str | None = None) -> NormBlocks:
    """Return the block sizes of a group: the first row of the device's table whose limits hold.

    device: one of `devices()`; by default the local one. The limits of a row are `rows`, `outputs`
    (the most, of all members together) and `weights` (the most bytes of one element of a member's
    products, times the number of products).
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
        blocks,
        **{k: min(getattr(blocks, k), power_of_two(v, LEAST_SIDE)) for k, v in least.items()},
    )
