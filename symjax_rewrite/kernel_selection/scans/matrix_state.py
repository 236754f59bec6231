"""Loops whose states are matrices, read as decays, outer products and queries.

The body is read as index terms. A carry is a matrix state under three conditions: a step updates it
to `a·S + k vᵀ`, the decay has no axis of the values, and everything else reads it through sums over
the axes of the keys: `Σ_k q·S`, before or after the step. All other axes are batch axes. The terms
do not depend on the spelling (einsum, outer, broadcasts, vmapped heads).

Sources: Katharopoulos et al. 2020, "Transformers are RNNs"; Sun et al. 2023, "Retentive network";
Yang et al. 2024, "Gated linear attention"; Dao & Gu 2024, "Transformers are SSMs".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import (
    class_operands,
    is_float_cast,
    makers_of,
    node_of,
    postorder,
)
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import is_rounded
from symjax_rewrite.ir.sum_of_products import ProductTerm, SumOfProducts
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.loops.carry_dependence import holds
from symjax_rewrite.loops.loop import Loop

Axes = tuple[int, ...]
Factors = tuple[Ref, ...]
MAX_TERMS = 8  # limit on terms of an expanded sum


class NotAMatrixError(Exception):
    """Carry that is no matrix state, with the reason (internal)."""


class StateTerm(NamedTuple):
    """Term coefficient · Π factors, times the state `before` or `after` the step if it is named.

    axes: for each axis of the state the index it is read at.
    """

    coefficient: float
    factors: Factors
    state: str = ""
    axes: Axes = ()


class Query(NamedTuple):
    """Result `Σ_keys q·S`, times `rest`, and the terms summed with it.

    values: of the body, all of them of one class. term: with the state. others: terms without it;
    their indices are the state's axes. left: the state's axis of each slot of the class. over:
    the summed axes.
    """

    values: tuple[int, ...]
    term: StateTerm
    others: tuple[StateTerm, ...]
    left: Axes
    over: Axes


@dataclass(frozen=True, slots=True)
class MatrixState:
    """Carry that is a matrix for every entry of its batch; factors read the state's axes.

    carry: its number. batch, keys, values: its axes. decay, key, value: the factors of each, with
    the coefficients of the decay and of the outer product. queries: the results that read it.
    """

    carry: int
    sizes: Axes
    batch: Axes
    keys: Axes
    values: Axes
    decay: StateTerm
    added: float
    key: Factors
    value: Factors
    queries: tuple[Query, ...]

    def size(self, axes: Axes) -> int:
        return math.prod(self.sizes[i] for i in axes)

    @property
    def kind(self) -> str:
        """Return the kernel's name of the decay."""
        if any(set(f.axes) & {*self.keys} for f in self.decay.factors):
            return "diagonal"
        return "scalar" if self.decay.factors or self.decay.coefficient != 1 else "none"

    def factors(self) -> list[Ref]:
        """Return every factor that must be known for all steps."""
        found = [*self.decay.factors, *self.key, *self.value]
        for query in self.queries:
            found += [f for term in (query.term, *query.others) for f in term.factors]
        return found


def terms_of(loop: Loop) -> TermGraph:
    """Return the body of a loop as index terms, with all of its inputs as leaves."""
    body = loop.body
    body.inputs = [*loop.consts, *loop.sources, *loop.counters, *[c.inner for c in loop.carries]]
    return build(body)


