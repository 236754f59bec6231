"""A report as HTML: no scripts, nothing loaded, light and dark, readable on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.ir.term_graph import dtype_of
from symjax_rewrite.reports import units
from symjax_rewrite.reports.derivation import DerivationStep
from symjax_rewrite.reports.page_style import PAGE_STYLE, SCOPE, STYLE
from symjax_rewrite.reports.record import Record, Side
from symjax_rewrite.reports.remedies import remedy
from symjax_rewrite.reports.roofline import Point, roofline
from symjax_rewrite.reports.source_lines import SourceBlock, source_blocks
from symjax_rewrite.reports.statements import Statement
from symjax_rewrite.reports.text import ROWS, grouped, headline, short_place, title
from symjax_rewrite.usage_records import Change

MOST_FORMULAS = 200  # different lines of one side
MOST_STEPS = 40  # of one change
_NUMBERED = re.compile(r"[₀-₉]+|_\d+\b|(?<=\bt)\d+\b")


def as_page(report: Record) -> str:
    """Return a report as a page of its own."""
    name = escape(f"{report.function} on {report.device}")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{PAGE_STYLE}</style></head>"
        f"<body>{as_fragment(report)}</body></html>\n"
    )


def as_fragment(report: Record) -> str:
    """Return a report as an element with a style of its own, as a notebook shows it."""
    sections = (
        _head(report), _costs(report), _done(report), _undecided(report), _formulas(report),
        _sources(report), _roofline(report), _candidates(report), _passes(report),
    )  # fmt: skip
    body = "\n".join(part for section in sections for part in section)
    return f'<div class="{SCOPE}"><style>{STYLE}</style>\n{body}\n</div>'


# ---------------------------------------------------------------- prices


def _head(report: Record) -> Iterator[str]:
    lead = headline(report)
    name, _, gains = lead.partition(": ")
    if not report.changed:
        name, _, gains = lead.partition(": ")[2].partition("; ")
        gains = f"left as written. {gains[:1].upper()}{gains[1:]}"
    yield f"<h1>{escape(name)}</h1><p>{escape(gains)}</p>"
    cards = [*_cards(report)] if report.changed else []
    if cards:
        yield f'<div class="cards">{"".join(cards)}</div>'


def _cards(report: Record) -> Iterator[str]:
    named = (
        ("seconds", "as fast, predicted"), ("flops", "fewer FLOPs"),
        ("bytes", "less memory traffic"), ("largest_intermediate", "smaller largest intermediate"),
        ("peak_bytes", "lower peak memory"), ("launches", "fewer kernel launches"),
    )  # fmt: skip
    for field, text in named:
        b, a = getattr(report.before, field), getattr(report.after, field)
        if units.is_number(b, a) and a and (b >= 1.05 * a or field == "seconds"):
            kind = "good" if b >= 1.05 * a else ""
            yield f'<div class="card {kind}"><b>{units.ratio(b / a)}</b><span>{text}</span></div>'


def _costs(report: Record) -> Iterator[str]:
    yield f"<h2>Costs by the model of {escape(report.device)}</h2>"
    heads = ("", "before", "after", "") if report.changed else ("", "as written")
    rows = [_cost_row(report, "model time", "seconds", None)]
    rows += [_cost_row(report, *row) for row in ROWS]
    yield f'<table class="narrow">{_row("th", heads)}{"".join(rows)}</table>'
    if report.sample:
        at = ", ".join(f"{name} = {size}" for name, size in report.sample.items())
        yield f'<p class="dim">Model time and launches at {escape(at)}.</p>'


def _cost_row(report: Record, label: str, field: str, unit: str | None) -> str:
    b, a = getattr(report.before, field), getattr(report.after, field)

    def text(x: Any) -> str:
        if unit is None:
            return units.duration(x)
        return units.quantity(x, unit) if unit else units.count(x)

    if not report.changed:
        return _row("td", (label, text(b)))
    ratio = units.ratio_of(b, a)
    kind = "" if not ratio else "good" if b > 1.05 * a else "bad" if a > 1.05 * b else ""
    whole = "num" if units.is_number(b, a) else "dim"
    cells = "".join(f'<td class="{whole}">{escape(text(x))}</td>' for x in (b, a))
    return f'<tr><td>{label}</td>{cells}<td class="num {kind}">{ratio}</td></tr>'


def _row(cell: str, texts: Sequence[str], more: str = "") -> str:
    inside = "".join(f"<{cell}>{escape(t)}</{cell}>" for t in texts)
    return f"<tr>{inside}{more}</tr>"


# ---------------------------------------------------------------- what was done


def _done(report: Record) -> Iterator[str]:
    groups = grouped(report.changes)
    if not groups:
        return
    yield "<h2>What was done</h2>"
    for change, places, ratio in groups:
        gain = "" if ratio is None else f"{units.ratio(ratio)} there"
        yield _candidate("taken", title(change), gain, places, "")
        yield from _derivation(report, change)


def _derivation(report: Record, change: Change) -> Iterator[str]:
    steps = report.details.steps(change)[:MOST_STEPS]
    if steps:
        count = f"{len(steps)} step{'s' * (len(steps) > 1)}"
        inside = "".join(map(_step, steps))
        yield f"<details open><summary>Derivation, {count}</summary>{inside}</details>"


def _step(step: DerivationStep) -> str:
    law = f"{step.property}: {step.law}" if step.law else step.property
    return (
        f'<div class="step"><b>{escape(step.rule)}</b> <span class="law">{escape(law)}</span>'
        f'<span class="mono">{escape(step.before)}</span>'
        f'<span class="mono">= {escape(step.after)}</span></div>'
    )


def _undecided(report: Record) -> Iterator[str]:
    advice = report.details.crossovers
    yield from ["<h2>Undecided for symbolic sizes</h2>"] if advice else []
    for each in advice:
        yield f"<p>{escape(str(each))}</p>"
        for text in each.undecided:
            yield f"<p>Not proved: <code>{escape(text)}</code></p>"
        yield f"<p><code>{escape(each.advice())}</code></p>"


def _candidate(kind: str, name: str, gain: str, places: Iterable[str], advice: str) -> str:
    counts = places if isinstance(places, dict) else {}
    where = "; ".join(f"{short_place(w)}{units.times(n)}" for w, n in counts.items() if w)
    change = f"<p>To change: {escape(advice)}</p>" if advice else ""
    return (
        f'<div class="cand"><div class="top"><span class="tag {kind}">{kind}</span>'
        f'<span>{escape(name)}</span><span class="gain">{escape(gain)}</span></div>'
        f'{change}<p class="where">{escape(where)}</p></div>'
    )


def _candidates(report: Record) -> Iterator[str]:
    refused = [use for use in report.routes if not use.taken]
    yield from ["<h2>Considered, not done</h2>"] if refused else []
    for use in sorted(refused, key=lambda r: -(r.ratio or 0)):
        gain = "" if use.ratio is None else f"{units.ratio(use.ratio)} there"
        reason = units.scaled_numbers(use.reason)
        yield _candidate("refused", f"{use.name}: {reason}", gain, use.places, remedy(use))


# ---------------------------------------------------------------- formulas and sources


def _formulas(report: Record) -> Iterator[str]:
    before = _counted(report.details.before)
    yield "<h2>The program in index notation</h2>"
    if not report.changed:
        yield _lines(before, {}, "")
        return
    after = _counted(report.details.after)
    yield '<div class="sides">'
    yield f"<div><h3>Before</h3>{_lines(before, after, 'old')}</div>"
    yield f"<div><h3>After</h3>{_lines(after, before, 'new')}</div></div>"


def _counted(lines: Sequence[Statement]) -> dict[str, tuple[Statement, int]]:
    """Return lines that differ by more than numbers of names, each with its number of places."""
    out: dict[str, tuple[Statement, int]] = {}
    for line in lines:
        key = f"{line.depth} {_NUMBERED.sub('', line.text)}"
        first, count = out.get(key, (line, 0))
        out[key] = (first, count + 1)
    return out


def _lines(mine: dict[str, tuple[Statement, int]], others: Any, kind: str) -> str:
    rows = []
    for key, (line, count) in list(mine.items())[:MOST_FORMULAS]:
        mark = kind if kind and key not in others else ""
        times = f'<span class="times">×{count}</span>' if count > 1 else ""
        rows.append(
            f'<div class="{mark}" style="margin-left:{1.5 * line.depth}em">{escape(line.text)}'
            f'{times}<span class="shape">{escape(line.shape)}</span></div>'
        )
    if len(mine) > MOST_FORMULAS:
        rows.append(f"<div>… and {len(mine) - MOST_FORMULAS} more lines</div>")
    return f'<div class="lines">{"".join(rows)}</div>'


def _sources(report: Record) -> Iterator[str]:
    blocks = source_blocks(report)
    if blocks:
        yield "<h2>Source lines</h2>"
        yield '<p class="dim">Share of the predicted time as written, and what happened.</p>'
    yield from map(_block, blocks)


def _block(block: SourceBlock) -> str:
    rows, last = [], None
    for line in block.lines:
        if last is not None and line.number != last + 1:
            rows.append('<div class="gap">⋮</div>')
        last = line.number
        share = ""
        if line.share >= 0.005:
            share = f'<i style="width:{100 * line.share:.0f}%"></i><b>{100 * line.share:.0f} %</b>'
        notes = "".join(f'<div class="note {n.kind}">{escape(n.text)}</div>' for n in line.notes)
        rows.append(
            f'<div class="row"><span class="no">{line.number}</span>'
            f'<span class="share">{share}</span><code>{escape(line.text) or " "}</code>'
            f"{notes}</div>"
        )
    name = escape(short_place(f"{block.file}:{block.lines[0].number} (f)").rpartition(":")[0])
    return f'<h3 class="mono">{name}</h3><div class="src">{"".join(rows)}</div>'


# ---------------------------------------------------------------- pictures


def _roofline(report: Record) -> Iterator[str]:
    sides = [("before", report.before), ("after", report.after)][: 1 + report.changed]
    found = (_point(label, side, report.sample) for label, side in sides)
    points = [p for p in found if p is not None]
    yield f"<h2>Roofline of {escape(report.device)}</h2>"
    if not points:
        yield '<p class="dim">No FLOPs of products: memory traffic and launches take the time.</p>'
        return
    if not report.changed:
        points = [Point("written", points[0].intensity, points[0].rate)]
    dtypes = _product_dtypes(report.details.sides[0].t.program)
    yield roofline(report.details.device, dtypes, points)


def _point(label: str, side: Side, sample: dict[str, int]) -> Point | None:
    """Return a form of the program in the roofline; None if it has no FLOPs or no price."""
    if None in (side.flops, side.bytes, side.seconds):
        return None
    flops, moved = (_at(x, sample) for x in (side.flops, side.bytes))
    if not flops or not moved or not side.seconds:
        return None
    return Point(label, flops / moved, flops / side.seconds)


def _at(size: Any, sample: dict[str, int]) -> float:
    """Return a number, at the sample of the named sizes if it has names."""
    return size if units.is_number(size) else value(size, sample)


def _product_dtypes(program: Program) -> list[str]:
    """Return the dtypes of a program's products, at most three."""
    dots = (e for e in program.equations if e.name in ("dot_general", "conv_general_dilated"))
    found = dict.fromkeys(dtype_of(e.eqn.invars[0].aval) for e in dots)
    return [*found][:3] or ["float32"]


def _passes(report: Record) -> Iterator[str]:
    yield "<h2>The optimiser</h2>"
    search = f"Search among the rules: {report.stop}. {units.duration(report.time_s)} in all."
    yield f'<p class="dim">{escape(search)}</p>'
    most = max(report.passes.values(), default=0.0) or 1.0
    rows = [
        f'<span>{escape(name)}</span><i style="width:{100 * s / most:.1f}%"></i>'
        f"<span>{units.duration(s)}</span>"
        for name, s in sorted(report.passes.items(), key=lambda x: -x[1])
        if s >= 0.001 * most
    ]
    yield f'<div class="passes">{"".join(rows)}</div>'
