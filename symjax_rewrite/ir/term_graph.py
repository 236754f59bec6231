"""The term graph: a flat program as one hash-consed graph of index terms.

Every value has a reference into the graph over the value's own atom positions. Equations without a
row in `primitives` or `indexing_primitives`, or whose axes do not line up, become native nodes.

    u = a.T; v = u @ b; w = sort(v)  # u is no node; v: contract a[k, i]·b[k, j]; w: a native node
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir import primitives
from symjax_rewrite.ir.axis_factorization import AxisMap
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.flat_program import Equation, Program, Value, bits
from symjax_rewrite.ir.index_constants import of_indices
from symjax_rewrite.ir.indexing_primitives import lift
from symjax_rewrite.ir.primitive_context import Groups, Layout, Site
from symjax_rewrite.ir.sizes import Dim, Poly, value
from symjax_rewrite.ir.term import LEAF, NATIVE, Ref
from symjax_rewrite.jax_internals import Literal

_SCALAR = Layout((), (), (), ())  # of a literal
SCAN_LIMIT = 1 << 22  # constants of more elements are not tested for uniformity


@dataclass(slots=True)
class TermGraph:
    """The program as index terms.

    views: for every value, its reference over its atom positions.
    positions: for every value, for every axis, the positions of its atoms.
    sizes, ids: for every value, the size and the solved atom of each atom position.
    layouts: for every value, its ids, sizes, positions and shape.
    dtypes: for every value, its dtype's name.
    made_by: for every class that an equation computes, (equation number, output number).
    """

    program: Program
    graph: EGraph = field(default_factory=EGraph)
    views: list[Ref | None] = field(default_factory=list)
    positions: list[Groups] = field(default_factory=list)
    sizes: list[tuple[Dim, ...]] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    made_by: dict[int, tuple[int, int]] = field(default_factory=dict)
    leaf_value: dict[int, int] = field(default_factory=dict)  # leaf class to value
    literals: dict[tuple[object, str], Ref] = field(default_factory=dict)  # by bits and dtype
    primitives: dict[str, Any] = field(default_factory=dict)  # by name, as the program uses them
    dim_env: dict[str, Any] = field(default_factory=dict)  # JAX dimensions by name
    sample: Mapping[str, int] = field(default_factory=dict)  # named sizes as numbers, for prices
    _values: dict[int, list[int]] = field(default_factory=dict)  # by class

    def where(self, cls: int) -> str:
        """Return the user's line that computes a class; empty if no equation does."""
        made = self.maker_of(cls)
        return "" if made is None else made.where()

    def maker_of(self, cls: int) -> Equation | None:
        """Return the equation that computes a class, or None."""
        made = self.made_by.get(cls)
        return None if made is None else self.program.equations[made[0]]

    def symbolic_names(self) -> set[str]:
        """Return the named sizes of the program."""
        return {
            n for sizes in self.sizes for s in sizes if isinstance(s, Poly) for n in s.variables()
        }

    def number(self, size: Dim) -> int:
        """Return a size as a number for a price or a preference; named sizes at the sample."""
        return size if isinstance(size, int) else max(value(size, self.sample), 0)

    @contextlib.contextmanager
    def at(self, sample: Mapping[str, int]) -> Iterator[None]:
        """Price named sizes at another sample inside this context."""
        before, self.sample = self.sample, sample
        try:
            yield
        finally:
            self.sample = before

    def jax_size(self, size: Dim) -> Any:
        """Return a size as an entry of a JAX shape."""
        return size.at(self.dim_env) if isinstance(size, Poly) else size

    def is_positive(self, size: Dim) -> bool:
        """Return True if a size is at least 1 at all values of its names."""
        if isinstance(size, int):
            return size > 0
        return jax_internals.at_least(self.jax_size(size), 1)

    def values_of(self, cls: int) -> list[int]:
        """Return the values of a class that equations make."""
        if not self._values:
            for e in self.program.equations:
                for v in e.outvals:
                    self._values.setdefault(self.view(v).cls, []).append(v)
        return self._values.get(cls, [])

    def view(self, value: Value) -> Ref:
        """Return the reference of a numbered value that is lifted already."""
        view = self.views[value] if isinstance(value, int) else None
        assert view is not None
        return view

    def slots_of(self, value: int) -> list[tuple[int, ...]] | None:
        """Return the slots of a value's class on each of its axes; None if it is broadcast."""
        axes, groups = self.view(value).axes, self.positions[value]
        if sorted(axes) != sorted([p for group in groups for p in group]):
            return None
        return [tuple([axes.index(p) for p in group]) for group in groups]


def build(program: Program) -> TermGraph:
    """Lift every equation of a flat program."""
    t = TermGraph(program)
    _name_atoms(t, AxisMap(program))
    t.views = [None] * len(program.avals)
    for v in program.inputs:
        _leaf(t, v)
    for v, const in program.consts.items():
        uniform = _is_uniform(const)
        view = None if uniform else of_indices(t.graph, const, t.sizes[v], t.primitives)
        t.views[v] = _constant_view(t, const) if uniform else view
        if t.views[v] is None:
            _leaf(t, v)
    for number, e in enumerate(program.equations):
        t.primitives.setdefault(e.name, e.eqn.primitive)
        _lift(t, number, e)
    return t


