"""The README's tables, made of records: nothing is measured here.

Ratios are of times, sample by sample, the median and the quartiles of a case's rounds: below 1 the
first is faster. A case of the parts that has no record is named as not measured.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from on_gpu import chains, measuring
from on_gpu.attention import MOSAIC
from on_gpu.scans import ONE_PASS, TABLE

MARGIN = 1.05  # a ratio beyond it is told as faster or slower
NONE, NOT_MEASURED = "–", "not measured"
ATTENTION = ("xla", "cudnn", "auto", "auto outside", "auto, triton", TABLE, MOSAIC, "pallas-triton")
# Pairs of contestants of attention: the time of the first over that of the second.
RATIOS = (("auto", "xla"), ("auto", "cudnn"), (TABLE, "cudnn"), (MOSAIC, "cudnn"))
SCANS = ("xla, lax.scan", "xla, associative_scan", "auto, lax.scan", "auto, associative_scan")
BLOCKS = re.compile(r"(triton|mosaic) \d")  # the name of a kernel with blocks of its own

Record = dict[str, Any]
Cases = Mapping[str, Sequence[Any]]


def write(out: Path, readme: Path, cases: Cases) -> None:
    """Write the tables of a folder of records into a README.

    Args:
        out: the folder of the records.
        readme: has markers for every part, for `machine` and for `rates`.
        cases: what the parts would measure, by part.
    """
    for name, parts in tables(out, cases).items():
        harness.write_between(readme, name, *parts)


def tables(out: Path, cases: Cases) -> dict[str, list[str]]:
    """Return paragraphs and tables by the name of their markers."""
    records = {part: measuring.read_part(part, out) for part in cases}
    everything = [record for some in records.values() for record in some]
    limits = {case.name: case.limit for case in cases.get("correct", ())}
    made = {
        "machine": [machines(everything)],
        "rates": [rates(records.get("norms", [])), *shortest(everything)],
        "correct": correct(records.get("correct", []), limits),
        "attention": attention(records.get("attention", [])),
        "backward": attention(records.get("backward", [])),
        "norms": norms([r for r in records.get("norms", []) if r["facts"]["kind"] == "norm"]),
        "scans": scans(records.get("scans", [])),
        "programs": programs(records.get("programs", [])),
    }
    for part, some in cases.items():
        there = {record["case"] for record in records[part]}
        missing = [case.name for case in some if case.name not in there]
        if missing:
            made[part].append(f"{NOT_MEASURED.capitalize()}, {len(missing)}: {'; '.join(missing)}.")
    return made


def machines(records: list[Record]) -> str:
    """Return a line on every device and set of versions."""
    seen = {}
    for one in (record["machine"] for record in records):
        versions = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
        device = one["device"].split(": ", 1)[1]
        host = f"{one['cores']} cores of {one['cpu']}, Python {one['python']}"
        seen[f"{one['date']}, {device}, {host}, {versions}."] = None
    return "\n".join(seen)


def rates(records: list[Record]) -> str:
    """Return the rates of copies and products by XLA; of copies, by all that the chain moves."""
    rows = []
    for record in sorted(records, key=lambda r: (r["facts"]["kind"], r["bytes"])):
        found, facts = record["contestants"].get("xla", {}), record["facts"]
        if facts["kind"] not in ("copy", "product") or "median_s" not in found:
            continue
        rate = f"{found.get('tflops', 0.0):.0f} TFLOP/s"
        if facts["kind"] == "copy":
            arrays = chains.arrays_moved(found["calls"], record["copies"]) / found["calls"]
            rate = harness.quantity(arrays * record["bytes"] / found["median_s"], "B/s")
        rows.append((record["case"], time_cell(record, "xla"), rate))
    return harness.markdown_table(("operation", "time", "rate"), rows)


def shortest(records: list[Record]) -> list[str]:
    """Return a line on the shortest chain of all, which shows how much a chain itself costs."""
    chain_s = [
        (found["calls"] * found["median_s"], f"{found['calls']} calls of {record['case']}, {name}")
        for record in records
        for name, found in record["contestants"].items()
        if "median_s" in found
    ]
    least, calls = min(chain_s, default=(None, ""))
    return [] if least is None else [f"The shortest chain: {harness.duration(least)}, {calls}."]


def correct(records: list[Record], limits: Mapping[str, float | None]) -> list[str]:
    """Return right and wrong values by kind of kernel and contestant, and why others have none.

    limits: the largest error of right values, by case.
    """
    count, reasons = collections.Counter(), collections.Counter()
    errors: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for record in records:
        kind = record["facts"]["kind"] + ", a NaN" * record["case"].endswith(", a NaN")
        for name, found in record["contestants"].items():
            key = kind, f"{name.split()[0]}, other blocks" if BLOCKS.match(name) else name
            answer = told(found)
            if answer == "measured":
                answer = "right" if is_right(found, limits.get(record["case"])) else "wrong"
                errors[key].append(found["error"])
            else:
                reasons[(key[1], answer, reason(found))] += 1
            count[*key, answer] += 1
    answers = ("right", "wrong", "refused", "failed", NOT_MEASURED)
    rows = [
        (*key, *(count[*key, a] or "" for a in answers), largest(errors[key]))
        for key in sorted({key[:2] for key in count})
    ]
    header = ("kind", "contestant", *answers, "largest error")
    others = [(name, answer, why, n) for (name, answer, why), n in sorted(reasons.items())]
    return [
        harness.markdown_table(header, rows),
        harness.markdown_table(("contestant", "answer", "reason", "values"), others),
    ]


def is_right(found: Record, limit: float | None) -> bool:
    """Return True for an error within a limit, else the limit of the day; not for a NaN."""
    return found["right"] if limit is None else found["error"] <= limit


def largest(errors: list[float]) -> str:
    """Return the largest error, NaN if there is one."""
    return error_cell({"error": max(errors, key=lambda e: (math.isnan(e), e))} if errors else {})


def attention(records: list[Record]) -> list[str]:
    """Return the rates with errors, then the ratios, of attention or its gradients."""
    names = [n for n in ATTENTION if any(n in r["contestants"] for r in records)]
    some = ordered(records, *RATIOS[0])
    pairs = [pair for pair in RATIOS if {*pair} <= {*names}]
    kernels = [k for k in ("triton", "mosaic") if any(best_blocks(r, f"{k} ")[0] for r in records)]
    wide, ratios = [], []
    for record in some:
        found = {kernel: best_blocks(record, f"{kernel} ") for kernel in kernels}
        fastest = (with_name(rate(record, name), name) for name, _ in found.values())
        wide.append((record["case"], *(rate(record, name) for name in names), *fastest))
        best = [ratio_cell(record, name, f"ours, {k}") for k, (name, _) in found.items()]
        ratios.append((record["case"], *(ratio_cell(record, *pair) for pair in pairs), *best))
    best_names = [f"best {kernel} blocks" for kernel in kernels]
    second = [*(" / ".join(p) for p in pairs), *(f"best blocks / ours, {k}" for k in kernels)]
    return [
        "TFLOP/s (error):",
        harness.markdown_table(("shape", *names, *best_names), wide),
        "Ratios of times:",
        harness.markdown_table(("shape", *second), ratios),
        *(totals(some, *pair) for pair in pairs),
        *failures(some, names),
    ]


def norms(records: list[Record]) -> list[str]:
    """Return the times of a norm and a linear layer, and their ratios to XLA's."""
    rows, some = [], ordered(records, TABLE, "xla")
    for record in some:
        best, _ = best_blocks(record, "triton ", TABLE)
        cells = [time_cell(record, name) for name in ("xla", "auto", TABLE)]
        ratios = [ratio_cell(record, name, "xla") for name in ("auto", TABLE, best)]
        rows.append((record["case"], *cells, with_name(time_cell(record, best), best), *ratios))
    header = ("layer", "xla", "auto", TABLE, "best blocks or form")
    header += ("auto / xla", f"{TABLE} / xla", "best / xla")
    best_of = lambda record: best_blocks(record, "triton ", TABLE)[0]  # noqa: E731
    return [
        harness.markdown_table(header, rows),
        totals(some, "auto", "xla"),
        totals(some, TABLE, "xla"),
        totals(some, best_of, "xla", "best blocks or form"),
    ]


