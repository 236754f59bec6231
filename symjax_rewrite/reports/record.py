"""The record of one decision: both programs with their prices, and every candidate considered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.usage_records import Change, RouteUse, RuleUse

if TYPE_CHECKING:
    from symjax_rewrite.reports.details import Details


@dataclass(slots=True)
class Side:
    """One form of the program and its modelled cost; a field is None if it has no price.

    flops: of contractions, 2mnk. bytes: read and written by all kernels. seconds: by the device
    model. peak_bytes: largest total of live values. largest_intermediate: bytes of the largest
    intermediate value. launches: kernels. Loops are multiplied by their trip counts; a trip count
    that depends on data has no price. A kernel is priced by its own model. make: returns the jaxpr.
    """

    flops: Any
    bytes: Any
    seconds: float | None
    peak_bytes: float | None
    largest_intermediate: float | None
    launches: float | None
    make: Callable[[], ClosedJaxpr] = field(repr=False)

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """Return the program; it is emitted on first use."""
        return self.make()


@dataclass(slots=True, repr=False)
class Record:
    """The data of a report.

    before, after: the program as written and as emitted. rules: the rules that were used. routes:
    kernels and rules that were considered, one entry for each name and reason. stop: the reason why
    saturation ended. time_s: seconds the optimiser took. function: the name of the program. device:
    the profile by which programs are priced. changes: the candidates that were taken, with the
    seconds of their part of the program. passes: seconds by pass. sample: the numbers at which
    named sizes were priced in seconds. details: source lines, index notation and derivations, made
    on demand.
    """

    before: Side
    after: Side
    rules: list[RuleUse]
    routes: list[RouteUse]
    stop: str
    time_s: float
    function: str
    device: str
    changes: list[Change]
    passes: dict[str, float]
    sample: dict[str, int]
    details: Details

    @property
    def best_alternative(self) -> RouteUse | None:
        """Return the refused candidate with the highest predicted ratio, if any was compared."""
        refused = [r for r in self.routes if not r.taken and r.ratio is not None]
        return max(refused, key=lambda r: r.ratio or 0.0, default=None)

    @property
    def plan(self) -> dict[str, Any]:
        """Return the value of `plan=` that reproduces the program."""
        return self.details.result.plan_record()

    @property
    def crossovers(self) -> list[str]:
        """Return, for symbolic sizes, the sizes at which the cheaper form changes."""
        return [str(c) for c in self.details.crossovers]

    @property
    def changed(self) -> bool:
        """Return True if the emitted program differs from the program as written."""
        return bool(self.changes)
