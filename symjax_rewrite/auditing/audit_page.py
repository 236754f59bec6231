"""An audit as HTML, in the style of reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from symjax_rewrite.auditing.findings import Finding, told
from symjax_rewrite.reports import units
from symjax_rewrite.reports.bottlenecks import Bottleneck
from symjax_rewrite.reports.html import Html, bar, fragment, page, row, table, tag
from symjax_rewrite.reports.places import short_place

HEADS = ("property", "values", "line", "use", "gain")


def as_page(audit: Any) -> str:
    """Return an `Audit` as a page of its own."""
    return page(f"audit of {audit.name}", as_fragment(audit))


def as_fragment(audit: Any) -> str:
    """Return the tables of an `Audit`, for a notebook."""
    return fragment(_parts(audit))


def _parts(audit: Any) -> Iterator[Html]:
    yield tag("h1", f"{audit.name} on {audit.device}")
    yield from (tag("p", line) for line in audit.summary)
    yield tag("h2", "Properties")
    yield table(HEADS, (_finding(*each) for each in told(audit.findings)), "stacked")
    if audit.missing:
        yield tag("p", f"None found: {', '.join(audit.missing)}.", kind="dim")
    yield tag("h2", f"Limits by line: {audit.bottleneck or 'nothing priced'}")
    yield table(("line", "limit", "seconds", "share"), map(_limit, audit.parts), "stacked limits")


def _finding(f: Finding, use: str, gain: str) -> Html:
    line = tag("code", short_place(f.where))
    mark = tag("span", use, kind="good" if f.taken else "bad")
    return row((tag("b", f.property), units.scaled_numbers(f.what), line, mark, gain))


def _limit(p: Bottleneck) -> Html:
    share = tag("div", f"{p.share:.0%}", bar(p.share), kind="bar")
    return row((tag("code", short_place(p.where)), p.limit, units.duration(p.seconds), share))
