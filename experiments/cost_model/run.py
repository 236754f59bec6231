"""The cost model against the clock: predicted and measured speedups of single candidates.

Every candidate that the performance fuzzer forced alone has a predicted and a measured speedup over
the program as written. How well do they agree in rank and in size, and for which kinds not?

python experiments/cost_model/run.py                 # results.json of the performance fuzzer
python experiments/cost_model/run.py --records F     # its records, one a line
python experiments/cost_model/run.py --write         # and writes the files beside it
python experiments/cost_model/run.py --quick         # records made up: a smoke test
"""

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import harness
import numpy as np
from performance_fuzz import report

RECORDS = HERE.parent / "performance_fuzz" / "results.json"
NEAR, FAR = 1.25, 2.0  # factors between prediction and measurement
FEW = 5  # candidates of a kind: fewer get no row


def main() -> None:
    options = parse()
    if not options.quick and not options.records.exists():
        where = options.records
        print(f"no records at {where}: run experiments/performance_fuzz/run.py --write first")
        return
    rows, source = made_up() if options.quick else read(options.records)
    found = [row for row in rows if row["predicted"]]
    parts = tell(found, source)
    print("\n\n".join(parts))
    if options.write and not options.quick:
        harness.write_json(HERE / "results.json", {"source": source, "candidates": found})
        harness.write_table(HERE / "README.md", *parts)
        plot(found)


def parse() -> argparse.Namespace:
    options = harness.parser(__doc__)
    options.add_argument("--records", type=Path, default=RECORDS)
    return options.parse_args()


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the candidates of a file of the performance fuzzer, and what made it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        stored = json.loads(text)
        programs = stored["results"]["programs"]
        return [row for p in programs for row in p["candidates"]], stored["machine"]
    records = [json.loads(line) for line in text.splitlines()]
    timed = [r for r in records if "forms" in r and not r["is_short"]]
    return report.candidates(timed), {"date": f"{path.name}, undated", "cpu": "no machine noted"}


def made_up() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return candidates whose measurements scatter around their predictions."""
    draw = random.Random(0)
    rows = []
    for seed in range(30):
        predicted = draw.lognormvariate(0, 1)
        measured = predicted * draw.lognormvariate(0, 0.2)
        row = {"seed": seed, "kind": draw.choice(("fold", "hoist")), "measured": measured}
        rows.append(row | {"predicted": predicted, "whole": predicted, "stated": None})
    return rows, {"date": "made up", "cpu": "none"}


def tell(rows: list[dict[str, Any]], source: dict[str, Any]) -> list[str]:
    rank, counted = report.correlation(rows, "predicted")
    wrong = [r for r in rows if r["predicted"] > 1 and r["measured"] < 1 / report.DIFFERENT]
    missed = [r for r in rows if r["predicted"] < 1 and r["measured"] > report.DIFFERENT]
    marks = [
        ["candidates", len(rows)],
        [f"rank correlation, of the {counted} that differ by 5 %", f"{rank:.2f}"],
        [f"measured within {NEAR}× of predicted", share(rows, NEAR)],
        [f"within {FAR:g}×", share(rows, FAR)],
        ["median of measured / predicted", f"{median(rows):.2f}"],
        ["predicted faster, measured slower by 5 %", len(wrong)],
        ["predicted slower, measured faster by 5 %", len(missed)],
    ]
    return [
        f"Records of {source['date']}, {source['cpu']}; CPU. Those of a GPU: "
        "[on a GPU](../on_gpu/README.md)",
        harness.markdown_table(["", ""], marks),
        "**By kind**: measured / predicted",
        harness.markdown_table(report.KINDS, [r for r in report.residuals(rows) if r[1] >= FEW]),
    ]


def share(rows: list[dict[str, Any]], factor: float) -> str:
    """Return the share of candidates measured within a factor of their prediction."""
    near = sum(abs(math.log(r["measured"] / r["predicted"])) <= math.log(factor) for r in rows)
    return f"{near / max(len(rows), 1):.1%}"


def median(rows: list[dict[str, Any]]) -> float:
    return float(np.median([r["measured"] / r["predicted"] for r in rows]))


def plot(rows: list[dict[str, Any]]) -> None:
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    most = sorted(kinds, key=lambda kind: -len(kinds[kind]))[:8]
    plt = harness.pyplot()
    figure, axes = plt.subplots(figsize=(7, 6.5))
    for kind in [*most, None]:
        own = [r for r in rows if (r["kind"] == kind if kind else r["kind"] not in most)]
        points = [[r[which] for r in own] for which in ("predicted", "measured")]
        axes.plot(*points, ".", ms=5, alpha=0.7, label=f"{kind or 'others'} ({len(own)})")
    ends = [f([r[w] for r in rows for w in ("predicted", "measured")]) for f in (min, max)]
    axes.plot(ends, ends, "k-", lw=0.8)
    for factor in (FAR, 1 / FAR):
        axes.plot(ends, [factor * e for e in ends], "k:", lw=0.6)
    axes.set(xscale="log", yscale="log", xlabel="predicted speedup", ylabel="measured speedup")
    axes.set_title("candidates of random programs, each alone; dotted: a factor of two")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "results.png", dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
