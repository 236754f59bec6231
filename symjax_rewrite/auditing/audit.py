"""`audit`: the six properties of a program, their uses, and the bottleneck of each part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from symjax_rewrite.auditing.audit_page import as_fragment, as_page
from symjax_rewrite.auditing.findings import PROPERTIES, Finding, findings, told
from symjax_rewrite.auditing.tracing import trace
from symjax_rewrite.reports import units
from symjax_rewrite.reports.bottlenecks import Bottleneck
from symjax_rewrite.reports.places import short_place
from symjax_rewrite.text_tables import aligned

SHOWN = 8  # parts that are listed as text; JSON and HTML have all


@dataclass(frozen=True, slots=True, repr=False)
class Audit:
    """The result of `audit`; prints as text and shows as HTML in notebooks.

    name, device: of the function and of the profile that priced it. findings: properties at lines,
    in the order of the six. parts: source lines with their modelled seconds, slowest first.
    before_s, after_s: seconds as written and optimised; None if a part has no price. before_bytes,
    after_bytes: of the largest intermediate. stop: the reason why the optimiser stopped.
    """

    name: str
    device: str
    findings: tuple[Finding, ...]
    parts: tuple[Bottleneck, ...]
    before_s: float | None
    after_s: float | None
    before_bytes: float | None
    after_bytes: float | None
    stop: str

    def of(self, name: str) -> tuple[Finding, ...]:
        """Return the findings of one property.

        Args:
            name: `associativity`, `separability`, `locality`, `sparsity`, `redundancy` or
                `symmetry`.
        """
        return tuple(f for f in self.findings if f.property == name)

    @property
    def bottleneck(self) -> str:
        """Return the bottleneck of the whole program: `compute`, `memory` or `launches`."""
        seconds: dict[str, float] = {}
        for p in self.parts:
            seconds[p.limit] = seconds.get(p.limit, 0.0) + p.seconds
        return max(seconds, key=seconds.__getitem__, default="")

    @property
    def missing(self) -> list[str]:
        """Return the properties without a finding."""
        return [name for name in PROPERTIES if not self.of(name)]

    @property
    def summary(self) -> tuple[str, str]:
        """Return the modelled seconds and the largest intermediate, as written and optimised."""
        seconds = f"{units.duration(self.before_s)} as written, {units.duration(self.after_s)}"
        sizes = f"{units.size(self.before_bytes)} as written, {units.size(self.after_bytes)}"
        return f"{seconds} optimised (modelled)", f"largest intermediate: {sizes} optimised"

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_fragment(self)

    def to_json(self) -> str:
        """Return the audit as JSON; null where there is no price."""
        return json.dumps({**asdict(self), "bottleneck": self.bottleneck}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write a self-contained page if the path ends in .html, else JSON."""
        path = Path(path)
        path.write_text(
            as_page(self) if path.suffix == ".html" else self.to_json(), encoding="utf-8"
        )


def audit(f: Any, *specs: Any, device: str | None = None) -> Audit:
    """Find the six properties of a program, their uses, and the bottlenecks of its parts.

    The properties are associativity, separability, locality, sparsity, redundancy and symmetry. A
    finding names the user's line, the rule or kernel that uses the property, the modelled seconds
    that this saves, or the reason why nothing uses it. Nothing runs on a device.

    Args:
        f: a function, a `jax.jit` of one, or a result of `sym_optimize`.
        specs: its arguments: arrays or `jax.ShapeDtypeStruct`s (named sizes too), and static values
            where its jit has them.
        device: the name of a device profile; default: that of `f`, or the device JAX runs on.

    Returns:
        The findings and the parts; it prints as text, and has `.to_json()` and `.save(path)`.

    Raises:
        UsageError: `f` is no function, or the device is unknown.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
        >>> found = audit(lambda x: x @ x.T, x, device="cpu")
        >>> [f.property for f in found.findings], found.bottleneck
        (['symmetry'], 'compute')
    """
    t = trace(f, specs, device)
    decision = t.decided(t.options)
    report = decision.report()
    parts = report.details.bottlenecks
    return Audit(
        t.name,
        t.device.name,
        tuple(findings(decision, t.closed, parts)),
        tuple(parts),
        report.before.seconds,
        report.after.seconds,
        report.before.largest_intermediate,
        report.after.largest_intermediate,
        report.stop,
    )


def _lines(a: Audit) -> Iterator[str]:
    first, *rest = a.summary
    yield from (f"{a.name} on {a.device}: {first}", *rest)
    rows = [*told(a.findings)]
    for name in PROPERTIES:
        mine = [row for row in rows if row[0].property == name]
        yield name if mine else f"{name}: none found"
        for f, use, gain in mine:
            yield f"  {units.scaled_numbers(f.what)}"
            yield f"    at {short_place(f.where)}"
            yield f"    {'; '.join(filter(None, (use, gain)))}"
    if a.parts:
        yield f"limits by line (the program as written: {a.bottleneck})"
    rows = [
        (p.limit, f"{p.share:.0%}", units.duration(p.seconds), short_place(p.where))
        for p in a.parts[:SHOWN]
    ]
    yield from (f"  {line}" for line in aligned(rows, "<>><"))
    if len(a.parts) > SHOWN:
        yield f"  and {len(a.parts) - SHOWN} more"