@dataclass(slots=True)
class StateReader:
    """Reader of one carry of a clean loop as a matrix; `t` is the loop's body as terms."""

    loop: Loop
    t: TermGraph
    carry: int
    state: Ref = field(init=False)
    out: Ref = field(init=False)
    moving: dict[int, bool] = field(default_factory=dict)  # class: True if it depends on the carry

    def read(self, readers: list[int]) -> MatrixState:
        """Return the carry as a matrix state.

        readers: body values that may depend on it through queries only.

        Raises:
            NotAMatrixError: the carry is no matrix state.
        """
        carry, t = self.loop.carries[self.carry], self.t
        assert isinstance(carry.out, int)
        self.state, self.out = t.view(carry.inner), t.view(carry.out)
        sizes = t.sizes[carry.inner]
        width = len(sizes)
        spread = any(sorted(r.axes) != list(range(width)) for r in (self.state, self.out))
        if t.sizes[carry.out] != sizes or spread:
            raise NotAMatrixError("an axis of the states is a broadcast, or two axes are one")
        if not all(isinstance(s, int) and s > 0 for s in sizes):
            raise NotAMatrixError("a size of the state is empty or a name")
        self.moving[self.state.cls] = True
        dtype = str(self.loop.body.avals[carry.inner].dtype)
        terms = self._read(self._form(dtype, whole=False).terms(self.out), whole=False)
        queries = self._queries(readers)
        if not queries:
            raise NotAMatrixError("its states are not read")
        over = {q.over for q in queries}
        if len(over) > 1:
            raise NotAMatrixError("its results sum the states over different axes")
        return self._arranged(tuple(map(int, sizes)), terms, queries)  # pyright: ignore[reportArgumentType]

    def depends(self, cls: int) -> bool:
        """Return True if a class depends on the carry."""
        operands = class_operands(self.t.graph)
        for c in postorder([cls], operands, self.moving):
            self.moving[c] = any(self.moving[a] for a in operands(c))
        return self.moving[cls]

    def _form(self, dtype: str, whole: bool) -> SumOfProducts:
        """Return a form that opens terms that depend on a state, up to the states.

        Casts and products that round to a dtype narrower than `dtype` are not opened. With `whole`
        the state after the step has its own name.
        """
        states = self._states(whole)

        def opens(ref: Ref, node: Node) -> bool:
            if ref.cls in states:
                return False
            if node.op == CONST:
                is_float = dtype_kind(self.t.graph.classes[ref.cls].dtype) == "f"
                return is_float and math.isfinite(node.attr[0])
            is_product = node.op == CONTRACT and not node.bound and not self._rounds(ref.cls, dtype)
            opened = node.op == ADD or is_product or self._is_cast(ref.cls, dtype)
            return opened and self.depends(ref.cls)

        return SumOfProducts(self.t.graph, opens, most_terms=MAX_TERMS)

    def _states(self, whole: bool) -> dict[int, tuple[str, Ref]]:
        """Return the states that may be factors, by class: their name and their reference."""
        states = {self.state.cls: ("before", self.state)}
        return {**states, self.out.cls: ("after", self.out)} if whole else states

    def _read(self, terms: list[ProductTerm] | None, whole: bool = True) -> list[StateTerm]:
        """Read terms as products with at most one state in each."""
        if terms is None:
            raise NotAMatrixError(f"a sum of more than {MAX_TERMS} products")
        return [self._read_term(t, self._states(whole)) for t in terms]

    def _read_term(self, term: ProductTerm, states: dict[int, tuple[str, Ref]]) -> StateTerm:
        found = [f for f in term.factors if f.cls in states]
        rest = tuple([f for f in term.factors if f.cls not in states])
        odd = next((f for f in rest if self.depends(f.cls)), None)
        if odd is not None:
            raise NotAMatrixError(f"{_name(node_of(self.t.graph, odd.cls))} of the states")
        if len(found) > 1:
            raise NotAMatrixError("a product of states")
        if not found:
            return StateTerm(term.coefficient, rest)
        name, state = states[found[0].cls]
        place = dict(zip(state.axes, found[0].axes, strict=True))
        return StateTerm(term.coefficient, rest, name, tuple(place[i] for i in range(len(place))))

    def _is_cast(self, cls: int, least: str) -> bool:
        """Return True if a class is another one, cast without loss relative to `least`."""
        g = self.t.graph
        if not is_float_cast(g, cls):
            return False
        old, new = g.classes[node_of(g, cls).args[0].cls].dtype, g.classes[cls].dtype
        return holds(new, old) or holds(new, least)

    def _rounds(self, cls: int, least: str) -> bool:
        """Return True if a class is a product that loses digits of its factors and of `least`."""
        g, dtype = self.t.graph, self.t.graph.classes[cls].dtype
        node = node_of(g, cls)
        rounded = is_rounded(node, [g.classes[a.cls].dtype for a in node.args], dtype)
        return rounded and not holds(dtype, least)

    def _queries(self, readers: list[int]) -> list[Query]:
        """Return the queries through which some body values depend on the states."""
        makers = makers_of(self.loop.body.equations)
        found: list[Query] = []
        stack, seen = list(readers), set()
        while stack:
            v = stack.pop()
            if v in seen or not self.depends(self.t.view(v).cls):
                continue
            seen.add(v)
            if any(v in query.values for query in found):
                continue
            view = self.t.view(v)
            query = self._query(v, view)
            if query is not None:
                found.append(query)
                continue
            if v not in makers or view.cls == self.out.cls:
                raise NotAMatrixError("a result reads the states without summing them")
            stack += makers[v].reads
        return found

    def _query(self, v: int, view: Ref) -> Query | None:
        """Return a value as a sum over axes of the state, or None."""
        node = node_of(self.t.graph, view.cls)
        width = len(self.t.sizes[v])
        if node.op != CONTRACT or not node.bound or len(view.axes) != width:
            return None
        bound = range(width, width + len(node.bound))
        try:
            form = self._form(self.t.graph.classes[view.cls].dtype, whole=True)
            terms = self._read(form.product([a.over((*view.axes, *bound)) for a in node.args]))
        except NotAMatrixError:
            return None
        states = [t for t in terms if t.state]
        if len(states) != 1 or sorted(states[0].axes) != [*range(bound.stop)]:
            return None
        axis = {i: s for s, i in enumerate(states[0].axes)}
        moved = [t._replace(factors=tuple(f.over(axis) for f in t.factors)) for t in terms]
        shared = [u for u, x in enumerate(self.t.views) if x is not None and x.cls == view.cls]
        return Query(
            tuple(u for u in shared if len(self.t.view(u).axes) == len(self.t.sizes[u])),
            next(t for t in moved if t.state),
            tuple(t for t in moved if not t.state),
            tuple(axis[i] for i in view.axes),
            tuple(sorted(axis[i] for i in bound)),
        )

    def _arranged(self, sizes: Axes, terms: list[StateTerm], queries: list[Query]) -> MatrixState:
        """Classify the axes as keys, values and batches, and assign the factors of each."""
        width, keys = len(sizes), queries[0].over
        decays = [t for t in terms if t.state]
        added = [t for t in terms if not t.state and t.coefficient]
        if any(t.axes != tuple(range(width)) for t in decays):
            raise NotAMatrixError("states are transposed at every step")
        if len(decays) != 1 or len(added) != 1:
            raise NotAMatrixError(f"a step has {len(decays)} decays and adds {len(added)} products")
        decay, product = decays[0], self._opened(added[0], keys)
        everything = [*product.factors, *decay.factors]
        everything += [f for q in queries for f in q.term.factors]
        taken = {i for f in everything if set(f.axes) & set(keys) for i in f.axes}
        taken |= {i for f in decay.factors for i in f.axes}
        values = tuple(i for i in range(width) if i not in taken and i not in keys)
        if not values:
            raise NotAMatrixError("the term added in a step is no outer product")
        if any(len(set(f.axes)) != len(f.axes) for f in everything):
            raise NotAMatrixError("a step reads a diagonal")
        inner = set(keys)
        return MatrixState(
            carry=self.carry,
            sizes=sizes,
            batch=tuple(i for i in range(width) if i not in keys and i not in values),
            keys=keys,
            values=values,
            decay=decay,
            added=product.coefficient,
            key=tuple(f for f in product.factors if inner & set(f.axes)),
            value=tuple(f for f in product.factors if not inner & set(f.axes)),
            queries=tuple(
                q._replace(others=tuple(self._opened(t, keys) for t in q.others)) for q in queries
            ),
        )

    def _opened(self, term: StateTerm, keys: Axes) -> StateTerm:
        """Return a product with the factors opened that have both key axes and other axes."""
        dtype = self.t.graph.classes[self.state.cls].dtype

        def opens(ref: Ref, node: Node) -> bool:
            if node.bound or not set(ref.axes) & {*keys} or set(ref.axes) <= {*keys}:
                return False
            scales = node.op == ADD and len(node.args) == 1
            multiplies = node.op == CONTRACT and not self._rounds(ref.cls, dtype)
            return scales or multiplies or self._is_cast(ref.cls, dtype)

        made = SumOfProducts(self.t.graph, opens).product(term.factors)
        if made is None:
            return term
        return StateTerm(term.coefficient * made[0].coefficient, made[0].factors)


def _name(node: Any) -> str:
    return node.attr[0] if node.op == MAP else f"a {node.op}"
