"""Tuning of the norm kernel: measure block sizes on the local GPU and write the package's table.

    python experiments/deferred_norm/tuning.py [--rounds 20] [--print]

For every row of the table, one shape within its limits is timed with each candidate that compiles.
The fastest candidate becomes the row's block sizes, with its time in `measured_s`. Without a GPU
nothing is written.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
from symjax_rewrite.pallas_kernels.norm.spec import NormSpec
from symjax_rewrite.pallas_kernels.norm.tiling import TABLE, NormBlocks, as_row, table
from symjax_rewrite.pallas_kernels.norm.triton import norm_triton

WIDTH = 4096
MOST_ROWS, MOST_OUTPUTS = 4096, 14336


def candidates(rows: int) -> Iterator[NormBlocks]:
    """Yield the candidate block sizes for a number of rows."""
    tall = [r for r in (16, 32, 64, 128) if r <= max(16, rows)]
    for cut in itertools.product(tall, (16, 32, 64, 128), (32, 64, 128, 256), (4, 8), (2, 3, 4)):
        if cut[0] * cut[1] <= 128 * 128 and cut[2] * (cut[0] + cut[1]) <= 2**15:
            yield NormBlocks(*cut)


def example(limits: dict[str, int]) -> NormSpec:
    """Build a layer at the limits of a row of the table."""
    rows, outputs = min(limits["rows"], MOST_ROWS), min(limits["outputs"], MOST_OUTPUTS)
    layers = {2: {}, 4: {"gated": True}, 8: {"gain": True}, 64: {"gain": True, "gated": True}}
    return forward(NormLinear(rows, WIDTH, outputs, dtype="bfloat16", **layers[limits["weights"]]))


def seconds(spec: NormSpec, blocks: NormBlocks, rounds: int) -> float | None:
    """Return the median time of one call in seconds; None where the kernel does not compile."""
    keys = jax.random.split(jax.random.key(0), len(spec.avals))
    arrays = [
        jax.random.normal(k, a.shape, jnp.float32).astype(a.dtype)
        for k, a in zip(keys, spec.avals, strict=True)
    ]
    run = jax.jit(functools.partial(norm_triton, spec, blocks=blocks))
    try:
        jax.block_until_ready(run(*arrays))
    except jax.errors.JaxRuntimeError:  # out of shared memory or registers
        return None
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready([run(*arrays) for _ in range(10)])
        times.append((time.perf_counter() - start) / 10)
    return statistics.median(times)


def tuned(rows: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Return the rows of the table with their block sizes replaced by the fastest."""
    out = []
    for row in rows:
        spec = example(row["limits"])
        timed = [(seconds(spec, cut, rounds), cut) for cut in candidates(spec.rows)]
        best = min(((s, cut) for s, cut in timed if s is not None), key=lambda pair: pair[0])
        out.append({"measured_s": best[0], "limits": row["limits"], "blocks": as_row(best[1])})
        print(row["limits"], as_row(best[1]), f"{best[0] * 1e6:.1f} us")
    return out


def main() -> None:
    """Tune the local device."""
    parser = argparse.ArgumentParser(description="Measure and write the table of blocks.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--print", action="store_true", help="do not write the table")
    chosen = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("no GPU here: nothing measured, the table stays as it is")
        return
    known = table()
    kind = jax.devices()[0].device_kind.lower()
    name = next((n for n in known if n in kind), kind.split()[-1])
    found = {**known, name: tuned(known.get(name, known["h200"]), chosen.rounds)}
    if not chosen.print:
        lines = [
            f' "{device}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
            for device, rows in found.items()
        ]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
