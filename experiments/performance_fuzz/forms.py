"""Every form of one program: as written, as chosen, with each candidate alone, and with all.

A candidate that is refused for its price is found too: margins of a device profile are opened.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from symjax_rewrite.candidates import Candidate
from symjax_rewrite.cost.device_profiles import Device, device_profile
from symjax_rewrite.optimizer import Optimiser, Result
from symjax_rewrite.options import Options
from symjax_rewrite.reports.builder import make_report
from symjax_rewrite.reports.program_cost import traffic
from symjax_rewrite.rules import packs

PLAIN, AUTO, ALONE, ALL = "plain", "auto", "alone", "all"
# Margins that compare a candidate with the program as written; the others choose among candidates.
OPEN = dict.fromkeys(
    ("rewrite", "dominating", "fold", "norm", "scan", "hoist", "tree", "banded"), 0.0
)
NEVER = {"faster": math.inf, "larger": math.inf}
SHARES = {"share_of_program": -1e9, "share_of_loop": -1e9}


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A program with the same values.

    kinds: names of what was taken. stated: (before, after) in seconds, the prices of the forced
    candidate by which it is taken or refused; None if its pass keeps them, or if it is in a loop.
    written_s, predicted_s: of a call of the program as written and of this form, by its report;
    None if it does not know. optimise_s: the optimiser's seconds of all cores, for what was chosen.
    """

    name: str
    closed: Any
    kinds: tuple[str, ...] = ()
    stated: tuple[float, float] | None = None
    written_s: float | None = None
    predicted_s: float | None = None
    optimise_s: float = 0.0


@dataclasses.dataclass(slots=True)
class Only:
    """Admits one candidate, by its place in the order of asking, and all of its group.

    What holds the bodies of a loop or branch is admitted where a body was rewritten. inside: True
    if one was, so that prices of what was taken are of one step.
    """

    place: int
    group: object = None
    asked: int = 0
    inside: bool = False
    taken: list[Candidate] = dataclasses.field(default_factory=list)

    def __call__(self, c: Candidate) -> bool:
        place, self.asked = self.asked, self.asked + 1
        if c.bodies:
            self.inside = True
            return True
        if place != self.place and (c.group is None or c.group != self.group):
            return False
        self.taken.append(c)
        return True


def opened(device: Device) -> Device:
    """Return a profile by which no candidate is refused for its price."""
    margins = dataclasses.replace(device.margins, **OPEN, **NEVER, **SHARES)
    folds = dataclasses.replace(device.folds, least_pairs=1 << 12, least_sparse_pairs=1 << 12)
    return dataclasses.replace(device, margins=margins, folds=folds)


def _any(candidate: Candidate) -> bool:
    """Admit every candidate."""
    return True


def optimiser(device: Device, admits: Callable[[Candidate], bool] = _any) -> Optimiser:
    """Return the optimiser with the default options."""
    return Optimiser(Options(rules=packs.default), packs.default, device, admits=admits)


def optimised(closed: Any, device: Device, admits: Callable[[Candidate], bool] = _any) -> Result:
    """Run the optimiser on a program."""
    return optimiser(device, admits).run(closed)


def candidates(closed: Any, device: Device) -> list[tuple[int, Candidate]]:
    """Return the candidates in a program as written, one of each group, with their places."""
    found: list[Candidate] = []
    optimised(closed, device, lambda c: bool(found.append(c)))
    seen: set[object] = set()
    out = []
    for place, c in enumerate(found):
        if c.group is None or c.group not in seen:
            out.append((place, c))
        seen.add(c.group)
    return out


def forced(closed: Any, device: Device, place: int, group: object) -> tuple[Result, Only]:
    """Return the program with one candidate, and what was taken: its equals at all places."""
    only = Only(place, group)
    return optimised(closed, device, only), only


def forms_of(closed: Any, most: int = 6) -> list[Form]:
    """Return the forms of a program; the first is the program as written.

    Args:
        closed: the program.
        most: candidates forced alone, at most.
    """
    device = device_profile(None, jax.devices()[0])
    wide = opened(device)
    plain_s = _of_call(traffic(closed, device, {}).seconds, device)
    plain = Form(PLAIN, closed, written_s=plain_s, predicted_s=plain_s)
    start = time.process_time()
    chosen = optimised(closed, device)
    spent_s = time.process_time() - start
    auto = dataclasses.replace(_form(AUTO, chosen, device), optimise_s=spent_s)
    alone: list[Form] = []
    seen = {str(closed.jaxpr)}
    for profile in (device, wide):
        for place, c in candidates(closed, profile):
            if len(alone) >= most:
                break
            if profile is device or _matters(c, plain_s):
                result, only = forced(closed, profile, place, c.group)
                priced = () if only.inside else only.taken
                form = _form(f"{ALONE} {len(alone)}", result, device, priced)
                if str(form.closed.jaxpr) not in seen:
                    alone.append(form)
                seen.add(str(form.closed.jaxpr))
    return [plain, auto, *alone, _form(ALL, optimised(closed, wide), device)]


def _matters(c: Candidate, whole_s: float | None) -> bool:
    """Return True unless the price of a candidate says that it changes next to nothing."""
    if c.before is None or c.after is None or whole_s is None:
        return True
    return abs(c.saved_s) > 0.01 * whole_s


def _form(name: str, result: Result, device: Device, taken: Iterable[Candidate] = ()) -> Form:
    closed = result.closed
    if result.taken:
        closed = jax.make_jaxpr(result.emit())(*result.closed.in_avals)
    report = make_report(result, optimiser(device))
    priced = [(c.before.seconds, c.after.seconds) for c in taken if c.before and c.after]
    stated = (sum(before for before, _ in priced), sum(after for _, after in priced))
    kinds = [*(u.name for u in result.routes if u.taken), *result.rules]
    return Form(
        name,
        closed,
        tuple(dict.fromkeys(kinds)),
        stated if priced else None,
        _of_call(report.before.seconds, device),
        _of_call(report.after.seconds, device),
    )


def _of_call(seconds: float | None, device: Device) -> float | None:
    """Return the seconds of a call, which is what is timed, by those of its kernels."""
    return None if seconds is None else seconds + device.call_s
