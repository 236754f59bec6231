"""The way through: jaxpr, terms, regions, saturation, extraction, plan (a pass over passes)."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from symjax_rewrite import jax_internals
from symjax_rewrite.codegen.emission import Plan, Rewritten, emit_function
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost, CostModel
from symjax_rewrite.errors import PlanError
from symjax_rewrite.ir.dataflow import Needed, needed, node_of
from symjax_rewrite.ir.flat_program import Program, flatten
from symjax_rewrite.ir.sizes import Assumptions, value
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.kernel_selection.conflicts import take
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.loop_optimizer import (
    Loops,
    differentiated_trees,
    has_loops,
    improve_loops,
    rewritten,
)
from symjax_rewrite.options import Options, log
from symjax_rewrite.rewriting.contraction_order import Tree
from symjax_rewrite.rewriting.extraction import DOMINATING_GAIN
from symjax_rewrite.rewriting.lemma_matching import compile_lemma
from symjax_rewrite.rewriting.region_partition import Key, Region, find_regions
from symjax_rewrite.rewriting.region_solver import Solution, Solver, symbolic_names
from symjax_rewrite.rewriting.repeated_products import spread_products
from symjax_rewrite.rewriting.rule import (
    ASSOCIATIVITY,
    COMMON,
    DISTRIBUTIVITY,
    FUSION,
    REDUNDANCY,
    REPEATED,
    SEPARABILITY,
    RulePack,
)
from symjax_rewrite.rewriting.search_bounds import least_seconds
from symjax_rewrite.usage_records import RouteUse, RuleUse

FEW_REGIONS = 4  # so few regions are solved whatever they weigh
MANY_REGIONS = 8  # so many are worth pricing the whole program for
REORDERING = frozenset({ASSOCIATIVITY, DISTRIBUTIVITY, SEPARABILITY})
CHOOSERS = frozenset({"max", "min", "reduce_max", "reduce_min"})  # differentiated by comparing
MOVES = frozenset({"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose"})
MIN_SHARE = 0.01  # of the program's modelled time: rewrites that gain less are left


@dataclass(slots=True)
class Result:
    """What the optimiser decided about one jaxpr.

    saved: costs of every rewritten region, before and after. bodies: results of loop and branch
    bodies, with how often they run. sample: the sizes symbolic names were priced at. known:
    classes that depend on frozen inputs alone. made: values the emitted program has made.
    repeated_s: seconds of work repeated for copies of an operand, which no term counts.
    has_gradients: whether a loop that stays has a kernel where it is differentiated.
    """

    closed: ClosedJaxpr
    terms: TermGraph | None = None
    plan: Plan = field(default_factory=Plan)
    saved: list[tuple[Cost, Cost]] = field(default_factory=list)
    bodies: list[tuple[Result, int]] = field(default_factory=list)
    rules: dict[str, RuleUse] = field(default_factory=dict)
    routes: list[RouteUse] = field(default_factory=list)
    crossovers: list[str] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)
    sample: dict[str, int] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    repeated_s: float = 0.0
    has_gradients: bool = False
    stop: str = "nothing to do"
    time_s: float = 0.0

    @property
    def taken(self) -> bool:
        """Whether anything is emitted differently."""
        plan = self.plan
        if plan.rewritten or plan.equations or plan.shared or plan.routed or plan.spread:
            return True
        return self.terms is not None and self.terms.program.closed is not self.closed

    @property
    def symbolic(self) -> bool:
        """Whether some size is a name."""
        return bool(self.terms is not None and self.terms.dim_env)

    def emit(self) -> Callable[..., list[Any]]:
        """A function of the flat inputs that computes what was decided."""
        if not self.taken or self.terms is None:
            return lambda *args: jax_internals.eval_jaxpr(self.closed, *args)
        return emit_function(self.terms, self.plan, self.made)

    @property
    def spares(self) -> bool:
        """Whether some equation of the program is not among those emitted."""
        assert self.terms is not None
        equations = self.terms.program.equations if self.taken else ()
        return any(not any(v in self.made for v in e.outvals) for e in equations)

    def spared(self) -> Callable[[str, tuple[tuple, ...]], bool]:
        """Whether the emitted program is spared what a primitive makes of operands of some kinds.

        So it is for an equation whose results it does not make, and for whatever differentiation
        adds that reads arrays of a shape of which it makes none. A maximum whose derivative asks
        which operand it equals is not kept either where these are made again, rounded otherwise.
        """
        assert self.terms is not None
        program = self.terms.program
        keys: dict[bool, set[tuple]] = {True: set(), False: set()}
        shapes: dict[bool, set[Any]] = {True: set(), False: set()}
        shapes[True].update(jax_internals.kind_of(program.avals[v])[0] for v in program.inputs)
        there = {*self.made, *program.inputs, *program.consts}
        kind_of = lambda name, kinds: (name, *(kinds[:1] if name == "sort" else kinds))  # noqa: E731
        moving, compared = program.moving(), set()  # kinds of maxima that are made again
        for e in program.equations:
            made = any(v in self.made for v in e.outvals)
            shapes[made].update(jax_internals.kind_of(v.aval)[0] for v in e.eqn.outvars)
            if (
                e.name in CHOOSERS
                and e.outvals[0] in moving
                and not there.issuperset(v for v in e.invals if isinstance(v, int))
            ):
                made = False
                compared.add(jax_internals.kind_of(e.eqn.outvars[0].aval))
            keys[made].add(kind_of(e.name, [jax_internals.kind_of(v.aval) for v in e.eqn.invars]))
        unmade = shapes[False] - shapes[True]

        def spared(name: str, operands: tuple[tuple, ...]) -> bool:
            key = kind_of(name, operands)  # a sort's derivative carries the places along
            if name in MOVES and operands[0] in compared:
                return True
            if key in keys[False] or key in keys[True]:
                return key in keys[False]
            return any(kind[0] in unmade for kind in operands)

        return spared

    def plan_record(self) -> dict[str, Any]:
        """What to pass as `plan=` to get the same program again."""
        return {"format": 1, "program": fingerprint(self.closed), "regions": sorted(self.regions)}

    def declined(self, name: str, reason: str, where: str) -> None:
        """Note something that was considered and not done, once per reason."""
        for use in self.routes:
            if (use.name, use.taken, use.reason) == (name, False, reason):
                use.count += 1
                return
        self.routes.append(RouteUse(name, False, reason, where))

    def absorb(self, body: Result) -> None:
        """Take over the record of a body that was rewritten."""
        self.routes.extend(body.routes)
        self.crossovers.extend(body.crossovers)
        self.regions.extend(body.regions)
        for name, use in body.rules.items():
            mine = self.rules.setdefault(name, RuleUse(name, use.property, 0))
            mine.where.extend(w for w in use.where if w not in mine.where)
            mine.count += use.count


def fingerprint(closed: ClosedJaxpr) -> str:
    """A digest of a program's text; the same in every process."""
    return hashlib.sha256(str(closed.jaxpr).encode()).hexdigest()[:16]


