"""Details of a report that take time to write: made on demand, each once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.optimizer import Optimiser, Result
from symjax_rewrite.reports.bottlenecks import Bottleneck, bottlenecks, kernel_times
from symjax_rewrite.reports.crossovers import Advice, Facts, advise
from symjax_rewrite.reports.derivation import Derivations, DerivationStep
from symjax_rewrite.reports.program_cost import ProgramTerms, unpriced
from symjax_rewrite.reports.statements import Statement, Statements
from symjax_rewrite.usage_records import Change, RouteUse

MOST_STATEMENTS = 2000  # of one side


class Details:
    """Parts of a report beside prices: statements, derivations, seconds by source line.

    result: the decision. optimiser: its rules and options. sides: the terms of the program as
    written and of the emitted program; kernels are opaque. pricing: the profile that prices both.
    """

    def __init__(
        self,
        result: Result,
        optimiser: Optimiser,
        sides: tuple[ProgramTerms, ProgramTerms],
        pricing: Device,
    ) -> None:
        self.result, self.optimiser, self.sides, self.pricing = result, optimiser, sides, pricing
        self.device = optimiser.device

    @functools.cached_property
    def crossovers(self) -> list[Advice]:
        """Return the choices that symbolic sizes leave undecided, with facts that decide them."""
        given = self.optimiser.options.assume
        takes = None if self.result.near else self._takes
        found = [advise(c, given, takes) for c in self.result.crossovers]
        return list({str(c): c for c in found}.values())

    def _takes(self, facts: Facts) -> bool:
        """Return True if the optimiser takes more candidates under these facts."""
        options = self.optimiser.options
        options = dataclasses.replace(options, assume=(*options.assume, *facts))
        other = Optimiser(options, self.optimiser.rules, self.device).run(self.result.closed)
        return len(other.changes) > len(self.result.changes)

    @functools.cached_property
    def before(self) -> list[Statement]:
        """Return the program as written, in index notation."""
        return _first(self._written)

    @functools.cached_property
    def after(self) -> list[Statement]:
        """Return the emitted program in index notation; a kernel is a call by name."""
        if self.sides[1] is self.sides[0]:
            return self.before
        labels = {id(p): c.name for c in self.result.changes for p in c.parts}
        return _first(Statements(self.sides[1], labels))

    @functools.cached_property
    def _written(self) -> Statements:
        return Statements(self.sides[0], {})

    def steps(self, change: Change | RouteUse) -> list[DerivationStep]:
        """Return the derivation of a change, or of a refused form, step by step."""
        return self._derivations.steps(change)

    @functools.cached_property
    def _derivations(self) -> Derivations:
        rules = {r.name: r for r in self.optimiser.rules.rules}
        return Derivations(rules, self._written.names_of_values())

    @functools.cached_property
    def bottlenecks(self) -> list[Bottleneck]:
        """Return the source lines of the program as written with their modelled seconds."""
        return bottlenecks(kernel_times(self.sides[0], self.pricing, self.result.sample))

    @functools.cached_property
    def unpriced(self) -> dict[str, int]:
        """Return the primitives of the program as written that no model prices, with counts."""
        found = unpriced(self.sides[0], self.pricing, self.result.sample)
        return dict(Counter(e.primitive.name for e in found))

    @property
    def seconds_by_line(self) -> dict[str, float]:
        """Return the modelled seconds of the program as written, by source line."""
        return {line.where: line.seconds for line in self.bottlenecks}

    @functools.cached_property
    def lines(self) -> Sequence[str]:
        """Return the source lines of the program as written, each once, in its order."""
        return list(dict.fromkeys(e.where() for e in self.sides[0].t.program.equations))

    def title(self) -> str:
        """Return the name of the function."""
        return jax_internals.traced_name(self.result.closed) or "function"


def _first(statements: Statements) -> list[Statement]:
    return list(itertools.islice(statements.lines(), MOST_STATEMENTS))
