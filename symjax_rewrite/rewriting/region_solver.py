"""Solution of one region: saturation, extraction, and the decision to take the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from symjax_rewrite.candidates import Context, Terms
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.term_cost import Cost, CostModel
from symjax_rewrite.ir.egraph import ORIGINAL, EGraph
from symjax_rewrite.ir.sizes import Dim, value
from symjax_rewrite.ir.term import CONST, DELTA, IOTA, LEAF, Node, Ref
from symjax_rewrite.obstacles import Obstacle, obstacle_of
from symjax_rewrite.options import log
from symjax_rewrite.rewriting.contraction_order import Pairs
from symjax_rewrite.rewriting.extraction import (
    Choice,
    Extraction,
    changed_classes,
    extract,
    original_choice,
)
from symjax_rewrite.rewriting.lemma_matching import compile_lemma
from symjax_rewrite.rewriting.region_keys import Region, region_graph
from symjax_rewrite.rewriting.rule import RuleContext
from symjax_rewrite.rewriting.saturation import saturate


@dataclass(slots=True)
class Solution:
    """A region solved once, for every place of the program that has the same key.

    to: number of a class in the key to e-graph reference, over the key's slots. changed: classes
    computed by another node; none if the region stays as written whatever its surroundings.
    declined: the reason why a cheaper form does not pay by itself. rows: of the region's key.
    crossovers: costs as written and of another form, of forms that are cheaper for some sizes only.
    """

    g: EGraph
    to: dict[int, Ref]
    choice: dict[int, Node]
    before: Cost
    after: Cost
    changed: list[int]
    declined: str
    refused: dict[tuple[str, str], int]
    stop: str
    rows: tuple
    crossovers: list[tuple[Cost, Cost]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Return the name of the rewrite in plans; the rows are long, so only plans need it."""
        return hashlib.sha256(repr(self.rows).encode()).hexdigest()[:12]

    def rule_of(self, cls: int) -> str:
        """Return the rule that created the node by which a class is computed."""
        reason = self.g.classes[cls].nodes[self.choice[cls]]
        if reason != ORIGINAL:
            return reason.rule
        return next((why.rule for keep, _, why in self.g.unions if keep == cls), reason.rule)


class Frozen:
    """A predicate: a class depends on frozen arguments alone. It covers classes added later too."""

    def __init__(self, g: EGraph, leaves: set[int]) -> None:
        self.g, self.leaves = g, leaves
        self.known: dict[int, bool] = {}

    def __call__(self, cls: int) -> bool:
        if not self.leaves:
            return False
        cls = _root(self.g, cls)
        found = self.known.get(cls)
        if found is None:
            self.known[cls] = False  # a node that reads its own class does not decide
            found = any(self.node(cls, n) for n in list(self.g.classes[cls].nodes))
            self.known[cls] = found
        return found

    def node(self, cls: int, n: Node) -> bool:
        """Return True if one node of a class reads frozen values only."""
        if n.op == LEAF:
            return cls in self.leaves
        if not n.args:
            return n.op in (CONST, DELTA, IOTA)
        return all(self(a.cls) for a in n.args)


@dataclass(slots=True)
class Solver:
    """Solves regions of a program; regions with equal keys are solved once."""

    context: Context
    terms: Terms

    def solve(self, region: Region) -> Solution:
        """Return the best form of a region."""
        solved = self.context.kept.setdefault("solved", {})
        if region.key not in solved:
            solved[region.key] = self._solved(region)
        return solved[region.key]

    def _solved(self, region: Region) -> Solution:
        """Return the best form of a region; symbolic sizes are tried at every sample."""
        r = _OwnGraph(self.context, self.terms, region)
        before = r.as_written()
        stop = r.saturate()
        roots = r.roots()
        priced = [*zip(r.models, before, strict=True)]
        found = [extract(r.g, roots, model, r.frozen, cost) for model, cost in priced]
        best, crossovers = found[0], []
        if self.terms.t.dim_env:
            best, crossovers = self._symbolic(r, found, priced)
        log("cost", "%s (%s)", best.reason, stop)
        b, a = best.before.seconds, best.after.seconds
        gains = b > 0 and margins.pays(b, a, "told", self.context.device)
        is_short = gains and obstacle_of(best.reason) is Obstacle.COST
        return Solution(
            r.g,
            {region.local[c]: region.in_key(c, ref) for c, ref in r.to.items()},
            best.choice,
            best.before,
            best.after,
            r.changed(best.choice) if best.taken or is_short else [],
            best.reason if not best.taken and (gains or crossovers) else "",
            {k: v for context in r.contexts for k, v in context.refused.items()},
            stop,
            region.key.rows,
            crossovers,
        )

    def _symbolic(
        self, r: _OwnGraph, found: list[Extraction], priced: list[tuple[CostModel, Cost]]
    ) -> tuple[Extraction, list[tuple[Cost, Cost]]]:
        """Take a form only if it is cheaper for all permitted sizes; otherwise report the sizes.

        found: the best form at every sample. priced: there, the model and the cost as written.
        """
        g, roots, original, model = r.g, r.roots(), original_choice(r.g), priced[0][0]
        before = model.symbolic(g, original, roots)
        crossovers: list[tuple[Cost, Cost]] = []
        for candidate in found:
            if not candidate.taken:
                continue
            after = model.symbolic(g, candidate.choice, roots)
            gained = before.flops - after.flops, before.bytes - after.bytes
            if self.terms.narrow:
                cheaper = _pays_at_each(r, candidate.choice, priced)
            else:
                cheaper = all(map(self.context.assumptions.nonnegative, gained))
            if cheaper:
                seconds = (candidate.before.seconds, candidate.after.seconds)
                costs = (replace(before, seconds=seconds[0]), replace(after, seconds=seconds[1]))
                return Extraction(*costs, candidate.choice, True, "cheaper for all sizes"), []
            if (before, after) not in crossovers:
                crossovers.append((before, after))
        same = replace(before, seconds=found[0].before.seconds)
        reason = Obstacle.SIZES("neither form is cheaper for all sizes")
        return Extraction(same, same, original, False, reason), crossovers


