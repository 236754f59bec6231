"""Row algebra after a fold, done where the sums are made: divisions, casts, log-sum-exp (a face).

A sink is a fold's state times row algebra; what follows it elementwise (a normaliser, a cast) is
row algebra too. All of it becomes the fold's epilogue, so that one kernel makes what the program
goes on with, and the raw sums are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite import lower
from symjax_rewrite.canonical import TermGraph
from symjax_rewrite.egraph import EGraph
from symjax_rewrite.ir import ADD, CONST, CONTRACT, MAP, Ref
from symjax_rewrite.monoid import shift_of
from symjax_rewrite.pallas_kernels.fold_spec import Epilogue
from symjax_rewrite.regions import Needed, node_of

# what both a loop and a Triton kernel can do to a row
ROW_MAPS = frozenset(
    """abs ceil clamp convert_element_type cos div eq exp exp2 floor ge gt is_finite le log log1p
    logistic lt max min ne not or and pow reciprocal rsqrt select_n sign sin sqrt tanh""".split()
)
Step = tuple[str, Any, tuple[int, ...], str]  # kind, data, earlier steps, dtype
Names = tuple[str, ...]


@dataclass(slots=True)
class Rows:
    """What a fold's epilogue computes.

    exits: the classes it gives, in order. names: for each of them, the axis of each slot. inside:
    every class that is computed on the way. axes: the axes of each result as it is stored.
    """

    epilogue: Epilogue
    exits: list[int]
    names: dict[int, Names]
    inside: set[int]
    axes: tuple[Names, ...]


@dataclass(slots=True)
class _Program:
    """The steps of an epilogue under construction, and what they read."""

    t: TermGraph
    sinks: dict[int, Any]
    state: dict[int, tuple[int, Names]]  # sink class: number of its sum (0: the maximum), features
    roles: dict[int, str]
    lead: Names
    operand: Callable[[Ref], int]
    after: set[int]
    names: dict[int, Names] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    number: dict[int, int] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)

    def step(self, kind: str, data: Any, args: tuple[int, ...], dtype: str) -> int:
        new = (kind, data, args, dtype)
        if new not in self.steps:
            self.steps.append(new)
        return self.steps.index(new)

    def value(self, ref: Ref, names: dict[int, str]) -> int | None:
        """The step of an operand whose index i is the axis names[i]; None if it is no row value."""
        axes = tuple(names.get(i, "") for i in ref.axes)
        if ref.cls in self.number:
            return self.number[ref.cls] if axes == self.names[ref.cls] else None
        node, dtype = node_of(self.t.graph, ref.cls), self.t.graph.classes[ref.cls].dtype
        if node.op == CONST:
            return self.step("const", node.attr[0], (), dtype)
        if ref.cls in self.after or len(set(axes)) != len(axes) or not set(axes) <= {*self.lead}:
            return None
        slot_of = {name: slot for slot, name in self.roles.items()}
        read = self.operand(Ref(ref.cls, tuple(slot_of[a] for a in axes)))
        if read not in self.reads:
            self.reads.append(read)
        return self.step("read", self.reads.index(read), (), dtype)

    def sink(self, cls: int) -> bool:
        """Take in a sink: its state times its row algebra."""
        sink = self.sinks[cls]
        number, features = self.state[cls]
        of_index = {i: self.roles[slot] for slot, i in enumerate(sink.tile.axes)}
        if sink.weights is not None:
            of_index.update(zip(_features_of(sink), features, strict=True))
        slots = range(len(self.t.graph.classes[cls].sizes))
        dtype = self.t.graph.classes[cls].dtype
        out = self.step("state", number, (), "")
        if sink.is_max:
            out = self.step("cast", None, (out,), dtype)
        else:
            terms = [self.value(r, of_index) for r, _ in sink.rest.exponent]
            factors = [self.value(r, of_index) for r, _ in sink.rest.factors]
            if None in terms or None in factors:
                return False
            data = (tuple(c for _, c in sink.rest.exponent), tuple(p for _, p in sink.rest.factors))
            out = self.step("scale", data, (out, *terms, *factors), dtype)  # pyright: ignore
        self.number[cls], self.names[cls] = out, tuple(of_index[i] for i in slots)
        return True

    def follow(self, cls: int) -> bool:
        """Take in a class that is elementwise in what is in already."""
        node, c = node_of(self.t.graph, cls), self.t.graph.classes[cls]
        if node.bound or ("float" not in c.dtype and c.dtype != "bool"):
            return False
        if node.op not in (ADD, CONTRACT) and not (node.op == MAP and node.attr[0] in ROW_MAPS):
            return False
        names: dict[int, str] = {}
        for a in node.args:
            for i, name in zip(a.axes, self.names.get(a.cls, ()), strict=False):
                if names.setdefault(i, name) != name:
                    return False
        if len(names) < len(c.sizes) or len(set(names.values())) < len(names):
            return False
        args = [self.value(a, names) for a in node.args]
        if None in args:
            return False
        self.number[cls] = self.step("apply", (node.op, node.attr), tuple(args), c.dtype)  # pyright: ignore
        self.names[cls] = tuple(names[i] for i in range(len(c.sizes)))
        return True


def _features_of(sink: Any) -> list[int]:
    return [i for i in sink.weights.axes if i not in sink.tile.axes]


def dependents(g: EGraph, need: Needed, roots: set[int]) -> set[int]:
    """The needed classes that depend on any of `roots`, and these."""
    found = set(roots)
    for cls in need.order:
        if any(a.cls in found for a in node_of(g, cls).args):
            found.add(cls)
    return found


def row_algebra(
    t: TermGraph,
    need: Needed,
    sinks: dict[int, Any],
    state: dict[int, tuple[int, Names]],
    roles: dict[int, str],
    lead: Names,
    operand: Callable[[Ref], int],
    routed: set[int],
) -> Rows | None:
    """The row algebra around a fold's sinks as its epilogue.

    Args:
        t: the program.
        need: what of it is needed.
        sinks: by class.
        state: by sink class, the number of its sum (0 for the maximum) and its feature axes.
        roles: the axis name of each tile slot.
        lead: batch axes, then the row axis.
        operand: gives the number of an operand over the tile's slots.
        routed: what depends on any sink of the program: two folds must not wait for each other.

    Returns:
        None where some row algebra cannot be done inside.
    """
    after = dependents(t.graph, need, set(sinks))
    program = _Program(t, sinks, state, roles, lead, operand, after)
    pairwise = _pairwise(t, need, sinks)
    for cls in need.order:
        if cls in sinks:
            if not program.sink(cls):
                return None
        elif cls in after and cls not in pairwise:
            foreign = (a for a in node_of(t.graph, cls).args if a.cls not in program.number)
            if not any(a.cls in routed for a in foreign):
                program.follow(cls)
    inside = _kept(t, need, program, set(sinks), pairwise)
    exits = sorted(_exits(need, inside, pairwise))
    axes = tuple(_stored(t, program, cls) for cls in exits)
    used = tuple(program.number[cls] for cls in exits)
    steps, reads = tuple(program.steps), tuple(program.reads)
    fun = _function(steps, used, t.primitives)
    key = ("rows", tuple((k, repr(d), a, x) for k, d, a, x in steps), used)
    names = {cls: program.names[cls] for cls in exits}
    return Rows(Epilogue(fun, axes, reads, key), exits, names, inside, axes)


def _pairwise(t: TermGraph, need: Needed, sinks: dict[int, Any]) -> set[int]:
    """The classes between the tile and the sinks: what is never made."""
    found: set[int] = set()
    columns = {
        t.graph.classes[s.tile.cls].sizes[s.tile.axes.index(s.index)] for s in sinks.values()
    }
    rank = min(len(s.tile.axes) for s in sinks.values())
    for cls in reversed(need.order):
        sizes, users = t.graph.classes[cls].sizes, need.users.get(cls, ())
        if len(sizes) < rank or not columns & set(sizes) or node_of(t.graph, cls).bound:
            continue
        if users and cls not in need.outside and all(u in found or u in sinks for u in users):
            found.add(cls)
    return found


def _exits(need: Needed, inside: set[int], pairwise: set[int]) -> list[int]:
    def leaves(cls: int) -> bool:
        users = need.users.get(cls, ())
        return cls in need.outside or any(u not in inside and u not in pairwise for u in users)

    return [cls for cls in inside if leaves(cls)]


def _kept(
    t: TermGraph, need: Needed, program: _Program, sinks: set[int], pairwise: set[int]
) -> set[int]:
    """The classes taken in that make what leaves the fold smaller."""

    def weight(inside: set[int]) -> int:
        classes = [t.graph.classes[c] for c in _exits(need, inside, pairwise)]
        return sum(
            math.prod(int(str(s)) for s in c.sizes) * np.dtype(c.dtype).itemsize for c in classes
        )

    inside = set(program.number)
    now = weight(inside)
    while True:
        for cls in sorted(set(_exits(need, inside, pairwise)) - sinks, reverse=True):
            then = weight(inside - {cls})
            if then <= now:
                inside, now = inside - {cls}, then
                break
        else:
            return inside


def _stored(t: TermGraph, program: _Program, cls: int) -> Names:
    """The axes of a result in the order in which the program holds it last."""
    names = program.names[cls]
    order = list(names)
    for v in range(len(t.views) - 1, -1, -1):
        view = t.views[v]
        if view is not None and view.cls == cls:
            by_place = sorted(range(len(names)), key=lambda s: view.axes[s])
            order = [names[s] for s in by_place]
            break
    features = [a for a in names if a not in program.lead]
    wanted = next((list(f) for _, f in program.state.values() if set(f) == set(features)), features)
    if [a for a in order if a in features] != wanted:
        order = [*(a for a in order if a not in features), *wanted]
    return tuple(order)


def _function(
    steps: tuple[Step, ...], used: tuple[int, ...], primitives: dict[str, Any]
) -> Callable[[tuple, tuple], tuple]:
    """The steps as a function of a fold's results and the values read."""

    def epilogue(results: tuple, values: tuple) -> tuple:
        made: list[Any] = []
        for kind, data, args, dtype in steps:
            if kind == "const":
                made.append(np.asarray(data).astype(np.dtype(dtype)))
            elif kind == "read":
                made.append(values[data])
            elif kind == "state":
                made.append(results[0][data])
            elif kind == "cast":
                made.append(made[args[0]].astype(np.dtype(dtype)))
            elif kind == "scale":
                scaled = _scaled(data, [made[a] for a in args], shift_of(results[0][0]))
                made.append(scaled.astype(np.dtype(dtype)))
            else:
                made.append(apply(data, [made[a] for a in args], dtype, primitives))
        return tuple([made[n] for n in used])

    return epilogue


