"""From what the optimiser decided to a `Report` (a face)."""

from __future__ import annotations

from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.api.report import Report, Side
from symjax_rewrite.cost.term_cost import Cost, CostModel, itemsize
from symjax_rewrite.ir.dataflow import needed, node_of
from symjax_rewrite.ir.flat_program import Program, flatten
from symjax_rewrite.ir.sizes import Dim, Poly, from_jax, product, value
from symjax_rewrite.ir.term_graph import build
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.optimizer import Optimiser, Result


def make_report(
    result: Result, optimiser: Optimiser, sides: tuple[ClosedJaxpr, ...] = ()
) -> Report:
    """The report of one decision, with both programs priced.

    `sides` are the programs to show, where they are not the traced and the emitted one.
    """
    before, after = program_costs(result, optimiser)
    if not sides:
        emitted = result.closed
        if result.taken:
            emitted = jax_internals.make_avals_jaxpr(result.emit(), result.closed.in_avals)
        sides = (result.closed, emitted)
    return Report(
        before=_side(sides[0], before),
        after=_side(sides[1], after),
        rules=sorted(result.rules.values(), key=lambda r: r.name),
        routes=result.routes,
        stop=result.stop,
        time_s=result.time_s,
        plan=result.plan_record(),
        crossovers=result.crossovers,
    )


def program_costs(result: Result, optimiser: Optimiser) -> tuple[Cost, Cost]:
    """What the written and the decided program cost."""
    written = flatten(result.closed)
    return _price(written, optimiser), _price(result.program or written, optimiser)


def _price(program: Program, optimiser: Optimiser) -> Cost:
    t = build(program)
    need = needed(t)
    choice = {c: node_of(t.graph, c) for c in need.order}
    model = CostModel(optimiser.device, lambda d: value(d, {}))
    return model.evaluate(t.graph, choice, tuple(sorted(need.outside)))


def _side(closed: ClosedJaxpr, cost: Cost) -> Side:
    peak, largest = memory(closed)
    return Side(closed, flops(closed), cost.bytes, cost.seconds, peak, largest)


def flops(closed: ClosedJaxpr) -> Dim:
    """FLOPs of the contractions of a jaxpr, 2mnk each; loops count as often as they run."""
    total: Dim = 0
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            out = product(from_jax(d) for d in eqn.outvars[0].aval.shape)
            total = 2 * out * product(from_jax(lhs[i]) for i in contracted) + total
        elif eqn.primitive.name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            out = product(from_jax(d) for d in eqn.outvars[0].aval.shape)
            total = 2 * out * (product(from_jax(d) for d in kernel) // features) + total
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            inner = [flops(body) for body in jax_internals.bodies(eqn)]
            if eqn.primitive.name == "cond":
                inner = [max(inner, key=lambda f: value(f, {}))]
            for f in inner:
                total = from_jax(times) * f + total
    return total


def memory(closed: ClosedJaxpr) -> tuple[float, float]:
    """Bytes alive at once at most, and of the largest value made, taking every equation as made.

    XLA fuses, so the true peak is lower; both sides of a comparison are counted alike. Symbolic
    sizes count as 64.
    """
    jaxpr = closed.jaxpr
    last: dict[Any, int] = {}
    for n, eqn in enumerate(jaxpr.eqns):
        for v in eqn.invars:
            if not jax_internals.is_literal(v):
                last[v] = n
    for v in jaxpr.outvars:
        if not jax_internals.is_literal(v):
            last[v] = len(jaxpr.eqns)
    alive = sum(_aval_bytes(v.aval) for v in (*jaxpr.invars, *jaxpr.constvars))
    peak, largest = alive, 0.0
    dead: dict[int, float] = {}
    for v, n in last.items():
        dead[n] = dead.get(n, 0.0) + _aval_bytes(v.aval)
    for n, eqn in enumerate(jaxpr.eqns):
        inner = 0.0
        for body in jax_internals.bodies(eqn):
            body_peak, body_largest = memory(body)
            inner = max(inner, body_peak)
            largest = max(largest, body_largest)
        made = sum(_aval_bytes(v.aval) for v in eqn.outvars)
        largest = max([largest, *(_aval_bytes(v.aval) for v in eqn.outvars)])
        alive += made
        peak = max(peak, alive + inner)
        alive -= dead.get(n, 0.0) + sum(_aval_bytes(v.aval) for v in eqn.outvars if v not in last)
    return peak, largest


def _aval_bytes(aval: Any) -> float:
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0.0
    size: Dim = product(from_jax(d) for d in shape)
    number = value(size, {}) if isinstance(size, Poly) else size
    return float(number * itemsize(str(aval.dtype)))