def scans(records: list[Record]) -> list[str]:
    """Return the times of the selective scan, and their ratios to XLA's associative scan."""
    first, to = "auto, lax.scan", "xla, associative_scan"
    rows, some = [], ordered(records, first, to)
    names = (*SCANS, TABLE, ONE_PASS)
    for record in some:
        best, _ = best_blocks(record, "triton ", TABLE)
        cells = [time_cell(record, name) for name in names]
        ratios = [ratio_cell(record, *pair) for pair in ((first, to), (TABLE, to), (ONE_PASS, to))]
        ratios.append(ratio_cell(record, best, TABLE))
        rows.append((record["case"], *cells, with_name(time_cell(record, best), best), *ratios))
    header = ("scan", *names, "best tiling", f"{first} / {to}", f"{TABLE} / {to}")
    header += (f"{ONE_PASS} / {to}", f"best tiling / {TABLE}")
    return [
        harness.markdown_table(header, rows),
        *(totals(some, name, to) for name in (first, TABLE, ONE_PASS)),
        *failures(some, names),
    ]


def programs(records: list[Record]) -> list[str]:
    """Return whole programs as written and as chosen, and how they fare by kind of change."""
    some = ordered(records, "auto", "xla")
    rows, kinds = [], collections.defaultdict(list)
    for record in some:
        found = record["contestants"].get("auto", {})
        taken = found.get("changes") or ["as written"]
        price = found.get("predicted_s", {})
        priced = (price.get(which) for which in ("written", "chosen"))
        rows.append(
            (
                " ".join(filter(None, (record["case"], record["facts"].get("family")))),
                found.get("calls", NONE),
                time_cell(record, "xla"),
                time_cell(record, "auto"),
                ratio_cell(record, "auto", "xla"),
                error_cell(found),
                ", ".join(taken),
                *(harness.duration(s) if s is not None else NONE for s in priced),
            )
        )
        for name in taken:
            kinds[name].append(record)
    header = ("program", "calls", "plain", "auto", "auto / plain", "error", "taken")
    by_kind = [
        (kind, *counts(members, "auto", "xla"))
        for kind, members in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]
    return [
        harness.markdown_table((*header, "predicted, plain", "predicted, auto"), rows),
        totals(some, "auto", "xla", "auto", "plain"),
        harness.markdown_table(("taken", "measured", "faster", "slower", "median ratio"), by_kind),
        *failures(some, ("xla", "auto")),
    ]