def _name_atoms(t: TermGraph, axes: AxisMap) -> None:
    """Store atoms, their sizes and positions for every value; equal axes share one entry."""
    known: dict[tuple[int, ...], Layout] = {}
    size_of: dict[int, Dim] = {}
    for v, mine in enumerate(axes.axes):
        layout = known.get(mine)
        if layout is None:
            groups = axes.groups(mine)
            ids = tuple([a for g in groups for a in g])
            for a in ids:
                if a not in size_of:
                    size_of[a] = axes.atom_size(a)
            sizes = tuple([size_of[a] for a in ids])
            shape = getattr(t.program.avals[v], "shape", ())
            numbered = _numbered(tuple([len(g) for g in groups]))
            layout = known[mine] = Layout(ids, sizes, numbered, shape)
            for d in shape:
                if jax_internals.is_symbolic(d):
                    t.dim_env.update(jax_internals.dim_variables(d))
        t.layouts.append(layout)
    t.ids = [layout.ids for layout in t.layouts]
    t.sizes = [layout.sizes for layout in t.layouts]
    t.positions = [layout.groups for layout in t.layouts]
    t.dtypes = [dtype_of(aval) for aval in t.program.avals]


@functools.cache
def _numbered(lengths: tuple[int, ...]) -> Groups:
    out, n = [], 0
    for length in lengths:
        out.append(tuple(range(n, n + length)))
        n += length
    return tuple(out)


def dtype_of(aval: Any) -> str:
    """Return the dtype's name; extended dtypes (random keys) have names of their own."""
    dtype = getattr(aval, "dtype", None)
    return "token" if dtype is None else primitives.dtype_name(dtype)


def _leaf(t: TermGraph, v: int) -> None:
    ref = t.graph.add(LEAF, v, (), t.sizes[v], (), t.dtypes[v])
    t.views[v] = ref
    t.leaf_value[ref.cls] = v


def _is_uniform(const: Any) -> bool:
    if primitives.is_number(const):
        return True
    size = getattr(const, "size", 0)
    if not 0 < size <= SCAN_LIMIT or primitives.dtype_kind(str(const.dtype)) not in "fciub":
        return False
    if not isinstance(const, np.ndarray) and not getattr(const, "is_fully_addressable", False):
        return False
    array = np.asarray(const)
    first = array.flat[0]
    return bool(array.flat[-1] == first and (array == first).all())


def _constant_view(t: TermGraph, const: Any) -> Ref:
    array = np.asarray(const)
    return primitives.constant(t.graph, array.flat[0].item(), str(array.dtype))


def _literal(t: TermGraph, literal: Literal) -> Ref:
    number, dtype = literal.val, dtype_of(literal.aval)
    key = (number.tobytes() if hasattr(number, "tobytes") else repr(number), dtype)
    ref = t.literals.get(key)
    if ref is None:
        value = np.asarray(number).astype(dtype).item()
        ref = t.literals[key] = primitives.constant(t.graph, value, dtype)
    return ref


def _lift(t: TermGraph, number: int, e: Equation) -> None:
    if e.same_as and _read_as(t, number, e):
        return
    site = _site(t, e)
    refs = lift(e.name, site) if site and not e.eqn.effects else None
    if refs is None:
        _native(t, number, e)
        return
    for k, (v, ref) in enumerate(zip(e.outvals, refs, strict=True)):
        t.views[v] = ref
        if e.name not in primitives.VIEWS:
            t.made_by.setdefault(ref.cls, (number, k))


def _read_as(t: TermGraph, number: int, e: Equation) -> bool:
    """Lift an equation by the terms of an equal implementation, if the axes line up.

    The body of a loop may be without the equations of the implementation, which nothing reads.
    """
    pairs = list(zip(e.outvals, e.same_as, strict=True))
    if not all(isinstance(u, int) and t.views[u] and t.ids[u] == t.ids[v] for v, u in pairs):
        return False
    for k, (v, u) in enumerate(pairs):
        view = t.view(u)
        t.views[v] = view
        t.made_by[view.cls] = (number, k)
    return True


def _site(t: TermGraph, e: Equation) -> Site | None:
    refs, ins = [], []
    views, layouts, dtypes = t.views, t.layouts, t.dtypes
    for v in e.invals:
        if isinstance(v, int):
            view = views[v]
            if view is None:
                return None
            ins.append(layouts[v])
        elif primitives.is_number(v.val):
            view = _literal(t, v)
            ins.append(_SCALAR)
        else:
            return None
        refs.append(view)
    outs = [layouts[v] for v in e.outvals]
    return Site(t.graph, e.eqn.params, refs, ins, outs, [dtypes[v] for v in e.outvals])


def _native(t: TermGraph, number: int, e: Equation) -> None:
    """Add a native node, with operands by position; equal pure equations share one node."""
    key = _native_key(t, number, e)
    for k, v in enumerate(e.outvals):
        n = len(t.sizes[v])
        args, bound = [], []
        for u in e.invals:
            if isinstance(u, int):
                start = n + len(bound)
                view = t.views[u]
                assert view is not None
                args.append(Ref(view.cls, tuple([start + i for i in view.axes])))
                bound.extend(t.sizes[u])
        dtype = t.dtypes[v]
        ref = t.graph.add(NATIVE, (key, k), tuple(args), t.sizes[v], tuple(bound), dtype)
        t.views[v] = ref
        t.made_by.setdefault(ref.cls, (number, k))


def _native_key(t: TermGraph, number: int, e: Equation) -> object:
    params = None if e.eqn.effects else primitives.params_key(e.eqn.params)
    if params is None or any(
        not isinstance(v, int) and not primitives.is_number(v.val) for v in e.invals
    ):
        return number
    operands = tuple(
        t.positions[v] if isinstance(v, int) else (bits(v), dtype_of(v.aval)) for v in e.invals
    )
    return (e.name, params, operands, tuple(t.positions[v] for v in e.outvals))
