"""What the report says of rules and routes; passes write it (imports nothing)."""

from __future__ import annotations

from dataclasses import dataclass, field


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
