"""Gains at a glance: the table and the picture of the project's README.

Nothing is measured here. Every figure is read from the committed `results.json` of the experiment
that measured it; a row names this experiment.

python experiments/gains/run.py             # prints the tables
python experiments/gains/run.py --write     # and writes the README's table and the picture
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parent
README = EXPERIMENTS.parent / "README.md"
sys.path[:0] = [str(EXPERIMENTS)]

import harness

DISPATCH_S = 20e-6  # shorter programs measure the dispatch of a call
SLOWER = 1.05  # "slower by more than 5 %", as the performance fuzzer counts


@dataclass(frozen=True)
class Row:
    """A ratio of times in the results of an experiment; `path` leads to it."""

    program: str
    experiment: str
    path: tuple[str, ...]
    inverse: bool = False  # stored as a share of the time as written

    def ratio(self) -> harness.Ratio:
        """Return how many times as fast as plain `jax.jit`, with the quartiles."""
        stored = self._at(self.path)
        median, low, high = (stored[name] for name in ("median", "low", "high"))
        if self.inverse:
            median, low, high = 1 / median, 1 / high, 1 / low
        return harness.Ratio(median, low, high)

    def memory(self) -> str:
        """Return the temporaries of both programs, where the experiment has them."""
        beside = self._at(self.path[:-1])
        sizes = beside.get("temporaries", {}) if isinstance(beside, dict) else {}
        if not sizes.get("plain"):
            return ""
        return " → ".join(harness.quantity(sizes[name], "B") for name in ("plain", "ours"))

    def _at(self, path: tuple[str, ...]) -> Any:
        found = results(self.experiment)
        for key in path:
            found = found[key]
        return found


def claim(program: str, name: str) -> Row:
    return Row(program, "calculations", ("claims", name, "times as fast", "called"))


def fold(program: str, name: str) -> Row:
    return Row(program, "folds", (name, "time"), inverse=True)


def block(program: str, name: str) -> Row:
    return Row(program, "envelope", (name, "S"))


HELPS = (
    claim("product of three matrices, `(A @ B) @ x`", "chain (A B) x, d = 128, L = 8192"),
    Row("normal equations, `H.T @ H @ x`", "linear_algebra", ("HᵀHx, n = 2000", "against_plain")),
    claim("adapter, `x @ (W + A @ B)`, one row", "adapter x (W + A B), d = 4096, r = 16, T = 1"),
    claim("two projections of one value, 512 rows", "the same, B = 512"),
    claim(
        "two experts between two projections, 64 rows",
        "experts, top 2 of d = 4096, k = 1024, T = 64",
    ),
    fold("attention, 4096 tokens", "attention, T = 4096"),
    fold("gradient of this attention", "its gradient, T = 4096"),
    fold("cross-entropy, 50,000 words", "cross-entropy, 1024 tokens, 50,000 words"),
    fold("10 nearest of 100,000", "kNN, k = 10, 4096 of 100,000"),
    fold("N-body forces, 8192 points", "N-body, 8192"),
    Row(
        "distances between 1000 and 1000 points in space",
        "short_rows",
        ("distances of all pairs", "3", "gain"),
    ),
    Row(
        "cross-entropy of 2 million logits", "short_rows", ("cross-entropy of logits", "1", "gain")
    ),
    Row(
        "selective scan, 1024 steps",
        "selective_scan",
        ("forward", "`lax.scan`", "1024", "speedup", "sym_optimize"),
    ),
    block(
        "transformer block, linear attention scores first",
        "cliff, 4096 tokens, linear attention scores first",
    ),
    Row("MiniLM with adapters, one sentence", "minilm", ("speed", "1 sentence", "ratio")),
)
HELPS_LITTLE = (
    block("transformer block, dense, weights frozen", "dense, 256 tokens, weights frozen"),
    block("transformer block, two experts, 256 tokens", "experts, 256 tokens, 2 experts"),
    Row("MiniLM with adapters, 12 sentences", "minilm", ("speed", "12 sentences", "ratio")),
    claim("two projections of one row", "shared projection x W₁ + x W₂, d = 4096, B = 1"),
    Row(
        "RMSNorm, then linear, 512 rows",
        "linear_algebra",
        ("RMSNorm then linear, [512,2048]", "against_plain"),
    ),
    Row("gradient of an MLP", "gradients", ("MLP", "gain_outside")),
)


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    parts = tell()
    print("\n\n".join(parts))
    if options.write:
        harness.write_between(README, "gains", *parts)
        plot(HERE / "results.png")


@cache
def record(experiment: str) -> dict[str, Any]:
    path = EXPERIMENTS / experiment / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))


def results(experiment: str) -> dict[str, Any]:
    return record(experiment)["results"]


def tell() -> list[str]:
    """Return the parts of the README's section."""
    header = ["", "program", "times as fast as `jax.jit`", "temporaries", "measured by"]
    rows = [
        [kind if first else "", row.program, row.ratio(), row.memory(), script(row.experiment)]
        for kind, group in (("helps", HELPS), ("helps little or not", HELPS_LITTLE))
        for first, row in ((row is group[0], row) for row in group)
    ]
    facts = harness.markdown_table(["over many programs", "", "measured by"], list(totals()))
    return [harness.markdown_table(header, rows), facts, note()]


