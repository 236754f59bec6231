"""Gradients of optimised losses against optimised gradients of losses, in turn.

python experiments/gradients/run.py                 # every row
python experiments/gradients/run.py --write         # and writes the files beside it
taskset -c 0 python experiments/gradients/run.py    # on one core, for a busy machine
python experiments/gradients/run.py --only scan     # rows whose names contain a word
python experiments/gradients/run.py --quick         # small sizes: a smoke test
"""

import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import programs

from symjax_rewrite import sym_optimize

NEAR = 1.15  # times as long is the same


def main() -> None:
    options = harness.parser(__doc__, rounds=15, named="rows").parse_args()
    shrink, rounds = (16, 3) if options.quick else (1, options.rounds)
    results = {}
    for row in programs.ROWS[:: 4 if options.quick else 1]:
        if options.only.lower() in row.name.lower():
            results[row.name] = measure(row, shrink, rounds)
            print(" | ".join(line(row.name, results[row.name])), flush=True)
    near = sum(verdict(result) == "near" for result in results.values())
    total = f"Within {NEAR} of each other: {near} of {len(results)}."
    table = harness.markdown_table(HEADER, [line(name, r) for name, r in results.items()])
    print(total)
    if options.write:
        harness.write_json(HERE / "results.json", results)
        harness.write_table(HERE / "README.md", total, table)


def measure(row: programs.Row, shrink: int, rounds: int) -> dict[str, Any]:
    """Time the three gradients of one loss, and compare their values."""
    arguments, fixed = row.arguments(shrink)
    loss = lambda *args: row.loss(*args, *fixed)  # noqa: E731
    numbers = tuple(range(len(arguments)))
    gradients = {
        "plain": jax.jit(jax.grad(loss, numbers)),
        "outside": jax.jit(jax.grad(sym_optimize(loss), numbers)),
        "inside": sym_optimize(jax.grad(loss, numbers)),
    }
    calls = harness.calls_of(gradients, arguments)
    wanted = calls["plain"]()
    samples = harness.interleave(calls, rounds, clock=time.process_time)
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "outside_to_inside": samples.ratio("outside", "inside"),
        "gain_outside": samples.ratio("plain", "outside"),
        "gain_inside": samples.ratio("plain", "inside"),
        "difference": {
            name: harness.difference(calls[name](), wanted) for name in ("outside", "inside")
        },
    }


def verdict(result: dict[str, Any]) -> str:
    """Say whether the median ratio is within `NEAR`; unclear where only a quartile is."""
    ratio = result["outside_to_inside"]
    if 1 / NEAR <= ratio.median <= NEAR:
        return "near"
    return "unclear" if ratio.low <= NEAR and ratio.high >= 1 / NEAR else "apart"


HEADER = [
    "loss", "`jit(grad(f))`", "`jit(grad(sym_optimize(f)))`", "`sym_optimize(grad(f))`",
    "second to third", "second as fast as plain", "third as fast as plain", "difference", "",
]  # fmt: skip


def line(name: str, result: dict[str, Any]) -> list[str]:
    seconds = (harness.duration(s) for s in result["seconds"].values())
    ratios = (str(result[k]) for k in ("outside_to_inside", "gain_outside", "gain_inside"))
    worst = f"{max(result['difference'].values()):.0e}"
    return [name, *seconds, *ratios, worst, verdict(result)]


if __name__ == "__main__":
    main()
