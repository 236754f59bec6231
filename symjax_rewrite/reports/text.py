"""A report as text: what was gained first, then the prices, then what was done and not done."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from symjax_rewrite.errors import readable_place
from symjax_rewrite.reports import units
from symjax_rewrite.reports.record import Record
from symjax_rewrite.reports.remedies import remedy
from symjax_rewrite.reports.value_names import place
from symjax_rewrite.usage_records import Change, RouteUse

# Rows of the table: label, field of `Side`, unit.
ROWS = (
    ("flops", "flops", "FLOP"),
    ("memory traffic", "bytes", "B"),
    ("largest intermediate", "largest_intermediate", "B"),
    ("peak memory", "peak_bytes", "B"),
    ("kernel launches", "launches", ""),
)
MOST_PLACES = 4  # source lines named for one entry


def as_text(report: Record) -> str:
    """Return a report as text for a terminal."""
    sections = (_table(report), _done(report), _open(report), _refused(report), _search(report))
    return "\n".join([headline(report), *(line for s in sections for line in s)])


def headline(report: Record) -> str:
    """Return what was gained, in one line."""
    before, after = report.before, report.after
    where = f"{report.function} on {report.device}"
    if not report.changed:
        return f"left as written: {where}{_alternative(report)}"
    gains = []
    if not units.is_number(before.flops, after.flops) and before.flops != after.flops:
        gains.append(f"flops {before.flops} to {after.flops}")
    if (gain := units.ratio_of(before.seconds, after.seconds)) and gain != "1.00×":
        times = f"{units.duration(before.seconds)} to {units.duration(after.seconds)}"
        gains.append(f"predicted {gain} as fast ({times})")
    for label, name, _ in ROWS[1:3]:
        b, a = getattr(before, name), getattr(after, name)
        if units.is_number(b, a) and a and b > 1.25 * a:
            gains.append(f"{label} {units.ratio(b / a)} smaller")
    return f"{where}: {'; '.join(gains) or 'rewritten, without a price'}"


def _alternative(report: Record) -> str:
    """Return the refused candidate with the highest predicted gain, as the end of a sentence."""
    best = report.best_alternative
    if best is None:
        undecided = report.details.crossovers
        return "; which form is cheaper depends on the sizes" if undecided else ""
    slower = ", slower" if (best.ratio or 0) < 1 else ""
    return f"; best alternative: {best.name}, predicted {units.ratio(best.ratio or 0)}{slower}"


def _table(report: Record) -> Iterator[str]:
    """Yield the prices of both forms; one column if nothing changed."""
    rows = [_time_row(report), *(_row(report, *row) for row in ROWS)]
    if report.changed:
        rows.insert(0, ("", "before", "after", ""))
    else:
        rows = [(label, before, "", "") for label, before, _, _ in rows]
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    for label, *cells in rows:
        text = "   ".join(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True) if w)
        yield f"  {label.ljust(widths[0])}   {text}".rstrip()
    if report.sample:
        at = ", ".join(f"{name} = {size}" for name, size in report.sample.items())
        yield f"  model time and launches at {at}"


def _time_row(report: Record) -> tuple[str, str, str, str]:
    b, a = report.before.seconds, report.after.seconds
    return "model time", units.duration(b), units.duration(a), units.ratio_of(b, a)


def _row(report: Record, label: str, name: str, unit: str) -> tuple[str, str, str, str]:
    b, a = getattr(report.before, name), getattr(report.after, name)
    if not unit:
        return label, units.count(b), units.count(a), units.ratio_of(b, a)
    return label, units.quantity(b, unit), units.quantity(a, unit), units.ratio_of(b, a)


def _done(report: Record) -> Iterator[str]:
    groups = grouped(report.changes)
    yield from ["done:"] if groups else []
    for change, places, ratio in groups:
        gain = f", {units.ratio(ratio)} there" if ratio is not None else ""
        yield f"  {title(change)}{gain}"
        yield from _places(places)


def grouped(changes: list[Change]) -> list[tuple[Change, dict[str, int], float | None]]:
    """Return equal changes once, with the number of their places by line and the least gain."""
    out: dict[tuple, tuple[Change, dict[str, int], list[float]]] = {}
    for c in changes:
        _, places, ratios = out.setdefault((c.name, c.rules, c.reason), (c, {}, []))
        for where, count in c.places.items():
            places[where] = places.get(where, 0) + count
        ratios += [] if c.ratio is None else [c.ratio]
    return [(c, places, min(ratios, default=None)) for c, places, ratios in out.values()]


def title(change: Change) -> str:
    """Return the rules of a change with their properties, or the kernel with its reason."""
    rules = ", ".join(f"{name} ({prop})" if prop else name for name, prop in change.rules)
    reason = units.scaled_numbers(change.reason)
    name = rules or change.name
    return f"{name}: {reason}" if reason else name


def _places(places: Mapping[str, int]) -> Iterator[str]:
    shown = [w for w in places if w][:MOST_PLACES]
    for where in shown:
        yield f"    at {short_place(where)}{units.times(places[where])}"
    if more := sum(1 for w in places if w) - len(shown):
        yield f"    and {more} more lines"


def short_place(where: str) -> str:
    """Return a source line by its notebook cell, or by its path from the working directory."""
    at, cell = place(where), readable_place(where)
    if at is None or cell != where:
        return cell
    path, line, function = at
    inside = os.path.abspath(path).startswith(os.getcwd() + os.sep)
    return f"{os.path.relpath(path) if inside else path}:{line} ({function})"


def _open(report: Record) -> Iterator[str]:
    """Yield what symbolic sizes leave undecided, and the facts that decide it."""
    for advice in report.details.crossovers:
        yield f"crossover: {advice}"
        yield from (f"    undecided: {inequality}" for inequality in advice.undecided)
        yield f"    {advice.advice()}"


def _refused(report: Record) -> Iterator[str]:
    refused = [r for r in report.routes if not r.taken]
    yield from ["considered, not done:"] if refused else []
    for use in sorted(refused, key=lambda r: -(r.ratio or 0)):
        yield f"  {use.name}: {refusal(use)}"
        yield from _places(use.places)
        if advice := remedy(use):
            yield f"    to change: {advice}"


def refusal(use: RouteUse) -> str:
    """Return the condition that failed, and the gain predicted for that part of the program."""
    reason = units.scaled_numbers(use.reason)
    told = use.ratio is None or f"{use.ratio:.2f} " in reason
    return reason if told else f"{reason} (predicted {units.ratio(use.ratio or 0)} there)"


def _search(report: Record) -> Iterator[str]:
    yield f"rule search: {report.stop}; optimiser {units.duration(report.time_s)}"