def script(experiment: str) -> str:
    return f"[`{experiment}/run.py`](experiments/{experiment}/README.md)"


def totals() -> Iterator[list[str]]:
    """Yield rows that sum up what the fuzzers and other people's models found."""
    programs = results("performance_fuzz")["programs"]
    timed = [p for p in programs if "harm" in p and p["plain_s"] > DISPATCH_S]
    harms, near = [p["harm"] for p in timed], [p["regret"] <= 1.10 for p in timed]
    by = script("performance_fuzz")
    faster, slower = sum(h < 1 / SLOWER for h in harms), sum(h > SLOWER for h in harms)
    yield [f"of {len(harms)} random programs, faster by more than 5 %", str(faster), by]
    yield ["slower by more than 5 %", str(slower), by]
    yield ["within 10 % of the best form known", f"{sum(near) / len(near):.0%}", by]
    runs = results("fuzz")["runs"]
    count, failed = sum(r["programs"] for r in runs), sum(len(r["failures"]) for r in runs)
    yield [
        f"of {count:,} random programs, wrong or failed",
        str(failed),
        script("fuzz"),
    ]
    models, by = list(results("real_models")["models"].values()), script("real_models")
    # Where XLA has made the same machine code of both, a ratio other than 1 is noise.
    harms = [m["against_plain"]["median"] for m in models if not m["same_machine_code"]]
    faster, slower = sum(h < 1 / SLOWER for h in harms), sum(h > SLOWER for h in harms)
    what = f"of {len(models)} models, training steps and simulations, faster by more than 5 %"
    yield [what, str(faster), by]
    yield ["slower by more than 5 %", str(slower), by]
    times = [(m["build"]["optimise_s"], m["build"]["compile_s"]) for m in models]
    whole = sum(t for t, _ in times) / sum(t for _, t in times)
    shares = [t / compiled for t, compiled in times]
    yield ["optimiser's time over XLA's compile time, sum of these", f"{whole:.0%}", by]
    yield ["the least and the largest of one", f"{min(shares):.0%}, {max(shares):.0%}", by]


def note() -> str:
    """Return where and when the experiments of the table were run."""
    names = {row.experiment for row in (*HELPS, *HELPS_LITTLE)}
    names |= {"performance_fuzz", "fuzz", "real_models"}
    machines = [record(name)["machine"] for name in sorted(names)]
    dates = sorted(machine["date"] for machine in machines)
    cores = sorted({str(machine["cores"]) for machine in machines})
    cpus = sorted({machine["cpu"] for machine in machines})
    versions = sorted({machine["versions"]["jax"] for machine in machines})
    where = f"{' or '.join(cores)} cores of {' or '.join(cpus)}, jax {', '.join(versions)}"
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{days}, {where}. GPU: [apart](experiments/on_gpu/README.md)."


def plot(path: Path) -> None:
    """Draw the table: one bar for each row, with quartiles."""
    plt = harness.pyplot()
    rows = (*HELPS, *HELPS_LITTLE)
    ratios = [row.ratio() for row in rows]
    places = range(len(rows))
    colours = ["tab:blue"] * len(HELPS) + ["tab:gray"] * len(HELPS_LITTLE)
    spans = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.28 * len(rows)))
    widths = [r.median - 1 for r in ratios]
    axes.barh(places, widths, left=1, xerr=spans, color=colours, ecolor="black", capsize=2)
    for place, ratio in zip(places, ratios, strict=True):
        axes.annotate(f" {ratio.median:.3g}×", (max(ratio.high, 1), place), va="center")
    axes.set_yticks(list(places), [row.program.replace("`", "") for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0.7, 2 * max(r.high for r in ratios))
    axes.axvline(1, color="black", lw=0.8)
    axes.set_xlabel("times as fast as jax.jit of the same function, CPU, median and quartiles")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