class _OwnGraph:
    """A region in an e-graph of its own, with a cost model for every sample of the named sizes.

    to: for a class of the program, its reference in the e-graph.
    """

    def __init__(self, context: Context, terms: Terms, region: Region) -> None:
        self.context, self.terms, self.region = context, terms, region
        self.g, self.to = region_graph(terms.t, region)
        leaves = {self.g.find(self.to[c]).cls: c for c in region.leaves}
        self.tags = {at: region.tags[c] for at, c in leaves.items()}
        self.frozen = Frozen(self.g, {at for at, c in leaves.items() if c in terms.known})
        computed = frozenset([at for at, tag in self.tags.items() if tag.computed])
        inlined = {at: tag.inlined for at, tag in self.tags.items() if tag.inlined}
        alone = frozenset([at for at, tag in self.tags.items() if tag.alone])
        self.models = [
            CostModel(context.device, _at(sample), computed, inlined, alone)
            for sample in terms.samples
        ]
        self.contexts = list(map(self._rule_context, self.models))

    def roots(self) -> tuple[int, ...]:
        """Return the classes of the roots, in their order."""
        return tuple(dict.fromkeys(self._classes(self.region.roots)))

    def _classes(self, classes: Iterable[int]) -> list[int]:
        """Return the present classes of some classes of the program."""
        return [_root(self.g, self.to[c].cls) for c in classes]

    def _rule_context(self, model: CostModel) -> RuleContext:
        g, need, tags = self.g, self.terms.need, self.tags
        back = {g.find(ref).cls: c for c, ref in self.to.items()}
        return RuleContext(
            g=g,
            model=model,
            numerics=self.context.options.numerics,
            uses=lambda c: need.uses.get(back[c], 1) if c in back else 1,
            frozen=self.frozen,
            storage=lambda c: tags[c].storage if c in tags else g.classes[c].dtype,
            pairs=Pairs.of(self.context.options.budget.pairs),
            has_frozen=bool(self.frozen.leaves),
            trees=self.context.kept.setdefault("trees", {}),
        )

    def as_written(self) -> list[Cost]:
        """Return the cost of the region as written, at every sample."""
        self._name_fused()
        written, roots = original_choice(self.g), self.roots()
        return [model.evaluate(self.g, written, roots, self.frozen) for model in self.models]

    def _name_fused(self) -> None:
        """Tell the models which roots one elementwise term elsewhere reads."""
        for model in self.models:
            model.fused = set(self._classes(self.region.fused))

    def saturate(self) -> str:
        """Apply the rules at every sample; return the reason why they stopped."""
        rules, budget = self.context.rules, self.context.options.budget
        patterns = tuple(map(compile_lemma, rules.lemmas))
        stops = {saturate(x, rules.axioms, patterns, budget) for x in self.contexts}
        self.frozen.known.clear()
        self._name_fused()
        return ", ".join(sorted(stops))

    def changed(self, choice: Choice) -> list[int]:
        """Return the classes that a choice computes by another node than the written node."""
        leaves = self.region.leaves
        given = set(self._classes(leaves))
        made = dict.fromkeys(self._classes(c for c in self.to if c not in leaves))
        # I·a = a: a computed class becomes an input
        return changed_classes(self.g, choice, self.roots()) + [c for c in made if c in given]


def _pays_at_each(r: _OwnGraph, choice: Choice, priced: list[tuple[CostModel, Cost]]) -> bool:
    """Return True if a form is to be taken at every sample of the sizes."""
    known, roots = any(map(r.frozen, choice)), r.roots()
    return all(
        margins.worthwhile(before, m.evaluate(r.g, choice, roots, r.frozen), m.device, known)[0]
        for m, before in priced
    )


def _at(sample: dict[str, int]) -> Callable[[Dim], int]:
    return lambda dim: value(dim, sample)


def _root(g: EGraph, cls: int) -> int:
    while (edge := g.parent[cls]) is not None:
        cls = edge.cls
    return cls
