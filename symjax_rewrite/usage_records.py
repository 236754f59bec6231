"""What the report says of rules and routes, and what saved plans say (imports the ground layer)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from symjax_rewrite.errors import PlanError
from symjax_rewrite.jax_internals import ClosedJaxpr

REPLAN = "make the plan again, for these arguments, with .explain(...).plan"


@dataclass(slots=True)
class RuleUse:
    """A rule that was used: its property, how often, and the user's lines it was used at."""

    name: str
    property: str
    count: int
    where: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RouteUse:
    """A kernel or rule that was considered: whether it was taken, why, and where first.

    count: how many places of the program this stands for.
    """

    name: str
    taken: bool
    reason: str
    where: str = ""
    count: int = 1


def fingerprint(closed: ClosedJaxpr) -> str:
    """Return a digest of a program's text; the same in every process."""
    return hashlib.sha256(str(closed.jaxpr).encode()).hexdigest()[:16]


def planned_regions(plan: Any, closed: ClosedJaxpr) -> set[str] | None:
    """Return the digests of the rewrites that a plan permits; None where there is no plan.

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
