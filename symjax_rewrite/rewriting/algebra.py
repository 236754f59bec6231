"""Algebra: rewriting of regions of index terms to the cheapest form that the rules derive."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from symjax_rewrite.candidates import Candidate, Context, Found, Refusal, Stopped, Terms
from symjax_rewrite.candidates import Crossover as FoundCrossover
from symjax_rewrite.codegen.emission import RegionForm, TermPart
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.term import LEAF, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.region_keys import Key, LeafTag, Region
from symjax_rewrite.rewriting.region_partition import (
    find_regions,
    inlined_operations,
    is_inlined,
)
from symjax_rewrite.rewriting.region_solver import Solution, Solver
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, DISTRIBUTIVITY, SEPARABILITY
from symjax_rewrite.rewriting.search_bounds import (
    Ordered,
    least_seconds,
    nearest,
    products_seconds,
    savings_bound,
)
from symjax_rewrite.text_tables import NOT_SEARCHED
from symjax_rewrite.usage_records import ratio_of

REORDERING = frozenset({ASSOCIATIVITY, DISTRIBUTIVITY, SEPARABILITY})


class Algebra:
    """Solves every region of a program; equal regions are solved once."""

    name = "algebra"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the regions that have a cheaper form."""
        terms = context.terms(program)
        t = terms.t
        regions = _regions(terms, bool(context.frozen))
        hopeless = _hopeless(program, context)
        for region in {r.key: r for r in regions if r.key in hopeless}.values():
            yield Refusal("search", hopeless[region.key], _where(t, region))
        solver = Solver(context, terms)
        for region in regions:
            if region.key in hopeless:
                continue
            context.check_clock()
            solution = solver.solve(region)
            yield Stopped(solution.stop)
            if context.allowed is None or solution.digest in context.allowed:
                yield from _found(context, terms, region, solution)


def giving_way_to_rules(
    found: Sequence[Found], program: Program, context: Context
) -> Iterator[Found]:
    """Yield candidates and refusals of a pass; refuse candidates where the rules save as much.

    The savings of the rules in a region are compared with the sum of its candidates' savings. The
    rules run later.
    """
    priced = [f for f in found if isinstance(f, Candidate) and f.saved_s > 0]
    made = {id(f): {v for p in f.parts for v in p.gives} | f.hidden for f in priced}
    refused: set[int] = set()
    for values, saved_s in _saved_by_rules(program, context, set().union(*made.values())):
        inside = [f for f in priced if values & made[id(f)]]
        if saved_s >= sum(f.saved_s for f in inside):
            refused.update(map(id, inside))
    reason = Obstacle.CONFLICT("the rules save as much")
    for f in found:
        if id(f) in refused and isinstance(f, Candidate):
            f = Refusal(f.name, reason, f.where, f.count, f.ratio)
        yield f


def _saved_by_rules(
    program: Program, context: Context, values: set[int]
) -> Iterator[tuple[set[int], float]]:
    """Yield, by region that computes some of the values, these and the seconds saved there."""
    terms = context.terms(program)
    t = terms.t
    if context.allowed is not None or not context.rules.rules or not values:
        return
    by_class: dict[int, set[int]] = {}
    for v in values:
        if v < len(t.views) and (view := t.views[v]) is not None:  # later ones link parts
            by_class.setdefault(view.cls, set()).add(v)
    solver, hopeless = Solver(context, terms), _hopeless(program, context)
    for region in _regions(terms, bool(context.frozen)):
        inside = by_class.keys() & set(region.classes)
        solution = solver.solve(region) if inside and region.key not in hopeless else None
        if solution is not None and solution.changed and not solution.declined:
            computed = set().union(*(by_class[c] for c in inside))
            yield computed, solution.before.seconds - solution.after.seconds


def _regions(terms: Terms, frozen: bool) -> list[Region]:
    """Return the regions of a program; they are found once."""
    if "regions" not in terms.kept:
        t, known = terms.t, terms.known

        def tag(c: int) -> LeafTag:
            computed = node_of(t.graph, c).op != LEAF
            inlined = inlined_operations(t.graph, terms.need, c)
            alone = is_inlined(t.graph, terms.need, c)
            return LeafTag(c in known, storage(t, c), computed, inlined, alone)

        part_of = lambda classes: nearest(t.graph, classes, terms.model)  # noqa: E731
        terms.kept["regions"] = find_regions(t, terms.need, tag, frozen, part_of)
    return terms.kept["regions"]


def _hopeless(program: Program, context: Context) -> dict[Key, str]:
    """Return the regions that are not worth a search, with reasons; they are found once.

    The savings of such a region are too small a share of the program, or its products are in their
    best order with nothing else to save. Small regions of a program that has few are worth a search
    in any case.
    """
    terms = context.terms(program)
    if context.allowed is not None or terms.known:
        return {}
    if "hopeless" not in terms.kept:
        regions = _regions(terms, bool(context.frozen))
        whole_s = functools.partial(context.program_seconds, program)
        terms.kept["hopeless"] = _without_savings(terms, regions, whole_s)
    return terms.kept["hopeless"]


