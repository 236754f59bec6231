"""The style of a report in HTML. Every rule is scoped to the report, so that none leaks out."""

SCOPE = "symjax-report"

_STYLE = """
{ --bg:#fff; --fg:#1d2433; --dim:#5d6779; --line:#dfe3ea; --soft:#f4f6f9; --good:#0a7d4f;
  --goodbg:#e3f5ec; --bad:#9a5b00; --badbg:#fff3dc; --before:#b4462a; --after:#0a7d4f;
  --bar:#c9d8f5; background:var(--bg); color:var(--fg); border:1px solid var(--line);
  border-radius:10px; box-sizing:border-box; font:15px/1.5 system-ui,-apple-system,"Segoe
  UI",Roboto,sans-serif; margin:0 auto; max-width:1100px; overflow-wrap:anywhere; padding:18px;
  text-align:left; }
*, *::before { box-sizing:border-box; }
h1 { font-size:21px; line-height:1.3; margin:0 0 2px; color:var(--fg); }
h2 { border-top:1px solid var(--line); color:var(--fg); font-size:16px; margin:22px 0 8px;
  padding-top:14px; }
h3 { color:var(--fg); font-size:14px; margin:10px 0 4px; }
p { margin:4px 0; color:var(--fg); }
.dim { color:var(--dim); }
code, pre, .mono { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans
  Mono",monospace; font-size:13px; background:none; color:inherit; }
.cards { display:grid; gap:10px; grid-template-columns:repeat(auto-fill,minmax(150px,1fr));
  margin:14px 0; }
.card { background:var(--soft); border-radius:8px; padding:10px 12px; }
.card b { display:block; font-size:24px; line-height:1.2; }
.card.good b { color:var(--good); }
.card.bad b { color:var(--bad); }
.card span { color:var(--dim); font-size:13px; }
table { border-collapse:collapse; color:var(--fg); font-size:14px; margin:0; width:100%; }
table.narrow { max-width:620px; }
tr { background:none; }
th, td { border:0; border-bottom:1px solid var(--line); color:var(--fg); padding:5px 8px;
  text-align:right; vertical-align:top; background:none; }
th { color:var(--dim); font-weight:600; }
th:first-child, td:first-child { padding-left:0; text-align:left; }
td.num { white-space:nowrap; }
td.good { color:var(--good); font-weight:600; }
td.bad, span.bad { color:var(--bad); }
span.good { color:var(--good); }
table.stacked th, table.stacked td { overflow-wrap:break-word; text-align:left; }
table.stacked td:nth-last-child(-n+2) { min-width:8.5em; }
table.limits td:nth-last-child(-n+3) { min-width:6em; white-space:nowrap; }
.bar i { background:var(--bar); border-radius:2px; display:block; height:8px; min-width:1px; }
.sides { display:grid; gap:14px;
  grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr)); }
.lines { background:var(--soft); border-radius:8px; font-family:ui-monospace,SFMono-Regular,Menlo,
  Consolas,"DejaVu Sans Mono",monospace; font-size:13px; line-height:1.55; max-height:460px;
  overflow:auto; padding:8px 0; }
.lines > div { padding:1px 12px 1px 30px; text-indent:-18px; border-left:3px solid transparent; }
.lines .old { border-left-color:var(--before); }
.lines .new { border-left-color:var(--after); background:var(--goodbg); }
.lines .shape { color:var(--dim); font-size:11.5px; margin-left:.8em; white-space:nowrap; }
.lines .times { color:var(--after); font-weight:600; margin-left:.6em; }
.src { background:var(--soft); border-radius:8px; font-size:13px; overflow-x:auto; padding:8px 0;
  }
.src .row { display:grid; grid-template-columns:44px 60px minmax(0,1fr); }
.src .no { color:var(--dim); padding-right:8px; text-align:right; user-select:none; font:12px/1.7
  ui-monospace,Menlo,Consolas,monospace; }
.src .share { align-self:start; margin-top:2px; color:var(--fg); font-size:11px; height:17px;
  line-height:17px; position:relative; text-align:right; padding-right:6px; }
.src .share i { background:var(--bar); border-radius:2px; bottom:0; left:0; position:absolute;
  top:0; }
.src .share b { font-weight:400; position:relative; }
.src code { font-size:12.5px; line-height:1.7; padding-right:12px; tab-size:4;
  white-space:pre-wrap; }
.src .note { font-size:12.5px; grid-column:3; line-height:1.45; margin:1px 12px 4px 0; padding:2px
  8px; border-radius:5px; width:fit-content; }
.src .taken { background:var(--goodbg); color:var(--good); }
.src .refused { background:var(--badbg); color:var(--bad); }
.src .gap { color:var(--dim); padding-left:20px; }
.cand { padding:8px 0; }
.cand + .cand { border-top:1px solid var(--line); }
.cand .top { align-items:baseline; display:flex; flex-wrap:wrap; gap:8px; }
.tag { border-radius:5px; font-size:12px; font-weight:600; padding:1px 8px; white-space:nowrap; }
.tag.taken { background:var(--goodbg); color:var(--good); }
.tag.refused { background:var(--badbg); color:var(--bad); }
.cand .gain { font-weight:600; margin-left:auto; white-space:nowrap; }
.cand p { font-size:14px; }
.cand .where, .step .law { color:var(--dim); font-size:12.5px; }
details { margin:6px 0; }
summary { cursor:pointer; color:var(--fg); font-size:14px; }
.step { border-left:3px solid var(--line); margin:8px 0; padding:2px 0 2px 12px; }
.step .mono { display:block; padding-left:1.6em; text-indent:-1.6em; }
.passes { display:grid; font-size:13px; gap:2px 10px; grid-template-columns:max-content 1fr
  max-content; max-width:620px; align-items:center; }
.passes i { background:var(--bar); border-radius:2px; display:block; height:11px; min-width:1px; }
svg { display:block; height:auto; max-width:720px; width:100%; }
svg text { fill:var(--fg); font:13px system-ui,sans-serif; }
svg .sj-tick { fill:var(--dim); font-size:12px; }
svg .sj-label { font-weight:600; font-size:14px; }
svg .sj-grid { stroke:var(--line); stroke-width:1; }
svg .sj-roof { stroke:var(--fg); stroke-width:2; }
svg .sj-move { stroke:var(--dim); stroke-dasharray:4 4; stroke-width:1.5; }
svg .sj-before, svg .sj-written { fill:var(--before); }
svg .sj-after { fill:var(--after); }
"""

