"""Margins from records: the least predicted speedup of a kind of candidate that is rarely wrong.

python experiments/performance_fuzz/margins.py RECORDS...

RECORDS are files of `run.py --records`, of seeds that are used for fitting. By kind: how far
measured speedups lie from the predicted ones, and for some margins how many candidates they admit,
how many of these are slower than the program as written by more than 5 %, and the mean speedup of
those that they refuse. The margins of `Margins` (`cost/profile_groups.py`) and of the CPU's profile
are the least ones that admit at most one slower candidate in twenty.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import harness
import numpy as np
from performance_fuzz import report
from performance_fuzz.forms import ALONE, PLAIN

KINDS = {
    "fold": "fold", "orientation": "orientation", "banded": "banded", "scan": "scan",
    "loop_batching": "hoist", "loop_invariant": "hoist", "sparse": "", "selection": "",
    "repeated_work": "", "common_subexpression": "",
}  # fmt: skip
MARGINS = (1.05, 1.1, 1.15, 1.25, 1.4, 1.5, 1.75, 2.0)
SLOWER = 1 / 1.05


def candidates(records: list[dict[str, Any]]) -> dict[str, list[tuple[float, float, float]]]:
    """Return by kind: predicted speedups of candidates, of their programs, and measured ones."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for r in records:
        if r.get("is_short", True):
            continue
        for name, form in r["forms"].items():
            own = {KINDS.get(k, "rewrite") for k in form["kinds"]} - {""}
            if not name.startswith(ALONE) or not form["stated"] or len(own) != 1:
                continue
            before, after = form["stated"]
            whole = report.stated_prediction(form)
            if form["same_as"] == PLAIN or after <= 0 or whole is None:
                continue
            found[own.pop()].append((before / after, whole, 1 / form["ratio"]))
    return found


def rows(kind: str, found: list[tuple[float, float, float]]) -> list[list[str]]:
    """Return the rows of a kind: its residuals, and what each margin would do."""
    spread = np.std([math.log(measured / whole) for _, whole, measured in found])
    out = []
    for margin in MARGINS:
        admitted = [m for own, _, m in found if own >= margin]
        refused = [m for own, _, m in found if own < margin and m > 1]
        slower = sum(m < SLOWER for m in admitted)
        share = f"{slower / len(admitted):.0%}" if admitted else "–"
        lost = f"{report.geometric(refused):.2f}" if refused else "–"
        out.append([kind, f"{spread:.2f}", f"{margin:.2f}", len(admitted), slower, share, lost])
    return out


def main() -> None:
    records = [json.loads(text) for f in sys.argv[1:] for text in Path(f).read_text().splitlines()]
    header = (
        "kind", "spread of residuals (log)", "margin", "admitted", "slower", "share",
        "mean speedup of faster ones refused",
    )  # fmt: skip
    table = [
        row for kind, found in sorted(candidates(records).items()) for row in rows(kind, found)
    ]
    print(harness.markdown_table(header, table))


if __name__ == "__main__":
    main()
