"""Harm, regret and accuracy of the predictions over the records of many programs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import harness
import numpy as np
from performance_fuzz.forms import ALONE, AUTO, PLAIN

HARM, DIFFERENT = 1.05, 1.05
NORMAL = 1.96  # standard deviations on either side of a mean: 95 %


def whole_prediction(form: dict[str, Any]) -> float | None:
    """Return how many times faster than as written a form is, as its report says."""
    before, after = form["written_s"], form["predicted_s"]
    return before / after if before and after else None


def stated_prediction(form: dict[str, Any]) -> float | None:
    """Return the same by the prices of the candidate, the rest as the report says."""
    whole = form["written_s"]
    if not whole or not form["stated"]:
        return None
    before, after = form["stated"]
    left = max(whole - before, 0.0) + after
    return max(whole, before) / left if left > 0 else None


def candidates(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every candidate that was forced alone: predictions and measurement."""
    out = []
    for r in records:
        for name, form in r["forms"].items():
            if not name.startswith(ALONE) or form["same_as"] == PLAIN:
                continue
            out.append(
                {
                    "seed": r.get("seed"),
                    "kind": " ".join(form["kinds"]) or "unnamed",
                    "measured": 1 / form["ratio"],
                    "whole": whole_prediction(form),
                    "stated": stated_prediction(form),
                }
            )
    for row in out:
        row["predicted"] = row["stated"] or row["whole"]
    return out


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the rank correlation; ties get the mean of their ranks."""
    if len(x) < 3:
        return math.nan
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(x: Sequence[float]) -> np.ndarray:
    values, places, counts = np.unique(np.asarray(x), return_inverse=True, return_counts=True)
    del values
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def correlation(rows: Sequence[dict[str, Any]], by: str) -> tuple[float, int]:
    """Return the rank correlation over candidates with a measured difference, and their number."""
    kept = [r for r in rows if r[by] and abs(math.log(r["measured"])) > math.log(DIFFERENT)]
    return spearman([r[by] for r in kept], [r["measured"] for r in kept]), len(kept)


def correlation_text(rows: Sequence[dict[str, Any]], by: str) -> str:
    """Return the correlation with its interval over 1,000 samples of the programs, 95 %."""
    value, count = correlation(rows, by)
    seeds: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        seeds[row["seed"]].append(row)
    groups, rng = list(seeds.values()), np.random.default_rng(0)
    samples = [
        correlation([r for k in rng.integers(len(groups), size=len(groups)) for r in groups[k]], by)
        for _ in range(1000 if count > 2 else 0)
    ]
    low, high = np.nanquantile([v for v, _ in samples] or [math.nan], (0.025, 0.975))
    return f"{value:.2f} [{low:.2f}–{high:.2f}] of {count}"


def residuals(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return by kind: count, and quantiles of measured / predicted speedups."""
    kinds: dict[str, list[float]] = defaultdict(list)
    slower: dict[str, int] = defaultdict(int)
    for r in rows:
        predicted = r["predicted"]
        if predicted:
            kinds[r["kind"]].append(r["measured"] / predicted)
            slower[r["kind"]] += r["measured"] < 1 / DIFFERENT and predicted > 1
    out = []
    for kind, values in sorted(kinds.items(), key=lambda item: -len(item[1])):
        low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
        out.append([kind, len(values), f"{low:.2f}", f"{middle:.2f}", f"{high:.2f}", slower[kind]])
    return out


def share(values: Sequence[float], most: float) -> str:
    """Return the share of values up to a bound, with its interval (Wilson's, 95 %)."""
    n, k = max(len(values), 1), sum(v <= most for v in values)
    middle = (k + NORMAL**2 / 2) / (n + NORMAL**2)
    half = NORMAL / (n + NORMAL**2) * math.sqrt(k * (n - k) / n + NORMAL**2 / 4)
    return f"{k / n:.1%} [{middle - half:.0%}–{middle + half:.0%}]"


def geometric(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else 1.0


def summary(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of marks: what, measured, asked."""
    timed = [r for r in records if "harm" in r and not r["is_short"]]
    short = [r for r in records if "harm" in r and r["is_short"]]
    regrets = [r["regret"] for r in timed]
    rows = candidates(r for r in records if "forms" in r and not r["is_short"])
    plain_s = sum(r["compile_s"][PLAIN] for r in records if "compile_s" in r)
    auto_s = sum(r["compile_s"][AUTO] for r in records if "compile_s" in r)
    optimise_s = sum(r["forms"][AUTO]["optimise_s"] for r in records if AUTO in r.get("forms", {}))
    faster = [r for r in timed if r["harm"] < 1 / DIFFERENT]
    return [
        ["programs timed", str(len(timed)), ""],
        ["faster by more than 5 %", str(len(faster)), ""],
        ["their mean speedup", f"{1 / geometric([r['harm'] for r in faster]):.2f}", ""],
        ["confirmed slower by more than 5 %", str(sum(r["harm"] > HARM for r in timed)), "0"],
        ["regret ≤ 1.10", share(regrets, 1.10), "≥ 95 %"],
        ["regret ≤ 1.5", share(regrets, 1.5), "≥ 99 %"],
        ["rank correlation of prices", correlation_text(rows, "predicted"), "≥ 0.9"],
        ["rank correlation of reports", correlation_text(rows, "whole"), ""],
        ["compile time / plain's", f"{auto_s / max(plain_s, 1e-9):.2f}", "≤ 1.05"],
        ["optimiser / plain's compile time", f"{optimise_s / max(plain_s, 1e-9):.1%}", "≤ 5 %"],
        ["programs below 20 µs (dispatch)", str(len(short)), ""],
        ["chosen / plain of these, mean", f"{geometric([r['harm'] for r in short]):.2f}", ""],
        ["errors", str(sum("error" in r for r in records)), "0"],
    ]


def worst(
    records: Sequence[dict[str, Any]], by: str, least: float, most: int = 25
) -> list[list[str]]:
    """Return the rows of the worst programs by harm or regret."""
    found = sorted(
        (r for r in records if r.get(by, 0) > least and not r["is_short"]), key=lambda r: -r[by]
    )
    out = []
    for r in found[:most]:
        chosen, best = r["forms"][AUTO], r["forms"][r["best"]]
        predicted = whole_prediction(chosen)
        out.append(
            [
                str(r.get("seed", r.get("name"))),
                r.get("family", ""),
                harness.duration(r["plain_s"]),
                f"{r['harm']:.2f}",
                f"{r['regret']:.2f}",
                ", ".join(chosen["kinds"]) or "–",
                f"{predicted:.2f}" if predicted else "–",
                ", ".join(best["kinds"]) or r["best"],
            ]
        )
    return out


HEADER = ("seed", "program", "plain", "harm", "regret", "chosen", "predicted gain", "best form")
KINDS = ("kind", "candidates", "10 %", "median", "90 %", "slower, predicted faster")


def tables(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tables of a run."""
    timed = [r for r in records if "harm" in r and not r["is_short"]]
    made = [harness.markdown_table(("", "measured", "asked"), summary(records))]
    made.append(
        "**Slower than as written**\n\n"
        + harness.markdown_table(HEADER, worst(timed, "harm", HARM))
    )
    made.append(
        "**Far from the best form**\n\n"
        + harness.markdown_table(HEADER, worst(timed, "regret", 1.1))
    )
    kinds = residuals(candidates(r for r in records if "forms" in r and not r["is_short"]))[:20]
    made.append(
        "**Measured / predicted speedup of candidates**\n\n" + harness.markdown_table(KINDS, kinds)
    )
    return made
