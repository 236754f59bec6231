"""From chosen terms back to JAX operations (a pass).

What was not rewritten is emitted as it came, equation for equation, with its name scope and
source line. A value is kept as an array together with the class slot each of its axes is
(`Array`), so consumers read it in any order and transposes are made only where a native equation
or a result asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.codegen import term_lowering
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import ORIGINAL, EGraph
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.term import ADD, CONTRACT, DELTA, IOTA, LEAF, MAP, Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.jax_internals import JaxprEqn


class Array(NamedTuple):
    """An array whose axis k is slot `slots[k]` of its class."""

    data: Any
    slots: tuple[int, ...]


@dataclass(slots=True)
class Rewritten:
    """One region's solution at one place of the program.

    g: the region's e-graph. choice: node by region class. leaves: program class of each leaf.
    origin: program class (and its slots) of each region class that has one.
    """

    g: EGraph
    choice: dict[int, Node]
    leaves: list[int]
    origin: dict[int, Ref]
    values: dict[int, Array] = field(default_factory=dict)
    scope: JaxprEqn | None = None


@dataclass(slots=True)
class Plan:
    """What to emit instead of the original.

    rewritten: program class to (solution, reference in its e-graph over the class's slots).
    equations: equations replaced by number (loops with optimised bodies). routed: program class
    to the kernel that computes it. shared: classes spelled twice. spread: classes that equations
    compute at more indices than they have; they are computed at their own. across: whether
    products of two operands that lie across the grain are slow (`Device.slow_across`).
    """

    rewritten: dict[int, tuple[Rewritten, Ref]] = field(default_factory=dict)
    equations: dict[int, JaxprEqn] = field(default_factory=dict)
    routed: dict[int, Any] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    spread: set[int] = field(default_factory=set)
    across: bool = False


class Emitter:
    """Emits one program; made anew for every emission, since it holds tracers."""

    def __init__(self, t: TermGraph, plan: Plan) -> None:
        self.t, self.plan = t, plan
        self.values: dict[int, Any] = {}
        self.arrays: dict[int, Array] = {}
        self.solutions: dict[int, dict[int, Array]] = {}
        self.folds: dict[int, list[Any]] = {}
        self.maker: dict[int, int] = {}
        for number, e in enumerate(t.program.equations):
            for v in e.outvals:
                self.maker[v] = number

    def run(self, args: Sequence[Any]) -> list[Any]:
        """The program's outputs at the given inputs."""
        program = self.t.program
        self.values.update(zip(program.inputs, args, strict=True))
        self.values.update(program.consts)
        for number, e in enumerate(program.equations):
            if e.eqn.effects:
                self._emit_equation(number, e)
        outputs = []
        for v in program.outputs:
            value = self.value(v)
            if isinstance(v, int):
                value = jax_internals.with_aval(value, program.avals[v])
            outputs.append(value)
        return outputs

    def value(self, v: Value) -> Any:
        """A program value as its own shape; needed equations are emitted first."""
        if not isinstance(v, int):
            return v.val
        stack, waiting = [v], set()
        while stack:
            top = stack[-1]
            if top in self.values:
                stack.pop()
                continue
            missing = [u for u in self._needs(top) if u not in self.values]
            if not waiting.isdisjoint(missing):
                raise RuntimeError("a value is needed for itself")
            if missing:
                waiting.add(top)
                stack.extend(missing)
                continue
            stack.pop()
            waiting.discard(top)
            self._make(top)
        return self.values[v]

    def _needs(self, v: int) -> list[int]:
        """Values that must be there before v is made (its region's leaves, or its operands)."""
        cls = self.t.view(v).cls
        if cls in self.arrays:
            return []
        if self._is_special(cls):
            return self._class_needs(cls)
        home = self._home(v, cls)
        if home is not None:
            return [home]
        return [u for u in self.t.program.equations[self.maker[v]].invals if isinstance(u, int)]

    def _is_special(self, cls: int) -> bool:
        plan = self.plan
        return cls in plan.routed or cls in plan.rewritten or cls in plan.spread

    def _home(self, v: int, cls: int) -> int | None:
        """Another value that computes the same class, where sharing it is worth a change."""
        if cls not in self.plan.shared or cls not in self.t.made_by:
            return None
        number, k = self.t.made_by[cls]
        home = self.t.program.equations[number].outvals[k]
        return None if home == v else home

    def _region_needs(self, solution: Rewritten, ref: Ref) -> list[int]:
        """The classes of the program that a region's value is computed from."""
        origins = (self._verbatim_origin(solution, cls) for cls in _cone(solution, ref.cls))
        return [o.cls for o in origins if o is not None and o.cls not in self.arrays]

    def _class_needs(self, cls: int) -> list[int]:
        """The values that must be there before a class is made, each once."""
        found: dict[int, None] = {}
        seen, stack = {cls}, [cls]
        while stack:
            c = stack.pop()
            if c in self.plan.routed:
                more = [x for x in self.plan.routed[c].needs(c) if x not in self.arrays]
            elif c in self.plan.rewritten:
                more = self._region_needs(*self.plan.rewritten[c])
            elif (home := self._value_of(c)) is not None:
                found[home] = None
                continue
            else:
                more = [a.cls for a in node_of(self.t.graph, c).args]
            fresh = [x for x in dict.fromkeys(more) if x not in seen]
            seen.update(fresh)
            stack.extend(reversed(fresh))
        return list(found)

    def _value_of(self, cls: int) -> int | None:
        """The program value that holds a class as it was written."""
        if cls in self.t.leaf_value:
            return self.t.leaf_value[cls]
        if cls in self.t.made_by and cls not in self.plan.spread:
            number, k = self.t.made_by[cls]
            v = self.t.program.equations[number].outvals[k]
            read = self.t.view(v).axes
            node = node_of(self.t.graph, cls)
            loose = node.op in (IOTA, ADD, MAP) or (node.op == CONTRACT and not node.bound)
            if loose and any(s != 1 and i not in read for i, s in enumerate(self.t.sizes[v])):
                return None  # it is spread over other axes
            if all(size != 0 or i in read for i, size in enumerate(self.t.sizes[v])):
                return v  # nothing can be read from an array that was spread over no elements
        return None

    def _make(self, v: int) -> None:
        cls = self.t.view(v).cls
        special = self._is_special(cls)
        home = None if special else self._home(v, cls)
        if home is not None and self._is_same(v, home):
            self.values[v] = self.value(home)
            return
        if special or home is not None:
            self.values[v] = self._from_array(v, self.array(cls))
            return
        number = self.maker[v]
        self._emit_equation(number, self.t.program.equations[number])

    def _is_same(self, v: int, other: int) -> bool:
        """Whether two values of a class hold it the same way round."""
        t = self.t
        return t.view(v).axes == t.view(other).axes and t.program.avals[v] == t.program.avals[other]

    def _emit_equation(self, number: int, e: Equation) -> None:
        if any(v in self.values for v in e.outvals):
            missing = [v for v in e.outvals if v not in self.values]
            if not missing:
                return
        eqn = self.plan.equations.get(number, e.eqn)
        outs = jax_internals.eval_equation(eqn, [self.value(v) for v in e.invals])
        for v, out in zip(e.outvals, outs, strict=True):
            self.values.setdefault(v, out)

    def _from_array(self, v: int, array: Array) -> Any:
        """The array of a class as the value v: broadcast, ordered, and with atoms merged."""
        view = self.t.views[v]
        assert view is not None
        aval = self.t.program.avals[v]
        labels = tuple(view.axes[s] for s in array.slots)
        sizes = term_lowering.jax_sizes(self.t.sizes[v], self.env)
        data = term_lowering.arrange(array.data, labels, tuple(range(len(sizes))), sizes)
        if tuple(data.shape) != tuple(aval.shape):
            data = lax.reshape(data, aval.shape)
        return data

    @property
    def env(self) -> dict[str, Any]:
        """JAX dimensions by name, for symbolic sizes."""
        return self.t.dim_env

    def array(self, cls: int) -> Array:
        """A class of the program as an array."""
        found = self.arrays.get(cls)
        if found is None:
            found = self.arrays[cls] = self._make_array(cls)
        return found

    def folded(self, route: Any) -> list[Any]:
        """The results of a routed fold, run once."""
        if id(route) not in self.folds:
            self.folds[id(route)] = route.run(self)
        return self.folds[id(route)]

    def _make_array(self, cls: int) -> Array:
        if cls in self.plan.routed:
            data, slots = self.plan.routed[cls].array(self, cls)
            return Array(data, slots)
        if cls in self.plan.rewritten:
            solution, ref = self.plan.rewritten[cls]
            made = self._solve(solution, ref.cls)
            return Array(made.data, tuple(ref.axes[s] for s in made.slots))
        v = self._value_of(cls)
        if v is not None:
            return self._to_array(v)
        node = node_of(self.t.graph, cls)
        operands = [self._operand(a, self.array(a.cls)) for a in node.args]
        return self._lower(self.t.graph, cls, node, operands)

    def _to_array(self, v: int) -> Array:
        """A value's class as an array: atoms split, broadcast axes dropped."""
        view = self.t.views[v]
        assert view is not None
        data = self.value(v)
        sizes = term_lowering.jax_sizes(self.t.sizes[v], self.env)
        if tuple(data.shape) != tuple(sizes):
            data = lax.reshape(data, sizes)
        slot_of = {i: s for s, i in enumerate(view.axes)}
        for axis in range(len(sizes) - 1, -1, -1):
            if axis not in slot_of:
                data = lax.index_in_dim(data, 0, axis, keepdims=False)
        return Array(data, tuple(slot_of[i] for i in sorted(slot_of)))

    @staticmethod
    def _operand(ref: Ref, array: Array) -> tuple[Any, tuple[int, ...]]:
        axes = ref.axes
        labels = [axes[s] if axes[s] >= 0 else term_lowering.dropped_label(s) for s in array.slots]
        return array.data, tuple(labels)

    def _verbatim_origin(self, solution: Rewritten, cls: int) -> Ref | None:
        """The program class to read for a region class, if it is computed as written."""
        node = solution.choice[cls]
        if node.op == LEAF:
            program_cls = solution.leaves[node.attr]
            return Ref(program_cls, tuple(range(node.out)))
        if solution.g.classes[cls].nodes.get(node) != ORIGINAL:
            return None
        origin = solution.origin.get(cls)
        if origin is None or self.plan.rewritten.get(origin.cls, (None,))[0] is solution:
            return None
        return origin

    def _solve(self, solution: Rewritten, root: int) -> Array:
        done = self.solutions.setdefault(id(solution), {})
        for cls in _cone(solution, root, done):
            origin = self._verbatim_origin(solution, cls)
            if origin is not None:
                array = self.array(origin.cls)
                slot = {p: s for s, p in enumerate(origin.axes)}
                done[cls] = Array(array.data, tuple(slot[p] for p in array.slots))
                continue
            node = solution.choice[cls]
            operands = [self._operand(a, done[a.cls]) for a in node.args]
            with jax_internals.maybe_scope(solution.scope):
                done[cls] = self._lower(solution.g, cls, node, operands)
        return done[root]

    def _lower(
        self, g: EGraph, cls: int, node: Node, operands: list[tuple[Any, tuple[int, ...]]]
    ) -> Array:
        c = g.classes[cls]
        sizes = term_lowering.jax_sizes((*c.sizes, *node.bound), self.env)
        guards = frozenset(
            k
            for k, a in enumerate(node.args)
            if node.op == CONTRACT and any(n.op == DELTA for n in g.classes[a.cls].nodes)
        )
        if self.plan.across and node.op == CONTRACT:
            operands = term_lowering.transposed_apart(node, operands)
        data, labels = term_lowering.lower_node(
            node, operands, sizes, c.dtype, self.t.primitives, guards
        )
        return Array(data, labels)


def _cone(solution: Rewritten, root: int, done: dict[int, Array] | None = None) -> list[int]:
    """Region classes under a root, operands first; leaves and finished ones are not opened."""
    order: list[int] = []
    seen: set[int] = set(done or ())
    stack: list[tuple[int, bool]] = [(root, False)]
    while stack:
        cls, ready = stack.pop()
        if ready:
            order.append(cls)
        elif cls not in seen:
            seen.add(cls)
            stack.append((cls, True))
            stack.extend((a.cls, False) for a in solution.choice[cls].args)
    return order


def emit_function(t: TermGraph, plan: Plan, made: set[int]) -> Callable[..., list[Any]]:
    """A function of the program's flat inputs that emits the plan, and notes what it made.

    Args:
        t: the program.
        plan: what to emit instead of what was written.
        made: filled with the program's values that exist in the emitted program, and those inside
            its kernels that are too dear to be made again for a gradient.
    """

    def emitted(*args: Any) -> list[Any]:
        emitter = Emitter(t, plan)
        outs = emitter.run(args)
        made.update(emitter.values)
        ran = (r for r in plan.routed.values() if id(r) in emitter.folds)
        dear = {c for r in ran for c in getattr(r, "dear", set)()}
        outvals = (v for e in t.program.equations for v in e.outvals) if dear else ()
        made.update(v for v in outvals if t.view(v).cls in dear)
        return outs

    return emitted
