"""Amdahl's envelope: what a rewrite of one part is worth to a whole block.

A block spends the share p of its time in the part that a rewrite makes s times faster. Does
S = 1 / ((1 − p) + p / s) predict the block's measured speedup, and do dense blocks, adapters,
experts and avoided cliffs gain what the sources give (0.5–4 %, 2–15 %, 1.5–3×)?

python experiments/envelope/run.py             # prints the table
python experiments/envelope/run.py --write     # and writes the files beside it
python experiments/envelope/run.py --quick     # small sizes: a smoke test
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import blocks
import harness
import jax
import numpy as np

from symjax_rewrite import sym_optimize

SPEEDUPS = (1.25, 2, 4, 16, math.inf)  # of the parts, for the curves


def amdahl(p: float, s: float) -> float:
    """Return the speedup of a whole of which the share p becomes s times faster."""
    return 1 / ((1 - p) + p / s)


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    results = {}
    for case in blocks.CASES[:: 4 if options.quick else 1]:
        rounds = 1 if options.quick else options.rounds
        results[f"{case.kind}, {case.name}"] = result = measure(case, rounds, options.quick)
        print(f"{case.kind:<10} {case.name:<44} {result['S']}", file=sys.stderr, flush=True)
        if options.write:  # a run that is interrupted leaves what it measured
            save(results)
    print("\n\n".join(tell(results)))


def save(results: dict[str, dict]) -> None:
    harness.write_json(HERE / "results.json", results)
    harness.write_table(HERE / "README.md", *tell(results))
    plot(results)


def measure(case: blocks.Case, rounds: int, quick: bool) -> dict[str, Any]:
    """Time block and part, as written and rewritten, in turn."""
    x, weights = case.arguments(quick)
    calls = {}
    for name, fun in {"block": case.block, "part": case.part}.items():
        calls[name], calls[f"{name}, ours"] = both(fun, x, weights, case.frozen)
    want, got = (calls[name]() for name in ("block", "block, ours"))
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    shares = samples.ratio("part", "block")
    s = samples.ratio("part", "part, ours")
    p = min(shares.median, 1.0)
    return {
        "p": shares,
        "s": s,
        "Amdahl": amdahl(p, s.median),
        "S": samples.ratio("block", "block, ours"),
        "seconds": {name: samples.median(name) for name in calls},
        "published": case.published,
        "model": model(case, quick),
        "difference": harness.difference(got, want),
    }


def both(fun: Callable, x: Any, weights: Any, frozen: bool) -> list[Callable[[], Any]]:
    """Return calls of a function as written and optimised; with its weights frozen, if asked."""
    if frozen:
        plain = jax.jit(lambda x: fun(x, weights))
        prepared = sym_optimize(lambda x, weights: fun(x, weights), frozen="weights")
        ours = prepared.prepare(weights=weights)
        return [lambda: plain(x), lambda: ours(x)]
    plain, ours = jax.jit(fun), sym_optimize(fun)
    return [lambda: plain(x, weights), lambda: ours(x, weights)]


def model(case: blocks.Case, quick: bool) -> dict[str, Any]:
    """Ask the library's cost model for p and S, on the CPU and predicted for an H200."""
    specs = harness.specs_of(case.arguments(quick))
    out = {}
    for device in ("cpu", "h200"):
        block, part = (
            sym_optimize(f, device=device).explain(*specs) for f in (case.block, case.part)
        )
        out[device] = {
            "p": part.before.seconds / block.before.seconds,
            "S": block.before.seconds / block.after.seconds,
            "rules": [use.name for use in block.rules],
            "routes": sorted({use.name for use in block.routes if use.taken}),
        }
    return out


def tell(results: dict[str, dict]) -> list[str]:
    header = ["block", "p", "s", "Amdahl", "S measured", "published", "", "model, CPU: p, S"]
    header += ["predicted, H200: S", "by"]
    rows = []
    for name, result in results.items():
        low, high = result["published"]
        cpu, gpu = result["model"]["cpu"], result["model"]["h200"]
        by = [*cpu["rules"], *cpu["routes"]]
        rows.append([
            name,
            percent(result["p"]),
            result["s"],
            f"{result['Amdahl']:.2f}",
            result["S"],
            f"{low:g}–{high:g}",
            place(result["S"], low, high),
            f"{cpu['p']:.0%}, {cpu['S']:.2f}",
            f"{gpu['S']:.2f}",
            ", ".join(dict.fromkeys(by)) or "frozen weights" * ("frozen" in name) or "as written",
        ])  # fmt: skip
    return [
        f"Measured on this CPU, float32, in turn, in {harness.CPU_NOTE}: p is the part's time "
        "over the block's, s the part's speedup, S the block's. GPU: not measured",
        harness.markdown_table(header, rows),
    ]


def percent(share: harness.Ratio) -> str:
    return f"{share.median:.1%} [{share.low:.1%}–{share.high:.1%}]"


def place(measured: harness.Ratio, low: float, high: float) -> str:
    """Say where the interval of a ratio lies beside a published range."""
    if measured.high < low:
        return "below"
    return "above" if measured.low > high else "within"


def plot(results: dict[str, dict]) -> None:
    plt = harness.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8))
    shares = np.linspace(0, 0.99, 200)
    for s in SPEEDUPS:
        name = "∞" if s == math.inf else f"{s:g}"
        left.plot(shares, [amdahl(p, s) for p in shares], label=f"s = {name}", lw=1)
    names = list(results)
    for number, result in enumerate(results.values()):
        p = min(result["p"].median, 1)
        left.plot(p, result["S"].median, "ko", ms=4)
        left.annotate(str(number + 1), (p, result["S"].median), textcoords="offset points",
                      xytext=(5, 4))  # fmt: skip
        low, high = result["published"]
        right.plot([low, high], [number] * 2, color="0.8", lw=9, solid_capstyle="butt")
        right.plot([result["S"].low, result["S"].high], [number] * 2, "k-")
        right.plot(result["S"].median, number, "ko", ms=5)
        right.plot(result["Amdahl"], number, "r|", ms=14)
    left.set(yscale="log", xlabel="share p", ylabel="speedup S of the whole",
             title="S = 1 / ((1 − p) + p / s); points: measured")  # fmt: skip
    left.legend()
    right.set(xscale="log", xlabel="S", title="grey: published, black: measured, red: Amdahl")
    right.set_yticks(range(len(names)), [f"{n + 1}: {name}" for n, name in enumerate(names)])
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(HERE / "results.png", dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
