"""Solution of one region: saturation, extraction, and the decision to take the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import repeat

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
        t, need, known = self.terms.t, self.terms.need, self.terms.known
        options, axioms = self.context.options, self.context.rules.axioms
        patterns = tuple(map(compile_lemma, self.context.rules.lemmas))
        g, to = region_graph(t, region)
        back = {g.find(ref).cls: c for c, ref in to.items()}
        leaves = {g.find(to[c]).cls: c for c in region.leaves}
        frozen = Frozen(g, {at for at, c in leaves.items() if c in known})
        tags = {at: region.tags[c] for at, c in leaves.items()}
        computed = frozenset([at for at, tag in tags.items() if tag.computed])
        inlined = frozenset([at for at, tag in tags.items() if tag.inlined])
        device = self.context.device
        models = [CostModel(device, _at(x), computed, inlined) for x in self.terms.samples]
        first = tuple(dict.fromkeys(to[c].cls for c in region.roots))
        written = original_choice(g)
        for model in models:
            model.fused = {to[c].cls for c in region.fused}
        before = [model.evaluate(g, written, first, frozen) for model in models]
        contexts = [
            RuleContext(
                g=g,
                model=model,
                numerics=options.numerics,
                uses=lambda c: need.uses.get(back[c], 1) if c in back else 1,
                frozen=frozen,
                storage=lambda c: tags[c].storage if c in tags else g.classes[c].dtype,
                pairs=Pairs.of(options.budget.pairs),
                has_frozen=bool(frozen.leaves),
                trees=self.context.kept.setdefault("trees", {}),
            )
            for model in models
        ]
        stop = ", ".join(sorted({saturate(x, axioms, patterns, options.budget) for x in contexts}))
        frozen.known.clear()
        roots = tuple(dict.fromkeys(_root(g, to[c].cls) for c in region.roots))
        for model in models:
            model.fused = {_root(g, to[c].cls) for c in region.fused}
        found = [
            extract(g, roots, *pair) for pair in zip(models, repeat(frozen), before, strict=False)
        ]
        best, crossovers = found[0], []
        if t.dim_env:
            priced = [*zip(models, before, strict=True)]
            best, crossovers = self._symbolic(g, roots, found, priced, frozen)
        log("cost", "%s (%s)", best.reason, stop)
        b, a = best.before.seconds, best.after.seconds
        gains = b > 0 and margins.pays(b, a, "told", self.context.device)
        is_short = gains and obstacle_of(best.reason) is Obstacle.COST
        changed = _changed(g, best, roots, region, to) if best.taken or is_short else []
        return Solution(
            g,
            {region.local[c]: region.in_key(c, ref) for c, ref in to.items()},
            best.choice,
            best.before,
            best.after,
            changed,
            best.reason if not best.taken and (gains or crossovers) else "",
            {k: v for ctx in contexts for k, v in ctx.refused.items()},
            stop,
            region.key.rows,
            crossovers,
        )

    def _symbolic(
        self,
        g: EGraph,
        roots: tuple[int, ...],
        found: list[Extraction],
        priced: list[tuple[CostModel, Cost]],
        frozen: Frozen,
    ) -> tuple[Extraction, list[tuple[Cost, Cost]]]:
        """Take a form only if it is cheaper for all permitted sizes; otherwise report the sizes.

        priced: at every sample, the model and the cost as written.
        """
        original, model = original_choice(g), priced[0][0]
        before = model.symbolic(g, original, roots)
        crossovers: list[tuple[Cost, Cost]] = []
        for candidate in found:
            if not candidate.taken:
                continue
            after = model.symbolic(g, candidate.choice, roots)
            gained = before.flops - after.flops, before.bytes - after.bytes
            if self.terms.narrow:
                cheaper = _pays_at_each(g, candidate.choice, roots, priced, frozen)
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


def _changed(
    g: EGraph, best: Extraction, roots: tuple[int, ...], region: Region, to: dict[int, Ref]
) -> list[int]:
    given = {_root(g, to[c].cls) for c in region.leaves}
    made = {_root(g, ref.cls): None for c, ref in to.items() if c not in region.leaves}
    # I·a = a: a computed class becomes an input
    return changed_classes(g, best.choice, roots) + [c for c in made if c in given]


def _pays_at_each(
    g: EGraph,
    choice: Choice,
    roots: tuple[int, ...],
    priced: list[tuple[CostModel, Cost]],
    frozen: Frozen,
) -> bool:
    """Return True if a form is to be taken at every sample of the sizes."""
    known = any(map(frozen, choice))
    return all(
        margins.worthwhile(before, m.evaluate(g, choice, roots, frozen), m.device, known)[0]
        for m, before in priced
    )


def _at(sample: dict[str, int]) -> Callable[[Dim], int]:
    return lambda dim: value(dim, sample)


def _root(g: EGraph, cls: int) -> int:
    while (edge := g.parent[cls]) is not None:
        cls = edge.cls
    return cls
