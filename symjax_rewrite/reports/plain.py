"""A report as plain data, and as JSON.

The schema is stable: `version` grows when a field changes its meaning or goes; new fields do not
change it. Seconds are in seconds, sizes in bytes; symbolic sizes and jaxprs are text; null is "no
price". `changes` holds the candidates taken, with `steps` of the derivation; `routes` every
candidate with its reason, of a refusal its `obstacle`, its `remedy` (a change that the user can
make) and the `steps` that derive the refused form; `lines` the predicted seconds of each source
line as written.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from symjax_rewrite.obstacles import obstacle_of
from symjax_rewrite.reports.record import Record, Side
from symjax_rewrite.reports.remedies import remedy
from symjax_rewrite.reports.statements import Statement
from symjax_rewrite.reports.text import headline
from symjax_rewrite.usage_records import Change, RouteUse

SCHEMA = "symjax_rewrite.report"
VERSION = 1


def as_json(report: Record) -> str:
    """Return a report as JSON text."""
    return json.dumps(as_data(report), indent=1, default=str, ensure_ascii=False)


def as_data(report: Record) -> dict[str, Any]:
    """Return a report as dictionaries, lists, numbers and text."""
    details, best = report.details, report.best_alternative
    seconds = details.seconds_by_line
    before = _side(report.before, details.before)
    is_same = report.after is report.before
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "function": report.function,
        "device": report.device,
        "headline": headline(report),
        "before": before,
        "after": before if is_same else _side(report.after, details.after),
        "rules": [asdict(r) for r in report.rules],
        "changes": [_change(report, c) for c in report.changes],
        "routes": [_route(report, r) for r in report.routes],
        "best_alternative": None if best is None else _route(report, best),
        "crossovers": report.crossovers,
        "advice": [asdict(a) for a in details.crossovers],
        "lines": [{"where": w, "seconds": seconds.get(w, 0.0)} for w in details.lines],
        "sample": report.sample,
        "stop": report.stop,
        "time_s": report.time_s,
        "passes": report.passes,
        "plan": report.plan,
    }


def _side(side: Side, statements: list[Statement]) -> dict[str, Any]:
    names = ("flops", "bytes", "seconds", "peak_bytes", "largest_intermediate", "launches")
    prices = {name: getattr(side, name) for name in names}
    return {"jaxpr": str(side.jaxpr), **prices, "terms": [asdict(s) for s in statements]}


def _change(report: Record, change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "rules": [{"name": name, "property": prop} for name, prop in change.rules],
        "reason": change.reason,
        "places": change.places,
        "seconds": change.seconds,
        "ratio": change.ratio,
        "key": change.key,
        "steps": [asdict(s) for s in report.details.steps(change)],
    }


def _route(report: Record, use: RouteUse) -> dict[str, Any]:
    obstacle, advice = (None, "") if use.taken else (obstacle_of(use.reason), remedy(use))
    steps = [asdict(s) for s in report.details.steps(use)]
    row = {f.name: getattr(use, f.name) for f in fields(use) if f.name != "parts"}
    return {**row, "obstacle": obstacle, "remedy": advice, "steps": steps}