def _scaled(data: tuple, args: list[Any], shift: Any) -> Any:
    """A state times e^(shift + Σ coefficient·term) · Π factor^power."""
    coefficients, powers = data
    terms, factors = args[1 : 1 + len(coefficients)], args[1 + len(coefficients) :]
    exponent = zip(terms, coefficients, strict=True)
    return args[0] * row_scale(shift, exponent, zip(factors, powers, strict=True))


def row_scale(shift: Any, exponent: Any, factors: Any) -> Any:
    """e^(shift + Σ coefficient·term) · Π factor^power, in the shift's dtype."""
    for term, coefficient in exponent:
        shift = shift + coefficient * term.astype(shift.dtype)
    scale = jnp.exp(shift)
    for factor, power in factors:
        value = factor.astype(scale.dtype)
        if power == -1:
            scale = scale / value
        else:
            scale = scale * value ** (int(power) if power.denominator == 1 else float(power))
    return scale


def apply(what: tuple, args: list[Any], dtype: str, primitives: dict[str, Any]) -> Any:
    """One elementwise term on arrays that broadcast."""
    op, attr = what
    if op == ADD:
        total: Any = None
        for coefficient, x in zip(attr, args, strict=True):
            term = x if coefficient == 1 else x * lower.literal(coefficient, dtype)
            total = term if total is None else total + term
        return total
    if op == CONTRACT:
        total = args[0]
        for x in args[1:]:
            total = total * x
        return total
    name, params = attr
    if name == "convert_element_type":
        return args[0].astype(np.dtype(dtype))
    if name == "reciprocal":
        return 1 / args[0]
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
    arrays = [jnp.broadcast_to(x, shape) for x in args]
    return primitives[name].bind(*arrays, **dict(params))
