"""`audit`: the six properties of a program, what uses them, and what limits each part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from symjax_rewrite.auditing.audit_page import fragment, page
from symjax_rewrite.auditing.bottlenecks import Bottleneck, bottlenecks, kernel_times
from symjax_rewrite.auditing.quantities import bytes_text, seconds_text
from symjax_rewrite.auditing.record import PROPERTIES, Finding, findings
from symjax_rewrite.auditing.tracing import pricing_device, trace
from symjax_rewrite.errors import readable_place
from symjax_rewrite.ir.flat_program import flatten

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
        """Return what limits the whole program: `compute`, `memory` or `launches`."""
        seconds: dict[str, float] = {}
        for p in self.parts:
            seconds[p.limit] = seconds.get(p.limit, 0.0) + p.seconds
        return max(seconds, key=seconds.__getitem__, default="")

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return fragment(self)

    def to_json(self) -> str:
        """Return the audit as JSON; null for what has no price."""
        return json.dumps({**asdict(self), "bottleneck": self.bottleneck}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write a self-contained page if the path ends in .html, else JSON."""
        path = Path(path)
        path.write_text(page(self) if path.suffix == ".html" else self.to_json(), encoding="utf-8")


def audit(f: Any, *specs: Any, device: str | None = None) -> Audit:
    """Find the six properties of a program, what uses each, and what limits its parts.

    The properties are associativity, separability, locality, sparsity, redundancy and symmetry. A
    finding names the user's line, the rule or kernel that uses the property, the modelled seconds
    that this saves, and what stands in the way otherwise. Nothing runs on a device.

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
    program = flatten(t.closed)
    times = kernel_times(program, pricing_device(decision, program), decision.result.sample)
    parts = bottlenecks(times)
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
    yield f"{a.name} on {a.device}: {seconds_text(a.before_s)} as written, " + (
        f"{seconds_text(a.after_s)} optimised (modelled)"
    )
    sizes = f"{bytes_text(a.before_bytes)} as written, {bytes_text(a.after_bytes)} optimised"
    yield f"largest intermediate: {sizes}"
    for name in PROPERTIES:
        mine = a.of(name)
        yield f"{name}" + ("" if mine else ": none found")
        for f in mine:
            yield f"  {f.what}"
            yield f"    at {readable_place(f.where) or 'an unknown line'}"
            yield f"    {use_text(f)}"
    if a.parts:
        yield f"limits by line (the program as written: {a.bottleneck})"
    for p in a.parts[:SHOWN]:
        row = f"  {p.limit:8}  {p.share:>4.0%}  {seconds_text(p.seconds):>8}"
        yield f"{row}  {readable_place(p.where) or 'an unknown line'}"
    if len(a.parts) > SHOWN:
        yield f"  and {len(a.parts) - SHOWN} more"


def use_text(f: Finding) -> str:
    """Return what uses a finding, the gain, and what stands in the way."""
    gain = "" if f.saved_s is None else f"saves {seconds_text(f.saved_s)}"
    if f.is_bound:
        gain = f"at most {seconds_text(f.saved_s)} to save"
    if f.ratio is not None:
        gain += f"{', ' if gain else ''}{f.ratio:.2f} times faster by itself"
    what = "used by" if f.taken else "not taken:"
    text = f"{what} {f.used_by}" if f.used_by else ""
    reason = "" if f.reason == f.what else f.reason
    return "; ".join(filter(None, (text, reason, gain)))
