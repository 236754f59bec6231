"""N-body: all pairs exactly, Newton's third law, and the far field by multipoles.

Where does it gain to compute each pair once? From which N does a far field with a checked error
bound beat all pairs, and does it take O(N log N)?

python experiments/n_body/run.py             # prints the tables
python experiments/n_body/run.py --write     # and writes the files beside it
python experiments/n_body/run.py --quick     # small sizes: a smoke test
"""

import math
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import far_field
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pairs

from symjax_rewrite import sym_optimize

EXACT = (1024, 4096, 8192, 16384, 32768, 65536)
FAR = EXACT
SYMMETRIC = 4096
CHECKED = 500  # points at which the far field is compared with float64


def main() -> None:
    options = harness.parser(__doc__, rounds=3).parse_args()
    rounds, quick = (1 if options.quick else options.rounds), options.quick
    third = {
        kernel.__name__: third_law(kernel, 1024 if quick else SYMMETRIC, rounds)
        for kernel in (pairs.gravity, pairs.screened)
    }
    far = {}
    for count in (1024,) if quick else FAR:
        far[count] = compare(count, rounds)
        print(count, far[count], file=sys.stderr, flush=True)
        if options.write:  # a run that is interrupted leaves what it measured
            save(third, far)
    print("\n\n".join(tell(third, far)))


def save(third: dict[str, Any], far: dict[int, Any]) -> None:
    harness.write_json(HERE / "results.json", {"third law": third, "far field": far})
    harness.write_table(HERE / "README.md", *tell(third, far))
    plot(far)


def bodies(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw points of the unit cube and positive masses."""
    rng = np.random.default_rng(0)
    return rng.random((count, 3), np.float32), rng.random(count, np.float32)


def third_law(kernel: pairs.Kernel, count: int, rounds: int) -> dict[str, Any]:
    """Time forces as written, as a fold, by blocks, and by unordered blocks, in turn."""
    arguments = [jnp.asarray(a) for a in bodies(count)]
    written = pairs.written(kernel)
    programs = {
        "as written": jax.jit(written),
        "`sym_optimize`": sym_optimize(written),
        "blocks": jax.jit(pairs.blocked(kernel)),
        "each pair once": jax.jit(pairs.symmetric(kernel)),
    }
    calls = {name: lambda f=f: f(*arguments) for name, f in programs.items()}
    values = [np.asarray(call()) for call in calls.values()]
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    scale = np.abs(values[0]).max()
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "gain": samples.ratio("blocks", "each pair once"),
        "over fold": samples.ratio("`sym_optimize`", "each pair once"),
        "tiles": pairs.tiles(count),
        "difference": max(float(np.abs(v - values[0]).max() / scale) for v in values),
        "count": count,
    }


def compare(count: int, rounds: int) -> dict[str, Any]:
    """Time all pairs and the far field, in turn; compare with float64 at some points."""
    x, m = bodies(count)
    grid = far_field.grid_of(x, m)
    given = [jnp.asarray(a) for a in (grid.points, grid.masses)]
    calls = {"far": lambda: far_field.potential(grid.depth, *given)}
    if count <= EXACT[-1]:
        fold, placed = sym_optimize(pairs.potential), [jnp.asarray(a) for a in (x, m)]
        calls["all pairs"] = lambda: fold(*placed)
    values, bounds = (far_field.in_order(grid, v, count) for v in calls["far"]())
    chosen = np.random.default_rng(1).integers(0, count, CHECKED)
    exact = reference(x, m, chosen)
    error = np.abs(values[chosen] - exact)
    rounding = 1e-5 * exact  # of sums in float32
    assert (error <= bounds[chosen] + rounding).all(), "the bound is wrong"
    samples = harness.interleave(calls, rounds, clock=harness.CPU_SECONDS)
    return {
        "seconds": {name: samples.median(name) for name in calls},
        "evaluations": far_field.evaluations(grid),
        "depth": grid.depth,
        "error": float((error / exact).max()),
        "bound": float((bounds[chosen] / exact).max()),
    }


def reference(x: np.ndarray, m: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the potential of some points in float64, by all pairs."""
    out = []
    for place in chosen:
        distance = np.sqrt(((x - x[place]).astype(np.float64) ** 2).sum(-1))
        distance[distance == 0] = np.inf
        out.append((m / distance).sum())
    return np.array(out)


def tell(third: dict[str, Any], far: dict[int, Any]) -> list[str]:
    names = list(next(iter(third.values()))["seconds"])
    header = ["forces", "N", *names, "blocks / each pair once", "tiles", "fold / each pair once"]
    rows = [
        [
            name,
            row["count"],
            *(harness.duration(row["seconds"][n]) for n in names),
            row["gain"],
            " / ".join(map(str, row["tiles"])),
            row["over fold"],
        ]
        for name, row in third.items()
    ]
    header_2 = ["N", "all pairs (`sym_optimize`)", "far field", "times as fast", "evaluations / N²"]
    header_2 += ["largest error", "largest bound"]
    rows_2 = [
        [
            count,
            harness.duration(row["seconds"]["all pairs"]) if "all pairs" in row["seconds"] else "–",
            harness.duration(row["seconds"]["far"]),
            _times(row["seconds"]),
            f"{row['evaluations'] / count**2:.3f}",
            f"{row['error']:.0e}",
            f"{row['bound']:.0e}",
        ]
        for count, row in far.items()
    ]
    return [
        f"**Newton's third law**, on this CPU in float32, in {harness.CPU_NOTE}",
        harness.markdown_table(header, rows),
        "**The far field**: potentials by quadrupoles; errors relative to float64 at "
        f"{CHECKED} points, all within their bounds; GPU: not measured",
        harness.markdown_table(header_2, rows_2),
        growth(far),
    ]


def _times(seconds: dict[str, float]) -> str:
    return f"{seconds['all pairs'] / seconds['far']:.2f}" if "all pairs" in seconds else "–"


def growth(far: dict[int, Any]) -> str:
    """Fit times as powers of N, and solve for the N where they are equal."""
    lines = {}
    for name in ("all pairs", "far"):
        found = [(n, row["seconds"][name]) for n, row in far.items() if name in row["seconds"]]
        if len(found) < 3:
            return ""
        lines[name] = np.polyfit(*np.log(np.array(found)).T, 1)
    (p, a), (q, b) = lines["all pairs"], lines["far"]
    crossover = math.exp((b - a) / (p - q))
    return (
        f"Time grows as N^{p:.2f} for all pairs and N^{q:.2f} for the far field, whose depth "
        f"changes with N in steps; the fits meet at N = {crossover:,.0f}."
    )


def plot(far: dict[int, Any]) -> None:
    series = {
        name: {n: row["seconds"][key] for n, row in far.items() if key in row["seconds"]}
        for name, key in (("all pairs, fold", "all pairs"), ("far field", "far"))
    }
    base = far[min(far)]["seconds"]["far"] / (min(far) * math.log(min(far)))
    series["N log N"] = {n: base * n * math.log(n) for n in far}
    harness.lines(HERE / "results.png", "potentials of N bodies", series, ("N", "CPU seconds"))


if __name__ == "__main__":
    main()
