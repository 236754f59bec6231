"""Records of rules and kernels for reports, and the format of saved plans."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from symjax_rewrite.errors import PlanError
from symjax_rewrite.jax_internals import ClosedJaxpr

REPLAN = "make the plan again, for these arguments, with .explain(...).plan"


@dataclass(slots=True)
class RuleUse:
    """A rule that was used: its property, the number of uses, and the user's source lines."""

    name: str
    property: str
    count: int
    where: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RouteUse:
    """A kernel or rule that was considered, the decision, its reason, and its first line.

    count: number of places of the program it represents. seconds: predicted, of these places as
    written and with the kernel or rule; None if no pass compared them. ratio: the first number of
    `seconds` divided by the second. places: the number of places by line. by_size: True for a
    refusal that other numbers for named sizes might turn. rules: the names of the rules that derive
    a refused form. parts: the parts that compute this form (`candidates.Part`).
    """

    name: str
    taken: bool
    reason: str
    where: str = ""
    count: int = 1
    ratio: float | None = None
    seconds: tuple[float, float] | None = None
    places: dict[str, int] = field(default_factory=dict)
    by_size: bool = False
    rules: tuple[str, ...] = ()
    parts: tuple[Any, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.places and self.where:
            self.places = {self.where: self.count}
        if self.ratio is None and self.seconds is not None:
            self.ratio = ratio_of(*self.seconds)


@dataclass(slots=True)
class Change:
    """A candidate that was taken: its rules with their properties or its reason, line and prices.

    seconds: predicted, as written and changed; None if no pass compared them. places: the number of
    places by line. key: equal for equal regions. parts: the parts of the program that compute the
    new form (`candidates.Part`).
    """

    name: str
    rules: tuple[tuple[str, str], ...]
    reason: str
    places: dict[str, int]
    seconds: tuple[float, float] | None
    key: str
    parts: tuple[Any, ...]

    @property
    def ratio(self) -> float | None:
        """Return the predicted speedup of the region; None if it is not known."""
        return None if self.seconds is None else ratio_of(*self.seconds)


def ratio_of(before_s: float, after_s: float) -> float | None:
    """Return the speedup `before_s / after_s`; None if either is not a positive number."""
    is_known = 0 < before_s < math.inf and 0 < after_s < math.inf
    return before_s / after_s if is_known else None


def fingerprint(closed: ClosedJaxpr) -> str:
    """Return a digest of a program's text; the same in every process."""
    return hashlib.sha256(str(closed.jaxpr).encode()).hexdigest()[:16]


def planned_regions(plan: Any, closed: ClosedJaxpr) -> set[str] | None:
    """Return the digests of the rewrites that a plan permits; None if there is no plan.

    Raises:
        PlanError: the plan is malformed or was made from another program.
    """
    if plan is None:
        return None
    if not isinstance(plan, dict) or plan.get("format") != 1 or "regions" not in plan:
        got = repr(plan)[:80]
        raise PlanError("not a plan", expected="report.plan", got=got, remedy=REPLAN)
    if plan.get("program") != fingerprint(closed):
        raise PlanError(
            "the plan was made from another program",
            expected=fingerprint(closed),
            got=plan.get("program"),
            remedy=REPLAN,
        )
    return set(plan["regions"])


def planned_choices(plan: Any) -> frozenset[str] | None:
    """Return the signatures of the candidates that a measured plan takes; None if it has none."""
    choices = plan.get("choices") if isinstance(plan, dict) else None
    return None if choices is None else frozenset(map(str, choices))
