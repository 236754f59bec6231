"""Emission: chosen terms and programs are converted back to JAX operations.

Equations that were not rewritten are emitted unchanged. A class of terms is an array together with
the class slot of each of its axes (`Array`). Consumers read it in any order, and a transpose is
emitted only if a native equation or a result needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.codegen import product_lowering, term_lowering
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.dataflow import node_of, postorder
from symjax_rewrite.ir.egraph import ORIGINAL, EGraph
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.replacement import Read
from symjax_rewrite.ir.term import ADD, CONTRACT, IOTA, LEAF, MAP, Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn


def run(program: Program, args: Sequence[Any]) -> list[Any]:
    """Run a program equation by equation; return its results at flat inputs."""
    made = values(program, args)
    results = [made[v] if isinstance(v, int) else v.val for v in program.outputs]
    avals = program.closed.out_avals
    return [jax_internals.with_aval(x, a) for x, a in zip(results, avals, strict=True)]


def values(program: Program, args: Sequence[Any]) -> dict[int, Any]:
    """Return every value of a program at flat inputs; equal transpositions are one.

    XLA folds a transposition into the product that makes its operand only if nothing else reads the
    product, and it does so before it finds that two transpositions are equal.
    """
    made: dict[int, Any] = dict(zip(program.inputs, args, strict=True)) | program.consts
    transposed: dict[Any, int] = {}
    for e in program.equations:
        if e.name == "transpose" and isinstance(e.invals[0], int):
            first = transposed.setdefault((e.invals[0], e.eqn.params["permutation"]), e.outvals[0])
            if first in made:
                made[e.outvals[0]] = made[first]
                continue
        operands = [made[v] if isinstance(v, int) else v.val for v in e.invals]
        made.update(zip(e.outvals, jax_internals.eval_equation(e.eqn, operands), strict=True))
    return made


def staged(program: Program) -> ClosedJaxpr:
    """Return a program as a jaxpr of the same inputs and results."""
    closed = program.closed
    return jax_internals.make_avals_jaxpr(lambda *args: run(program, args), closed.in_avals)


class Array(NamedTuple):
    """An array whose axis k is slot `slots[k]` of its class."""

    data: Any
    slots: tuple[int, ...]


@dataclass(slots=True)
class RegionForm:
    """The solution of one region at one place of the program.

    g: the region's e-graph. choice: node by region class. leaves: program class (and its slots) of
    each leaf. origin: the same, of each region class that has one. scope: the equation whose name
    scope is used.
    """

    g: EGraph
    choice: dict[int, Node]
    leaves: list[Ref]
    origin: dict[int, Ref]
    scope: JaxprEqn | None = None


class ClassMaker(Protocol):
    """An object that computes classes of terms by other means than their written nodes.

    gives: the classes that it computes for other readers. needs: the classes that must be computed
    before a class of its own. array: a class's value, and its slots.
    """

    def gives(self) -> set[int]: ...
    def needs(self, cls: int) -> Iterable[int]: ...
    def array(self, reader: TermReader, cls: int) -> tuple[Any, tuple[int, ...]]: ...


@runtime_checkable
class OneRun(ClassMaker, Protocol):
    """A maker whose classes are computed from the results of one run.

    beside: the classes that are read to compute a class from the results.
    """

    def beside(self, cls: int) -> Iterable[int]: ...

    def operands(self) -> Iterable[int]:
        """Return the classes that the run reads."""
        ...

    def run(self, emitter: TermReader) -> Any:
        """Return the results of the run."""
        ...


@dataclass(eq=False, slots=True)
class TermPart:
    """Values of a program whose classes are computed differently, as a `Part` (`ir.replacement`).

    t: the program's terms. makers: by class, the object that computes it. forms: by class, the
    solution of a region and a reference into its e-graph, over the class's slots. own: classes that
    are computed over their own indices, although equations have more indices. shared: classes of
    which every value is read from the first value. links: by class that no value of the program
    holds, the value through which parts exchange it. wide: the same, by class that parts hold in
    f32. opens: True if later passes see the equations. across: True if products of two operands
    with a strided contracted axis are slow. short_row: products with a vector compute the sums in
    `own`, but not down rows of so few elements; None: sums do. source: the equation whose name
    scope all get. results: the values that hold the results of the only maker, which another part
    runs, and their tree.
    """

    t: TermGraph
    makers: Mapping[int, ClassMaker] = field(default_factory=dict)
    forms: Mapping[int, tuple[RegionForm, Ref]] = field(default_factory=dict)
    own: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    links: Mapping[int, int] = field(default_factory=dict)
    wide: Mapping[int, int] = field(default_factory=dict)
    opens: bool = True
    across: bool = False
    short_row: int | None = None
    source: JaxprEqn | None = None
    results: tuple[tuple[int, ...], Any] | None = None
    gives: tuple[int, ...] = field(default=(), init=False)
    _homes: dict[int, int | None] = field(default_factory=dict, init=False)  # by class

    def __post_init__(self) -> None:
        classes = (*self.makers, *self.forms, *self.own, *self.shared)
        homes = {self.value_of(cls) for cls in self.shared}
        values = (v for cls in dict.fromkeys(classes) for v in self.t.values_of(cls))
        exchanged = (v for v, _ in self._exchanged())
        self.gives = (*(v for v in values if v not in homes), *exchanged)

    def _exchanged(self) -> Iterator[tuple[int, int]]:
        """Yield the values through which parts exchange classes made here, with the classes."""
        mine = (*self.makers, *self.own)
        return ((by[c], c) for by in (self.links, self.wide) for c in mine if c in by)

    def needs(self, value: int) -> list[int]:
        """Return the values that must be computed before a value, each once."""
        return self._values_under([self.class_of(value)])

    def _values_under(self, classes: Sequence[int]) -> list[int]:
        """Return the values that must be computed before some classes, each once."""
        found: dict[int, None] = {}
        seen, stack = {*classes}, [*classes]
        while stack:
            c = stack.pop()
            if c in self.makers:
                more = self._maker_needs(c)
                found.update(dict.fromkeys(self.results[0] if self.results else ()))
            elif c not in self.own and (link := self.wide.get(c, self.links.get(c))) is not None:
                found[link] = None
                continue
            elif c in self.forms:
                more = self._form_needs(*self.forms[c])
            elif (home := self.value_of(c)) is not None:
                found[home] = None
                continue
            else:
                more = [a.cls for a in node_of(self.t.graph, c).args]
            fresh = [x for x in dict.fromkeys(more) if x not in seen]
            seen.update(fresh)
            stack.extend(reversed(fresh))
        return list(found)

    def _maker_needs(self, cls: int) -> Iterable[int]:
        """Return the classes that a class needs, beside results that another part gives."""
        maker = self.makers[cls]
        if self.results is not None and isinstance(maker, OneRun):
            return maker.beside(cls)
        return maker.needs(cls)

    def divided(self, new_value: Callable[[Any], int]) -> tuple[MakerRun, TermPart] | None:
        """Return the run of the only maker, and the values from its results; None for others."""
        from symjax_rewrite.pallas_kernels.backend import deferring_kernels  # heavy: when used

        makers = {id(m): m for m in self.makers.values()}
        if len(makers) != 1 or self.forms or self.own or self.results is not None:
            return None
        (maker,) = makers.values()
        if not isinstance(maker, OneRun):
            return None
        reads = self._values_under([*maker.operands()])
        avals = [self.t.program.avals[v] for v in reads]

        def run(*arrays: Any) -> Any:
            known = dict(zip(reads, arrays, strict=True))
            return maker.run(TermReader(self, lambda v: known[v] if isinstance(v, int) else v.val))

        with deferring_kernels(True):  # shapes need no kernel of another platform
            leaves, tree = jax.tree.flatten(jax.eval_shape(run, *avals))
        values = tuple(new_value(jax_internals.array_aval(x.shape, x.dtype)) for x in leaves)
        return MakerRun(self, maker, values), replace(self, results=(values, tree), opens=True)

    def cost(self, device: Device) -> Cost | None:
        """Return the cost of its makers' kernels on a device; None if a maker has no cost model."""
        from symjax_rewrite.pallas_kernels.backend import planning_for  # heavy: when used

        total = Cost()
        for maker in {id(m): m for m in self.makers.values()}.values():
            with planning_for(device):
                found = getattr(maker, "price", lambda _: None)(device)
            if found is None:
                return None
            total = total.plus(found)
        return total if self.makers else None

    def class_of(self, value: int) -> int:
        """Return the class that a value holds, or that parts exchange through it."""
        for v, cls in self._exchanged():
            if v == value:
                return cls
        return self.t.view(value).cls

    def emit(self, wanted: Sequence[int], read: Read) -> list[Any]:
        """Return the arrays of the wanted values."""
        reader = TermReader(self, read)
        return [reader.value(v) for v in wanted]

    def value_of(self, cls: int) -> int | None:
        """Return the program value that holds a class as it was written."""
        if cls not in self._homes:
            self._homes[cls] = self._home(cls)
        return self._homes[cls]

    def _home(self, cls: int) -> int | None:
        t = self.t
        if cls in t.leaf_value:
            return t.leaf_value[cls]
        if cls not in t.made_by or cls in self.own:
            return None
        number, k = t.made_by[cls]
        v = t.program.equations[number].outvals[k]
        read = t.view(v).axes
        node = node_of(t.graph, cls)
        loose = node.op in (IOTA, ADD, MAP) or (node.op == CONTRACT and not node.bound)
        if loose and any(s != 1 and i not in read for i, s in enumerate(t.sizes[v])):
            return None  # the value is broadcast over other axes
        if all(size != 0 or i in read for i, size in enumerate(t.sizes[v])):
            return v  # no element can be read from an array that was broadcast over an empty axis
        return None

    def _form_needs(self, form: RegionForm, ref: Ref) -> list[int]:
        """Return the classes of the program from which a region's value is computed."""
        origins = (self.verbatim_origin(form, cls) for cls in self.cone(form, ref.cls))
        return [o.cls for o in origins if o is not None]

    def cone(self, form: RegionForm, root: int, done: Iterable[int] = ()) -> list[int]:
        """Return the classes of a region from which one is computed here, operands first.

        done: classes to leave out. Those that are read as written end the walk.
        """

        def operands(cls: int) -> list[int]:
            is_read = self.verbatim_origin(form, cls) is not None
            return [] if is_read else [a.cls for a in form.choice[cls].args]

        return postorder([root], operands, done)

    def verbatim_origin(self, form: RegionForm, cls: int) -> Ref | None:
        """Return the program class to read for a region class that is computed as written."""
        node = form.choice[cls]
        if node.op == LEAF:
            return form.leaves[node.attr]
        if form.g.classes[cls].nodes.get(node) != ORIGINAL:
            return None
        origin = form.origin.get(cls)
        if origin is None or self.forms.get(origin.cls, (None,))[0] is form:
            return None
        return origin


