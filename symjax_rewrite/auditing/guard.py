"""`guard`: a regression test for model code, which fails where an equal form is far cheaper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from symjax_rewrite.auditing.intermediates import Intermediate, largest_intermediate
from symjax_rewrite.auditing.tracing import Decision, TracedFunction, trace
from symjax_rewrite.errors import CliffError, UsageError
from symjax_rewrite.reports import units
from symjax_rewrite.reports.derivation import law_of
from symjax_rewrite.reports.places import short_place
from symjax_rewrite.reports.report import Report
from symjax_rewrite.reports.text import unpriced
from symjax_rewrite.rewriting.rule import TRANSFORMATIONS
from symjax_rewrite.rules import packs
from symjax_rewrite.usage_records import ratio_of


@dataclass(frozen=True, slots=True)
class GuardResult:
    """The result of a guard that holds.

    regret: modelled seconds of the program over those of the cheapest equal form found, at least 1;
    None if a part of either has no price. largest_intermediate: bytes of the largest value that is
    neither argument nor result. where: its source line. device: the profile that priced. note: the
    reason why there is no regret.
    """

    regret: float | None
    largest_intermediate: float
    where: str
    device: str
    note: str = ""

    def __str__(self) -> str:
        if self.regret is None:
            return f"unknown: {self.note}"
        at = f" ({short_place(self.where)})" if self.where else ""
        largest = f"largest intermediate {units.size(self.largest_intermediate)}{at}"
        return f"ok: regret {self.regret:.2f} on {self.device}, {largest}"


def guard(
    f: Any,
    *specs: Any,
    max_regret: float | None = 1.5,
    max_intermediate: float | str | None = None,
    device: str | None = None,
) -> GuardResult:
    """Raise an error if an equal form of a program is much cheaper, or an intermediate too large.

    A plain or jitted function counts as written. Of a result of `sym_optimize` counts what is
    emitted under its options, compared with what the default rules and kernels would emit. Nothing
    runs on a device: costs are those of the model (`Report.before`, `Report.after`).

    Args:
        f: a function, a `jax.jit` of one, or a result of `sym_optimize`.
        specs: its arguments: arrays or `jax.ShapeDtypeStruct`s (named sizes too), and static values
            where its jit has them.
        max_regret: how many times more seconds than the cheapest equal form the program may need;
            None: any number.
        max_intermediate: most bytes of a value that is neither argument nor result, as a number or
            text such as `"2 GB"`; every equation counts as materialised, as in reports. None: any.
        device: the name of a device profile; default: that of `f`, or the device JAX runs on.

    Returns:
        The regret and the largest intermediate found.

    Raises:
        CliffError: a limit is exceeded; the message names the line, the better form and what to do.
        UsageError: a limit, the device or `f` is invalid.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from symjax_rewrite import errors, sym_optimize
        >>> s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        >>> def lora(x, W, A, B): return x @ (W + A @ B)
        >>> specs = s(8, 2048), s(2048, 2048), s(2048, 16), s(16, 2048)
        >>> guard(sym_optimize(lora), *specs, max_intermediate="1 MB").regret
        1.0
        >>> try: guard(lora, *specs, device="cpu")
        ... except errors.CliffError as error: print(error.expected)
        at most 1.5 times the cheapest equal form
    """
    is_number = isinstance(max_regret, (int, float)) and not isinstance(max_regret, bool)
    if max_regret is not None and not (is_number and max_regret >= 1):
        raise UsageError("max_regret must be a number >= 1", expected=">= 1", got=repr(max_regret))
    most_bytes = None if max_intermediate is None else units.parse_bytes(max_intermediate)
    t = trace(f, specs, device)
    own = t.decided(t.options)
    best = own if not t.is_optimised else _unrestricted(t, own)
    mine, other = own.report(), best.report()
    used = mine.after if t.is_optimised else mine.before
    largest = largest_intermediate(used.jaxpr, mine.sample)
    regret = _regret(mine, other, t.is_optimised)
    if regret is not None and max_regret is not None and regret > max_regret:
        raise _cliff(t, best, other, regret, max_regret)
    if most_bytes is not None and largest.bytes > most_bytes:
        raise _too_large(t, largest, most_bytes, other)
    note = "" if regret is not None else unpriced(other) or f"no price: {other.stop}"
    return GuardResult(regret, largest.bytes, largest.where, t.device.name, note)


def _regret(mine: Report, best: Report, is_optimised: bool) -> float | None:
    """Return how many times faster the best form is; each report prices its sides alike."""
    gain = _speedup(best)
    own = _speedup(mine) if is_optimised else 1.0
    return None if gain is None or own is None else max(gain / own, 1.0)


def _speedup(report: Report) -> float | None:
    before, after = report.before.seconds, report.after.seconds
    if before is None or after is None:
        return None
    return 1.0 if before == after else ratio_of(before, after)


def _unrestricted(t: TracedFunction, own: Decision) -> Decision:
    """Return the decision under the default rules and kernels, if the function has others."""
    options = replace(t.options, rules=packs.default, kernels="auto", plan=None, tune=False)
    return own if options == t.options else t.decided(options)


def _cliff(
    t: TracedFunction, best: Decision, report: Report, regret: float, most: float
) -> CliffError:
    """Return the error that names the better form."""
    forms = _forms(best, report)
    form, where = forms[0] if forms else ("the optimised program", "")
    also = f", and {', '.join(text for text, _ in forms[1:])}" if forms[1:] else ""
    after_s = report.after.seconds or 0.0
    advice = "leave out rules= and kernels=" if t.is_optimised else "decorate it: @sym_optimize"
    return CliffError(
        f"an equal form of {t.name} is predicted {units.speed(regret)} on {t.device.name}",
        where=where,
        expected=f"at most {most:g} times the cheapest equal form",
        got=f"{units.duration(regret * after_s)}; {units.duration(after_s)} by {form}{also}",
        remedy=f"write that form, or {advice}",
    )


def _too_large(t: TracedFunction, found: Intermediate, most: float, best: Report) -> CliffError:
    """Return the error that names a large intermediate."""
    other = largest_intermediate(best.after.jaxpr, best.sample).bytes
    remedy = "compute it in blocks, or raise max_intermediate="
    if other <= most and not t.is_optimised:
        remedy = f"decorate the function: @sym_optimize holds {units.size(other)} at most"
    return CliffError(
        f"an intermediate of {t.name} has {units.size(found.bytes)}: {found.text}",
        where=found.where,
        expected=f"at most {units.size(most)}",
        got=units.size(found.bytes),
        remedy=remedy,
    )


def _forms(best: Decision, report: Report) -> list[tuple[str, str]]:
    """Return the rules and kernels of a report as text, with lines, the largest gain first."""
    laws = {**TRANSFORMATIONS, **{r.name: law_of(r) for r in best.optimiser.rules.rules}}
    gains: dict[str, float] = {}
    for c in best.proposed:
        gains[c.where] = max(gains.get(c.where, 0.0), c.saved_s)
    out = []
    for use in report.rules:
        law = laws.get(use.name, "")
        where = max(use.where, key=lambda w: gains.get(w, 0.0), default="")
        out.append((f"{use.name} ({use.property})" + (f": {law}" if law else ""), where))
    named = {use.name for use in report.rules}
    taken = [r for r in report.routes if r.taken and r.name not in named]
    out += [(f"{r.name}: {units.scaled_numbers(r.reason)}", r.where) for r in taken]
    return sorted(out, key=lambda form: -gains.get(form[1], 0.0))
