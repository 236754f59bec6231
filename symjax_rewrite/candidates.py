"""The interface of passes: candidates, refusals, passes and their context.

A pass reads a program and yields candidates: values of the program that could be computed in
another way, with the costs of both ways. `policy` takes or refuses candidates; a pass takes none.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import equation_seconds
from symjax_rewrite.cost.light_programs import is_light
from symjax_rewrite.cost.row_steps import BY_ORDER
from symjax_rewrite.cost.term_cost import Cost, CostModel
from symjax_rewrite.ir.dataflow import Needed, needed, node_of, numbers
from symjax_rewrite.ir.flat_program import Equation, Program, Value
from symjax_rewrite.ir.replacement import Part, Read
from symjax_rewrite.ir.sizes import Assumptions, value
from symjax_rewrite.ir.term import LEAF
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.options import Options
from symjax_rewrite.usage_records import ratio_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """Values of a program as a function of other values: the part that most passes need.

    Args:
        gives: numbers of the values that the function returns.
        reads: the values that it takes; none may depend on one of `gives`.
        fun: of the arrays of `reads`; returns the array of the one value it gives, or a sequence
            of arrays, one per value, each with the shape and dtype of its value.
        opens: True if later passes see the operations of `fun` instead of one equation.
        source: the equation whose name scope and source line its operations get.
    """

    gives: tuple[int, ...]
    reads: tuple[Value, ...]
    fun: Callable[..., Any]
    opens: bool = True
    source: JaxprEqn | None = None

    def needs(self, value: int) -> Iterable[int]:
        """Return the numbers of the values read to make one of those given."""
        return numbers(self.reads)

    def emit(self, wanted: Sequence[int], read: Read) -> Sequence[Any]:
        """Return the arrays of the values wanted."""
        made = self.fun(*map(read, self.reads))
        made = made if isinstance(made, Sequence) else (made,)
        by_value = dict(zip(self.gives, made, strict=True))
        return [by_value[v] for v in wanted]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """An alternative computation of values of a program.

    name: the name in packs, reports, `bisect` and plans. parts: the values, and their new
    computation. where: the user's line. reason: the gain, as a sentence; for kernels. rules: (name,
    property) of each rule that justifies it; empty for a kernel. before, after: cost of the values
    as written and of the alternative; None if the pass has compared the costs itself. key: its
    identifier in a plan. group: identifier of equal candidates at several places, which are priced
    as one. share: True if it must gain a share of the whole program's time. leaves_copies: True if
    its price leaves out transposed copies that its equations need. short: the reason why its price
    alone gains too little, so that it is taken only where transposed copies go with it. hidden:
    values that must be dead afterwards. count: number of places it represents. also: reasons and
    lines of further parts, taken together with the first. bodies: results of the bodies of loops
    and branches in it, with their trip counts. prices_ahead: True if its cost counts the kernels
    that later passes make of its loops.
    """

    name: str
    parts: tuple[Part, ...]
    where: str = ""
    reason: str = ""
    rules: tuple[tuple[str, str], ...] = ()
    before: Cost | None = None
    after: Cost | None = None
    key: str = ""
    group: object = None
    share: bool = False
    leaves_copies: bool = False
    short: str = ""
    hidden: frozenset[int] = frozenset()
    count: int = 1
    also: tuple[tuple[str, str], ...] = ()
    bodies: tuple[tuple[Any, int], ...] = ()
    prices_ahead: bool = False

    @property
    def saved_s(self) -> float:
        """Return the modelled seconds that it saves; 0 if it is not priced here."""
        b, a = self.before, self.after
        return 0.0 if b is None or a is None else b.seconds - a.seconds

    @property
    def ratio(self) -> float | None:
        """Return seconds as written divided by seconds afterwards; None if not priced here."""
        b, a = self.before, self.after
        return None if b is None or a is None else ratio_of(b.seconds, a.seconds)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A computation that a pass considered and does not propose, with the reason.

    reason: a sentence that an `Obstacle` makes; a plain one has the obstacle `FORM`. count: number
    of places it represents. ratio: predicted seconds as written divided by those of the refused
    computation; None if no pass compared them. by_size: True if other numbers for named
    sizes might turn the refusal. rules: the names of the rules that derive the refused form. parts:
    this form.
    """

    name: str
    reason: str
    where: str = ""
    count: int = 1
    ratio: float | None = None
    by_size: bool = False
    rules: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Crossover:
    """A form that is cheaper for some sizes only: the costs as written and of the form."""

    before: Cost
    after: Cost