def _without_savings(
    terms: Terms, regions: list[Region], whole_s: Callable[[], float]
) -> dict[Key, str]:
    t, model, device = terms.t, terms.model, terms.model.device
    g, search = t.graph, device.search
    places = Counter(r.key for r in regions)
    reasons: dict[Key, str] = {}
    ordered: Ordered = {}
    least_whole_s = products_seconds(g, terms.need.order, model)
    little = Obstacle.SHARE(f"{NOT_SEARCHED}{margins.little(device)}")
    for key, region in {r.key: r for r in regions}.items():
        if len(places) < search.few_regions and len(region.classes) <= search.small_region:
            continue
        choice = {c: node_of(g, c) for c in region.local}
        leaves = set(region.leaves)
        cost = model.evaluate(g, choice, tuple(region.roots), leaves.__contains__)
        saved_s = places[key] * savings_bound(cost, g, region, model)
        if not margins.gains_share(saved_s, least_whole_s, "program", device):
            reasons[key] = little
            continue
        if not t.dim_env and _is_in_best_order(terms, region, cost, ordered):
            reasons[key] = Obstacle.SHARE(f"{NOT_SEARCHED}the order of products is the best")
        elif not margins.gains_share(saved_s, whole_s(), "program", device):
            reasons[key] = little
    return reasons


def _is_in_best_order(terms: Terms, region: Region, cost: Cost, ordered: Ordered) -> bool:
    """Return True if no form of a region pays by the order of its products.

    cost: of the region as written. ordered: products whose best order is known.
    """
    for by_factors in (False, True):
        least = least_seconds(terms.t.graph, region, terms.model, ordered, by_factors)
        if least is None:
            return False
        if not margins.pays(cost.seconds, least, "dominating", terms.model.device):
            return True
    return False


def _found(
    context: Context, terms: Terms, region: Region, s: Solution
) -> Iterator[Candidate | Refusal | FoundCrossover]:
    t = terms.t
    where = _where(t, region)
    for rule, reason in s.refused:
        yield Refusal(rule, reason, where)
    yield from (FoundCrossover(*costs) for costs in s.crossovers)
    if not s.changed:
        if s.declined:
            ratio = None if s.crossovers else ratio_of(s.before.seconds, s.after.seconds)
            yield Refusal("rewrite", s.declined, where, ratio=ratio)
        return
    names = list(dict.fromkeys(s.rule_of(c) for c in s.changed))
    digest = s.digest
    if _may_overflow(context, t, region, names):
        reason = Obstacle.RANGE("float16 may overflow: numerics='finite' permits it")
        yield Refusal("rewrite", reason, where)
        return
    properties = {r.name: r.property for r in context.rules.rules}
    yield Candidate(
        "rewrite",
        (_part(context, t, region, s),),
        where,
        rules=tuple((n, properties.get(n, "")) for n in names),
        before=s.before,
        after=s.after,
        key=digest,
        group=digest,
        share=not terms.known,
        leaves_copies=True,
        short=s.declined,
    )


def _part(context: Context, t: TermGraph, region: Region, s: Solution) -> TermPart:
    origin: dict[int, Ref] = {}
    refs = {c: s.to[number].over(region.slots[c]) for c, number in region.local.items()}
    for program, ref in refs.items():
        ref = s.g.find(ref)
        widths = (len(set(ref.axes)), len(s.g.classes[ref.cls].sizes))
        if widths == (len(t.graph.classes[program].sizes),) * 2:
            origin.setdefault(ref.cls, Ref(program, ref.axes))
    leaves = [Ref(c, refs[c].axes) for c in region.leaves]
    form = RegionForm(s.g, s.choice, leaves, origin, scope=_scope(t, region))
    changed = set(s.changed)
    inner: set[int] = set()  # changed classes that no value holds: steps within an equation
    forms: dict[int, tuple[RegionForm, Ref]] = {}
    for c, ref in refs.items():
        ref = s.g.find(ref)
        reads_inner = any(a.cls in inner for a in node_of(t.graph, c).args)
        if (ref.cls in changed or reads_inner) and c not in region.leaves:
            forms[c] = (form, ref)
            if c not in t.made_by:
                inner.add(c)
    return TermPart(t, forms=forms, across=context.device.slow_across)


def _may_overflow(context: Context, t: TermGraph, region: Region, names: Iterable[str]) -> bool:
    """Return True if float16, whose maximum is 65504, is summed or multiplied in another order."""
    if context.options.numerics.permits("finite"):
        return False
    if not any(t.graph.classes[c].dtype == "float16" for c in region.classes):
        return False
    return any(r.property in REORDERING for r in context.rules.rules if r.name in names)


def _where(t: TermGraph, region: Region) -> str:
    made = (t.where(c) for c in (*reversed(region.roots), *reversed(region.classes)))
    return next(filter(None, made), "<unknown>")


def _scope(t: TermGraph, region: Region) -> JaxprEqn | None:
    makers = map(t.maker_of, (*reversed(region.roots), *reversed(region.classes)))
    return next((e.eqn for e in makers if e is not None), None)


def storage(t: TermGraph, cls: int) -> str:
    """Return the dtype that the weights behind an elementwise chain are stored in."""
    node = node_of(t.graph, cls)
    while node.op in ("map", "add") and len(node.args) == 1:
        cls = node.args[0].cls
        node = node_of(t.graph, cls)
    return t.graph.classes[cls].dtype
