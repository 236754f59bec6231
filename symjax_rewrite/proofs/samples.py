"""Counterexamples: two functions evaluated at random values, several sizes and special values.

Values are float64 where the functions compute the same in float64 as in the dtypes declared, so
that a difference of 1e-9 is one. Sampling shows a difference; it proves nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import Assumptions
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.proofs.problems import Problem, concrete, is_wide
from symjax_rewrite.proofs.verdicts import Different
from symjax_rewrite.testing.numpy_evaluator import evaluate, tolerance

WIDE = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}
MOST_WORK = 2e8  # multiplications and elements of one evaluation
KINDS = ("normal", "small", "whole", "bits")


@dataclass(slots=True)
class Sampled:
    """The outcome of sampling: a counterexample, or the number of instances that agree."""

    different: Different | None
    instances: int = 0
    note: str = ""


def size_names(specs: Sequence[Any]) -> list[str]:
    """Return the named sizes of specs."""
    texts = [str(d) for s in specs for d in s.shape if jax_internals.is_symbolic(d)]
    names = {n for text in texts for n in re.findall(r"[A-Za-z_]\w*", text)}
    return sorted(names - {"floordiv", "mod", "max", "min", "non_negative"})


def size_choices(specs: Sequence[Any], facts: Assumptions) -> Iterator[dict[str, int]]:
    """Yield sizes: all different, all equal, all one, and others; those that the facts allow."""
    names, draw = size_names(specs), np.random.default_rng(0)
    if not names:
        yield {}
        return
    tried = [
        {n: 2 + (k + 1) % 5 + 5 * (k // 5) for k, n in enumerate(names)},
        dict.fromkeys(names, 3),
        dict.fromkeys(names, 1),
    ]
    tried += [{n: int(draw.integers(1, 1 << j)) for n in names} for j in range(2, 8)]
    tried += facts.samples(names)
    found: list[dict[str, int]] = []
    for sizes in tried:
        fits = len(found) < 3 and facts.holds(sizes) and _is_proper(specs, sizes)
        if fits and sizes not in found:
            found.append(sizes)
            yield sizes


def _is_proper(specs: Sequence[Any], sizes: dict[str, int]) -> bool:
    """Return True if no array at these sizes is empty, and together they are small."""
    shapes = [concrete(s, sizes).shape for s in specs]
    return all(n >= 1 for shape in shapes for n in shape) and sum(map(math.prod, shapes)) < 1e6


def sample(problem: Problem) -> Sampled:
    """Compare two functions of flat arrays at random values."""
    specs = problem.leaves
    if any(dtype_kind(str(s.dtype)) == "?" for s in specs):
        return Sampled(None, note="inputs of these dtypes are not sampled")
    out = Sampled(None)
    for sizes in size_choices(specs, problem.facts):
        try:
            jaxprs, dtypes = _traced(problem, sizes)
        except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
            out.note = f"not traced at {sizes}: {type(error).__name__}"
            continue
        if sum(map(_cost, jaxprs)) > MOST_WORK:
            out.note = "too large to be sampled"
            continue
        shapes = [concrete(s, sizes).shape for s in specs]
        for seed, kind in enumerate(KINDS):
            inputs = tuple(
                _drawn(seed, k, kind, *x) for k, x in enumerate(zip(shapes, dtypes, strict=True))
            )
            found = compare(jaxprs, inputs, sizes)
            if found is not None:
                return Sampled(found)
            out.instances += 1
    return out


def _traced(problem: Problem, sizes: dict[str, int]) -> tuple[list[ClosedJaxpr], list[str]]:
    """Return both functions' jaxprs and the inputs' dtypes: wide ones if the programs are equal."""
    usual = problem.at(sizes)
    dtypes = [str(s.dtype) for s in problem.leaves]
    wide = [WIDE.get(d, d) for d in dtypes]
    if wide == dtypes or is_wide(()):
        return usual, dtypes
    with jax.enable_x64(True):
        specs = [concrete(s, sizes, d) for s, d in zip(problem.leaves, wide, strict=True)]
        try:
            made = [jax_internals.make_jaxpr(f, *specs)[0] for f in problem.functions]
        except (TypeError, ValueError):  # such as a carry that is float32 by name
            return usual, dtypes
    same = all(_primitives(a) == _primitives(b) for a, b in zip(usual, made, strict=True))
    return (made, wide) if same else (usual, dtypes)


def _primitives(closed: ClosedJaxpr) -> list[str]:
    names = (e.primitive.name for e in jax_internals.all_equations(closed))
    return [name for name in names if name != "convert_element_type"]


def _cost(closed: ClosedJaxpr) -> float:
    """Return about how many operations a jaxpr takes."""
    total = 0.0
    for e in closed.jaxpr.eqns:
        inner = sum(_cost(body) for body in jax_internals.bodies(e))
        total += inner * float(e.params.get("length", 1) or 1)
        sizes = [np.prod(v.aval.shape, dtype=float) for v in (*e.invars, *e.outvars)
                 if hasattr(v.aval, "shape")]  # fmt: skip
        total += sum(sizes)
        if e.primitive.name == "conv_general_dilated":
            total += sizes[-1] * sizes[1]
        if e.primitive.name == "dot_general":
            (left, _), _ = e.params["dimension_numbers"]
            depth = [e.invars[0].aval.shape[k] for k in left]
            total += sizes[-1] * float(np.prod(depth, dtype=float))
    return total


def _drawn(seed: int, number: int, kind: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    draw = np.random.default_rng([seed, number, *shape])
    of = dtype_kind(dtype)
    if of == "b":
        return draw.integers(0, 2, shape).astype(bool)
    if of in "iu" or kind in ("whole", "bits"):
        low = 0 if of == "u" or kind == "bits" or (of == "i" and kind == "normal") else -3
        made = draw.integers(low, 2 if kind == "bits" else 4, shape)
        return np.asarray(made).astype(dtype)
    scale = 1.0 if kind == "normal" else 0.02
    made = scale * draw.normal(size=shape)
    return np.asarray(made + (1j * scale * draw.normal(size=shape) if of == "c" else 0)).astype(
        dtype
    )


def compare(
    jaxprs: list[ClosedJaxpr], inputs: tuple[np.ndarray, ...], sizes: dict[str, int]
) -> Different | None:
    """Return the counterexample that some inputs are, or None."""
    with jax.enable_x64(any(str(x.dtype) in WIDE.values() for x in inputs)):
        lefts, rights = ([np.asarray(x) for x in evaluate(closed, inputs)] for closed in jaxprs)
    allowed = max(tolerance(d) for closed in jaxprs for d in _dtypes(closed))
    scale = max(
        [float(np.max(np.abs(x), initial=0)) for x in inputs if x.dtype.kind in "fcV"] or [0]
    )
    for k, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        if left.shape != right.shape:
            return Different(f"output {k} is {left.shape} in f and {right.shape} in g", inputs)
        where = _difference(left, right, allowed, scale)
        if where is None:
            continue
        place = f"output {k}" + (f" at {list(where)}" if where else "")
        reason = f"{place} is {left[where]} in f and {right[where]} in g ({left.dtype})"

        def again() -> bool:
            return compare(jaxprs, inputs, sizes) is not None

        return Different(reason, inputs, left, right, k, where, sizes, again)
    return None


def _dtypes(closed: ClosedJaxpr) -> list[str]:
    """Return the inexact dtypes of a jaxpr, and float64."""
    values = [v for e in jax_internals.all_equations(closed) for v in (*e.invars, *e.outvars)]
    dtypes = {str(getattr(v.aval, "dtype", "")) for v in values}
    return ["float64", *(d for d in dtypes if dtype_kind(d) in "fc")]


def _difference(
    left: np.ndarray, right: np.ndarray, allowed: float, scale: float
) -> tuple[int, ...] | None:
    """Return the index of the largest difference; None if all are within rounding."""
    if left.dtype.kind in "iub":
        wrong = left != right
        return tuple(map(int, np.argwhere(wrong)[0])) if wrong.any() else None
    x, y = (a.astype(np.complex128 if a.dtype.kind == "c" else np.float64) for a in (left, right))
    finite = np.isfinite(x) & np.isfinite(y)
    one_sided = np.isfinite(x) != np.isfinite(y)
    if one_sided.any():
        return tuple(map(int, np.argwhere(one_sided)[0]))
    gap = np.abs(np.subtract(x, y, out=np.zeros_like(x), where=finite))
    size = max(scale, *(float(np.max(np.abs(a[finite]), initial=0)) for a in (x, y)))
    if gap.size == 0 or not gap.max() > allowed * size:
        return None
    return tuple(map(int, np.unravel_index(int(np.argmax(gap)), gap.shape)))
