"""The report of one decision: both programs with their prices, and every candidate considered."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.usage_records import RouteUse, RuleUse


@dataclass(slots=True)
class Side:
    """One form of the program and its modelled cost; a field is None if it has no price.

    flops: of contractions, 2mnk. bytes: read and written by all kernels. seconds: by the device
    model. peak_bytes: largest total of live values. largest_intermediate: bytes of the largest
    intermediate value. Loops are multiplied by their trip counts; a trip count that depends on data
    has no price. A kernel is priced by its own model.
    """

    jaxpr: ClosedJaxpr
    flops: Any
    bytes: Any
    seconds: float | None
    peak_bytes: float | None
    largest_intermediate: float | None


@dataclass(slots=True, repr=False)
class Report:
    """The result of `explain`.

    before, after: the program as written and as emitted. rules: the rules that were used. routes:
    kernels and rules that were considered, one entry for each name and reason. stop: the reason why
    saturation ended. time_s: seconds the optimiser took. plan: the value of `plan=` that reproduces
    the program. crossovers: for symbolic sizes, the sizes at which the cheaper form changes.
    sample: the numbers at which named sizes were priced in seconds.
    """

    before: Side
    after: Side
    rules: list[RuleUse]
    routes: list[RouteUse]
    stop: str
    time_s: float
    plan: dict[str, Any]
    crossovers: list[str] = field(default_factory=list)
    sample: dict[str, int] = field(default_factory=dict)

    @property
    def best_alternative(self) -> RouteUse | None:
        """Return the refused candidate with the highest predicted ratio, if any was compared."""
        refused = [r for r in self.routes if not r.taken and r.ratio is not None]
        return max(refused, key=lambda r: r.ratio or 0.0, default=None)

    def __str__(self) -> str:
        lines = ["rewritten:"] if self.rules else []
        for r in self.rules:
            lines.append(f"  {r.name} ({r.property}) x{r.count}")
            lines += [f"    at {w}" for w in r.where]
        taken = [f"  {r.name}: {r.reason}{_place(r)}" for r in self.routes if r.taken]
        lines += ["routed:", *taken] if taken else []
        if not self.rules and not taken:
            best = self.best_alternative
            text = best and f"; best alternative: {best.name}{_predicted(best)} ({best.reason})"
            lines.append(f"left as written{text or ''}")
        lines.append(_row("", "before", "after", "ratio"))
        for name, unit in (("flops", ""), ("bytes", "B"), ("largest_intermediate", "B")):
            b, a = getattr(self.before, name), getattr(self.after, name)
            lines.append(_row(name, _number(b, unit), _number(a, unit), _ratio(b, a)))
        b, a = self.before.seconds, self.after.seconds
        at = ", ".join(f"{name} = {size}" for name, size in self.sample.items())
        lines.append(_row("model time", _time(b), _time(a), _ratio(b, a)) + (at and f"  at {at}"))
        lines += [f"crossover: {c}" for c in self.crossovers]
        skipped = [r for r in self.routes if not r.taken]
        lines += ["considered and not done:"] if skipped else []
        lines += [f"  {r.name}: {r.reason}{_predicted(r)}{_place(r)}" for r in skipped]
        lines.append(f"search: {self.stop}, {self.time_s * 1e3:.1f} ms")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> str:
        """Return the report as JSON: jaxprs and symbolic sizes as text, null for no price."""
        names = [f.name for f in fields(self)]
        names.insert(4, "best_alternative")
        return json.dumps({name: getattr(self, name) for name in names}, indent=1, default=_plain)

    def save(self, path: str | Path) -> None:
        """Write `to_json()`, or HTML if the path ends in .html."""
        path = Path(path)
        text = self._repr_html_() if path.suffix == ".html" else self.to_json()
        path.write_text(text, encoding="utf-8")


def _plain(x: Any) -> Any:
    """Return the fields of a part of the report, or any other value as text."""
    is_part = isinstance(x, (Side, RuleUse, RouteUse))
    return {k: getattr(x, k) for k in x.__slots__} if is_part else str(x)


def _predicted(use: RouteUse) -> str:
    return "" if use.ratio is None else f", predicted {use.ratio:.2f}x"


def _place(use: RouteUse) -> str:
    more = f" and {use.count - 1} more" if use.count > 1 else ""
    return f" (at {use.where}{more})" if use.where else ""


def _row(*cells: str) -> str:
    return "  " + cells[0].ljust(22) + "".join(c.rjust(24) for c in cells[1:])


NOT_PRICED = "not priced"


def _time(seconds: float | None) -> str:
    return NOT_PRICED if seconds is None else f"{seconds * 1e6:.1f} us"


def _number(value: Any, unit: str) -> str:
    if value is None:
        return NOT_PRICED
    if not isinstance(value, (int, float)):
        return str(value)
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def _ratio(before: Any, after: Any) -> str:
    if isinstance(before, (int, float)) and isinstance(after, (int, float)) and before and after:
        return f"{before / after:.2f}x"
    return ""
