"""Row algebra computed in the epilogue of a fold: divisions, casts, log-sum-exp.

A reduction's value is the fold's results times row algebra. Elementwise terms that follow it (a
normaliser, a cast) are row algebra too. The fold's epilogue computes all of them, so that the raw
sums are never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.codegen import term_lowering
from symjax_rewrite.codegen.step_evaluation import handlers
from symjax_rewrite.ir.dataflow import Needed, cone, node_of
from symjax_rewrite.ir.products import held_dtype
from symjax_rewrite.ir.step_program import Step, StepProgram, key_of, place_in, pruned, run
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.pairwise_terms import bytes_of
from symjax_rewrite.kernel_selection.folds.reductions import Addend, Form, Reduction
from symjax_rewrite.kernel_selection.folds.tile_program import TileBuilder, held_dtypes
from symjax_rewrite.pallas_kernels.fold.spec import Epilogue
from symjax_rewrite.pallas_kernels.monoid import shift_of

# row operations that both loops and Triton kernels support
ROW_MAPS = frozenset(
    """abs ceil clamp convert_element_type cos div eq exp exp2 floor ge gt is_finite le log log1p
    logistic lt max min ne not or and pow reciprocal rsqrt select_n sign sin sqrt tanh""".split()
)
Names = tuple[str, ...]
Place = tuple[int, int]  # output of a fold, and the index of its result
Value = int | tuple[int, int]  # a class, or (reduction, term): a term before its row algebra


@dataclass(slots=True)
class Served:
    """Reduction as one fold computes it.

    form: its terms, axes by name. places: for each term the result of the fold, the result of its
    shift (None without an exponential) and its feature axes. names: index of the reduction to axis
    name. lead: the axes of every result.
    """

    reduction: Reduction
    form: Form
    names: dict[int, str]
    lead: Names
    places: list[tuple[Place, Place | None, Names]] = field(default_factory=list)


@dataclass(slots=True)
class Rows:
    """Values computed by a fold's epilogue.

    returned: the values that it returns, in order. names: by value, the axis of each slot. inside:
    every class computed on the way. axes: the axes of each result as it is stored.
    """

    epilogue: Epilogue
    returned: list[Value]
    names: dict[Value, Names]
    inside: set[int]
    axes: tuple[Names, ...]


@dataclass(slots=True)
class FoldSurroundings:
    """Program around a fold.

    need: its live set. pairwise: classes that are never materialised. read: classes that others
    read. late: classes that other folds compute at the same time or later.
    """

    t: TermGraph
    need: Needed
    pairwise: set[int]
    read: set[int]
    late: set[int]


@dataclass(slots=True)
class _RowSteps(StepProgram):
    """Builder of an epilogue's steps and of the list of operands they read."""

    t: TermGraph
    lead: Names
    after: set[int]
    late: set[int]
    wide: frozenset[int] | None
    names: dict[Value, Names] = field(default_factory=dict)
    number: dict[Value, int] = field(default_factory=dict)
    reads: list[Ref] = field(default_factory=list)

    def value(self, ref: Ref, names: dict[Any, str] | None = None) -> int | None:
        """Return the step of an operand with its indices renamed; None if it is no row value."""
        axes: Any = ref.axes if names is None else tuple(names.get(i, "") for i in ref.axes)
        if ref.cls in self.number:
            return self.number[ref.cls] if axes == self.names[ref.cls] else None
        node, dtype = node_of(self.t.graph, ref.cls), self.t.graph.classes[ref.cls].dtype
        if node.op == CONST:
            return self.add("const", node.attr[0], (), dtype)
        if ref.cls in self.after or ref.cls in self.late:
            return None
        if len(set(axes)) != len(axes) or not set(axes) <= {*self.lead}:
            return None
        dtype = held_dtype(dtype) if ref.cls in (self.wide or ()) else dtype
        return self.add("read", place_in(self.reads, Ref(ref.cls, axes)), (), dtype)

    def serve(self, served: Served) -> bool:
        """Add a reduction: the fold's results times their row algebra."""
        found, cls = served.reduction, served.reduction.cls
        dtype = self.t.graph.classes[cls].dtype
        whole = not any(served.names.get(b) in served.lead for b in found.bound)
        whole = whole and not any(addend.after for addend in served.form)
        if not whole or self.wide is not None:
            dtype = held_dtype(dtype)  # a value that is summed later is not rounded before
        if not {addend.kind for addend in served.form} <= {
            "exp",
            "sum",
            "max",
            "min",
            "any",
            "all",
        }:
            return False
        made: list[int] = []
        for k, (addend, place) in enumerate(zip(served.form, served.places, strict=True)):
            scaled = self._scaled(addend, place, dtype)
            if scaled is None:
                return False
            made.append(scaled)
            if not whole:
                self.number[cls, k], self.names[cls, k] = scaled, (*served.lead, *place[2])
        if not whole:
            return True
        total = made[0]
        if len(made) > 1:
            total = self.add("apply", (ADD, (1,) * len(made)), tuple(made), dtype)
        slots = range(len(self.t.graph.classes[cls].sizes))
        self.number[cls], self.names[cls] = total, tuple(served.names[i] for i in slots)
        return True

    def _scaled(
        self, addend: Addend, place: tuple[Place, Place | None, Names], dtype: str
    ) -> int | None:
        state = self.add("state", place[0], (), "")
        if addend.kind not in ("exp", "sum"):
            return self.add("cast", None, (state,), dtype)
        terms = [self.value(r) for r, _ in addend.exponent]
        factors = [self.value(r) for r, _ in addend.factors]
        steps: Any = (state, *terms, *factors)
        coefficients, powers = (tuple(x for _, x in p) for p in (addend.exponent, addend.factors))
        data = (place[1], coefficients, powers, addend.coefficient)
        return None if None in steps else self.add("scale", data, steps, dtype)

    def follow(self, cls: int) -> bool:
        """Add a class that is elementwise in classes already added."""
        node, c = node_of(self.t.graph, cls), self.t.graph.classes[cls]
        if node.bound or ("float" not in c.dtype and c.dtype != "bool"):
            return False
        if node.op not in (ADD, CONTRACT) and not (node.op == MAP and node.attr[0] in ROW_MAPS):
            return False
        names: dict[Any, str] = {}
        for a in node.args:
            for i, name in zip(a.axes, self.names.get(a.cls, ()), strict=False):
                if names.setdefault(i, name) != name:
                    return False
        if len(names) < len(c.sizes) or len(set(names.values())) < len(names):
            return False
        args: list[Any] = [self.value(a, names) for a in node.args]
        if None in args:
            return False
        dtype = c.dtype
        if self.wide is not None:
            written = [self.t.graph.classes[a.cls].dtype for a in node.args]
            wanted, held = held_dtypes(node, written, dtype)
            dtype = held_dtype(dtype) if cls in self.wide else held
            args = [self.cast(a, d) for a, d in zip(args, wanted, strict=True)]
        self.number[cls] = self.add("apply", (node.op, node.attr), tuple(args), dtype)
        self.names[cls] = tuple(names[i] for i in range(len(c.sizes)))
        return True

    def result(self, value: Value) -> int:
        """Return the step of a value that leaves the fold, in the dtype that it is stored in."""
        step = self.number[value]
        if self.wide is None or not isinstance(value, int):
            return step
        dtype = self.t.graph.classes[value].dtype
        return self.cast(step, held_dtype(dtype) if value in self.wide else dtype)

    def finish(self, used: list[int]) -> tuple[tuple[Step, ...], tuple[int, ...], list[Ref]]:
        """Return the steps that `used` needs, their roots, and the references they read."""
        steps, roots = pruned(self.steps, used)
        numbers = [step.data for step in steps if step.kind == "read"]
        place = iter(range(len(numbers)))
        kept = tuple([s._replace(data=next(place)) if s.kind == "read" else s for s in steps])
        return kept, roots, [self.reads[n] for n in numbers]