@dataclass(frozen=True, slots=True)
class Stopped:
    """The reason why a search ended."""

    reason: str


Found = Candidate | Refusal | Crossover | Stopped


class Pass(Protocol):
    """The interface of a pass, which finds candidates of one kind.

    name: in packs, plans and reports. candidates: the findings in a program that earlier passes
    have rewritten.
    """

    @property
    def name(self) -> str: ...
    def candidates(self, program: Program, context: Context) -> Iterable[Found]: ...


@dataclass
class Terms:
    """A program as index terms, with its live set, cost model and sizes.

    known: classes that depend on frozen inputs alone. samples: the numbers at which symbolic sizes
    are priced. narrow: True if they stand for all sizes. kept: facts that passes found in the
    program, for later passes.
    """

    t: TermGraph
    need: Needed
    known: set[int]
    samples: list[dict[str, int]]
    model: CostModel
    narrow: bool = False
    kept: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def seconds(self) -> float:
        """Return the modelled seconds of the program."""
        return self._in_order + self._device.spread_seconds(self.model.spread_bytes(self.t))

    @functools.cached_property
    def stored(self) -> set[int]:
        """Return the classes that the program stores, as written."""
        t = self.t
        facts = {c: self.model.facts_of(t.graph, c, node_of(t.graph, c)) for c in self.need.order}
        return self.model.written(facts, tuple(sorted(self.need.outside)), set())

    @functools.cached_property
    def seconds_by_order(self) -> float:
        """Return the part of these seconds that follows from the orders of axes in memory."""
        return self._in_order - self._priced(CostModel(self._device, self.model.at, is_whole=True))

    def ordered_seconds(self, equations: Iterable[Equation]) -> float:
        """Return the most seconds that some equations take for the order of axes in memory."""
        g = self.t.graph
        made = {self.t.view(v).cls for e in equations if e.name in BY_ORDER for v in e.outvals}
        return sum([self.model.ordered_seconds(g, c, node_of(g, c)) for c in made])

    @functools.cached_property
    def _in_order(self) -> float:
        return self._priced(self.model)

    def _priced(self, model: CostModel) -> float:
        g, roots = self.t.graph, tuple(sorted(self.need.outside))
        choice = {c: node_of(g, c) for c in self.need.order}
        return model.evaluate(g, choice, roots, self.known.__contains__).seconds

    @property
    def _device(self) -> Device:
        return self.model.device


class OutOfTimeError(Exception):
    """The emergency clock of the budget ran out (internal)."""