_DARK = """
{ --bg:#14181f; --fg:#e4e8ef; --dim:#9aa5b6; --line:#2c3442; --soft:#1b212b; --good:#58d39b;
  --goodbg:#12352a; --bad:#f0b35a; --badbg:#3a2c12; --before:#f08a6c; --after:#58d39b;
  --bar:#2e4571; }
"""

_NARROW = """
{ border-radius:0; padding:12px; }
h1 { font-size:18px; }
.card b { font-size:20px; }
th, td { padding:4px 5px; }
table { font-size:12.5px; }
table.stacked th { display:none; }
table.stacked tr { border-bottom:1px solid var(--line); display:block; padding:6px 0; }
table.stacked td { border:0; display:block; padding:1px 0; }
table.limits td:nth-child(2), table.limits td:nth-child(3) { display:inline-block; min-width:0;
  padding-right:12px; }
svg text, svg .sj-tick, svg .sj-label { font-size:17px; }
.lines, .lines code { font-size:12px; }
.src .row { grid-template-columns:30px 44px minmax(0,1fr); }
.src .no { padding-right:5px; }
.src code { font-size:11.5px; }
"""


def _scoped(rules: str) -> str:
    """Return style rules with every selector below the report's own class."""
    out = []
    for rule in rules.strip().split("}\n"):
        selectors, _, body = rule.partition("{")
        scoped = ", ".join(f".{SCOPE} {s.strip()}".strip() for s in selectors.split(","))
        text = " ".join(body.replace("}", "").split())
        out.append(f"{scoped} {{{text}}}")
    return "\n".join(out)


STYLE = "\n".join(
    (
        _scoped(_STYLE),
        f"@media (prefers-color-scheme: dark) {{\n{_scoped(_DARK)}\n}}",
        f"@media (max-width: 620px) {{\n{_scoped(_NARROW)}\n}}",
    )
)
# Of a page of its own: the surroundings of the report.
PAGE_STYLE = """
html { color-scheme: light dark; }
body { background: #eef1f5; margin: 0; padding: 16px 8px; }
@media (prefers-color-scheme: dark) { body { background: #0d1016; } }
@media (max-width: 620px) { body { padding: 0; } }
"""
