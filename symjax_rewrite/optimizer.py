"""The driver: runs a jaxpr through the list of passes and records the decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from symjax_rewrite import jax_internals, policy
from symjax_rewrite.added_passes import with_added
from symjax_rewrite.candidates import (
    Candidate,
    Context,
    Crossover,
    Found,
    OutOfTimeError,
    Pass,
    Refusal,
    Stopped,
)
from symjax_rewrite.codegen import emission
from symjax_rewrite.collector import collector_paused
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.light_programs import LITTLE_WORK
from symjax_rewrite.cost.near_margins import near
from symjax_rewrite.errors import PlanError
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import Equation, Program, Value, flatten, flattening_once
from symjax_rewrite.ir.program_key import program_key
from symjax_rewrite.ir.replacement import ConflictError, replaced
from symjax_rewrite.ir.sizes import Assumptions
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.loops.loop_reading import LOOPS
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.options import Options, log
from symjax_rewrite.pallas_kernels.backend import deferring_kernels, planning_for, staging_once
from symjax_rewrite.passes import FOLDS, OF_INVARIANTS, OF_LOOPS, PASSES
from symjax_rewrite.rewriting.rule import RulePack
from symjax_rewrite.signatures import Selection
from symjax_rewrite.text_tables import NOT_SEARCHED
from symjax_rewrite.usage_records import (
    REPLAN,
    Change,
    RouteUse,
    RuleUse,
    fingerprint,
    planned_choices,
    planned_regions,
)

_WITH_BODIES = LOOPS | {"cond", "jit", jax_internals.REMAT}


@dataclass(slots=True)
class Result:
    """The decisions of the optimiser on one jaxpr.

    program: the emitted program; None if the jaxpr is emitted unchanged. sample: the numbers at
    which symbolic sizes are priced. keys: of the candidates taken, for plans. finished: True if all
    passes ran on the whole program. choices: signatures of the candidates that were measured to be
    worth it; None if the model has chosen. spent: the limit of the budget by which the program, or
    a body in it, was kept as written. emitted: the jaxpr of `program`, once it has been made.
    changes: the candidates that were taken. passes: seconds by pass. defers: True if kernels of
    GPUs are traced only where the program is lowered for one. near: True if the decision is for
    sizes near the sample; the crossovers are those of all sizes.
    """

    closed: ClosedJaxpr
    program: Program | None = None
    rules: dict[str, RuleUse] = field(default_factory=dict)
    routes: list[RouteUse] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    crossovers: list[Crossover] = field(default_factory=list)
    passes: dict[str, float] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    sample: dict[str, int] = field(default_factory=dict)
    finished: bool = True
    spent: str = ""
    stop: str = "nothing to do"
    time_s: float = 0.0
    emitted: ClosedJaxpr | None = None
    choices: frozenset[str] | None = None
    defers: bool = False
    near: bool = False

    @property
    def taken(self) -> bool:
        """Return True if the emitted program differs from the jaxpr."""
        return self.program is not None

    @property
    def settled(self) -> bool:
        """Return True if no other numbers for its named sizes could change a decision."""
        return not self.crossovers and not any(use.by_size for use in self.routes)

    def emit(self) -> Callable[..., list[Any]]:
        """Return a function of the flat inputs that runs the optimised program."""
        program = self.program
        if program is None:
            return lambda *args: jax_internals.eval_jaxpr(self.closed, *args)

        def run(*args: Any) -> list[Any]:
            with deferring_kernels(self.defers), staging_once():
                return emission.run(program, args)

        return run

    def staged(self) -> ClosedJaxpr:
        """Return the jaxpr of the optimised program; it is made once."""
        if self.emitted is None:
            avals = self.closed.in_avals
            self.emitted = jax_internals.make_avals_jaxpr(self.emit(), avals)
        return self.emitted

    def plan_record(self) -> dict[str, Any]:
        """Return the value of `plan=` that reproduces the program."""
        plan = {"format": 1, "program": fingerprint(self.closed), "regions": sorted(self.keys)}
        return plan if self.choices is None else {**plan, "choices": sorted(self.choices)}

    def declined(self, f: Refusal | RouteUse) -> None:
        """Record a refusal: one entry for each name, rules and reason.

        The entry of several places has the first line and the highest ratio of all.
        """
        for use in self.routes:
            if not use.taken and (use.name, use.rules, use.reason) == (f.name, f.rules, f.reason):
                use.count += f.count
                use.ratio = max((r for r in (use.ratio, f.ratio) if r is not None), default=None)
                use.places[f.where] = use.places.get(f.where, 0) + f.count
                return
        log("route", "%s: %s", f.name, f.reason)
        self.routes.append(
            RouteUse(
                f.name,
                False,
                f.reason,
                f.where,
                f.count,
                f.ratio,
                by_size=f.by_size,
                rules=f.rules,
                parts=f.parts,
            )
        )

    def took(self, c: Candidate) -> None:
        """Record a candidate that was taken."""
        if c.key and c.key not in self.keys:
            self.keys.append(c.key)
        b, a = c.before, c.after
        seconds = None if b is None or a is None else (b.seconds, a.seconds)
        if c.reason:
            log("route", "%s: %s", c.name, c.reason)
            use = RouteUse(c.name, True, c.reason, c.where, c.count, c.ratio, seconds)
            self.routes.append(use)
        places = {c.where: c.count} | {where: 1 for _, where in c.also if where != c.where}
        self.changes.append(Change(c.name, c.rules, c.reason, places, seconds, c.key, c.parts))
        self.routes += [RouteUse(c.name, True, reason, where) for reason, where in c.also]
        for name, prop in c.rules:
            use = self.rules.setdefault(name, RuleUse(name, prop, 0))
            use.count += 1
            if c.where not in use.where:
                log("rules", "%s at %s", name, c.where)
                use.where.append(c.where)
        for body, times in c.bodies:
            self.absorb(body, times)

    def absorb(self, body: Result, times: int) -> None:
        """Add the record of a body that was rewritten."""
        for use in body.routes:
            if use.taken:
                self.routes.append(use)
            else:
                self.declined(use)
        self.changes += body.changes
        self.crossovers += body.crossovers
        self.keys += body.keys
        for name, use in body.rules.items():
            mine = self.rules.setdefault(name, RuleUse(name, use.property, 0))
            mine.where += [w for w in use.where if w not in mine.where]
            mine.count += use.count


class Optimiser:
    """The optimiser of jaxprs under one set of options; solved regions are cached.

    device: the profile on which programs are priced.
    admits: False for a candidate that must not be taken (`Context.admits`); default: none.
    selection: the candidates to take, by signature; None leaves the choice to the model.
    """

    def __init__(
        self,
        options: Options,
        rules: RulePack,
        device: Device,
        admits: Callable[[Candidate], bool] = lambda _: True,
    ) -> None:
        self.options, self.rules, self.device, self.admits = options, rules, device, admits
        self.selection: Selection | None = None
        if (choices := planned_choices(options.plan)) is not None:
            self.selection, self.device = Selection(choices), near(device)
        self.passes = with_added(rules.added, PASSES)
        self.assumptions = Assumptions(options.assume)
        self.kept: dict[str, Any] = {}

    def selects(self, c: Candidate, program: Program) -> bool:
        """Return True if the selection, if there is one, has the candidate."""
        return self.selection is None or self.selection.admits(c, program)

    def run(self, closed: ClosedJaxpr, frozen: frozenset[int] = frozenset()) -> Result:
        """Decide the program to emit for a jaxpr; `frozen` are numbers of inputs known beforehand.

        Raises:
            PlanError: a plan was given that is malformed or made from another program.
        """
        start = time.perf_counter()
        allowed = planned_regions(self.options.plan, closed)
        with collector_paused(), planning_for(self.device), flattening_once():
            result = self._run(closed, frozen, allowed, start, {}, self.device.call_s)
        if allowed is not None and not allowed <= set(result.keys):
            raise PlanError(
                "the plan names rewrites that this program and version do not have",
                got=", ".join(sorted(allowed - set(result.keys))),
                remedy=REPLAN,
            )
        result.time_s = time.perf_counter() - start
        result.choices = self.selection.wanted if self.selection is not None else None
        return result

    def _run(
        self,
        closed: ClosedJaxpr,
        frozen: frozenset[int],
        allowed: set[str] | None,
        start: float,
        solved: dict[Hashable, tuple[Result, ClosedJaxpr]],
        call_s: float = 0.0,
        is_live: bool = False,
        passes: Sequence[Pass] | None = None,
    ) -> Result:
        """Optimise a program; `solved` holds the results of bodies: equal ones are run once.

        is_live: True if nothing in the program and in the bodies of its scans is dead. passes: to
        run in place of all.
        """
        count, most = len(closed.jaxpr.eqns), self.options.budget.equations
        if not count:
            return Result(closed)
        if count > most:
            return _kept(closed, f"{count} equations exceed the budget of {most}")
        spent: list[str] = []

        def optimise(body: ClosedJaxpr, known: frozenset[int] = frozenset()) -> Result:
            place = (known, id(body.jaxpr), *map(id, body.consts))
            if place not in solved:
                key = (known, program_key(body) or place)
                if key not in solved:
                    alive = id(body.jaxpr) in run.live_bodies
                    passes = [p for p in self.passes if not known or p.name in OF_INVARIANTS]
                    made = self._run(body, known, allowed, start, solved, 0.0, alive, passes)
                    solved[key] = made, body
                solved[place] = solved[key][0], body  # held, so that no other has its place
            spent.append(solved[place][0].spent)
            return solved[place][0]

        mine = self.options, self.rules, self.device, self.assumptions
        context = Context(*mine, frozen, allowed, start, optimise, self.kept, admits=self.admits)
        context.selects, context.call_s = self.selects, call_s
        context.folded = lambda program: _folded(program, context)
        run = _Run(closed, context, is_live)
        try:
            result = run.through(self.passes if passes is None else passes)
        except OutOfTimeError:
            return _kept(closed, f"the clock of {self.options.budget.seconds} s ran out")
        result.spent = next(filter(None, spent), "")
        return result


def _kept(closed: ClosedJaxpr, why: str) -> Result:
    return Result(closed, stop=why, spent=why, finished=False)


def _folded(program: Program, context: Context) -> Program:
    """Return a program with the folds that are found in it; nothing is recorded."""
    found = [f for f in FOLDS.candidates(program, context) if isinstance(f, Candidate)]
    try:
        return replaced(program, [p for c in found for p in c.parts]) if found else program
    except ConflictError:
        return program


class _Run:
    def __init__(self, closed: ClosedJaxpr, context: Context, is_live: bool) -> None:
        defers = context.options.kernels == "auto" and not context.device.runs_on_gpu
        self.context, self.result = context, Result(closed, defers=defers)
        self.program = self.first = flat(closed, is_live)
        scans = [e.eqn for e in self.first.equations if e.name == "scan"]
        self.live_bodies = {id(e.params["jaxpr"].jaxpr) for e in scans}
        self.stops: set[str] = set()
        self.seen: dict[str, Program] = {}  # by pass, the program after it
        self.priced_ahead = False  # a change counts the kernels of its loops

    def through(self, passes: Sequence[Pass]) -> Result:
        """Run the passes; on a light program those of loops, and added ones."""
        light = self._is_light()
        for each in passes:
            if not light or each.name in OF_LOOPS or each not in PASSES:
                self._run(each)
        if light:
            self._note(Refusal("search", Obstacle.SHARE(NOT_SEARCHED + LITTLE_WORK)))
        self.result.program = None if self.program is self.first else self.program
        self.result.sample = self.context.sample
        self.result.stop = ", ".join(sorted(self.stops)) or "nothing to do"
        return self.result

    def _is_light(self) -> bool:
        """Return True if no pass of terms can gain, and none was asked for."""
        context = self.context
        asked = context.options.kernels not in ("auto", "off") or context.frozen
        asked = asked or context.allowed is not None
        return not asked and context.is_light(self.program)

    def _run(self, each: Pass) -> None:
        if self.seen.get(each.name) is self.program:
            return
        again, start = each.name in self.seen, time.perf_counter()
        found = [*each.candidates(self.program, self.context)]
        proposed = [f for f in found if isinstance(f, Candidate)]
        taken: list[Candidate] = []
        if proposed:
            self.program, taken, refused = policy.chosen(self.program, proposed, self.context)
            found += refused
            self.priced_ahead |= any(c.prices_ahead for c in taken)
        self.seen[each.name] = self.program
        for f in found:
            if f in taken if isinstance(f, Candidate) else not (again and self._is_known(f)):
                self._note(f)
        took = time.perf_counter() - start
        self.result.passes[each.name] = self.result.passes.get(each.name, 0.0) + took

    def _is_known(self, f: Found) -> bool:
        """Return True for a refusal that the first run of a pass gave."""
        known = {(use.name, use.reason) for use in self.result.routes if not use.taken}
        return isinstance(f, Refusal) and (f.name, f.reason) in known

    def _note(self, f: Found) -> None:
        match f:
            case Candidate():
                is_counted = self.priced_ahead and f.name == "scan" and not f.rules
                self.result.took(replace(f, before=None, after=None) if is_counted else f)
            case Refusal():
                self.result.declined(f)
            case Crossover() if f not in self.result.crossovers:
                self.result.crossovers.append(f)
            case Stopped(reason):
                self.stops.add(reason)


def flat(closed: ClosedJaxpr, is_live: bool = False) -> Program:
    """Return the flat program without dead equations, and without dead values in its loops.

    is_live: True if it has none.
    """
    program = flatten(closed)
    if is_live:
        return program
    with_bodies = _WITH_BODIES if any(e.name in LOOPS for e in program.equations) else ()
    live, kept = {*numbers(program.outputs)}, []
    for e in reversed(program.equations):
        if e.name in with_bodies:
            part = _live_part(e, live, closed)
        else:
            part = e if e.eqn.effects or not live.isdisjoint(e.outvals) else None
        if part is not None:
            kept.append(part)
            live.update(part.reads, numbers(part.same_as))
    program.equations = kept[::-1]
    return program


def _live_part(e: Equation, live: Collection[int], program: ClosedJaxpr) -> Equation | None:
    """Return an equation without dead values in its bodies; None if it is dead itself."""
    eqn = jax_internals.live_equation(e.eqn, [v in live for v in e.outvals], program)
    if eqn is None or eqn is e.eqn:
        return eqn and e
    taken = zip(e.eqn.invars, e.invals, strict=True)
    value: dict[Any, Value] = {a: v for a, v in taken if not jax_internals.is_literal(a)}
    invals = [a if jax_internals.is_literal(a) else value[a] for a in eqn.invars]
    made = dict(zip(e.eqn.outvars, e.outvals, strict=True))
    outvals = [made[v] for v in eqn.outvars]
    return Equation(eqn, tuple(invals), tuple(outvals), e.same_as, e.calls)