class Router(Protocol):
    """Finds what a kernel should compute."""

    def find(self, t: TermGraph, need: Needed) -> tuple[list[Any], list[RouteUse]]:
        """The kernels to route to, and what was considered."""
        ...


class LoopRouter(Protocol):
    """Finds a kernel that should run a loop."""

    def route_loop(self, loop: Loop, device: str, gradient: bool = False) -> tuple[Any, str]:
        """A kernel for a loop on a device, or None, and why; `gradient`: to be differentiated."""
        ...


class Settler(Protocol):
    """Finds what to compute another way after the rules, in what they left as written."""

    def find(self, t: TermGraph, need: Needed, plan: Plan) -> tuple[list[Any], list[RouteUse]]:
        """What to route, and what was considered."""
        ...


class Optimiser:
    """Optimises jaxprs under one set of options; solved regions are kept and reused."""

    def __init__(
        self,
        options: Options,
        rules: RulePack,
        device: Device,
        routers: tuple[Router, ...] = (),
        settlers: tuple[Settler, ...] = (),
        loop_router: LoopRouter | None = None,
    ) -> None:
        self.settlers, self.loop_router = settlers, loop_router
        self.options, self.rules, self.device, self.routers = options, rules, device, routers
        self.assumptions = Assumptions(options.assume)
        self.patterns = tuple(compile_lemma(x) for x in rules.lemmas)
        self.solved: dict[Key, Solution] = {}
        self.trees: dict[tuple, Tree] = {}

    def run(self, closed: ClosedJaxpr, frozen: frozenset[int] = frozenset()) -> Result:
        """Decide what to emit for a jaxpr; `frozen` are numbers of inputs known beforehand.

        Raises:
            PlanError: a plan was given that is malformed or made from another program.
        """
        start = time.perf_counter()
        allowed = self._allowed(closed)
        with _no_collection():
            result = self._run(closed, frozen, allowed, start)
        if allowed is not None and not allowed <= set(result.regions):
            raise PlanError(
                "the plan names rewrites that this program and version do not have",
                got=", ".join(sorted(allowed - set(result.regions))),
                remedy="make the plan again with .explain(...).plan",
            )
        result.time_s = time.perf_counter() - start
        return result

    def _allowed(self, closed: ClosedJaxpr) -> set[str] | None:
        plan = self.options.plan
        if plan is None:
            return None
        if not isinstance(plan, dict) or plan.get("format") != 1 or "regions" not in plan:
            raise PlanError("not a plan", expected="report.plan", got=repr(plan)[:80])
        if plan.get("program") != fingerprint(closed):
            raise PlanError(
                "the plan was made from another program",
                expected=fingerprint(closed),
                got=plan.get("program"),
            )
        return set(plan["regions"])

    def _run(
        self, closed: ClosedJaxpr, frozen: frozenset[int], allowed: set[str] | None, start: float
    ) -> Result:
        result = Result(closed, plan=Plan(across=self.device.slow_across))
        count = len(closed.jaxpr.eqns)
        budget = self.options.budget
        if not count:
            return result
        if count > budget.equations:
            result.stop = f"{count} equations exceed the budget of {budget.equations}"
            return result
        t = build(self._loops(result, allowed, start))
        result.terms = t
        need = needed(t)
        known = result.known = _frozen_classes(t, need, frozen)
        self._route(result, t, need)
        stops = set()
        solver = self._solver(t, result)
        found: list[tuple[Region, Solution]] = []
        tag = lambda c: (c in known, storage(t, c))  # noqa: E731
        regions = find_regions(t, need, tag, bool(frozen))
        hopeless = set() if allowed is not None else self._hopeless(result, t, need, regions)
        for region in regions:
            if region.key in hopeless:
                continue
            if time.perf_counter() - start > budget.seconds:
                return Result(closed, t, stop=f"the clock of {budget.seconds} s ran out")
            solution = self.solved.get(region.key)
            if solution is None:
                solution = solver.solve(t, need, region, known)
                self.solved[region.key] = solution
            stops.add(solution.stop)
            if allowed is not None and solution.digest not in allowed:
                continue
            if not any(c in result.plan.routed for c in region.local):
                found.append((region, solution))
        self._apply_all(result, t, need, found)
        self._take(result, t, (s.find(t, need, result.plan) for s in self.settlers))
        passes = self.rules.passes
        if REPEATED in passes and (allowed is None or REPEATED in allowed):
            self._narrow(result, t, need)
        self._bodies(result, t, allowed, start)
        if COMMON in passes and self.options.numerics.permits("reassoc"):
            result.plan.shared = _shared(t, need)  # written as a term it may be rounded otherwise
        for c in result.plan.shared:
            self._note(result, COMMON, REDUNDANCY, t.where(c))
        result.stop = ", ".join(sorted(stops)) or "nothing to do"
        return result

    def _loops(self, result: Result, allowed: set[str] | None, start: float) -> Program:
        """The flat program, with its loops in their cheapest form."""
        program = flatten(result.closed)
        if not has_loops(program):
            return program

        def optimise(body: ClosedJaxpr) -> ClosedJaxpr | None:
            found = self._run(body, frozenset(), allowed, start)
            return (
                jax_internals.make_avals_jaxpr(found.emit(), body.in_avals) if found.taken else None
            )

        live = flatten(jax_internals.without_dead(result.closed))
        reorders = self.options.numerics.permits("reassoc")
        router, device = self.loop_router, self.device

        def find(loop: Loop) -> tuple[Any, str]:
            assert router is not None
            kernel, why = router.route_loop(loop, device.name)
            if kernel is None and router.route_loop(loop, device.name, gradient=True)[0]:
                result.has_gradients = True
            return kernel, why

        route = None if router is None else find
        passes = self.rules.passes
        trees = differentiated_trees(program, device, reorders) if FUSION in passes else Loops()
        if trees.changes:
            program = live = flatten(jax_internals.without_dead(rewritten(program, trees.changes)))
        loops = improve_loops(live, device, reorders, passes, optimise, route)
        for reason, eqn in loops.refused:
            result.declined("loop", reason, jax_internals.source_line(eqn))
        for taken, reason, eqn in trees.routes + loops.routes:
            result.routes.append(RouteUse("scan", taken, reason, jax_internals.source_line(eqn)))
        for change in trees.changes + loops.changes:
            for name in change.names:
                self._note(result, name, REDUNDANCY, jax_internals.source_line(change.eqn))
        return flatten(rewritten(live, loops.changes)) if loops.changes else program

    def _route(self, result: Result, t: TermGraph, need: Needed) -> None:
        need.known = frozenset(result.known)
        self._take(result, t, (router.find(t, need) for router in self.routers))

    @staticmethod
    def _take(
        result: Result, t: TermGraph, found: Iterable[tuple[list[Any], list[RouteUse]]]
    ) -> None:
        """Take the routes that stand together with those taken before."""
        for routes, uses in found:
            result.routes.extend(uses)
            dropped = take(t, result.plan.routed, routes)
            if dropped and uses:
                for use in uses:
                    use.taken = use.taken and dropped < len(routes)
                result.declined(
                    uses[0].name, "another kernel computes, hides or waits for what it needs", ""
                )

    def _apply_all(
        self, result: Result, t: TermGraph, need: Needed, found: list[tuple[Region, Solution]]
    ) -> None:
        """Apply what gains; what would gain next to nothing of the whole program stays."""
        least = 0.0
        if any(s.changed for _, s in found):
            model = CostModel(self.device, lambda d: value(d, result.sample))
            least = MIN_SHARE * self._program_seconds(result, t, need, model)
        gains: dict[str, float] = {}
        for _, s in found:
            gain = s.before.seconds - s.after.seconds
            gains[s.digest] = gains.get(s.digest, 0.0) + gain
        for region, s in found:
            small = bool(s.changed) and gains[s.digest] < least and not result.known
            self._apply(result, t, region, s, small)

    def _narrow(self, result: Result, t: TermGraph, need: Needed) -> None:
        """Compute once what equations compute for every copy of an operand."""
        if not self.options.numerics.permits("reassoc"):
            return
        plan = result.plan
        model = CostModel(self.device, lambda d: value(d, result.sample))
        found = spread_products(t, need, model)
        if not found:
            return
        least = MIN_SHARE * self._program_seconds(result, t, need, model)
        other = plan.routed.keys() | plan.rewritten.keys()
        for cls, saved in found:
            read = cls in need.outside or any(u not in other for u in need.users.get(cls, ()))
            if saved > least and read and cls not in other:
                plan.spread.add(cls)
                result.repeated_s += saved
                self._note(result, REPEATED, REDUNDANCY, t.where(cls))
        if plan.spread:
            result.regions.append(REPEATED)

    def _hopeless(
        self, result: Result, t: TermGraph, need: Needed, regions: list[Region]
    ) -> set[Key]:
        """Keys of regions that are not worth a search, of a program that has many.

        They are too little of the program, or one product with nothing beside it to save.
        """
        places = Counter(r.key for r in regions)
        if len(places) < FEW_REGIONS or result.known:
            return set()
        g = t.graph
        model = CostModel(self.device, lambda d: value(d, result.sample))
        seconds: dict[Key, float] = {}
        single: set[Key] = set()
        distinct = {r.key: r for r in regions}
        for key, region in distinct.items():
            choice = {c: node_of(g, c) for c in region.local}
            leaves = set(region.leaves)
            cost = model.evaluate(g, choice, tuple(region.roots), leaves.__contains__)
            seconds[key] = places[key] * cost.seconds
            least = None if t.dim_env else least_seconds(g, region, model)
            if least is not None and cost.seconds < DOMINATING_GAIN * least:
                single.add(key)
        products = sum(model.product_seconds(g, c, node_of(g, c)) for c in need.order)
        small = {key for key, s in seconds.items() if s < MIN_SHARE * products}
        if len(places) - len(small | single) > MANY_REGIONS:  # the rest may take longer
            total = self._program_seconds(result, t, need, model)
            small = {key for key, s in seconds.items() if s < MIN_SHARE * total}
        for key, region in distinct.items():
            if key in small:
                result.declined("search", "less than 1 % of the program's time", _where(t, region))
            elif key in single:
                result.declined("search", "one product and little beside it", _where(t, region))
        return small | single

    @staticmethod
    def _program_seconds(result: Result, t: TermGraph, need: Needed, model: CostModel) -> float:
        known = result.known
        choice = {c: node_of(t.graph, c) for c in need.order}
        roots = tuple(sorted(need.outside))
        return model.evaluate(t.graph, choice, roots, lambda c: c in known).seconds

    def _solver(self, t: TermGraph, result: Result) -> Solver:
        samples = self.assumptions.samples(symbolic_names(t)) if t.dim_env else [{}]
        result.sample = samples[0]
        return Solver(
            self.options,
            self.rules.axioms,
            self.patterns,
            self.device,
            self.assumptions,
            samples,
            self.trees,
        )

    def _apply(
        self, result: Result, t: TermGraph, region: Region, s: Solution, small: bool
    ) -> None:
        numbered = {n: c for c, n in region.local.items()}
        where = _where(t, region)
        for rule, reason in s.refused:
            result.declined(rule, reason, where)
        result.crossovers.extend(c for c in s.crossovers if c not in result.crossovers)
        if small or not s.changed:
            declined = "gains less than 1 % of the program" if small else s.declined
            if declined:
                result.declined("rewrite", declined, where)
            return
        names = dict.fromkeys(s.rule_of(c) for c in s.changed)
        if self._may_overflow(t, region, names):
            result.declined("rewrite", "float16 may overflow: numerics='finite' permits it", where)
            return
        origin: dict[int, Ref] = {}
        for number, ref in s.to.items():
            ref = s.g.find(ref)
            program = numbered[number]
            widths = (len(set(ref.axes)), len(s.g.classes[ref.cls].sizes))
            if widths == (len(t.graph.classes[program].sizes),) * 2:
                origin.setdefault(ref.cls, Ref(program, ref.axes))
        solution = Rewritten(s.g, s.choice, region.leaves, origin, scope=_scope(t, region))
        changed = set(s.changed)
        inner: set[int] = set()  # changed classes that are no value, only a step within an equation
        for number, ref in s.to.items():
            ref, c = s.g.find(ref), numbered[number]
            reads_inner = any(a.cls in inner for a in node_of(t.graph, c).args)
            if (ref.cls in changed or reads_inner) and c not in region.leaves:
                result.plan.rewritten[c] = (solution, ref)
                if c not in t.made_by:
                    inner.add(c)
        result.saved.append((s.before, s.after))
        result.regions.append(s.digest)
        for name in names:
            self._count(result, name, where)
            result.rules[name].count += 1

    def _may_overflow(self, t: TermGraph, region: Region, names: Iterable[str]) -> bool:
        """Whether float16, which ends at 65504, is summed or multiplied in another order."""
        if self.options.numerics.permits("finite"):
            return False
        if not any(t.graph.classes[c].dtype == "float16" for c in region.classes):
            return False
        return any(r.property in REORDERING for r in self.rules.rules if r.name in names)

    def _note(self, result: Result, name: str, property: str, where: str) -> None:
        use = result.rules.setdefault(name, RuleUse(name, property, 0))
        use.where.append(where)
        use.count += 1

    def _count(self, result: Result, name: str, where: str) -> None:
        use = result.rules.get(name)
        if use is None:
            rule = next((r for r in self.rules.rules if r.name == name), None)
            use = result.rules[name] = RuleUse(name, rule.property if rule else "", 0)
            log("rules", "%s at %s", name, where)
        if where not in use.where:
            use.where.append(where)

    def _bodies(self, result: Result, t: TermGraph, allowed: set[str] | None, start: float) -> None:
        """Bodies of loops, branches and remat are programs of their own."""
        for number, e in enumerate(t.program.equations):
            spots = jax_internals.optimisable_bodies(e.eqn)
            if not spots:
                continue
            eqn = e.eqn
            for spot in spots:
                body = self._run(spot.body, frozenset(), allowed, start)
                if body.taken:
                    made = jax_internals.make_avals_jaxpr(body.emit(), spot.body.in_avals)
                    replaced = spot.replace(eqn, made)
                    if replaced is None:
                        continue
                    eqn = replaced
                    result.absorb(body)
                result.bodies.append((body, spot.times))
            if eqn is not e.eqn:
                result.plan.equations[number] = eqn


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No pass of the cycle collector meanwhile: with JAX loaded one takes longer than all of this.

    Nothing here makes reference cycles, so that what is left need not be looked through as young
    objects either: freezing and unfreezing makes it old at once. Garbage of before goes first.
    """
    was_on = gc.isenabled()
    if was_on:
        gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _where(t: TermGraph, region: Region) -> str:
    made = (t.where(c) for c in (*reversed(region.roots), *reversed(region.classes)))
    return next(filter(None, made), "<unknown>")


def _scope(t: TermGraph, region: Region) -> Any:
    for c in (*reversed(region.roots), *reversed(region.classes)):
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
        node = node_of(t.graph, c)
        if node.op == "leaf":
            if t.leaf_value[c] in inputs:
                known.add(c)
        elif all(a.cls in known for a in node.args):
            known.add(c)
    return known


def _shared(t: TermGraph, need: Needed) -> set[int]:
    """Contractions that the program spells twice, up to transposition."""
    count = Counter(
        t.view(e.outvals[0]).cls for e in t.program.equations if e.name == "dot_general"
    )
    return {c for c, n in count.items() if n > 1 and c in need.uses}


def storage(t: TermGraph, cls: int) -> str:
    """How the weights behind an elementwise chain are stored: the dtype they start from."""
    node = node_of(t.graph, cls)
    while node.op in ("map", "add") and len(node.args) == 1:
        cls = node.args[0].cls
        node = node_of(t.graph, cls)
    return t.graph.classes[cls].dtype
