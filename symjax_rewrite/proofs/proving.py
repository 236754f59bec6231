"""`prove_equal`: do two JAX functions compute the same value, by the laws of arithmetic?

The functions are sampled first: a difference is a counterexample. Then both are brought to normal
form (`normal_forms`). Equal normal forms are a proof. Its steps are the applications of laws; both
sides of each are compared at random values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from symjax_rewrite.errors import UsageError, choice
from symjax_rewrite.ir.sizes import consistent
from symjax_rewrite.options import Budget
from symjax_rewrite.proofs.algebra.arithmetic import Calculus, OutOfBudgetError
from symjax_rewrite.proofs.algebra.forms import Poly
from symjax_rewrite.proofs.algebra.laws import LAWS
from symjax_rewrite.proofs.checks import Checked
from symjax_rewrite.proofs.notation import Notation
from symjax_rewrite.proofs.problems import Problem, is_wide, scope_of, specs_of
from symjax_rewrite.proofs.reading.normal_forms import Mode, NormalForms, equal, normal_forms
from symjax_rewrite.proofs.samples import Sampled, sample
from symjax_rewrite.proofs.verdicts import MODULO, Different, Proof, ProofStep, Unknown

# Forms of loops and orders, as an unfinished proof names them.
WHOLE = {
    "iteration": "a loop without a closed form",
    "recurrence": "an affine recurrence without a closed form",
    "sorted": "sort",
    "order": "argsort",
    "argmax": "argmax",
}
LAWS_PER_NODE = 10  # the budget of nodes, in applications of laws


def prove_equal(
    f: Callable[..., Any],
    g: Callable[..., Any],
    *specs: Any,
    kwargs: Mapping[str, Any] | None = None,
    numerics: str = "reassoc",
    assume: Sequence[str] | str = (),
    budget: Budget | None = None,
) -> Proof | Different | Unknown:
    """Prove that two functions have equal values, for all values and all named sizes.

    A proof is about real numbers: rounding, overflow and the order of operations do not count, and
    neither do infinities and NaN, except −∞ in masks and as the start of a running maximum.
    Integers do not overflow. Where either function divides by zero, or takes a root or a logarithm
    outside its domain, both must. Derivatives are no part of it.

    Loops that count are proved by induction, for any number of steps, named sizes too: folds of
    sums, maxima and online softmaxes, running means, affine recurrences, and loops of equal starts
    and equal steps. Up to 16 steps
    are unfolded too, so that a loop equals its unrolled form or a tree of `associative_scan`.
    Sampling only refutes; it never proves.

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
        raise UsageError("unknown numerics", **choice(numerics, ("reassoc", "finite")))
    started = time.perf_counter()
    tree = (specs, dict(kwargs or {}))
    args, named = specs_of(tree, scope_of(tree))
    with jax.enable_x64(is_wide((args, named))):
        problem = Problem.of(f, g, args, named, consistent(assume), numerics, budget or Budget())
        if (different := problem.structure()) is not None:
            return different
        found = sample(problem)
        return decided(problem, found, started) if found.different is None else found.different


def decided(problem: Problem, found: Sampled, started: float) -> Proof | Unknown:
    """Return the verdict of the normal forms."""
    size = sum(len(c.jaxpr.eqns) for c in problem.traced)
    if size > problem.budget.equations:
        return Unknown(f"{size} equations are more than the budget", samples=found.instances)
    first, reason = _attempt(problem, Mode())
    last = first
    modes = [Mode(maxima_as_cases=True)] if first is None else first.other_modes()
    for mode in modes if reason else ():
        forms, why = _attempt(problem, mode)
        if forms is not None and not why:
            last, reason = forms, ""
            break
    if last is None or reason:
        return _unknown(problem, last, reason, found)
    return _proof(problem, last, started, found)


def _attempt(problem: Problem, mode: Mode) -> tuple[NormalForms | None, str]:
    """Return both functions in normal form, and why this is no proof; empty if it is one."""
    count = len(problem.traced[0].out_avals)
    most = LAWS_PER_NODE * problem.budget.nodes
    try:
        forms = normal_forms(problem.both, count, problem.facts, most, mode)
        return forms, _gap(problem, forms)
    except OutOfBudgetError as error:
        return None, f"the budget ended it: {error}"
    except RecursionError:
        return None, "the budget ended it: the terms are nested too deeply"


