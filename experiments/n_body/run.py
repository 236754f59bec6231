"""N-body: all pairs exactly, Newton's third law, and the far field under `approx(rtol)`.

Where does it gain to compute each pair once? From which N does a far field with a checked error
bound beat all pairs, and how does its time grow?

python experiments/n_body/run.py             # prints the tables
python experiments/n_body/run.py --write     # and writes the files beside it
python experiments/n_body/run.py --quick     # small sizes: a smoke test
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pairs

from symjax_rewrite import sym_optimize

COUNTS = (4096, 8192, 16384, 32768, 65536)
RTOL = 1e-2
ONCE = (2048, 4096, 8192)
CHECKED = 500  # points at which the far field is compared with float64


def main() -> None:
    options = harness.parser(__doc__, rounds=3).parse_args()
    rounds, quick = (1 if options.quick else options.rounds), options.quick
    third = {
        f"{kernel.__name__}, N = {count}": third_law(pairs.written(kernel), count, rounds)
        for kernel in (pairs.gravity, pairs.screened)
        for count in ((1024,) if quick else ONCE)
    }
    far: dict[str, Any] = {}
    for count in (1024,) if quick else COUNTS:
        for sums in (pairs.potential, pairs.written(pairs.gravity)):
            found = far.setdefault(sums.__name__, {})
            found[count] = compare(sums, count, rounds)
            print(sums.__name__, count, found[count], file=sys.stderr, flush=True)
        if options.write:  # a run that is interrupted leaves what it measured
            save(third, far)
    print("\n\n".join(tell(third, far)))


def save(third: dict[str, Any], far: dict[str, Any]) -> None:
    harness.write_json(HERE / "results.json", {"third law": third, "far field": far})
    harness.write_table(HERE / "README.md", *tell(third, far))
    plot(far)


def bodies(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw points of the unit cube and positive masses."""
    rng = np.random.default_rng(0)
    return rng.random((count, 3), np.float32), rng.random(count, np.float32)


def third_law(written: Callable, count: int, rounds: int) -> dict[str, Any]:
    """Time forces as written, as a fold over all pairs, and over each pair once, in turn."""
    arguments = [jnp.asarray(a) for a in bodies(count)]
    programs = {
        "as written": jax.jit(written),
        "all pairs": sym_optimize(written, kernels="xla"),
        "each pair once": sym_optimize(written, kernels="always"),
    }
    calls = harness.calls_of(programs, arguments)
    values = [call() for call in calls.values()]
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    taken = _taken(sym_optimize(written).explain(*arguments))
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "gain": samples.ratio("all pairs", "each pair once"),
        "taken": "each pair once" if "computed once" in taken.get("fold", "") else "all pairs",
        "difference": max(harness.difference(v, values[0]) for v in values),
    }


def compare(sums: Callable, count: int, rounds: int) -> dict[str, Any]:
    """Time all pairs and cells, in turn; compare with float64 at some points."""
    arguments = [jnp.asarray(a) for a in bodies(count)]
    programs = {
        "all pairs": sym_optimize(sums),
        "cells": sym_optimize(sums, numerics=f"approx({RTOL})", kernels="always"),
        "chosen": sym_optimize(sums, numerics=f"approx({RTOL})"),
    }
    calls = harness.calls_of(programs, arguments)
    taken = {name: _taken(f.explain(*arguments)) for name, f in programs.items()}
    chosen = np.random.default_rng(1).integers(0, count, CHECKED)
    exact, values = reference(sums, arguments, chosen), np.asarray(calls["cells"]())
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "gain": samples.ratio("all pairs", "cells"),
        "taken": taken,
        "same": bool((values == np.asarray(calls["all pairs"]())).all()),
        "error": float(np.abs(values[chosen] - exact).max() / np.abs(values).max()),
    }


def _taken(report: Any) -> dict[str, str]:
    return {r.name: r.reason for r in report.routes if r.taken}


def reference(sums: Callable, arguments: list, chosen: np.ndarray) -> np.ndarray:
    """Return the sums at some points in float64, by all pairs."""
    with jax.enable_x64(True):
        x, m = (jnp.asarray(np.asarray(a, np.float64)) for a in arguments)
        one = jax.jit(lambda k: sums(x, m, rows=x[k][None])[0])
        return np.array([one(k) for k in chosen])


def tell(third: dict[str, Any], far: dict[str, Any]) -> list[str]:
    names = list(next(iter(third.values()))["seconds"])
    header = ["forces", *names, "all pairs / each pair once", "the model takes", "difference"]
    rows = [
        [
            name,
            *(harness.duration(row["seconds"][n]) for n in names),
            row["gain"],
            row["taken"],
            f"{row['difference']:.0e}",
        ]
        for name, row in third.items()
    ]
    header_2 = ["sums", "N", "all pairs (`sym_optimize`)", "by cells", "times as fast", "grid"]
    header_2 += ["the model takes", "largest error"]
    rows_2 = [
        [
            name,
            count,
            harness.duration(row["seconds"]["all pairs"]),
            harness.duration(row["seconds"]["cells"]),
            row["gain"],
            row["taken"]["cells"].get("far_field", "none").partition(";")[0],
            "cells" if "far_field" in row["taken"]["chosen"] else "all pairs",
            "0 (all pairs)" if row["same"] else f"{row['error']:.0e}",
        ]
        for name, found in far.items()
        for count, row in found.items()
    ]
    return [
        f"**Newton's third law**, on this CPU in float32, in {harness.CPU_NOTE}",
        harness.markdown_table(header, rows),
        f'**The far field** under `numerics="approx({RTOL})"`: errors relative to float64 at '
        f"{CHECKED} points, over the largest value; GPU: not measured",
        harness.markdown_table(header_2, rows_2),
        *(growth(name, found) for name, found in far.items()),
    ]


def growth(sums: str, found: dict[int, Any]) -> str:
    """Fit times as powers of N, and solve for the N where they are equal."""
    if len(found) < 3:
        return ""
    lines = {
        name: harness.fitted_power({n: row["seconds"][name] for n, row in found.items()})
        for name in ("all pairs", "cells")
    }
    (p, a), (q, b) = lines["all pairs"], lines["cells"]
    crossover = math.exp((b - a) / (p - q))
    return (
        f"Time of {sums} grows as N^{p:.2f} for all pairs and N^{q:.2f} by cells, whose number "
        f"changes with N in steps; the fits meet at N = {crossover:,.0f}."
    )


def plot(far: dict[str, dict[int, Any]]) -> None:
    series = {
        f"{sums}, {name}": {n: row["seconds"][name] for n, row in found.items()}
        for sums, found in far.items()
        for name in ("all pairs", "cells")
    }
    harness.lines(HERE / "results.png", "sums over N bodies", series, ("N", "CPU seconds"))


if __name__ == "__main__":
    main()