def row_algebra(
    around: FoldSurroundings, served: dict[int, Served], tiles: TileBuilder
) -> Rows | None:
    """Return the row algebra around a fold's reductions as its epilogue.

    Operands that the epilogue reads are added to `tiles`. None where some row algebra cannot be
    computed inside.
    """
    t, need = around.t, around.need
    lead, *others = {s.lead for s in served.values()}
    if others:
        return None  # sums over rows have no row for the epilogue
    after = cone(served, lambda cls: need.users.get(cls, ()))
    program = _RowSteps(t, lead, after, around.late, tiles.wide)
    reached, queue = set(served), sorted(served)  # operands have smaller numbers
    while queue:
        cls = heappop(queue)
        if cls in served:
            if not program.serve(served[cls]):
                return None
        elif cls in around.pairwise or not program.follow(cls):
            continue
        for user in need.users.get(cls, ()):
            if user not in reached:
                reached.add(user)
                heappush(queue, user)
    inside = _kept(around, program, set(served))
    returned: list[Value] = [*sorted(_returned(around, inside))]
    returned += [v for v in program.number if isinstance(v, tuple)]
    axes = tuple(_stored(t, program, served, value) for value in returned)
    steps, used, refs = program.finish([program.result(value) for value in returned])
    reads = tuple(tiles.operand(ref) for ref in refs)
    fun = _function(steps, used, t.primitives)
    key = ("rows", key_of(steps), used)
    dtypes = tuple([steps[n].dtype for n in used])
    epilogue = Epilogue(fun, axes, reads, key, dtypes, all(map(_is_plain, steps)))
    return Rows(epilogue, returned, program.names, inside, axes)


