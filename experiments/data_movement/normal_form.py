"""Folds of an emitted program in index notation, and the bytes that its loops read and write."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.kernel_selection.folds import builder
from symjax_rewrite.pallas_kernels.fold.spec import ExpSums, FoldSpec

BINARY = {"add": "+", "sub": "−", "mul": "·", "div": "/", "lt": "<", "le": "≤", "gt": ">"}
UNCHANGED = {
    "broadcast_in_dim", "reshape", "convert_element_type", "squeeze", "stop_gradient", "copy",
}  # fmt: skip
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def folds_of(fun: Callable, specs: Sequence[Any], **options: Any) -> tuple[Any, list[FoldSpec]]:
    """Return the report of a function and the folds that its emitted program calls."""
    found: list[FoldSpec] = []
    run = builder.fold

    def record(spec: FoldSpec, *operands: Any, **more: Any) -> Any:
        found.append(spec)
        return run(spec, *operands, **more)

    builder.fold = record
    try:
        report = sym_optimize(fun, **options).explain(*specs)
        assert report.after.jaxpr  # is staged when it is read
    finally:
        builder.fold = run
    return report, list(dict.fromkeys(found))


def index_notation(spec: FoldSpec, names: Sequence[str]) -> list[str]:
    """Return the equations of a softmax-weighted fold without batch axes.

    Args:
        spec: a fold with one output of `ExpSums`.
        names: of its operands.
    """
    (output,) = spec.outputs
    if not isinstance(output, ExpSums) or spec.batch:
        raise ValueError(f"index notation is for softmax folds without batch axes: {spec}")
    letters = _letters(spec)

    def operand(number: int) -> str:
        return f"{names[number]}[{','.join(letters[a] for a in spec.operands[number].axes)}]"

    dots = [
        f"Σ_{''.join(letters[a] for a in c.over)} {operand(c.row)}·{operand(c.col)}"
        for c in spec.contractions
    ]
    i, j = letters[spec.row], letters[spec.col]
    tile = expression(lambda *d: spec.tile.fun(d, (), _zero(), _zero()), [f"({d})" for d in dots])
    lines = [f"s[{i},{j}] = {tile}", f"m[{i}] = max_{j} s[{i},{j}]"]
    states = [f"m[{i}]"]
    for number, term in enumerate(output.terms):
        weights = "" if term.weights is None else f"·{operand(term.weights)}"
        feature = "".join(letters[a] for a in spec.features(term.weights)) if weights else ""
        state = f"z{number}[{','.join([i, *feature])}]"
        lines.append(f"{state} = Σ_{j} exp(s[{i},{j}] − m[{i}]){weights}")
        states.append(state)
    for result, axes in enumerate(spec.epilogue.axes if spec.epilogue else ()):
        lines.append(f"out[{','.join(letters[a] for a in axes)}] = {_result(spec, result, states)}")
    return lines


def _result(spec: FoldSpec, number: int, states: list[str]) -> str:
    epilogue = spec.epilogue
    assert epilogue is not None
    return expression(lambda *state: epilogue.fun((state,), ())[number], states)


def _letters(spec: FoldSpec) -> dict[str, str]:
    """Return a letter per axis: i for rows, j for columns, d, e … for features."""
    rest = (axis for axis, _ in spec.sizes if axis not in (spec.row, spec.col))
    return {spec.row: "i", spec.col: "j", **dict(zip(rest, "defgh", strict=False))}


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def expression(fun: Callable, names: Sequence[str]) -> str:
    """Return a function of scalars as one formula."""
    closed = jax.make_jaxpr(fun)(*(jnp.zeros((1, 1)) for _ in names))
    (text,) = _formula(closed.jaxpr, closed.consts, names)
    return text if isinstance(text, str) else f"{text:g}"


Part = str | float


def _formula(jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Part]) -> list[Part]:
    """Evaluate a jaxpr on formulas; parts that are numbers stay numbers."""
    known: dict[Any, Part] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {v: float(np.asarray(c)) for v, c in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> Part:
        return float(np.asarray(atom.val)) if isinstance(atom, core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [read(v) for v in equation.invars]
        inner = next((equation.params[k] for k in CALLS if k in equation.params), None)
        if inner is not None:
            out = _formula(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
        else:
            out = [_applied(equation, values)]
        known.update(zip(equation.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _applied(equation: Any, values: list[Part]) -> Part:
    """Return one operation on formulas, computed where all are numbers."""
    name = equation.primitive.name
    if name in UNCHANGED:
        return values[0]
    if all(isinstance(v, float) for v in values):
        return float(
            np.asarray(equation.primitive.bind(*map(jnp.float32, values), **equation.params))
        )
    texts = [v if isinstance(v, str) else f"{v:g}" for v in values]
    if name == "mul" and "-1" in texts:
        return f"(−{texts[1 - texts.index('-1')]})"
    if name == "max" and "-inf" in texts:
        return texts[1 - texts.index("-inf")]
    if name in BINARY:
        return f"({texts[0]} {BINARY[name]} {texts[1]})"
    if name == "select_n":
        return f"where({texts[0]}, {texts[2]}, {texts[1]})"
    return f"{name}({', '.join(texts)})"


@dataclasses.dataclass(frozen=True, slots=True)
class Movement:
    """Bytes of an emitted program, counted on its jaxpr.

    ends: arguments and results, each once. sliced: what loops read of arrays and write to them,
    times their trips. largest: the largest array that has not the shape of an argument or result
    and is no view of another.
    """

    ends: int
    sliced: int
    largest: int


def movement(closed: Any) -> Movement:
    """Count the bytes of a jaxpr, inner ones included."""
    jaxpr = closed.jaxpr
    ends = sum(_bytes(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars))
    shapes = {v.aval.shape for v in (*jaxpr.invars, *jaxpr.outvars)}
    inside = list(_equations(jaxpr, 1, frozenset()))
    apart = [e for e, _, _ in inside if not jax_internals.bodies(e) and not _view(e)]
    made = [v.aval for e in apart for v in e.outvars]
    sliced = sum(trips * sum(map(_bytes, _moved(e, whole))) for e, trips, whole in inside)
    return Movement(ends, sliced, max(_bytes(a) for a in made if a.shape not in shapes))


def _moved(equation: Any, whole: frozenset) -> list[Any]:
    """Return what an equation in a loop reads or writes of arrays made outside."""
    if equation.primitive.name == "dynamic_slice":
        return [equation.outvars[0].aval]
    if equation.primitive.name == "dynamic_update_slice":
        return [equation.invars[1].aval]
    if jax_internals.bodies(equation):
        return []
    return [v.aval for v in equation.invars if not isinstance(v, core.Literal) and v in whole]


def _view(equation: Any) -> bool:
    return equation.primitive.name in ("reshape", "squeeze")


def _equations(jaxpr: Any, trips: int, whole: frozenset) -> Iterator[tuple[Any, int, frozenset]]:
    """Yield every equation, how often it runs, and the constants of the loop around it."""
    for equation in jaxpr.eqns:
        yield equation, trips, whole
        loops = equation.primitive.name == "scan"
        times = equation.params["length"] if loops else 1
        for body in jax_internals.bodies(equation):
            count = jax_internals.scan_counts(equation)[0] if loops else 0
            constants = frozenset(body.jaxpr.invars[:count])
            yield from _equations(body.jaxpr, trips * times, constants)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
