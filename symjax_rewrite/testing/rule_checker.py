"""Rules tested with no test written for them (a face).

An axiom is run alone on generated programs (`specimens`) in which it fires. *Every* node it adds
is emitted and evaluated, not only the one extraction would choose, and compared with its class:
exactly for integers, and for floats within a multiple of the error bound of what was written (a
running error analysis), so that a form that cancels is caught. A lemma is a specimen itself, and
must follow from the axioms or cite its proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
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
from symjax_rewrite.errors import RuleError
from symjax_rewrite.ir.dataflow import Needed, needed
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.ir.term import (
    ADD,
    CONCAT,
    CONST,
    CONTRACT,
    CUMSUM,
    DELTA,
    IOTA,
    LEAF,
    SLICE,
    TAKE,
    Node,
)
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.options import Budget, Numerics
from symjax_rewrite.rewriting.algebra import storage
from symjax_rewrite.rewriting.contraction_order import Pairs
from symjax_rewrite.rewriting.lemma_matching import Pattern, compile_lemma
from symjax_rewrite.rewriting.region_partition import Region, find_regions, region_graph
from symjax_rewrite.rewriting.region_solver import Frozen
from symjax_rewrite.rewriting.rule import Axiom, Lemma, RuleContext, line_of
from symjax_rewrite.rewriting.saturation import saturate
from symjax_rewrite.rules import packs
from symjax_rewrite.testing.numpy_evaluator import evaluate, tolerance
from symjax_rewrite.testing.rule_examples import SPECIMENS, Sizes, Specimen, arguments, size_tables

DTYPES = ("float64", "float32", "int32", "complex128", "bfloat16", "float16")
SCALES = ((1.0, 0.0), (1e-3, 0.0), (1e3, 0.0), (1.0, 1e4))  # factor and offset of float64 samples
SLACK = {"float64": 1e3, "complex128": 1e3, "float32": 100.0, "bfloat16": 4.0, "float16": 4.0}
BUDGET = Budget(nodes=1_000, rounds=6)
ENOUGH = 4  # specimens per rule that are tried at every dtype and size


@dataclass(slots=True)
class Forms:
    """One region of a program after saturation: every class with every way to compute it."""

    t: TermGraph
    region: Region
    g: EGraph
    stop: str

    def made_by(self, rule: str) -> bool:
        """Whether a rule added a node or a union."""
        nodes = (r.rule for c in self.g.live() for r in self.g.classes[c].nodes.values())
        return rule in nodes or any(why.rule == rule for _, _, why in self.g.unions)


class Difference(NamedTuple):
    """A node whose value is not that of its class."""

    rule: str
    node: str
    error: float
    allowed: float


def all_forms(
    fun: Any,
    avals: Iterable[Any],
    axioms: tuple[Axiom, ...],
    patterns: tuple[Pattern, ...] = (),
    numerics: str = "reassoc",
    frozen: Iterable[int] = (),
) -> list[Forms]:
    """Trace, cut into regions and saturate, keeping everything that was found."""
    closed, _ = jax_internals.make_jaxpr(fun, *avals)
    t = build(flatten(closed))
    need = needed(t)
    out = []
    known = Frozen(t.graph, {t.view(t.program.inputs[k]).cls for k in frozen})
    for region in find_regions(t, need, lambda c: (known(c), storage(t, c)), bool(known.leaves)):
        g, to = region_graph(t, region)
        ctx = _context(t, need, region, g, to, numerics, known)
        stop = saturate(ctx, axioms, patterns, BUDGET)
        out.append(Forms(t, region, g, stop))
    return out


def _context(
    t: TermGraph,
    need: Needed,
    region: Region,
    g: EGraph,
    to: dict[int, Any],
    numerics: str,
    known: Frozen,
) -> RuleContext:
    back = {g.find(ref).cls: c for c, ref in to.items()}
    uses = {r: need.uses.get(c, 1) for r, c in back.items()}
    stored = {g.find(to[c]).cls: storage(t, c) for c in region.leaves}
    return RuleContext(
        g=g,
        model=CostModel(CPU, lambda d: value(d, {})),
        numerics=Numerics.of(numerics),
        uses=lambda c: uses.get(c, 1),
        frozen=Frozen(g, {g.find(to[c]).cls for c in region.leaves if known(c)}),
        storage=lambda c: stored.get(c) or g.classes[c].dtype,
        pairs=Pairs.of(20_000),
    )


def differences(
    forms: list[Forms], fun_avals: list[Any], samples: Iterable[Any]
) -> list[Difference]:
    """Nodes that do not compute what their class is, at some of the samples."""
    if not forms:
        return []
    rows: list[tuple[str, str, str]] = []

    def everything(*args: Any) -> list[Any]:
        rows.clear()
        t = forms[0].t
        made = emission.values(t.program, args)
        reader = TermReader(TermPart(t), lambda v: made[v] if isinstance(v, int) else v.val)
        return [x for f in forms for x in _Values(f, reader).compare(rows)]

    closed = jax.make_jaxpr(everything)(*fun_avals)
    out = []
    for arrays in samples:
        values = evaluate(closed, arrays)
        for k, (rule, text, dtype) in enumerate(rows):
            wanted, bound, got = values[3 * k : 3 * k + 3]
            found = _difference(wanted, bound, got, dtype)
            if found is not None:
                out.append(Difference(rule, text, *found))
    return out


def _difference(
    wanted: np.ndarray, bound: np.ndarray, got: np.ndarray, dtype: str
) -> tuple[float, float] | None:
    if not wanted.size:
        return None
    if dtype_kind(dtype) in "iub":
        wrong = int(np.sum(wanted != got))
        return (float(wrong), 0.0) if wrong else None
    wide = np.complex128 if dtype_kind(dtype) == "c" else np.float64
    wanted, got = wanted.astype(wide), got.astype(wide)
    if not np.isfinite(wanted).all():
        return None  # overflow in what was written: nothing is promised
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
        """For every node and symmetry of a class: the class, its error bound, and the node."""
        for cls in self.g.live():
            c = self.g.classes[cls]
            wanted = self._plain(self.value[cls], c.sizes)
            bound = self._plain(self.error[cls], c.sizes)
            for node, why in list(c.nodes.items())[1:]:
                if node.op == LEAF:
                    continue
                rows.append((why.rule, f"{node.op} {node.attr}", c.dtype))
                yield from (wanted, bound, self._plain(self._lower(cls, node), c.sizes))
            for order in c.symmetric:
                rows.append(("symmetry", str(order), c.dtype))
                yield from (wanted, bound, lax.transpose(wanted, order))

    @staticmethod
    def _plain(array: Array, sizes: tuple[Any, ...]) -> Any:
        return term_lowering.arrange(array.data, array.slots, tuple(range(len(sizes))), sizes)

    def _try(self, cls: int) -> bool:
        for node in self.g.classes[cls].nodes:
            if node.op == LEAF:
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

    def _operand(self, ref: Any, source: dict[int, Array]) -> tuple[Any, tuple[int, ...]]:
        ref = self.g.find(ref)
        array = source[ref.cls]
        axes = [
            ref.axes[s] if ref.axes[s] >= 0 else term_lowering.dropped_label(s) for s in array.slots
        ]
        return array.data, tuple(axes)

    def _write(self, cls: int, node: Node, operands: list, dtype: str) -> Array:
        c = self.g.classes[cls]
        deltas = [
            any(n.op == DELTA for n in self.g.classes[self.g.find(a).cls].nodes) for a in node.args
        ]
        guards = frozenset(k for k, d in enumerate(deltas) if d and node.op == CONTRACT)
        sizes = (*c.sizes, *node.bound)
        primitives = self.forms.t.primitives
        return Array(*term_lowering.lower_node(node, operands, sizes, dtype, primitives, guards))

    def _bound(self, cls: int, node: Node) -> Array:
        """First-order rounding error of a node whose operands have theirs."""
        value, c = self.value[cls], self.g.classes[cls]
        if dtype_kind(c.dtype) not in "fc" or node.op in (CONST, DELTA, IOTA):
            return Array(jnp.zeros(value.data.shape, _wide()), value.slots)
        eps = _eps(c.dtype)
        errors = [self._operand(a, self.error) for a in node.args]
        plain = [(_size(x), i) for x, i in (self._operand(a, self.value) for a in node.args)]
        if node.op == CONTRACT:
            terms = [plain[:k] + [errors[k]] + plain[k + 1 :] for k in range(len(plain))]
            bare = node._replace(attr=None)
            made = [self._write(cls, bare, term, str(_wide())) for term in terms]
            return self._total(
                [*made, _times(self._write(cls, bare, plain, str(_wide())), eps)], c.sizes
            )
        if node.op == ADD:
            absolute = node._replace(attr=tuple(abs(k) for k in node.attr))
            once = len(node.args) < 3 and all(k == 1 for k in absolute.attr)
            own = Array(_size(value.data), value.slots)
            own = own if once else self._write(cls, absolute, plain, str(_wide()))
            return self._total(
                [self._write(cls, absolute, errors, str(_wide())), _times(own, eps)], c.sizes
            )
        if node.op in (SLICE, CONCAT):
            return self._write(cls, node, errors, str(_wide()))
        if node.op == TAKE:
            values = [self._operand(a, self.value) for a in node.args[1:]]
            bare = node._replace(attr=("clip", None, node.attr[2]))
            return self._write(cls, bare, [errors[0], *values], str(_wide()))
        if node.op == CUMSUM:
            own = _times(self._write(cls, node, plain, str(_wide())), eps)
            return self._total([self._write(cls, node, errors, str(_wide())), own], c.sizes)
        pairs = zip(errors, plain, strict=True)
        relative = sum(_largest(e) / (_largest(x) + 1e-30) for (e, _), (x, _) in pairs)
        size = _size(value.data)
        return Array((eps + 8 * relative) * _largest(size) + 0 * size, value.slots)

    def _total(self, arrays: list[Array], sizes: tuple[Any, ...]) -> Array:
        total = self._plain(arrays[0], sizes)
        for a in arrays[1:]:
            total = total + self._plain(a, sizes)
        return Array(total, tuple(range(len(sizes))))


def _size(data: Any) -> Any:
    if dtype_kind(str(data.dtype)) in "fc":
        data = lax.abs(data)
    return lax.convert_element_type(data, _wide())


def _wide() -> Any:
    """The widest real dtype of the x64 mode at hand: what error bounds are computed in."""
    return jnp.result_type(float)


def _largest(data: Any) -> Any:
    return jnp.max(data, initial=0.0)


def _times(array: Array, factor: float) -> Array:
    return Array(array.data * factor, array.slots)


def check_rule(rule: Axiom | Lemma, examples: Iterable[Specimen] = ()) -> int:
    """Test a rule on generated programs; returns in how many it fired.

    Args:
        rule: an axiom or a lemma.
        examples: specimens of your own, for an axiom that the library's do not reach.

    Raises:
        RuleError: some form it makes has another shape or value; or it never fires; or it fires
            where `numerics="exact"`; or a lemma neither follows from the axioms nor cites a proof.

    Example:
        >>> from symjax_rewrite import packs
        >>> check_rule(packs.associativity.rules[0]) >= 4
        True
    """
    if isinstance(rule, Lemma):
        return _check_lemma(rule)
    return _check_axiom(rule, (*examples, *SPECIMENS))


def _check_axiom(rule: Axiom, specimens: tuple[Specimen, ...]) -> int:
    others = tuple(a for a in packs.default.axioms if a.name != rule.name)
    for axioms in ((rule,), (rule, *others)):  # some laws need another to be seen at all
        fired = _check_with(rule, axioms, specimens)
        if fired:
            return fired
    raise RuleError(
        f"axiom {rule.name!r} fires in no generated program",
        where=line_of(rule),
        remedy="give check_rule examples=, or add a specimen to symjax_rewrite/specimens.py",
    )


def _check_with(rule: Axiom, axioms: tuple[Axiom, ...], specimens: tuple[Specimen, ...]) -> int:
    fired = 0
    for number, specimen in enumerate(specimens):
        tables = size_tables(specimen, seed=number)
        if not fires(rule, specimen, tables[0], axioms=axioms):
            continue
        fired += 1
        _check_exact(rule, axioms, specimen, tables[0])
        everywhere = fired <= ENOUGH
        for dtype in DTYPES if everywhere else ("float64",):
            for sizes in tables if everywhere else tables[:1]:
                _check_at(rule, axioms, specimen, sizes, dtype)
    return fired


def fires(
    rule: Axiom,
    specimen: Specimen,
    sizes: Sizes | None = None,
    dtype: str = "float64",
    numerics: str = "",
    axioms: tuple[Axiom, ...] = (),
) -> bool:
    """Whether a rule adds anything to a program.

    Args:
        rule: the axiom.
        specimen: the program.
        sizes: its named sizes; default: distinct ones.
        dtype: of its float arguments.
        numerics: the level allowed; default: what the rule asks for.
        axioms: what to run; default: the rule alone.
    """
    if not specimen.takes(dtype):
        return False
    level = numerics or rule.numerics
    with _mode(dtype):
        avals = specimen.avals(sizes, dtype)
        forms = all_forms(specimen.fun, avals, axioms or (rule,), (), level, specimen.frozen())
    return any(f.made_by(rule.name) for f in forms)


def _check_exact(rule: Axiom, axioms: tuple[Axiom, ...], specimen: Specimen, sizes: Sizes) -> None:
    if rule.numerics != "exact" and fires(rule, specimen, sizes, "float64", "exact", axioms):
        raise RuleError(
            f"axiom {rule.name!r} fires on floats under numerics='exact'",
            where=line_of(rule),
            got=specimen.name,
        )


def _check_at(
    rule: Axiom, axioms: tuple[Axiom, ...], specimen: Specimen, sizes: Sizes, dtype: str
) -> None:
    if not specimen.takes(dtype):
        return
    avals = specimen.avals(sizes, dtype)
    everything = frozenset(range(len(avals)))
    for frozen in {specimen.frozen(), everything if dtype == "float64" else specimen.frozen()}:
        with _mode(dtype):
            forms = all_forms(specimen.fun, avals, axioms, (), rule.numerics, frozen)
            wrong = differences(forms, avals, arguments(specimen, sizes, dtype, _scales(dtype)))
        if wrong:
            raise _differ(f"axiom {rule.name!r}", line_of(rule), specimen, sizes, dtype, wrong[0])


def _mode(dtype: str) -> Any:
    """64 bits only for dtypes that need them: sums of int32 are int64 there."""
    return jax.enable_x64(dtype in ("float64", "complex128"))


def _scales(dtype: str) -> tuple[tuple[float, float], ...]:
    return SCALES if dtype == "float64" else SCALES[:1]


def _differ(
    what: str, where: str, specimen: Specimen, sizes: Sizes, dtype: str, wrong: Difference
) -> RuleError:
    at = ", ".join(f"{k}={v}" for k, v in sizes.items())
    return RuleError(
        f"{what} makes a form of another value in {specimen.name!r} at {at}, {dtype}",
        where=where,
        expected=f"a difference of at most {wrong.allowed:.3g}",
        got=f"{wrong.error:.3g} by the node {wrong.node} of {wrong.rule!r}",
        remedy="the two sides of the law are not equal here: correct it, or narrow its condition",
    )


def _check_lemma(rule: Lemma) -> int:
    pattern = compile_lemma(rule)
    fired = 0
    for dtype, sizes in _lemma_cases(rule):
        with _mode(dtype):
            check_sides(rule, sizes, dtype)
            fired += _check_pattern(rule, pattern, sizes, dtype)
    if not fired:
        raise RuleError(
            f"lemma {rule.name!r} does not match its own left side",
            where=line_of(rule),
            expected="a left side that is a product or a sum",
        )
    if not rule.proof and not is_derivable(rule):
        raise RuleError(
            f"lemma {rule.name!r} does not follow from the axioms",
            where=line_of(rule),
            remedy="cite where it is proved: @lemma(..., proof=...)",
        )
    return fired


def _lemma_cases(rule: Lemma) -> Iterator[tuple[str, Sizes]]:
    """Dtypes and sizes at which the left side of a lemma means something."""
    for dtype in DTYPES:
        with _mode(dtype):
            tables = size_tables(_side(rule), seed=0) if _stays_in(rule, dtype) else []
            for sizes in tables:
                try:
                    jax_internals.make_jaxpr(_side(rule).fun, *_side(rule).avals(sizes, dtype))
                except (IndexError, TypeError, ValueError):
                    continue
                yield dtype, sizes


def _side(rule: Lemma, side: int | None = 0) -> Specimen:
    """One side of a lemma as a program, or both; scalar arguments are the number 3."""
    words = tuple(w for w in rule.shapes if w)

    def program(*arrays: Any) -> Any:
        given = iter(arrays)
        sides = rule.sides(*(next(given) if w else 3 for w in rule.shapes))
        return sides if side is None else sides[side]

    return Specimen(rule.name, words, program, small=rule.small)


def _check_pattern(rule: Lemma, pattern: Pattern, sizes: Sizes, dtype: str) -> bool:
    """Every form the pattern makes of the left side; whether it matched."""
    left = _side(rule)
    avals = left.avals(sizes, dtype)
    forms = all_forms(left.fun, avals, (), (pattern,), rule.numerics)
    wrong = differences(forms, avals, arguments(left, sizes, dtype, _scales(dtype)))
    if wrong:
        raise _differ(f"lemma {rule.name!r}", line_of(rule), left, sizes, dtype, wrong[0])
    return any(f.made_by(rule.name) for f in forms)


def _stays_in(rule: Lemma, dtype: str) -> bool:
    """Integers and complex numbers: only where both sides stay in them."""
    if dtype_kind(dtype) == "f":
        return True
    both = _side(rule, None)
    try:
        closed, _ = jax_internals.make_jaxpr(both.fun, *both.avals(None, dtype))
    except TypeError:
        return False
    made = {str(v.aval.dtype) for e in closed.jaxpr.eqns for v in e.outvars}
    return all(dtype_kind(d) in "iub" or d == dtype for d in made)


def check_sides(rule: Lemma, sizes: Sizes, dtype: str) -> None:
    """Compare the sides of a lemma at random values.

    Raises:
        RuleError: they differ in shape, dtype or value.
    """
    both = _side(rule, None)
    closed, _ = jax_internals.make_jaxpr(both.fun, *both.avals(sizes, dtype))
    a, b = closed.out_avals
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise RuleError(
            f"the sides of lemma {rule.name!r} differ in shape or dtype",
            where=line_of(rule),
            expected=a.str_short(),
            got=b.str_short(),
        )
    for args in arguments(both, sizes, dtype, _scales(dtype)):
        x, y = evaluate(closed, args)
        found = _difference(x, np.zeros(()), y, dtype)
        if found is not None and not found[0] <= tolerance(dtype) * float(np.max(np.abs(x))):
            at = ", ".join(f"{k}={v}" for k, v in sizes.items())
            raise RuleError(
                f"the sides of lemma {rule.name!r} differ in value at {at}, {dtype}",
                where=line_of(rule),
                expected=f"a difference of at most {tolerance(dtype):.3g} of the largest value",
                got=f"{found[0]:.3g} where the largest value is {np.max(np.abs(x)):.3g}",
            )


def is_derivable(rule: Lemma, axioms: tuple[Axiom, ...] | None = None) -> bool:
    """Whether both sides of a lemma land in one class by the axioms alone, at some sizes."""
    axioms = packs.default.axioms if axioms is None else axioms
    both = _side(rule, None)
    for seed in range(3):
        sizes = size_tables(both, seed)[0]
        closed, _ = jax_internals.make_jaxpr(both.fun, *both.avals(sizes, "float32"))
        t = build(flatten(closed))
        if _meet(t, axioms):
            return True
    return False


def _meet(t: TermGraph, axioms: tuple[Axiom, ...]) -> bool:
    need = needed(t)
    whole = Region(need.order, [])
    g, to = EGraph(), {}
    leaves = {}
    for c in need.order:
        info, node = t.graph.classes[c], t.graph.classes[c].first
        args = tuple(
            a._replace(cls=to[a.cls].cls, axes=tuple(a.axes[i] for i in to[a.cls].axes))
            for a in node.args
        )
        attr = leaves.setdefault(c, len(leaves)) if node.op == LEAF else node.attr
        to[c] = g.add(node.op, attr, args, info.sizes, node.bound, info.dtype)
    ctx = _context(t, need, whole, g, to, "reassoc", Frozen(t.graph, set()))
    saturate(ctx, axioms, (), BUDGET)
    ends = []
    for view in map(t.view, t.program.outputs):
        ref = to[view.cls]
        ends.append(g.find(ref._replace(axes=tuple(view.axes[i] for i in ref.axes))))
    return all(a == b for a, b in pairwise(ends))