@dataclass(slots=True)
class Context:
    """The context of a pass: options, device, rules and caches.

    frozen: numbers of inputs that are known beforehand. allowed: keys of a plan that is replayed.
    optimise: optimises another program under the same options, all passes or, with numbers of its
    inputs that are known, the algebra. kept: caches that an optimiser keeps across programs, by
    pass. loops: equations of this program that were analysed as loops. light_loops: those that no
    pass could change, nor their bodies. sample: the numbers at which symbolic sizes were priced.
    admits: False for a candidate that policy must not take; it is asked once for every candidate,
    in the order in which they are found. selects: likewise, of the candidate and the program it was
    found in. folded: returns a program with the folds that are found in it. call_s: seconds of a
    call of the program beside its kernels; 0 for the body of a loop or branch.
    """

    options: Options
    rules: Any  # RulePack
    device: Device
    assumptions: Assumptions
    frozen: frozenset[int]
    allowed: set[str] | None
    started: float
    optimise: Callable[..., Any]
    kept: dict[str, Any]
    loops: dict[int, JaxprEqn] = field(default_factory=dict)  # by id
    light_loops: dict[int, JaxprEqn] = field(default_factory=dict)  # by id
    sample: dict[str, int] = field(default_factory=dict)
    admits: Callable[[Candidate], bool] = lambda _: True
    selects: Callable[[Candidate, Program], bool] = lambda *_: True
    folded: Callable[[Program], Program] = lambda program: program
    call_s: float = 0.0
    _made: list[tuple[Program, dict[Any, Any]]] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Return True if the pack permits a pass, or another transformation that is no rule."""
        return name not in self.rules.without

    def runs(self, name: str) -> bool:
        """Return True if the pack and the plan, if one is replayed, permit a transformation."""
        return self.has(name) and (self.allowed is None or name in self.allowed)

    def reorders(self) -> bool:
        """Return True if sums may be rounded in another order."""
        return self.options.numerics.permits("reassoc")

    def check_clock(self) -> None:
        """Raise `OutOfTimeError` if the emergency clock has run out."""
        if time.perf_counter() - self.started > self.options.budget.seconds:
            raise OutOfTimeError

    def once(self, make: Callable[[Program], T], program: Program) -> T:
        """Return what a function makes of a program; it is made once."""
        known = [pair for pair in self._made if pair[0] is program] or [(program, {})]
        others = [pair for pair in self._made if pair[0] is not program]
        self._made = [*known, *others[:2]]  # variants of a program are compared with it
        made = known[0][1]
        if make not in made:
            made[make] = make(program)
        return made[make]

    def terms(self, program: Program) -> Terms:
        """Return the program as index terms; built once."""
        return self.once(self._build, program)

    def is_light(self, program: Program) -> bool:
        """Return True if no pass of terms can gain on a program (`cost.light_programs`)."""
        return self.once(self._is_light, program)

    def program_seconds(self, program: Program) -> float:
        """Return the modelled seconds of a call of a program, with the bodies of its loops."""
        terms = self.terms(program)
        if "program_seconds" not in terms.kept:
            inside = [e.eqn for e in program.equations if jax_internals.bodies(e.eqn)]
            in_bodies = sum(equation_seconds(e, self.device) for e in inside)  # in no term's price
            terms.kept["program_seconds"] = terms.seconds + in_bodies + self.call_s
        return terms.kept["program_seconds"]

    def _is_light(self, program: Program) -> bool:
        return is_light(program, self.device)

    def _build(self, program: Program) -> Terms:
        t = build(program)
        need = needed(t)
        known = _frozen_classes(t, need, self.frozen)
        need.known = frozenset(known)
        self.assumptions = self.assumptions.with_constraints(t.dim_env.values())
        names = t.symbolic_names()
        samples = self.assumptions.samples(names) if t.dim_env else [{}]
        t.sample = max(samples, key=lambda s: math.prod(s.values()))
        sample = self.sample = samples[0]
        model = CostModel(self.device, lambda d: value(d, sample), terms=t, is_whole=True)
        return Terms(t, need, known, samples, model, self.assumptions.are_narrow(names))


def _frozen_classes(t: TermGraph, need: Needed, frozen: frozenset[int]) -> set[int]:
    """Return the classes that depend on frozen inputs and constants alone."""
    known: set[int] = set()
    inputs = {t.program.inputs[k] for k in frozen} | set(t.program.consts)
    for c in need.order if frozen else ():
        node = node_of(t.graph, c)
        is_leaf = node.op == LEAF
        if t.leaf_value[c] in inputs if is_leaf else all(a.cls in known for a in node.args):
            known.add(c)
    return known
