"""`prove_equal`: do two JAX functions compute the same value, by the laws of arithmetic?

The functions are sampled first: a difference is a counterexample. Then both are brought to normal
form (`normal_forms`). Equal normal forms are a proof. Its steps are the applications of laws; both
sides of each are compared at random values. May import every folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export, lax

from symjax_rewrite import jax_internals
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.sizes import Assumptions, value
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.options import Budget
from symjax_rewrite.proofs.arithmetic import Calculus, OutOfBudgetError
from symjax_rewrite.proofs.evaluation import (
    TOLERANCE,
    Evaluation,
    TooLargeError,
    law_error,
    relative_difference,
    sampled,
)
from symjax_rewrite.proofs.forms import ZERO, Atom, Number, Poly
from symjax_rewrite.proofs.normal_forms import NormalForms, Output, normal_forms
from symjax_rewrite.proofs.notation import Notation
from symjax_rewrite.proofs.reductions import with_split_ranges
from symjax_rewrite.proofs.samples import Sampled, concrete, sample, size_choices
from symjax_rewrite.proofs.specs import specs_of
from symjax_rewrite.proofs.verdicts import MODULO, Different, Proof, ProofStep, Unknown
from symjax_rewrite.testing.numpy_evaluator import evaluate

LAWS_PER_NODE = 10  # the budget of nodes, in applications of laws
ROUNDS = 4  # denominators within denominators that are multiplied out


def prove_equal(
    f: Callable[..., Any],
    g: Callable[..., Any],
    *specs: Any,
    kwargs: Mapping[str, Any] | None = None,
    numerics: str = "reassoc",
    assume: Sequence[str] = (),
    budget: Budget | None = None,
) -> Proof | Different | Unknown:
    """Prove that two functions have equal values, for all values and all named sizes.

    A proof is about real numbers: rounding, overflow and the order of operations do not count, and
    neither do infinities and NaN, except −∞ in masks and as the start of a running maximum.
    Integers do not overflow. Where either function divides by zero, or takes a root or a logarithm
    outside its domain, both must. Derivatives are no part of it.

    Loops that count are proved by induction, for any number of steps: folds of sums, maxima and
    online softmaxes, and affine recurrences. Sampling only refutes; it never proves.

    Args:
        f: a function of arrays.
        g: another function of the same arguments.
        specs: the positional arguments: arrays, `jax.ShapeDtypeStruct`s (with symbolic sizes of
            `jax.export` too), texts such as `"f32[b,4096]"` in which names are symbolic sizes, or
            pytrees of them. Values of arrays are not read.
        kwargs: keyword arguments, of the same kinds.
        numerics: "reassoc", or "finite": no infinity and no NaN arises, so that `x/x` is 1.
        assume: facts about sizes, such as `"r < d"`.
        budget: `nodes` bounds the applications of laws (ten per node), `equations` the programs.

    Returns:
        A `Proof` (true), a `Different` with a counterexample, or an `Unknown` that tells how far
        the proof came (both false).

    Raises:
        UsageError: a spec is malformed, or a function cannot be traced.

    Examples:
        >>> import jax
        >>> def naive(x):
        ...     return jax.numpy.exp(x) / jax.numpy.exp(x).sum(-1, keepdims=True)
        >>> bool(prove_equal(jax.nn.softmax, naive, "f32[n,d]"))
        True
        >>> bool(prove_equal(jax.nn.softmax, naive, "f32[n,d]").replay())
        True
    """
    if numerics not in ("reassoc", "finite"):
        raise UsageError("unknown numerics", expected="reassoc, finite", got=repr(numerics))
    started = time.perf_counter()
    tree = (specs, dict(kwargs or {}))
    args, named = specs_of(tree, _scope(tree))
    with jax.enable_x64(_is_wide((args, named))):
        problem = Problem.of(f, g, args, named, Assumptions(assume), numerics, budget or Budget())
        structure = problem.structure()
        if structure is not None:
            return structure
        found = sample(problem.functions, problem.leaves, problem.facts)
        if found.different is not None:
            return found.different
        return _decided(problem, found, started)


@dataclass(frozen=True, slots=True)
class Problem:
    """Two functions of flat arrays, traced. kinds: the structure of their results."""

    functions: tuple[Callable[..., Any], Callable[..., Any]]
    leaves: list[Any]
    traced: tuple[ClosedJaxpr, ClosedJaxpr]
    kinds: tuple[Any, Any]
    names: tuple[str, ...]
    facts: Assumptions
    numerics: str
    budget: Budget

    @classmethod
    def of(cls, f: Any, g: Any, args: Any, named: Any, *options: Any) -> Problem:
        """Trace two functions."""
        functions, traced, kinds, leaves = [], [], [], []
        for name, fun in (("f", f), ("g", g)):
            flat, leaves = jax_internals.of_leaves(fun, args, named, jax.ShapeDtypeStruct)
            try:
                closed, kind = jax_internals.make_jaxpr(flat, *leaves)
            except Exception as error:  # tracing runs the user's function
                lines = str(error).strip().splitlines() or ["no message"]
                what = f"{name} cannot be traced: {type(error).__name__}: {lines[0]}"
                raise UsageError(what, got=", ".join(map(_text_of, leaves))) from error
            functions.append(flat)
            traced.append(closed)
            kinds.append(kind)
        names = _names_of((args, named), len(leaves))
        return cls(
            (functions[0], functions[1]), leaves, (traced[0], traced[1]),
            (kinds[0], kinds[1]), names, *options,
        )  # fmt: skip

    def structure(self) -> Different | None:
        """Return the difference in structure, shapes or dtypes of the results, if any."""
        if self.kinds[0] != self.kinds[1]:
            return Different(f"f returns {self.kinds[0]}, g returns {self.kinds[1]}")
        for k, (x, y) in enumerate(zip(*(c.out_avals for c in self.traced), strict=True)):
            if x.dtype != y.dtype or tuple(x.shape) != tuple(y.shape):
                return Different(
                    f"output {k} is {_text_of(x)} in f and {_text_of(y)} in g", output=k
                )
        return None

    def both(self) -> ClosedJaxpr:
        """Return the program of both functions; comparisons relate the axes of their results."""
        f, g = self.functions

        def run(*args: Any) -> Any:
            left, right = jax.tree.leaves(f(*args)), jax.tree.leaves(g(*args))
            return [*left, *right, *map(lax.eq, left, right)]

        return jax_internals.make_jaxpr(run, *self.leaves)[0]

    def normal_forms(self, maxima_as_cases: bool) -> NormalForms:
        """Return both functions in normal form."""
        count = len(self.traced[0].out_avals)
        most = LAWS_PER_NODE * self.budget.nodes
        return normal_forms(self.both(), count, self.facts, most, maxima_as_cases)


def _decided(problem: Problem, found: Sampled, started: float) -> Proof | Unknown:
    """Return the verdict of the normal forms."""
    size = sum(len(c.jaxpr.eqns) for c in problem.traced)
    if size > problem.budget.equations:
        return Unknown(f"{size} equations are more than the budget", samples=found.instances)
    reason, forms = "", None
    for as_cases in (False, True):
        try:
            forms = problem.normal_forms(as_cases)
        except OutOfBudgetError as error:
            reason = f"the budget ended it: {error}"
            continue
        except RecursionError:
            reason = "the budget ended it: the terms are nested too deeply"
            continue
        reason = _gap(problem, forms)
        if not reason:
            return _proof(problem, forms, started, found)
    return _unknown(problem, forms, reason, found)


def _gap(problem: Problem, forms: NormalForms) -> str:
    """Return why normal forms are no proof; empty if they are one."""
    for k, (left, right) in enumerate(forms.pairs):
        if not equal(forms.a, left.value, right.value):
            return f"the normal forms of output {k} differ"
        if problem.numerics != "finite" and left.conditions.keys() != right.conditions.keys():
            notation = _notation(problem, forms)
            alone = [
                f"{_condition_text(notation, c)} in {name} alone"
                for name, mine, other in (("f", left, right), ("g", right, left))
                for key, c in mine.conditions.items() if key not in other.conditions
            ]  # fmt: skip
            text = " and ".join(alone)
            return f"equal where both are defined, but not defined at the same points: {text}"
    return ""


def equal(a: Calculus, p: Poly, q: Poly) -> bool:
    """Return True if polynomials are equal, after denominators are multiplied out."""
    if p == q:
        return True
    rest = a.sub(p, q)
    for _ in range(ROUNDS):
        rest = with_split_ranges(a, rest)
        below: dict[Atom, Number] = {}
        for mono, _ in rest:
            for atom, e in mono:
                if e < 0:
                    below[atom] = max(below.get(atom, 0), -e)
        parts = []
        for mono, c in rest:
            factors = dict(mono)
            for atom, e in below.items():
                factors[atom] = factors.get(atom, 0) + e
            parts.append(a.term(c, factors))
        product, multiplied = a.term(1, below), a.add(*parts)
        text = "a/b = c/d if a·d = c·b"
        rest = a.record("common_denominator", text, "mul", rest, product, after=multiplied)
        if rest == ZERO:
            return True
    return False


# ---------------------------------------------------------------- verdicts


def _proof(problem: Problem, forms: NormalForms, started: float, found: Sampled) -> Proof | Unknown:
    checked = Checked.of(problem, forms, seed=0)
    if checked.wrong:
        return _unknown(problem, forms, checked.wrong, found)
    notation = _notation(problem, forms)
    steps = tuple(_steps(notation, forms, checked))
    texts = tuple(_equation_text(notation, left) for left, _ in forms.pairs)
    conditions = {
        _condition_text(notation, c) for left, _ in forms.pairs for c in left.conditions.values()
    }

    def again(seed: int) -> bool:
        fresh = problem.normal_forms(forms.a.maxima_as_cases)
        return not _gap(problem, fresh) and not Checked.of(problem, fresh, seed).wrong

    seconds = time.perf_counter() - started
    modulo = MODULO if problem.numerics != "finite" else (*MODULO, "no division by zero arises")
    return Proof(
        steps, texts, modulo, tuple(sorted(conditions)), tuple(checked.sizes), seconds, again
    )


def _unknown(problem: Problem, forms: NormalForms | None, reason: str, found: Sampled) -> Unknown:
    left, right, rest = [], [], []
    if forms is not None:
        notation = _notation(problem, forms)
        for f, g in forms.pairs:
            if f.value != g.value:
                left.append(notation.poly(f.value))
                right.append(notation.poly(g.value))
                rest.append(notation.poly(forms.a.sub(f.value, g.value)))
    reason = f"{reason} ({found.note})" if found.note else reason
    return Unknown(reason, tuple(left), tuple(right), tuple(rest), found.instances)


@dataclass(slots=True)
class Checked:
    """The laws of a proof compared at random values.

    errors: for each law, the number of instances and the largest error. wrong: what failed.
    """

    errors: list[tuple[int, float]]
    sizes: list[dict[str, int]]
    wrong: str = ""

    @classmethod
    def of(cls, problem: Problem, forms: NormalForms, seed: int) -> Checked:
        """Compare both sides of every law, and every normal form with its function."""
        laws = list(forms.a.laws.values())
        out = cls([(0, 0.0)] * len(laws), [])
        for number, sizes in enumerate(size_choices(problem.leaves, problem.facts)):
            evaluation = _evaluation(forms, sizes, np.random.default_rng([seed, number]))
            out.sizes.append(sizes)
            for k, law in enumerate(laws):
                try:
                    error = law_error(law, evaluation)
                except TooLargeError:
                    continue
                count, worst = out.errors[k]
                out.errors[k] = (count + (error is not None), max(worst, error or 0.0))
                if error is not None and error > TOLERANCE:
                    out.wrong = f"a step of the law {law.name!r} failed its check by {error:.1e}"
            out.wrong = out.wrong or _reading_error(problem, forms, evaluation, sizes)
        return out


def _evaluation(forms: NormalForms, sizes: dict[str, int], draw: np.random.Generator) -> Evaluation:
    def shape(number: int) -> tuple[int, ...]:
        return tuple(int(value(s, sizes)) for s in forms.t.sizes[number])

    evaluation = Evaluation(forms.a, shape, sizes, draw)
    for v, const in forms.t.program.consts.items():
        if not jax_internals.is_tracer(const) and hasattr(const, "dtype"):
            evaluation.inputs[v] = np.asarray(const).reshape(shape(v))
    return evaluation


def _reading_error(
    problem: Problem, forms: NormalForms, evaluation: Evaluation, sizes: dict[str, int]
) -> str:
    """Return why a normal form has not the value of its function; empty if it has, or is opaque."""
    if any(
        f.kind == "opaque" or (f.kind == "map" and f.attr[0] == "round")
        for f in forms.a.table.forms
    ):
        return ""
    specs = [concrete(s, sizes) for s in problem.leaves]
    if sum(np.prod(s.shape, dtype=float) for s in specs) > 1e5:
        return ""
    inputs = []
    for v, spec in zip(forms.inputs, specs, strict=True):
        drawn = evaluation.inputs.get(v)
        if drawn is None:
            drawn = np.abs(evaluation.draw.normal(size=spec.shape)) + 0.1
            drawn = (drawn > 0.6) if spec.dtype == bool else drawn
        inputs.append(np.asarray(drawn).reshape(spec.shape).astype(spec.dtype))
        evaluation.inputs[v] = (
            inputs[-1]
            .astype(np.complex128 if inputs[-1].dtype.kind == "c" else np.float64)
            .reshape(evaluation.shapes(v))
        )
    closed = jax_internals.make_jaxpr(problem.functions[0], *specs)[0]
    for k, (made, (left, _)) in enumerate(zip(evaluate(closed, inputs), forms.pairs, strict=True)):
        if (error := _value_error(forms, evaluation, left, made)) > 1e-2:
            return f"the normal form of output {k} has another value than f, by {error:.1e}"
    return ""


def _value_error(
    forms: NormalForms, evaluation: Evaluation, output: Output, made: np.ndarray
) -> float:
    """Return the relative difference of an output and its normal form at some indices."""
    env, depth = sampled(evaluation, list(output.names))
    try:
        with np.errstate(all="ignore"):
            mine = evaluation.poly(output.value, env, depth)
    except TooLargeError:
        return 0.0
    sizes = [evaluation.size(forms.a.table.sizes[n]) for n in output.names]
    array = np.asarray(made).reshape(sizes)
    theirs = array[tuple(env[n] for n in output.names)] if output.names else array
    wide = theirs.astype(np.complex128 if theirs.dtype.kind == "c" else np.float64)
    return relative_difference(wide, mine) or 0.0


def _steps(notation: Notation, forms: NormalForms, checked: Checked) -> list[ProofStep]:
    """Return the laws that were applied, in order."""
    ends = [(out.laws, name) for pair in forms.pairs for out, name in zip(pair, "fg", strict=True)]
    steps = []
    for number, law in enumerate(forms.a.laws.values()):
        of = next((name for end, name in ends if number < end), "f and g")
        notation.letters.clear()
        before, after = notation.operation(law.before), notation.poly(law.after)
        count, error = checked.errors[number]
        if before != after:
            steps.append(ProofStep(law.name, law.text, before, after, law.where, of, count, error))
    return steps


def _notation(problem: Problem, forms: NormalForms) -> Notation:
    return Notation(forms.a, dict(zip(forms.inputs, problem.names, strict=False)))


def _equation_text(notation: Notation, output: Output) -> str:
    notation.letters.clear()
    read = ",".join(notation.letter(n) for n in output.names)
    text = notation.poly(output.value)
    return f"[{read}] ↦ {text}" if read else text


def _condition_text(notation: Notation, condition: Any) -> str:
    signs = {"nonzero": "≠ 0", "positive": "> 0", "nonnegative": "≥ 0"}
    notation.letters.clear()
    return f"{notation.poly(condition.p)} {signs[condition.kind]}"


def _names_of(tree: Any, count: int) -> tuple[str, ...]:
    """Return a name for each array among the arguments."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = []
    for path, leaf in paths:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            names.append("x" + "".join(str(p) for p in path[1:]).translate(_BRACKETS))
    return tuple(names[:count])


_BRACKETS = str.maketrans({"[": "", "]": "", "'": "", ".": ""})


def _text_of(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _scope(tree: Any) -> export.SymbolicScope:
    """Return the scope of the symbolic sizes of specs, or a new one."""
    for leaf in jax.tree.leaves(tree):
        for d in getattr(leaf, "shape", ()):
            if jax_internals.is_symbolic(d):
                return d.scope
    return export.SymbolicScope()


def _is_wide(tree: Any) -> bool:
    """Return True if 64-bit types are enabled, or asked for."""
    dtypes = {str(getattr(x, "dtype", "")) for x in jax.tree.leaves(tree)}
    return bool(dtypes & {"float64", "complex128"}) or bool(jax.config.read("jax_enable_x64"))
