"""A report as text: first the gain, then the prices, then the candidates taken and refused."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from symjax_rewrite.cost import margins
from symjax_rewrite.obstacles import Objection, Obstacle, obstacle_of
from symjax_rewrite.reports import units
from symjax_rewrite.reports.places import short_place
from symjax_rewrite.reports.record import Record
from symjax_rewrite.reports.remedies import BY_HAND, remedy
from symjax_rewrite.text_tables import NOT_SEARCHED, aligned
from symjax_rewrite.usage_records import Change, RouteUse

# Rows of the table: label, field of `Side`, its text.
ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("model time", "seconds", units.duration),
    ("FLOPs of products", "flops", units.flops),
    ("memory traffic", "bytes", units.size),
    ("largest intermediate", "largest_intermediate", units.size),
    ("peak memory", "peak_bytes", units.size),
    ("kernel launches", "launches", units.count),
)
SEARCH = "search"  # the name of refusals that say why a part was not searched
# The factor of a reason that opens with a predicted gain.
_FACTOR = re.compile(rf"(?<=^{units.PREDICTED})[\d.]+×")
MOST_PLACES = 4  # source lines named for one entry


def as_text(report: Record) -> str:
    """Return a report as text for a terminal."""
    sections = (_table(report), _done(report), _open(report), _refused(report), _search(report))
    return "\n".join([headline(report), *(line for s in sections for line in s)])


def headline(report: Record) -> str:
    """Return the gain, in one line."""
    before, after = report.before, report.after
    where = f"{report.function} on {report.device}"
    if not report.changed:
        return f"left as written: {where}{_alternative(report)}"
    gains = []
    is_symbolic = not (units.is_number(before.flops) or units.is_number(after.flops))
    if is_symbolic and before.flops != after.flops:
        gains.append(f"FLOPs {before.flops} to {after.flops}")
    gain = _gain(report)
    if gain and (said := units.speed(gain)) != "no faster":
        times = f"{units.duration(before.seconds)} to {units.duration(after.seconds)}"
        there = f" at {units.sizes(report.sample)}" if report.sample else ""
        gains.append(f"predicted {said} ({times}{there})")
    for label, name, _ in ROWS[2:4]:
        b, a = getattr(before, name), getattr(after, name)
        if units.is_number(b, a) and a and b > 1.25 * a:
            gains.append(f"{label} {units.ratio(b / a)} smaller")
    return f"{where}: {'; '.join(gains) or _gain_of_parts(report)}"


def _gain(report: Record) -> float | None:
    """Return the predicted speedup of the whole program; None if it has no price."""
    before_s, after_s = report.before.seconds, report.after.seconds
    return before_s / after_s if before_s and after_s else None


def _gain_of_parts(report: Record) -> str:
    """Return the largest gain of a change, where the prices of the whole program tell none."""
    there = max((c.ratio or 0 for c in report.changes), default=0)
    if there <= 1:
        return "rewritten, without a price"
    return f"predicted {units.speed(there)} where it was rewritten"


def _alternative(report: Record) -> str:
    """Return the refused candidate with the highest predicted gain, as the end of a sentence."""
    if report.details.crossovers:
        return "; which form is cheaper depends on the sizes"
    best = report.best_alternative
    if best is None:
        return (
            "; no form considered applies" if considered(report) else "; no cheaper form is known"
        )
    said = units.speed(best.ratio or 0)
    if not said.endswith("as fast"):
        return "; no form considered is predicted faster"
    return f"; best alternative: {named(best)}, predicted {said} there"


def _table(report: Record) -> Iterator[str]:
    """Yield the prices of both forms; one column if nothing changed."""
    rows = [cells if report.changed else cells[:2] for _, cells in cost_rows(report)]
    heads = [("", "before", "after", "")] if report.changed else []
    yield from (f"  {line}" for line in aligned([*heads, *rows], "<>", 3))
    if report.sample:
        yield f"  numbers are those at {units.sizes(report.sample)}"
    if found := unpriced(report):
        yield f"  {found}"


def unpriced(report: Record) -> str:
    """Return the operations for which some cost has no price; empty if all are priced."""
    if None not in (report.before.seconds, report.before.flops, report.before.bytes):
        return ""
    names = [f"{name}{units.times(count)}" for name, count in report.details.unpriced.items()]
    return f"without a price: {', '.join(names)}" if names else ""


def cost_rows(report: Record) -> Iterator[tuple[str, tuple[str, str, str, str]]]:
    """Yield rows of the prices: the field of `Side`; its label, before, after and their ratio."""
    for label, name, text in ROWS:
        b, a = getattr(report.before, name), getattr(report.after, name)
        if name == "flops" and b == a == 0:
            continue  # without a product there is nothing to compare
        yield name, (label, text(b), text(a), units.ratio_of(b, a))


def _done(report: Record) -> Iterator[str]:
    groups = grouped(report)
    yield from ["done:"] if groups else []
    for change, places, ratio in groups:
        yield f"  {title(change)}{gain_there(ratio)}"
        yield from _places(places)


def grouped(report: Record) -> list[tuple[Change, dict[str, int], float | None]]:
    """Return equal changes once, with the number of their places by line and the least gain.

    A change that stands alone is the gain of the whole program. Its own gain is left out unless it
    is larger: a pass may leave out operations that the report counts, such as those fused into a
    loop.
    """
    out: dict[tuple, tuple[Change, dict[str, int], list[float]]] = {}
    for c in report.changes:
        _, places, ratios = out.setdefault((c.name, c.rules, c.reason), (c, {}, []))
        for where, count in c.places.items():
            places[where] = places.get(where, 0) + count
        ratios += [] if c.ratio is None else [c.ratio]
    least = (
        1.005 * (_gain(report) or 0.0) if len(out) == 1 else 0.0
    )  # another number, in three digits
    found = ((c, places, min(ratios, default=None)) for c, places, ratios in out.values())
    return [(c, places, gain if (gain or 0.0) > least else None) for c, places, gain in found]


def gain_there(ratio: float | None) -> str:
    """Return the gain of a change at its place, as the end of a sentence; empty if unknown."""
    return "" if ratio is None else f", {units.speed(ratio)} there"


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


def _open(report: Record) -> Iterator[str]:
    """Yield the choices that symbolic sizes leave undecided, and the facts that decide them."""
    for advice in report.details.crossovers:
        yield f"crossover: {advice}"
        yield from (f"    undecided: {inequality}" for inequality in advice.undecided)
        yield f"    {advice.advice()}"


def _refused(report: Record) -> Iterator[str]:
    refused = considered(report)
    yield from ["considered, not done:"] if refused else []
    for use in refused:
        yield f"  {named(use)}: {refusal(use)}"
        yield from _places(use.places)
        advice = remedy(use)
        yield from [f"    to change: {advice}"] if advice else []
        if advice == BY_HAND:
            yield from (f"      {s.before}\n      = {s.after}" for s in report.details.steps(use))
    more = short_lines(report)
    yield from [f"  {more}" if refused else f"considered, not done: {more}"] if more else []


def considered(report: Record) -> list[RouteUse]:
    """Return the refusals, the highest predicted gain first.

    Refusals that differ by their predicted gain alone are one, with the range of the gains. Left
    out are conflicts where all lines were changed, parts that were not searched, and the lines
    that `short_lines` counts.
    """
    return [use for use in _refusals(report) if not _is_short(report, use)]


def short_lines(report: Record) -> str:
    """Return how many refusals are left out because their lines take too little time to matter."""
    count = sum(_is_short(report, use) for use in _refusals(report))
    return f"{count} more, at lines of {margins.little(report.details.device)}" if count else ""


def _is_short(report: Record, use: RouteUse) -> bool:
    """Return True for a refusal without a price, if its lines are too short for any gain."""
    seconds = report.details.seconds_by_line
    if use.ratio is not None or not seconds.keys() >= use.places.keys():
        return False
    there_s, whole_s = sum(map(seconds.__getitem__, use.places)), sum(seconds.values())
    return not margins.gains_share(there_s, whole_s, "program", report.details.device)


def _refusals(report: Record) -> list[RouteUse]:
    groups: dict[tuple, list[RouteUse]] = defaultdict(list)
    for use in (r for r in report.routes if not r.taken and r.name != SEARCH):
        if is_superseded(use, report.changes):
            continue
        groups[use.name, use.rules, _FACTOR.sub("", use.reason)].append(use)
    return sorted(map(_merged, groups.values()), key=lambda r: -(r.ratio or 0))


def is_superseded(use: RouteUse, changes: list[Change]) -> bool:
    """Return True for a conflict where all lines of the refusal were changed."""
    rewritten = {where for c in changes for where in c.places}
    return obstacle_of(use.reason) is Obstacle.CONFLICT and rewritten.issuperset(use.places)


def _merged(uses: list[RouteUse]) -> RouteUse:
    ends = [f(uses, key=lambda r: r.ratio or 0) for f in (min, max)]
    factors = [found[0] for use in ends if (found := _FACTOR.search(use.reason))]
    if len({*factors}) < 2:
        return uses[0]
    low, high = sorted(factors, key=lambda x: float(x[:-1]))
    reason = Objection(_FACTOR.sub(f"{low} to {high}", uses[0].reason), obstacle_of(uses[0].reason))
    places: dict[str, int] = {}
    for where, count in (place for use in uses for place in use.places.items()):
        places[where] = places.get(where, 0) + count
    return replace(uses[0], reason=reason, ratio=ends[1].ratio, places=places)


def refusal(use: RouteUse) -> str:
    """Return the condition that failed, and the gain predicted for that part of the program."""
    reason = units.scaled_numbers(use.reason)
    told = use.ratio is None or reason.startswith(units.PREDICTED)
    return reason if told else f"{reason} (predicted {units.speed(use.ratio or 0)} there)"


def named(use: RouteUse) -> str:
    """Return the rules by which a refused form is derived, or the name of its pass."""
    return ", ".join(use.rules) or use.name


def _search(report: Record) -> Iterator[str]:
    yield from measurements(report)
    yield f"rule search: {search(report)}; optimiser {units.duration(report.time_s)}"


def measurements(report: Record) -> list[str]:
    """Return the measurements of `tune=True`, for a reader."""
    return [f"{r.name}: {r.reason}" for r in report.routes if r.taken and r.name == "tune"]


def search(report: Record) -> str:
    """Return how the search among equal forms ended, and why some lines were left out of it."""
    left_out = [r for r in report.routes if r.name == SEARCH]
    lines = len({where for r in left_out for where in r.places})
    why = "; ".join(dict.fromkeys(r.reason.removeprefix(NOT_SEARCHED) for r in left_out))
    part = f"without {lines} line{'s' * (lines > 1)}" if lines else "of loops alone"
    said = f", {part} ({why})" if left_out else ""
    return report.stop.replace("saturated", "complete (saturated)") + said
