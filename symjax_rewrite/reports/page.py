"""A report as HTML: no scripts, nothing loaded, light and dark, readable on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.term_graph import dtype_of
from symjax_rewrite.reports import units
from symjax_rewrite.reports.derivation import DerivationStep
from symjax_rewrite.reports.html import Html, bar, fragment, joined, page, row, table, tag
from symjax_rewrite.reports.places import short_place
from symjax_rewrite.reports.program_cost import at_sample
from symjax_rewrite.reports.record import Record, Side
from symjax_rewrite.reports.remedies import remedy
from symjax_rewrite.reports.roofline import Point, roofline
from symjax_rewrite.reports.source_lines import SourceBlock, source_blocks
from symjax_rewrite.reports.statements import Statement
from symjax_rewrite.reports.text import (
    considered,
    cost_rows,
    grouped,
    headline,
    measurements,
    named,
    refusal,
    search,
    short_lines,
    title,
    unpriced,
)
from symjax_rewrite.usage_records import Change, RouteUse

MOST_FORMULAS = 200  # different lines of one side
MOST_STEPS = 40  # of one change
_NUMBERED = re.compile(r"[₀-₉]+|_\d+\b|(?<=\bt)\d+\b")


def as_page(report: Record) -> str:
    """Return a report as a page of its own."""
    return page(f"{report.function} on {report.device}", as_fragment(report))


def as_fragment(report: Record) -> str:
    """Return a report as an element with a style of its own, as a notebook shows it."""
    sections = (
        _head(report), _costs(report), _done(report), _undecided(report), _formulas(report),
        _sources(report), _roofline(report), _candidates(report), _passes(report),
    )  # fmt: skip
    return fragment(part for section in sections for part in section)


# ---------------------------------------------------------------- prices


def _head(report: Record) -> Iterator[Html]:
    lead = headline(report)
    name, _, gains = lead.partition(": ")
    if not report.changed:
        name, _, gains = lead.partition(": ")[2].partition("; ")
        gains = f"Left as written{gains and f'; {gains}'}."
    yield from (tag("h1", name), tag("p", gains))
    cards = [*_cards(report)] if report.changed else []
    if cards:
        yield tag("div", *cards, kind="cards")


def _cards(report: Record) -> Iterator[Html]:
    named = (
        ("seconds", "as fast, predicted"), ("flops", "fewer FLOPs"),
        ("bytes", "less memory traffic"), ("largest_intermediate", "smaller largest intermediate"),
        ("peak_bytes", "lower peak memory"), ("launches", "fewer kernel launches"),
    )  # fmt: skip
    for field, text in named:
        b, a = getattr(report.before, field), getattr(report.after, field)
        if units.is_number(b, a) and a and (b >= 1.05 * a or field == "seconds"):
            kind = "card good" if b >= 1.05 * a else "card"
            yield tag("div", tag("b", units.ratio(b / a)), tag("span", text), kind=kind)


def _costs(report: Record) -> Iterator[Html]:
    yield tag("h2", f"Costs by the model of {report.device}")
    heads = ("", "before", "after", "") if report.changed else ("", "as written")
    yield table(heads, (_cost_row(report, *each) for each in cost_rows(report)), "narrow")
    if report.sample:
        yield tag("p", f"Numbers are those at {units.sizes(report.sample)}.", kind="dim")
    if found := unpriced(report):
        yield tag("p", found, kind="dim")


def _cost_row(report: Record, field: str, cells: tuple[str, str, str, str]) -> Html:
    if not report.changed:
        return row(cells[:2])
    b, a = getattr(report.before, field), getattr(report.after, field)
    kind = "" if not cells[3] else " good" if b > 1.05 * a else " bad" if a > 1.05 * b else ""
    whole = "num" if units.is_number(b, a) else "dim"
    return row(cells, kinds=("", whole, whole, f"num{kind}"))


# ---------------------------------------------------------------- changes


def _done(report: Record) -> Iterator[Html]:
    groups = grouped(report)
    yield from [tag("h2", "What was done")] if groups else []
    for change, places, ratio in groups:
        yield _candidate("taken", title(change), ratio, places)
        yield from _derivation(report, change)


def _derivation(report: Record, change: Change | RouteUse) -> Iterator[Html]:
    steps = report.details.steps(change)[:MOST_STEPS]
    if steps:
        summary = tag("summary", f"Derivation, {len(steps)} step{'s' * (len(steps) > 1)}")
        yield tag("details", summary, *map(_step, steps), open="open")


def _step(step: DerivationStep) -> Html:
    law = f"{step.property}: {step.law}" if step.law else step.property
    sides = (tag("span", text, kind="mono") for text in (step.before, f"= {step.after}"))
    return tag("div", tag("b", step.rule), " ", tag("span", law, kind="law"), *sides, kind="step")


def _undecided(report: Record) -> Iterator[Html]:
    advice = report.details.crossovers
    yield from [tag("h2", "What depends on symbolic sizes")] if advice else []
    for each in advice:
        yield tag("p", str(each))
        for text in each.undecided:
            yield tag("p", "Not proved: ", tag("code", text))
        yield tag("p", tag("code", each.advice()))


def _candidate(
    kind: str, name: str, ratio: float | None, places: Mapping[str, int], advice: str = ""
) -> Html:
    gain = "" if ratio is None else f"{units.speed(ratio)} there"
    where = "; ".join(f"{short_place(w)}{units.times(n)}" for w, n in places.items() if w)
    tags = (
        tag("span", kind, kind=f"tag {kind}"),
        tag("span", name),
        tag("span", gain, kind="gain"),
    )
    parts = [tag("div", *tags, kind="top")]
    parts += [tag("p", f"To change: {advice}")] if advice else []
    return tag("div", *parts, tag("p", where, kind="where"), kind="cand")


def _candidates(report: Record) -> Iterator[Html]:
    refused = considered(report)
    yield from [tag("h2", "Considered, not done")] if refused else []
    for use in refused:
        text = f"{named(use)}: {refusal(use)}"
        yield _candidate("refused", text, None, use.places, remedy(use))
        yield from _derivation(report, use)
    if more := short_lines(report):
        yield tag("p", f"Considered, not done: {more}.", kind="dim")


# ---------------------------------------------------------------- formulas and sources


def _formulas(report: Record) -> Iterator[Html]:
    before = _counted(report.details.before)
    yield tag("h2", "The program in index notation")
    if not report.changed:
        yield _lines(before, {}, "")
        return
    after = _counted(report.details.after)
    yield tag(
        "div",
        tag("div", tag("h3", "Before"), _lines(before, after, "old")),
        tag("div", tag("h3", "After"), _lines(after, before, "new")),
        kind="sides",
    )


def _counted(lines: Sequence[Statement]) -> dict[str, tuple[Statement, int]]:
    """Return lines that differ by more than numbers of names, each with its number of places."""
    out: dict[str, tuple[Statement, int]] = {}
    for line in lines:
        key = f"{line.depth} {_NUMBERED.sub('', line.text)}"
        first, count = out.get(key, (line, 0))
        out[key] = (first, count + 1)
    return out


def _lines(mine: dict[str, tuple[Statement, int]], others: Any, kind: str) -> Html:
    rows = []
    for key, (line, count) in list(mine.items())[:MOST_FORMULAS]:
        times = [tag("span", f"×{count}", kind="times")] if count > 1 else []
        parts = (line.text, *times, tag("span", line.shape, kind="shape"))
        mark = "" if key in others else kind
        rows.append(tag("div", *parts, kind=mark, style=f"margin-left:{1.5 * line.depth}em"))
    if len(mine) > MOST_FORMULAS:
        rows.append(tag("div", f"… and {len(mine) - MOST_FORMULAS} more lines"))
    return tag("div", *rows, kind="lines")


def _sources(report: Record) -> Iterator[Html]:
    blocks = source_blocks(report)
    if blocks:
        yield tag("h2", "Source lines")
        about = "Share of the predicted time as written, and what happened."
        yield tag("p", about, kind="dim")
    yield from map(_block, blocks)


def _block(block: SourceBlock) -> Html:
    rows, last = [], None
    for line in block.lines:
        if last is not None and line.number != last + 1:
            rows.append(tag("div", "⋮", kind="gap"))
        last = line.number
        text = f"{100 * line.share:.0f} %"
        share = [bar(line.share), tag("b", text)] if line.share >= 0.005 else []
        cells = (
            tag("span", str(line.number), kind="no"),
            tag("span", *share, kind="share"),
            tag("code", line.text or " "),
            *(tag("div", n.text, kind=f"note {n.kind}") for n in line.notes),
        )
        rows.append(tag("div", *cells, kind="row"))
    name = short_place(f"{block.file}:{block.lines[0].number} (f)").rpartition(":")[0]
    return joined((tag("h3", name, kind="mono"), tag("div", *rows, kind="src")))


# ---------------------------------------------------------------- pictures


def _roofline(report: Record) -> Iterator[Html]:
    sides = [("before", report.before), ("after", report.after)][: 1 + report.changed]
    found = (_point(label, side, report.sample) for label, side in sides)
    points = [p for p in found if p is not None]
    yield tag("h2", f"Roofline of {report.device}")
    if not points:
        is_priced = None not in (report.before.flops, report.before.bytes, report.before.seconds)
        why = "No FLOPs of products: memory traffic and launches take the time."
        why = why if is_priced else "Not drawn: an operation has no price."
        yield tag("p", why, kind="dim")
        return
    if not report.changed:
        points = [Point("written", points[0].intensity, points[0].rate)]
    dtypes = _product_dtypes(report.details.sides[0].t.program)
    yield roofline(report.details.device, dtypes, points)


def _point(label: str, side: Side, sample: dict[str, int]) -> Point | None:
    """Return a form of the program in the roofline; None if it has no FLOPs or no price."""
    if None in (side.flops, side.bytes, side.seconds):
        return None
    flops, moved = (at_sample(x, sample) for x in (side.flops, side.bytes))
    if not flops or not moved or not side.seconds:
        return None
    return Point(label, flops / moved, flops / side.seconds)


def _product_dtypes(program: Program) -> list[str]:
    """Return the dtypes of a program's products, at most three."""
    dots = (e for e in program.equations if e.name in ("dot_general", "conv_general_dilated"))
    found = dict.fromkeys(dtype_of(e.eqn.invars[0].aval) for e in dots)
    return [*found][:3] or ["float32"]


def _passes(report: Record) -> Iterator[Html]:
    yield tag("h2", "The optimiser")
    yield from (tag("p", line) for line in measurements(report))
    ended = f"Rule search: {search(report)}; {units.duration(report.time_s)} in all."
    yield tag("p", ended, kind="dim")
    most = max(report.passes.values(), default=0.0) or 1.0
    slowest = sorted(report.passes.items(), key=lambda x: -x[1])
    rows = [
        (tag("span", name), bar(s / most), tag("span", units.duration(s)))
        for name, s in slowest
        if s >= 0.001 * most
    ]
    yield tag("div", *(cell for each in rows for cell in each), kind="passes")
