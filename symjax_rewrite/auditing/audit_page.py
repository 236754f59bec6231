"""An audit as HTML: one self-contained page, light and dark, readable on a phone."""

from __future__ import annotations

from html import escape
from typing import Any

from symjax_rewrite.auditing.quantities import bytes_text, seconds_text
from symjax_rewrite.auditing.record import PROPERTIES, Finding
from symjax_rewrite.errors import readable_place

STYLE = """
.symjax-audit { color-scheme: light dark; --line: #8884; --good: #2a7d46; --bad: #a35a00;
  --bar: #4a7fc1; font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; }
@media (prefers-color-scheme: dark) {
  .symjax-audit { --good: #6fce8e; --bad: #e0a458; --bar: #7fb0ea; } }
.symjax-audit h2 { font-size: 1.2rem; margin: 0 0 .3rem; }
.symjax-audit h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.symjax-audit table { border-collapse: collapse; width: 100%; }
.symjax-audit td, .symjax-audit th { border-bottom: 1px solid var(--line); padding: .3rem .5rem;
  text-align: left; vertical-align: top; overflow-wrap: anywhere; }
.symjax-audit code { font-size: .85em; }
.symjax-audit .taken { color: var(--good); } .symjax-audit .open { color: var(--bad); }
.symjax-audit .bar { background: var(--bar); height: .6em; min-width: 1px; }
@media (max-width: 40rem) {
  .symjax-audit th { display: none; }
  .symjax-audit td { display: block; border: 0; padding: .1rem .3rem; }
  .symjax-audit tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0; } }
"""
HEADS = ("property", "what has it", "line", "what uses it", "gain")


def page(audit: Any) -> str:
    """Return an `Audit` as a page of its own."""
    title = escape(f"audit of {audit.name}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title></head><body>{fragment(audit)}</body></html>"
    )


def fragment(audit: Any) -> str:
    """Return the tables of an `Audit`, for a notebook."""
    summary = (
        f"{seconds_text(audit.before_s)} as written, {seconds_text(audit.after_s)} optimised; "
        f"largest intermediate {bytes_text(audit.before_bytes)} as written, "
        f"{bytes_text(audit.after_bytes)} optimised (modelled on {audit.device})"
    )
    rows = "".join(map(_finding, audit.findings))
    missing = [name for name in PROPERTIES if not audit.of(name)]
    none = f"<p>None found: {escape(', '.join(missing))}.</p>" if missing else ""
    parts = "".join(
        f"<tr><td><code>{escape(readable_place(p.where) or 'an unknown line')}</code></td>"
        f"<td>{p.limit}</td><td>{escape(seconds_text(p.seconds))}</td><td>{p.share:.0%}"
        f'<div class="bar" style="width:{100 * p.share:.1f}%"></div></td></tr>'
        for p in audit.parts
    )
    return (
        f'<div class="symjax-audit"><style>{STYLE}</style><h2>{escape(audit.name)}</h2>'
        f"<p>{escape(summary)}</p><h3>Properties</h3><table>{_head(HEADS)}{rows}</table>{none}"
        f"<h3>Limits by line: {escape(audit.bottleneck or 'nothing priced')}</h3>"
        f"<table>{_head(('line', 'limit', 'seconds', 'share'))}{parts}</table></div>"
    )


def _head(names: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"


def _finding(f: Finding) -> str:
    state = "taken" if f.taken else "open"
    used = f.used_by if f.taken or not f.used_by else f"not {f.used_by}"
    text = f"{used}: {f.reason}" if used and f.reason else used or f.reason
    gain = "" if f.saved_s is None else seconds_text(f.saved_s)
    gain = f"at most {gain}" if f.is_bound else gain
    if f.ratio is not None:
        gain = f"{gain} ({f.ratio:.2f} times)" if gain else f"{f.ratio:.2f} times"
    cells = (f.property, f.what, f"<code>{escape(readable_place(f.where))}</code>", text, gain)
    shown = [c if k == 2 else escape(c) for k, c in enumerate(cells)]
    body = "".join(
        f'<td class="{state}">{c}</td>' if k == 3 else f"<td>{c}</td>" for k, c in enumerate(shown)
    )
    return f"<tr>{body}</tr>"
