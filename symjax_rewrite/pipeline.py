"""The way through: jaxpr, terms, regions, saturation, extraction, plan (a pass over passes)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from symjax_rewrite import compat
from symjax_rewrite.canonical import TermGraph, build
from symjax_rewrite.compat import ClosedJaxpr
from symjax_rewrite.config import Options, log
from symjax_rewrite.cost import Cost, CostModel
from symjax_rewrite.device import Device
from symjax_rewrite.dims import Assumptions, Dim, Poly, value
from symjax_rewrite.egraph import EGraph
from symjax_rewrite.emit import Plan, Rewritten, emit_function
from symjax_rewrite.extract import Extraction, changed_classes, extract
from symjax_rewrite.ir import Ref
from symjax_rewrite.regions import Needed, Region, find_regions, needed, region_graph
from symjax_rewrite.report import RouteUse, RuleUse
from symjax_rewrite.rule import Context, RulePack
from symjax_rewrite.saturate import saturate
from symjax_rewrite.trace import flatten


@dataclass(slots=True)
class Solution:
    """A region solved once, for every place of the program that has the same key."""

    g: EGraph
    to: dict[int, Ref]  # region-local class number to e-graph reference
    found: Extraction
    changed: list[int]
    refused: dict[tuple[str, str], int]
    stop: str


@dataclass(slots=True)
class Result:
    """What the optimiser decided about one jaxpr."""

    closed: ClosedJaxpr
    terms: TermGraph | None = None
    plan: Plan = field(default_factory=Plan)
    saved: list[tuple[Cost, Cost]] = field(default_factory=list)
    rules: dict[str, RuleUse] = field(default_factory=dict)
    routes: list[RouteUse] = field(default_factory=list)
    crossovers: list[str] = field(default_factory=list)
    stop: str = "nothing to do"
    time_s: float = 0.0

    @property
    def taken(self) -> bool:
        """Whether anything is emitted differently."""
        return bool(self.plan.rewritten or self.plan.equations or self.plan.shared)

    def emit(self) -> Callable[..., list[Any]]:
        """A function of the flat inputs that computes what was decided."""
        if not self.taken or self.terms is None:
            return lambda *args: compat.eval_jaxpr(self.closed, *args)
        return emit_function(self.terms, self.plan)


class Optimiser:
    """Optimises jaxprs under one set of options; solved regions are kept and reused."""

    def __init__(self, options: Options, rules: RulePack, device: Device) -> None:
        self.options, self.rules, self.device = options, rules, device
        self.assumptions = Assumptions(options.assume)
        self.solved: dict[tuple, Solution] = {}

    def run(self, closed: ClosedJaxpr, frozen: frozenset[int] = frozenset()) -> Result:
        """Decide what to emit for a jaxpr; `frozen` are numbers of inputs known beforehand."""
        start = time.perf_counter()
        result = Result(closed)
        count = len(closed.jaxpr.eqns)
        if count > self.options.budget.equations:
            result.stop = f"{count} equations exceed the budget of {self.options.budget.equations}"
        elif count:
            self._optimise(result, frozen)
        result.time_s = time.perf_counter() - start
        return result

    def _optimise(self, result: Result, frozen: frozenset[int]) -> None:
        t = result.terms = build(flatten(result.closed))
        need = needed(t)
        known = _frozen_classes(t, need, frozen)
        tag = lambda c: (c in known, _storage(t, c))  # noqa: E731
        stops = set()
        for region in find_regions(t, need, tag):
            key = region.key
            solution = self.solved.get(key)
            if solution is None:
                solution = self.solved[key] = self._solve(t, need, region, known)
            stops.add(solution.stop)
            self._apply(result, t, region, solution)
        result.stop = ", ".join(sorted(stops)) or "nothing to do"

    def _solve(self, t: TermGraph, need: Needed, region: Region, known: set[int]) -> Solution:
        g, to = region_graph(t, region)
        back = {g.find(ref).cls: c for c, ref in to.items()}
        uses = {r: need.uses.get(c, 1) for r, c in back.items()}
        frozen = {r for r, c in back.items() if c in known}
        storage = {r: _storage(t, c) for r, c in back.items()}
        roots = tuple(to[c].cls for c in region.roots)
        local = {region.local[c]: ref for c, ref in to.items()}
        model = CostModel(self.device, lambda d: value(d, {}))
        ctx = Context(
            g,
            model,
            self.options.numerics,
            lambda c: uses.get(c, 1),
            lambda c: c in frozen,
            lambda c: storage.get(c, ""),
            self.options.budget.pairs,
        )
        stop = saturate(ctx, self.rules.axioms, self.options.budget)
        roots = tuple(g.find(Ref(r, ())).cls if not g.classes[r].sizes else _root(g, r) for r in roots)
        found = extract(g, roots, model, lambda c: False)
        changed = changed_classes(g, found.choice, roots) if found.taken else []
        log("cost", "%s (%s)", found.reason, stop)
        return Solution(g, local, found, changed, ctx.refused, stop)

    def _apply(self, result: Result, t: TermGraph, region: Region, s: Solution) -> None:
        numbered = {n: c for c, n in region.local.items()}
        where = _where(t, region)
        for (rule, reason), _ in s.refused.items():
            result.routes.append(RouteUse(rule, False, reason, where))
        if not s.changed:
            if s.found.before.seconds > s.found.after.seconds * 1.02:
                result.routes.append(RouteUse("rewrite", False, s.found.reason, where))
            return
        origin: dict[int, Ref] = {}
        for number, ref in s.to.items():
            ref = s.g.find(ref)
            program = numbered[number]
            slot = {i: k for k, i in enumerate(ref.axes)}
            if len(slot) == len(s.g.classes[ref.cls].sizes) == len(t.graph.classes[program].sizes):
                axes = tuple(ref.axes)
                origin.setdefault(ref.cls, Ref(program, axes))
        solution = Rewritten(s.g, s.found.choice, region.leaves, origin, scope=_scope(t, region))
        changed = set(s.changed)
        affected = _affected(s, changed)
        for number, ref in s.to.items():
            ref = s.g.find(ref)
            if ref.cls in affected:
                result.plan.rewritten[numbered[number]] = (solution, ref)
        result.saved.append((s.found.before, s.found.after))
        for c in s.changed:
            reason = s.g.classes[c].nodes[s.found.choice[c]]
            self._count(result, reason.rule, where)

    def _count(self, result: Result, name: str, where: str) -> None:
        use = result.rules.get(name)
        if use is None:
            rule = next((r for r in self.rules.rules if r.name == name), None)
            use = result.rules[name] = RuleUse(name, rule.property if rule else "", 0)
        if where not in use.where:
            use.where.append(where)
            use.count += 1


def _root(g: EGraph, r: int) -> int:
    return g.find(Ref(r, tuple(range(len(g.classes[r].sizes))))).cls


def _affected(s: Solution, changed: set[int]) -> set[int]:
    """Classes whose value now comes from a changed node: themselves changed."""
    return changed


def _where(t: TermGraph, region: Region) -> str:
    eqn = _scope(t, region)
    return compat.source_line(eqn) if eqn is not None else "<unknown>"


def _scope(t: TermGraph, region: Region) -> Any:
    for c in reversed(region.roots):
        if c in t.made_by:
            return t.program.equations[t.made_by[c][0]].eqn
    return None


def _frozen_classes(t: TermGraph, need: Needed, frozen: frozenset[int]) -> set[int]:
    """Classes that depend on frozen inputs and constants alone."""
    if not frozen:
        return set()
    known: set[int] = set()
    inputs = {t.program.inputs[k] for k in frozen} | set(t.program.consts)
    for c in need.order:
        node = next(iter(t.graph.classes[c].nodes))
        if node.op == "leaf":
            if t.leaf_value[c] in inputs:
                known.add(c)
        elif node.args and all(a.cls in known for a in node.args):
            known.add(c)
    return known


def _storage(t: TermGraph, cls: int) -> str:
    """How the weights behind an elementwise chain are stored: their narrowest dtype."""
    node = next(iter(t.graph.classes[cls].nodes))
    while node.op in ("map", "add") and len(node.args) == 1:
        cls = node.args[0].cls
        node = next(iter(t.graph.classes[cls].nodes))
    return t.graph.classes[cls].dtype


def symbolic_names(sizes: tuple[Dim, ...]) -> set[str]:
    """Names of sizes among dims."""
    return {n for s in sizes if isinstance(s, Poly) for n in s.variables()}