def _gap(problem: Problem, forms: NormalForms) -> str:
    """Return why normal forms are no proof; empty if they are one."""
    for left, right in forms.pairs:
        if not equal(forms.a, left.value, right.value):
            return f"the normal forms of output {left.number} differ"
        if problem.numerics != "finite" and left.conditions.keys() != right.conditions.keys():
            notation = _notation(problem, forms)
            alone = [
                f"{notation.condition(c)} in {name} alone"
                for name, mine, other in (("f", left, right), ("g", right, left))
                for key, c in mine.conditions.items() if key not in other.conditions
            ]  # fmt: skip
            text = " and ".join(alone)
            return f"equal where both are defined, but not defined at the same points: {text}"
    return ""


def _proof(problem: Problem, forms: NormalForms, started: float, found: Sampled) -> Proof | Unknown:
    checked = Checked.of(problem, forms, seed=0)
    if checked.wrong:
        return _unknown(problem, forms, checked.wrong, found)
    notation = _notation(problem, forms)
    texts = [notation.equation(left.at, left.value) for left, _ in forms.pairs]
    conditions = {
        notation.condition(c) for left, _ in forms.pairs for c in left.conditions.values()
    }

    def again(seed: int) -> bool:
        fresh, why = _attempt(
            problem, Mode(forms.a.maxima_as_cases, forms.a.entries, forms.a.angle_sums)
        )
        return fresh is not None and not why and not Checked.of(problem, fresh, seed).wrong

    steps = tuple(_steps(notation, forms, checked))
    modulo = MODULO if problem.numerics != "finite" else (*MODULO, "no division by zero arises")
    seconds = time.perf_counter() - started
    return Proof(
        steps, tuple(texts), modulo, tuple(sorted(conditions)), tuple(checked.sizes), seconds, again
    )


def _unknown(problem: Problem, forms: NormalForms | None, reason: str, found: Sampled) -> Unknown:
    sides: list[tuple[str, ...]] = [(), (), ()]
    missing: tuple[str, ...] = ()
    if forms is not None:
        notation = _notation(problem, forms)
        pairs = [(f.value, g.value) for f, g in forms.pairs if f.value != g.value]
        rows = [(f, g, forms.a.sub(f, g)) for f, g in pairs]
        sides = [tuple([notation.poly(row[k]) for row in rows]) for k in range(3)]
        missing = _whole_operations(forms.a, [rest for _, _, rest in rows])
    reason = f"{reason} ({found.note})" if found.note else reason
    return Unknown(reason, *sides, missing=missing, samples=found.instances)


def _whole_operations(a: Calculus, rest: Sequence[Poly]) -> tuple[str, ...]:
    """Return the names of operations in polynomials that no law took apart."""
    atoms = {atom for p in rest for mono, _ in p for atom, _ in mono}
    found = set()
    for form in (a.table.forms[k] for k in {k for x in atoms for k in a.reached(x.form)}):
        if form.kind in WHOLE:
            found.add(WHOLE[form.kind])
        elif form.kind == "map":
            found.add(str(form.attr[0]))
        elif form.kind == "opaque":
            name = form.attr[1] if form.attr[0] == "native" else form.attr[0]
            found.add(str(name[0] if isinstance(name, tuple) else name))
    return tuple(sorted(found))


def _steps(notation: Notation, forms: NormalForms, checked: Checked) -> list[ProofStep]:
    """Return the laws that were applied, in order."""
    ends = [(out.laws, name) for pair in forms.pairs for out, name in zip(pair, "fg", strict=True)]
    steps = []
    for number, law in enumerate(forms.a.laws.values()):
        of = next((name for end, name in ends if number < end), "f and g")
        notation.letters.clear()
        before, after = notation.operation(law.before), notation.poly(law.after)
        if before != after:
            error = checked.errors[number]
            steps.append(ProofStep(law.name, LAWS[law.name], before, after, law.where, of, *error))
    return steps


def _notation(problem: Problem, forms: NormalForms) -> Notation:
    return Notation(forms.a, dict(zip(forms.inputs, problem.names, strict=False)))