@dataclass(eq=False, slots=True)
class MakerRun:
    """The run of a maker of several classes, as a `Part` that gives all its results."""

    part: TermPart
    maker: OneRun
    gives: tuple[int, ...]
    opens: bool = False

    @property
    def source(self) -> JaxprEqn | None:
        """Return the equation whose name scope the run gets."""
        return self.part.source

    def needs(self, value: int) -> list[int]:
        """Return the values that the run reads."""
        del value
        return self.part._values_under([*self.maker.operands()])

    def emit(self, wanted: Sequence[int], read: Read) -> list[Any]:
        """Return the results that are wanted."""
        made = jax.tree.leaves(self.maker.run(TermReader(self.part, read)))
        by_value = dict(zip(self.gives, made, strict=True))
        return [by_value[v] for v in wanted]

    def cost(self, device: Device) -> Cost | None:
        """Return the cost of the run on a device; None if the maker has no cost model."""
        return self.part.cost(device)


class TermReader:
    """Reads classes as arrays during the emission of one part."""

    def __init__(self, part: TermPart, read: Read) -> None:
        self.part, self.t, self.read = part, part.t, read
        self._arrays: dict[int, Array] = {}
        self._wide: dict[int, Array] = {}
        self._solutions: dict[int, dict[int, Array]] = {}
        self._results: dict[int, list[Any]] = {}

    @property
    def env(self) -> dict[str, Any]:
        """Return the JAX dimensions by name, for symbolic sizes."""
        return self.t.dim_env

    def value(self, v: int) -> Any:
        """Return a value from the array of its class: broadcast, ordered, and with atoms merged."""
        cls, t = self.part.class_of(v), self.t
        is_wide = v == self.part.wide.get(cls)
        if is_wide or v == self.part.links.get(cls):
            array = self.wide_array(cls) if is_wide else self.array(cls)
            sizes = term_lowering.jax_sizes(t.graph.classes[cls].sizes, self.env)
            return term_lowering.in_order(array.data, array.slots, sizes)
        view, aval, home = t.view(v), t.program.avals[v], self.part.value_of(cls)
        if home is not None and home != v:
            is_kept = cls not in self.part.makers and cls not in self.part.forms
            if is_kept and view.axes == t.view(home).axes and aval == t.program.avals[home]:
                return self.read(home)
        array = self.array(cls, _slots_in_order(view.axes, range(len(aval.shape))))
        labels = tuple(view.axes[s] for s in array.slots)
        sizes = term_lowering.jax_sizes(t.sizes[v], self.env)
        data = term_lowering.in_order(array.data, labels, sizes)
        return data if tuple(data.shape) == tuple(aval.shape) else lax.reshape(data, aval.shape)

    def array(self, cls: int, order: Sequence[int] = ()) -> Array:
        """Return a class of the program as an array.

        order: its slots in the order in which the first reader has them; a product whose operands
        may stand in either order gives them so.
        """
        if cls not in self._arrays:
            self._arrays[cls] = self._make(cls, order)
        return self._arrays[cls]

    def wide_array(self, cls: int) -> Array:
        """Return a class in the dtype of its maker, which may be wider than its own."""
        held = getattr(self.part.makers.get(cls), "held", None)
        if held is not None:
            if cls not in self._wide:
                self._wide[cls] = Array(*held(self, cls))
            return self._wide[cls]
        if cls in self.part.makers or cls not in self.part.wide:
            return self.array(cls)
        return self._from_value(cls, self.part.wide[cls])

    def _from_value(self, cls: int, v: int) -> Array:
        return Array(self.read(v), tuple(range(len(self.t.graph.classes[cls].sizes))))

    def folded(self, maker: Any) -> list[Any]:
        """Return the results of an object that computes several classes, run once."""
        if id(maker) not in self._results and self.part.results is not None:
            values, tree = self.part.results
            self._results[id(maker)] = jax.tree.unflatten(tree, [self.read(v) for v in values])
        elif id(maker) not in self._results:
            self._results[id(maker)] = maker.run(self)
        return self._results[id(maker)]

    def _make(self, cls: int, order: Sequence[int]) -> Array:
        if cls in self.part.makers:
            return Array(*self.part.makers[cls].array(self, cls))
        if cls in self.part.wide:
            dtype = np.dtype(self.t.graph.classes[cls].dtype)
            made = self._from_value(cls, self.part.wide[cls])
            return made._replace(data=made.data.astype(dtype))
        if cls in self.part.links and cls not in self.part.own:
            return self._from_value(cls, self.part.links[cls])
        if cls in self.part.forms:
            form, ref = self.part.forms[cls]
            made = self._solve(form, ref.cls, _slots_in_order(ref.axes, order))
            return Array(made.data, tuple(ref.axes[s] for s in made.slots))
        v = self.part.value_of(cls)
        if v is not None:
            return self._to_array(v)
        node = node_of(self.t.graph, cls)
        below = [self.array(a.cls, _order_below(node, a, order)) for a in node.args]
        operands = list(map(self.operand, node.args, below))
        short_row = self.part.short_row if cls in self.part.own else None
        made = self._lower(self.t.graph, cls, node, operands, order, short_row)
        if cls not in self.part.own:
            return made
        # XLA fuses a sum into the operations that read it broadcast, which compute it again.
        return made._replace(data=lax.optimization_barrier(made.data))

    def _to_array(self, v: int) -> Array:
        """Return a value's class as an array: atoms split, broadcast axes dropped."""
        view, data = self.t.view(v), self.read(v)
        sizes = term_lowering.jax_sizes(self.t.sizes[v], self.env)
        if tuple(data.shape) != tuple(sizes):
            data = lax.reshape(data, sizes)
        slot_of = {i: s for s, i in enumerate(view.axes)}
        for axis in range(len(sizes) - 1, -1, -1):
            if axis not in slot_of:
                data = lax.index_in_dim(data, 0, axis, keepdims=False)
        return Array(data, tuple(slot_of[i] for i in sorted(slot_of)))

    @staticmethod
    def operand(ref: Ref, array: Array) -> tuple[Any, tuple[int, ...]]:
        """Return an array with the index by which a reference reads each of its axes."""
        axes = ref.axes
        labels = [axes[s] if axes[s] >= 0 else term_lowering.dropped_label(s) for s in array.slots]
        return array.data, tuple(labels)

    def _solve(self, form: RegionForm, root: int, order: Sequence[int]) -> Array:
        done = self._solutions.setdefault(id(form), {})
        classes, orders = self.part.cone(form, root, done), {root: order}
        for cls in reversed(classes):
            for a in form.choice[cls].args:
                orders.setdefault(a.cls, _order_below(form.choice[cls], a, orders[cls]))
        for cls in classes:
            origin = self.part.verbatim_origin(form, cls)
            if origin is not None:
                array = self.array(origin.cls)
                done[cls] = Array(array.data, tuple(map(origin.axes.index, array.slots)))
                continue
            node = form.choice[cls]
            operands = [self.operand(a, done[a.cls]) for a in node.args]
            with jax_internals.equation_scope(form.scope):
                done[cls] = self._lower(form.g, cls, node, operands, orders[cls])
        return done[root]

    def _lower(
        self,
        g: EGraph,
        cls: int,
        node: Node,
        operands: list[tuple[Any, tuple[int, ...]]],
        order: Sequence[int],
        short_row: int | None = None,
    ) -> Array:
        c = g.classes[cls]
        sizes = term_lowering.jax_sizes((*c.sizes, *node.bound), self.env)
        guards = term_lowering.deltas_in(g, node)
        if self.part.across and node.op == CONTRACT:
            operands = product_lowering.transposed_apart(node, operands)
        names = self.t.primitives
        made = term_lowering.lower_node(
            node, operands, sizes, c.dtype, names, guards, order, short_row
        )
        return Array(*made)


def _slots_in_order(axes: Sequence[int], order: Sequence[int]) -> Sequence[int]:
    """Return the slots of an operand in the order in which a reader has its indices.

    axes: the index that reads each slot. order: of the indices; none for the order of numbers.
    """
    places = {i: n for n, i in enumerate(order)}
    return sorted(range(len(axes)), key=lambda s: places.get(axes[s], len(places) + axes[s]))


def _order_below(node: Node, operand: Ref, order: Sequence[int]) -> Sequence[int]:
    """Return the order that an elementwise node wants of an operand; others take any."""
    is_elementwise = node.op in (ADD, MAP) or (node.op == CONTRACT and not node.bound)
    return _slots_in_order(operand.axes, order) if is_elementwise else ()