def _is_plain(step: Step) -> bool:
    """Return True for a step that keeps the values of a reduction."""
    if step.kind == "scale":
        shift, coefficients, powers, coefficient = step.data
        return shift is None and not coefficients and not powers and coefficient == 1
    return step.kind in ("state", "cast")


def _returned(around: FoldSurroundings, inside: set[int]) -> list[int]:
    """Return the classes inside the epilogue that an outside class reads."""
    need, within = around.need, inside | around.pairwise
    return [
        c
        for c in inside
        if c in need.outside or c in around.read or not within.issuperset(need.users.get(c, ()))
    ]


def _kept(around: FoldSurroundings, program: _RowSteps, returned: set[int]) -> set[int]:
    """Return the classes inside the epilogue that make the fold's outputs smaller."""

    def weight(inside: set[int]) -> int:
        return sum(bytes_of(around.t, c) for c in _returned(around, inside))

    inside = {v for v in program.number if isinstance(v, int)}
    now = weight(inside)
    while True:
        for cls in sorted(set(_returned(around, inside)) - returned, reverse=True):
            then = weight(inside - {cls})
            if then <= now:
                inside, now = inside - {cls}, then
                break
        else:
            return inside


def _stored(t: TermGraph, program: _RowSteps, served: dict[int, Served], value: Value) -> Names:
    """Return the axes of a result in the order in which the program stores it last."""
    names = program.names[value]
    order = list(names)
    view = next((w for w in reversed(t.views) if w is not None and w.cls == value), None)
    if view is not None:
        order = [names[s] for s in sorted(range(len(names)), key=view.axes.__getitem__)]
    if program.lead[-1] not in order:  # the single row
        order.insert(sum(a in program.lead for a in order), program.lead[-1])
    features = [a for a in names if a not in program.lead]
    known = [list(place[2]) for s in served.values() for place in s.places]
    wanted = next((f for f in known if set(f) == set(features)), features)
    if [a for a in order if a in features] != wanted:
        order = [*(a for a in order if a not in features), *wanted]
    return tuple(order)


def _function(
    steps: tuple[Step, ...], used: tuple[int, ...], primitives: dict[str, Any]
) -> Callable[[tuple, tuple], tuple]:
    def epilogue(results: tuple, values: tuple) -> tuple:
        def scale(data: tuple, args: list[Any], dtype: str) -> Any:
            return _scaled(data, args, results).astype(np.dtype(dtype))

        def state(place: Place, args: list[Any], dtype: str) -> Any:
            return results[place[0]][place[1]]

        read = lambda number, args, dtype: values[number]  # noqa: E731
        made = run(steps, handlers(primitives, read=read, state=state, scale=scale))
        return tuple([made[n] for n in used])

    return epilogue


def _scaled(data: tuple, args: list[Any], results: tuple) -> Any:
    """Return a result times e^(shift + Σ coefficient·term) · Π factor^power."""
    shift, coefficients, powers, coefficient = data
    top = None if shift is None else results[shift[0]][shift[1]]
    terms, factors = args[1 : 1 + len(coefficients)], args[1 + len(coefficients) :]
    exponent = list(zip(terms, coefficients, strict=True))
    scale = row_scale(top, exponent, list(zip(factors, powers, strict=True)), args[0].dtype)
    number = term_lowering.literal(coefficient, str(args[0].dtype))
    data = args[0] * number if abs(coefficient) < 1 else args[0]  # may leave the range otherwise
    scaled = data if scale is None else data * scale
    return scaled if coefficient == 1 or abs(coefficient) < 1 else scaled * number


def row_scale(top: Any, exponent: list, factors: list, dtype: Any) -> Any:
    """Return e^(shift + Σ coefficient·term) · Π factor^power in a dtype; None where it is 1.

    top: the maximum that exponentials were shifted by; None for no shift. exponent: (term,
    coefficient) pairs. factors: (factor, power) pairs.
    """
    scale: Any = None
    if top is not None or exponent:
        shift: Any = jnp.zeros((), dtype) if top is None else shift_of(top).astype(dtype)
        for term, coefficient in exponent:
            shift = shift + coefficient * term.astype(dtype)
        scale = jnp.exp(shift)
    for factor, power in factors:
        value = factor.astype(dtype)
        if power == -1:
            scale = (jnp.ones((), dtype) if scale is None else scale) / value
        else:
            value **= int(power) if power.denominator == 1 else float(power)
            scale = value if scale is None else scale * value
    return scale
