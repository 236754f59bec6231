"""Proofs compared at random values: every law that was applied, and every normal form.

A law `exp(x[i] + y[i]) = exp(x[i])·exp(y[i])` is evaluated on both sides in float64, at several
sizes; a normal form is compared with the value of its function.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.proofs.evaluation import (
    TOLERANCE,
    Evaluation,
    TooLargeError,
    law_error,
    relative_difference,
    sampled,
)
from symjax_rewrite.proofs.problems import Problem, concrete
from symjax_rewrite.proofs.reading.normal_forms import NormalForms, Output
from symjax_rewrite.proofs.samples import size_choices
from symjax_rewrite.testing.numpy_evaluator import evaluate

MOST_INPUTS = 1e5  # elements of the arguments of a function that is evaluated
READING_TOLERANCE = 1e-2  # of a function in its own dtypes


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
    specs = [concrete(s, sizes) for s in problem.leaves]
    if sum(np.prod(s.shape, dtype=float) for s in specs) > MOST_INPUTS or _is_opaque(forms):
        return ""
    inputs = []
    for v, spec in zip(forms.inputs, specs, strict=True):
        drawn = evaluation.inputs.get(v)
        if drawn is None:
            drawn = np.abs(evaluation.draw.normal(size=spec.shape)) + 0.1
            drawn = (drawn > 0.6) if spec.dtype == bool else drawn
        inputs.append(np.asarray(drawn).reshape(spec.shape).astype(spec.dtype))
        evaluation.inputs[v] = _wide(inputs[-1]).reshape(evaluation.shapes(v))
    made = evaluate(problem.at(sizes)[0], inputs)
    for left, _ in forms.pairs:
        if (error := _value_error(forms, evaluation, left, made[left.number])) > READING_TOLERANCE:
            return (
                f"the normal form of output {left.number} has another value than f, by {error:.1e}"
            )
    return ""


def _is_opaque(forms: NormalForms) -> bool:
    """Return True if outputs of f have operations that are not interpreted, or round."""
    atoms = {atom for left, _ in forms.pairs for mono, _ in left.value for atom, _ in mono}
    reached = [forms.a.table.forms[k] for atom in atoms for k in forms.a.reached(atom.form)]
    return any(f.kind == "opaque" or (f.kind == "map" and f.attr[0] == "round") for f in reached)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _value_error(
    forms: NormalForms, evaluation: Evaluation, output: Output, made: np.ndarray
) -> float:
    """Return the relative difference of an output and its normal form at some indices."""
    names = [n for index in output.at for n, _ in index[1]]
    env, depth = sampled(evaluation, names)
    try:
        with np.errstate(all="ignore"):
            mine = evaluation.poly(output.value, env, depth)
    except TooLargeError:
        return 0.0
    array = np.asarray(made).reshape([evaluation.size(s) for s in output.sizes])
    theirs = array[tuple(evaluation.index(i, env) for i in output.at)] if output.at else array
    return relative_difference(_wide(theirs), mine) or 0.0
