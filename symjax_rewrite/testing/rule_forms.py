"""The forms that rules make of a program, and their values.

*Every* node that the rules add to a region is evaluated, not only the extracted nodes, and compared
with its class. Integers must be equal. Floats must agree within a multiple of the error bound of
the written program (a running error analysis), so that a form with cancellation is detected.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.codegen import emission, term_lowering
from symjax_rewrite.codegen.emission import Array, TermPart, TermReader
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.cost.term_cost import CostModel
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import needed
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.ir.term import Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.options import Budget, Numerics
from symjax_rewrite.rewriting.algebra import storage
from symjax_rewrite.rewriting.contraction_order import Pairs
from symjax_rewrite.rewriting.lemma_matching import Pattern
from symjax_rewrite.rewriting.region_keys import LeafTag, Region, region_graph
from symjax_rewrite.rewriting.region_partition import find_regions
from symjax_rewrite.rewriting.region_solver import Frozen
from symjax_rewrite.rewriting.rule import Axiom, RuleContext
from symjax_rewrite.rewriting.saturation import saturate
from symjax_rewrite.testing.numpy_evaluator import evaluate
from symjax_rewrite.testing.rule_examples import Sizes, Specimen

DTYPES = ("float64", "float32", "int32", "complex128", "bfloat16", "float16")
SCALES = ((1.0, 0.0), (1e-3, 0.0), (1e3, 0.0), (1.0, 1e4))  # factor and offset of float64 samples
SLACK = {"float64": 1e3, "complex128": 1e3, "float32": 100.0, "bfloat16": 4.0, "float16": 4.0}
BUDGET = Budget(nodes=1_000, rounds=6)


@dataclass(slots=True)
class Forms:
    """One region of a program after saturation: every class with all of its nodes.

    roots: the classes that the rest of the program reads. frozen: classes known beforehand.
    """

    t: TermGraph
    region: Region
    g: EGraph
    to: dict[int, Ref]
    roots: tuple[int, ...]
    frozen: Frozen

    def made_by(self, rule: str) -> bool:
        """Return True if a rule added a node or a union."""
        nodes = (r.rule for c in self.g.live() for r in self.g.classes[c].nodes.values())
        return rule in nodes or any(why.rule == rule for _, _, why in self.g.unions)


class Difference(NamedTuple):
    """A node whose value differs from the value of its class."""

    rule: str
    node: str
    error: float
    allowed: float


class _Traced:
    """A function as index terms, of which regions are saturated."""

    def __init__(self, fun: Any, avals: Iterable[Any], frozen: Iterable[int]) -> None:
        self.t = t = build(flatten(jax_internals.make_jaxpr(fun, *avals)[0]))
        self.need = needed(t)
        self.known = Frozen(t.graph, {t.view(t.program.inputs[k]).cls for k in frozen})

    def saturated(
        self, region: Region, axioms: tuple[Axiom, ...], patterns: tuple[Pattern, ...], level: str
    ) -> Forms:
        """Return all forms that the rules make of one region."""
        g, to = region_graph(self.t, region)
        uses = {g.find(ref).cls: self.need.uses.get(c, 1) for c, ref in to.items()}
        stored = {g.find(to[c]).cls: storage(self.t, c) for c in region.leaves}
        known = [c for c in region.leaves if self.known(c)]
        context = RuleContext(
            g=g,
            model=CostModel(CPU, lambda d: value(d, {})),
            numerics=Numerics.of(level),
            uses=lambda c: uses.get(c, 1),
            frozen=Frozen(g, {g.find(to[c]).cls for c in known}),
            storage=lambda c: stored.get(c) or g.classes[c].dtype,
            pairs=Pairs.of(20_000),
        )
        saturate(context, axioms, patterns, BUDGET)
        roots = tuple(dict.fromkeys(g.find(to[c]).cls for c in region.roots))
        return Forms(self.t, region, g, to, roots, Frozen(g, {g.find(to[c]).cls for c in known}))


def all_forms(
    fun: Any,
    avals: Iterable[Any],
    axioms: tuple[Axiom, ...],
    patterns: tuple[Pattern, ...] = (),
    numerics: str = "reassoc",
    frozen: Iterable[int] = (),
) -> list[Forms]:
    """Trace a function, cut it into regions and saturate them; return all forms."""
    traced = _Traced(fun, avals, frozen)
    t, known = traced.t, traced.known
    tag = lambda c: LeafTag(known(c), storage(t, c), computed=False)  # noqa: E731
    regions = find_regions(t, traced.need, tag, bool(known.leaves))
    return [traced.saturated(region, axioms, patterns, numerics) for region in regions]


def whole_form(
    fun: Any, avals: Iterable[Any], axioms: tuple[Axiom, ...], frozen: Iterable[int] = ()
) -> tuple[Forms, list[Ref]]:
    """Saturate a program as one region; return its forms and its outputs in them."""
    traced = _Traced(fun, avals, frozen)
    t, order = traced.t, traced.need.order
    leaves = [c for c in order if t.graph.classes[c].first.op == op.LEAF]
    views = [t.view(v) for v in t.program.outputs]
    region = Region(order, list(dict.fromkeys(v.cls for v in views)), leaves=leaves)
    forms = traced.saturated(region, axioms, (), "reassoc")
    return forms, [forms.g.find(forms.to[v.cls].over(v.axes)) for v in views]


def differences(
    forms: list[Forms], fun_avals: list[Any], samples: Iterable[Any]
) -> list[Difference]:
    """Return the nodes whose value differs from that of their class at some of the samples."""
    if not forms:
        return []
    rows: list[tuple[str, str, str]] = []
    t = forms[0].t

    def everything(*args: Any) -> list[Any]:
        rows.clear()
        made = emission.values(t.program, args)
        reader = TermReader(TermPart(t), lambda v: made[v] if isinstance(v, int) else v.val)
        return [x for f in forms for x in _Values(f, reader).compare(rows)]

    closed = jax.make_jaxpr(everything)(*fun_avals)
    out = []
    for arrays in samples:
        values = evaluate(closed, arrays)
        for k, (rule, text, dtype) in enumerate(rows):
            wanted, bound, got = values[3 * k : 3 * k + 3]
            found = difference(wanted, bound, got, dtype)
            if found is not None:
                out.append(Difference(rule, text, *found))
    return out


def difference(
    wanted: np.ndarray, bound: np.ndarray, got: np.ndarray, dtype: str
) -> tuple[float, float] | None:
    """Return an error and the error allowed, if the error is larger."""
    if not wanted.size:
        return None
    if dtype_kind(dtype) in "iub":
        wrong = int(np.sum(wanted != got))
        return (float(wrong), 0.0) if wrong else None
    wide = np.complex128 if dtype_kind(dtype) == "c" else np.float64
    wanted, got = wanted.astype(wide), got.astype(wide)
    if not np.isfinite(wanted).all():
        return None  # the written program overflows: nothing is required
    with np.errstate(all="ignore"):
        error = float(np.max(np.abs(wanted - got)))
    eps = _eps(dtype)
    allowed = SLACK.get(dtype, 100.0) * (float(np.max(bound)) + eps * float(np.max(np.abs(wanted))))
    return None if error <= allowed else (error, allowed)


def _eps(dtype: str) -> float:
    return float(jnp.finfo(dtype).eps)


class _Values:
    """The value of every class as written, with a bound on its rounding error (traced)."""

    def __init__(self, forms: Forms, reader: TermReader) -> None:
        self.forms, self.g = forms, forms.g
        self.reader = reader
        self.value: dict[int, Array] = {}
        self.error: dict[int, Array] = {}
        waiting = self.g.live()
        while waiting:
            left = [c for c in waiting if not self._try(c)]
            assert len(left) < len(waiting), "a class has no node that does not need itself"
            waiting = left

    def compare(self, rows: list[tuple[str, str, str]]) -> Iterator[Any]:
        """Yield the class, its error bound and a node, for every node and symmetry of a class."""
        for cls in self.g.live():
            c = self.g.classes[cls]
            wanted = self._plain(self.value[cls], c.sizes)
            bound = self._plain(self.error[cls], c.sizes)
            for node, why in list(c.nodes.items())[1:]:
                if node.op == op.LEAF:
                    continue
                rows.append((why.rule, f"{node.op} {node.attr}", c.dtype))
                yield from (wanted, bound, self._plain(self._lower(cls, node), c.sizes))
            for order in c.symmetric:
                rows.append(("symmetry", str(order), c.dtype))
                yield from (wanted, bound, lax.transpose(wanted, order))

    @staticmethod
    def _plain(array: Array, sizes: tuple[Any, ...]) -> Any:
        return term_lowering.in_order(array.data, array.slots, sizes)

    def _try(self, cls: int) -> bool:
        for node in self.g.classes[cls].nodes:
            if node.op == op.LEAF:
                self.value[cls] = self.reader.array(self.forms.region.leaves[node.attr])
                zero = jnp.zeros(self.value[cls].data.shape, _wide())
                self.error[cls] = Array(zero, self.value[cls].slots)
                return True
            if all(self.g.find(a).cls in self.value for a in node.args):
                self.value[cls] = self._lower(cls, node)
                self.error[cls] = self._bound(cls, node)
                return True
        return False

    def _lower(self, cls: int, node: Node) -> Array:
        operands = [self._operand(a, self.value) for a in node.args]
        return self._write(cls, node, operands, self.g.classes[cls].dtype)

    def _operand(self, ref: Ref, source: dict[int, Array]) -> tuple[Any, tuple[int, ...]]:
        ref = self.g.find(ref)
        return TermReader.operand(ref, source[ref.cls])

    def _write(self, cls: int, node: Node, operands: list, dtype: str) -> Array:
        guards = term_lowering.deltas_in(self.g, node)
        sizes, primitives = (*self.g.classes[cls].sizes, *node.bound), self.forms.t.primitives
        return Array(*term_lowering.lower_node(node, operands, sizes, dtype, primitives, guards))

    def _bound(self, cls: int, node: Node) -> Array:
        """Return the first-order rounding error of a node, given the errors of its operands."""
        value, c = self.value[cls], self.g.classes[cls]
        if dtype_kind(c.dtype) not in "fc" or node.op in (op.CONST, op.DELTA, op.IOTA):
            return Array(jnp.zeros(value.data.shape, _wide()), value.slots)
        errors = [self._operand(a, self.error) for a in node.args]
        values = [self._operand(a, self.value) for a in node.args]
        sizes = [(_size(x), i) for x, i in values]
        wide = lambda node, operands: self._write(cls, node, operands, str(_wide()))  # noqa: E731
        eps, size = _eps(c.dtype), Array(_size(value.data), value.slots)
        if node.op == op.CONTRACT:
            bare = node._replace(attr=None)
            terms = [sizes[:k] + [errors[k]] + sizes[k + 1 :] for k in range(len(sizes))]
            made = [wide(bare, term) for term in terms]
            return self._total([*made, _times(wide(bare, sizes), eps)], c.sizes)
        if node.op == op.ADD:
            absolute = node._replace(attr=tuple(abs(k) for k in node.attr))
            once = len(node.args) < 3 and all(k == 1 for k in absolute.attr)
            own = size if once else wide(absolute, sizes)
            return self._total([wide(absolute, errors), _times(own, eps)], c.sizes)
        if node.op in (op.SLICE, op.CONCAT):
            return wide(node, errors)
        if node.op == op.TAKE:
            bare = node._replace(attr=("clip", None, node.attr[2]))
            return wide(bare, [errors[0], *values[1:]])
        if node.op == op.CUMSUM:
            return self._total([wide(node, errors), _times(wide(node, sizes), eps)], c.sizes)
        pairs = zip(errors, sizes, strict=True)
        relative = sum(_largest(e) / (_largest(x) + 1e-30) for (e, _), (x, _) in pairs)
        return Array((eps + 8 * relative) * _largest(size.data) + 0 * size.data, value.slots)

    def _total(self, arrays: list[Array], sizes: tuple[Any, ...]) -> Array:
        plain = [self._plain(a, sizes) for a in arrays]
        return Array(functools.reduce(operator.add, plain), tuple(range(len(sizes))))


def _size(data: Any) -> Any:
    if dtype_kind(str(data.dtype)) in "fc":
        data = lax.abs(data)
    return lax.convert_element_type(data, _wide())


def _wide() -> Any:
    """Return the widest real dtype of the current x64 mode, in which error bounds are computed."""
    return jnp.result_type(float)


def _largest(data: Any) -> Any:
    return jnp.max(data, initial=0.0)


def _times(array: Array, factor: float) -> Array:
    return Array(array.data * factor, array.slots)


def fires(
    rule: Axiom,
    specimen: Specimen,
    sizes: Sizes | None = None,
    dtype: str = "float64",
    numerics: str = "",
    axioms: tuple[Axiom, ...] = (),
) -> bool:
    """Return True if a rule adds anything to a program.

    By default sizes are distinct, the level of numerics is the one that the rule requires, and the
    rule runs alone.
    """
    if not specimen.takes(dtype):
        return False
    level = numerics or rule.numerics
    with mode(dtype):
        avals = specimen.avals(sizes, dtype)
        forms = all_forms(specimen.fun, avals, axioms or (rule,), (), level, specimen.frozen())
    return any(f.made_by(rule.name) for f in forms)


def mode(dtype: str) -> Any:
    """Enable 64 bits only for dtypes that need them: with x64, sums of int32 are int64."""
    return jax.enable_x64(dtype in ("float64", "complex128"))


def scales(dtype: str) -> tuple[tuple[float, float], ...]:
    """Return the factors and offsets of samples of a dtype."""
    return SCALES if dtype == "float64" else SCALES[:1]