def told(found: Record | None) -> str:
    """Return what became of a contestant: measured, refused, failed, or not measured."""
    for answer in ("refused", "failed"):
        if answer in (found or {}):
            return answer
    return NOT_MEASURED if not found or "not_run" in found else "measured"


def reason(found: Record) -> str:
    """Return why a contestant has no values, in one line."""
    text = next((found[key] for key in ("refused", "failed", "not_run") if key in found), "")
    return " ".join(text.split("got:")[-1].split()).replace("|", "/")[:120]


def failures(records: list[Record], names: Sequence[str]) -> list[str]:
    """Return a paragraph on the named contestants that gave no values; none where all did."""
    lines = [
        f"- {record['case']}, {name}: {answer}, {reason(found)}"
        for record in records
        for name in names
        if (found := record["contestants"].get(name)) and (answer := told(found)) != "measured"
    ]
    return ["\n".join(lines)] if lines else []


def best_blocks(record: Record, prefix: str, *others: str) -> tuple[str, float]:
    """Return the fastest contestant among kernels with blocks and `others`; ("", inf) if none."""
    seconds = {
        name: found["median_s"]
        for name, found in record["contestants"].items()
        if "median_s" in found and (name.startswith(prefix) or name in others)
    }
    return min(seconds.items(), key=lambda item: item[1], default=("", math.inf))


def ratio(record: Record, name: str, to: str) -> harness.Ratio | None:
    """Return the ratio of two contestants' times; None where one has no times."""
    seconds = {n: record["contestants"].get(n, {}).get("seconds") for n in (name, to)}
    if not all(seconds.values()):
        return None
    return harness.Samples({n: each for n, each in seconds.items() if each}).ratio(name, to)


def ratio_cell(record: Record, name: str, to: str) -> str:
    """Return a ratio and its quartiles; a small one with two digits that are not zero."""
    found = ratio(record, name, to)
    if found is None:
        return NONE
    if found.median >= 0.1:
        return str(found)
    return f"{found.median:.2g} [{found.low:.2g}–{found.high:.2g}]"


def with_name(cell: str, name: str) -> str:
    """Return a cell with the name of its contestant; "" where there is none."""
    return f"{cell}: {name}" if name else NONE


def rate(record: Record, name: str) -> str:
    """Return TFLOP/s and the error, or why there are none."""
    found = record["contestants"].get(name)
    if found is None or "median_s" not in found:
        return told(found) if found else NONE
    return f"{found['tflops']:.0f} ({error_cell(found)})"


def time_cell(record: Record, name: str) -> str:
    """Return the time, or why there is none."""
    found = record["contestants"].get(name)
    if found is None or "median_s" not in found:
        return told(found) if found else NONE
    return harness.duration(found["median_s"])


def error_cell(found: Record) -> str:
    """Return the error, or why there is none."""
    return NONE if "error" not in found else f"{found['error']:.1e}" if found["error"] else "0"


def ordered(records: list[Record], name: str, to: str) -> list[Record]:
    """Return records by the ratio of two contestants, those without one last."""

    def key(record: Record) -> tuple[bool, float]:
        found = ratio(record, name, to)
        return found is None, found.median if found else 0.0

    return sorted(records, key=key)


def counts(
    records: list[Record], name: str | Callable[[Record], str], to: str
) -> tuple[int, int, int, str]:
    """Return how many are measured, faster and slower than the margin, and the median ratio."""
    found = [ratio(r, name if isinstance(name, str) else name(r), to) for r in records]
    medians = sorted(one.median for one in found if one)
    faster = sum(median < 1 / MARGIN for median in medians)
    slower = sum(median > MARGIN for median in medians)
    middle = f"{medians[len(medians) // 2]:.2f}" if medians else NONE
    return len(medians), faster, slower, middle


def totals(
    records: list[Record],
    name: str | Callable[[Record], str],
    to: str,
    called: str = "",
    called_to: str = "",
) -> str:
    """Return how many cases are faster and slower by more than 5 %.

    name: a contestant, or a function that picks one of a record; `called` names it in the line.
    """
    measured, faster, slower, middle = counts(records, name, to)
    percent = f"{100 * (MARGIN - 1):.0f} %"
    about = f"{called or name} / {called_to or to}"
    return (
        f"{about}: {measured} measured, {faster} faster by more than {percent}, {slower} slower by "
        f"more than {percent}, median ratio {middle}."
    )
