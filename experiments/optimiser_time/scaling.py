"""The optimiser's time over the length of a program, to 10,000 equations.

Is it near linear in the number of equations, for layers that repeat and for layers that all differ?
CPU seconds of this process, which other processes do not count in.

python experiments/optimiser_time/scaling.py             # prints the table
python experiments/optimiser_time/scaling.py --write     # and writes the files beside it
python experiments/optimiser_time/scaling.py --quick     # short programs: a smoke test
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import models

from symjax_rewrite import sym_optimize

REPEATED = (3, 6, 12, 24, 48, 115)  # layers of GPT-2, about 87 equations each
DIFFERING = (8, 16, 32, 64, 128, 320)  # blocks of their own widths, about 31 equations each


def repeated(layers: int) -> tuple[Callable, tuple]:
    """GPT-2 with so many layers, unrolled."""
    ids = models.array(1, 128, dtype=jnp.int32)
    return models.gpt2, (models.gpt2_shapes(layers), ids)


def differing(blocks: int) -> tuple[Callable, tuple]:
    """Residual blocks with an adapter, no two of one width."""
    shapes, width = [], 64
    for number in range(blocks):
        hidden, rank = 128 + 8 * number, 2 + number % 7
        shapes.append(
            {
                "norm": {"scale": models.array(width), "bias": models.array(width)},
                "up": models.array(width, hidden),
                "a": models.array(width, rank),
                "b": models.array(rank, hidden),
                "down": models.array(hidden, width),
            }
        )
    return residual_blocks, (shapes, models.array(32, width))


def residual_blocks(params: list[dict], x: jax.Array) -> jax.Array:
    for block in params:
        y = models.layer_norm(block["norm"], x)
        x = x + jax.nn.gelu(y @ (block["up"] + block["a"] @ block["b"])) @ block["down"]
    return x


FAMILIES = {"layers that repeat": (repeated, REPEATED), "that differ": (differing, DIFFERING)}


def main() -> None:
    options = harness.parser(__doc__, rounds=3).parse_args()
    rounds = 1 if options.quick else options.rounds
    measure(*differing(2), 1)  # imports what the first run imports
    results: dict[str, list[dict[str, Any]]] = {}
    for family, (make, counts) in FAMILIES.items():
        for count in counts[:2] if options.quick else counts:
            results.setdefault(family, []).append(measure(*make(count), rounds))
            print(family, results[family][-1], file=sys.stderr, flush=True)
    parts = tell(results)
    print("\n\n".join(parts))
    if options.write:
        harness.write_json(HERE / "scaling.json", results)
        harness.write_table(HERE / "README.md", *parts, name="scaling")
        plot(results)


def measure(fun: Callable, specs: tuple, rounds: int) -> dict[str, Any]:
    """Return CPU seconds of tracing alone, and of tracing and optimising; caches cleared."""
    traces, whole, walls = [], [], []
    for _ in range(rounds):
        jax.clear_caches()
        traces.append(harness.seconds_of(lambda: jax.make_jaxpr(fun)(*specs), harness.CPU_SECONDS))
        jax.clear_caches()
        optimised = sym_optimize(lambda *args: fun(*args))
        start = time.process_time()
        walls.append(optimised.explain(*specs).time_s)
        whole.append(time.process_time() - start)
    equations = len(jax.make_jaxpr(fun)(*specs).eqns)
    return {
        "equations": equations,
        "trace_s": statistics.median(traces),
        "explain_s": statistics.median(whole),
        "wall_s": statistics.median(walls),
    }


def optimiser_s(row: dict[str, Any]) -> float:
    """Return what optimising and reporting took beside tracing."""
    return max(row["explain_s"] - row["trace_s"], 1e-9)


def tell(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    header = ["", "equations", "tracing", "optimiser and report", "per equation"]
    header += ["optimiser alone, wall clock"]
    rows = [
        [
            family,
            row["equations"],
            harness.duration(row["trace_s"]),
            harness.duration(optimiser_s(row)),
            harness.duration(optimiser_s(row) / row["equations"]),
            harness.duration(row["wall_s"]),
        ]
        for family, found in results.items()
        for row in found
    ]
    powers = [
        f"{family}: {power(found, optimiser_s):.2f}, tracing {power(found, trace_s):.2f}"
        for family, found in results.items()
    ]
    return [
        "CPU seconds, the median; every cache cleared before each round",
        harness.markdown_table(header, rows),
        f"Time grows as equations to the power of: {'; '.join(powers)}.",
    ]


def trace_s(row: dict[str, Any]) -> float:
    return row["trace_s"]


def power(rows: list[dict[str, Any]], read: Callable[[dict[str, Any]], float]) -> float:
    """Return p of seconds = c·equationsᵖ."""
    return harness.fitted_power({row["equations"]: read(row) for row in rows})[0]


def plot(results: dict[str, list[dict[str, Any]]]) -> None:
    series = {}
    for family, found in results.items():
        series[f"optimiser, {family}"] = {r["equations"]: optimiser_s(r) for r in found}
        series[f"tracing, {family}"] = {r["equations"]: r["trace_s"] for r in found}
    title = "time before compilation, by the length of the program"
    harness.lines(HERE / "scaling.png", title, series, ("equations", "CPU seconds"))


if __name__ == "__main__":
    main()
