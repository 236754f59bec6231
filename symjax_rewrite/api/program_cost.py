"""What a whole program costs as it stands, kernels and loops included (a face).

Both sides of a report are priced by the same count. What cannot be known is None: the trips of a
loop that data decide, kernels that give no estimate, operations whose work no model says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import CPU, Device
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.cost.term_cost import CostModel, itemsize
from symjax_rewrite.ir.dataflow import needed, node_of
from symjax_rewrite.ir.flat_program import Equation, flatten
from symjax_rewrite.ir.sizes import Dim, from_jax, product, value
from symjax_rewrite.ir.term import NATIVE
from symjax_rewrite.ir.term_graph import build
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.loops.loop import read_loop

# Operations that read no more of their first operand than they give.
TAKES = frozenset({"gather", "dynamic_slice", "slice", "squeeze", "reshape"})
MOVES = TAKES | {"concatenate", "copy", "dynamic_update_slice", "pad", "rev", "tile", "transpose"}
# One operation for an element that is written or read.
PASSES = frozenset(
    "add_any cumlogsumexp cummax cummin cumprod cumsum iota reduce_and reduce_max reduce_min"
    " reduce_or reduce_prod reduce_sum argmax argmin select_n".split()
)
FREE = frozenset({"name", "optimization_barrier", "platform_index", "pvary", "stop_gradient"})
CALLS = frozenset(
    {"scan", "while", "cond", "jit", "pjit", "sym_call", "closed_call", *jax_internals.REMAT}
)
RULED = ("custom_jvp_call", "custom_vjp_call")
# Sums of products that 2mnk does not say.
PRODUCTS = frozenset({"fft", "ragged_dot", "ragged_dot_general", "scaled_dot"})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read and written by all kernels, and seconds by the device model; None if not known."""

    bytes: Dim | float | None = 0
    seconds: float | None = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(_plus(self.bytes, other.bytes), _plus(self.seconds, other.seconds))

    def times(self, n: Dim, sample: dict[str, int]) -> Traffic:
        """The same, done n times."""
        moved = None if self.bytes is None else n * self.bytes
        return Traffic(moved, None if self.seconds is None else _at(n, sample) * self.seconds)


UNKNOWN = Traffic(None, None)


def _plus(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    return b + a if isinstance(a, (int, float)) else a + b


def _at(size: Dim | float, sample: dict[str, int]) -> float:
    """The number a size is at a sample of the named sizes."""
    return size if isinstance(size, (int, float)) else value(size, sample)


def flops(closed: ClosedJaxpr, device: Device = CPU) -> Dim | None:
    """FLOPs of the contractions of a jaxpr, 2mnk each; loops count as often as they run.

    Returns:
        None where some equation multiplies and sums an unknown number of times.
    """
    total: Dim = 0
    for eqn in closed.jaxpr.eqns:
        mine = _equation_flops(eqn, device)
        if mine is None:
            return None
        total = mine + total
    return total


def _equation_flops(eqn: JaxprEqn, device: Device) -> Dim | None:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        lhs = shape_of(eqn.invars[0])
        return 2 * _size(eqn.outvars[0]) * product(from_jax(lhs[i]) for i in contracted)
    if name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        rest = [from_jax(d) for k, d in enumerate(shape_of(eqn.invars[1])) if k != features]
        return 2 * _size(eqn.outvars[0]) * product(rest)
    if name == "pallas_call":
        estimate = eqn.params.get("cost_estimate")
        return None if estimate is None else estimate.flops
    if not _runs_bodies(name):
        return 0 if _has_no_products(name) else None
    found = [flops(body, device) for body in bodies_run(eqn, device)]
    bodies = [f for f in found if f is not None]
    if not bodies or len(bodies) < len(found):
        return None
    if name == "cond":
        return max(bodies, key=lambda f: value(f, {}))
    total: Dim = 0
    for f in bodies:
        total = f + total
    if total == 0:
        return 0
    trips = trips_of(eqn)
    return None if trips is None else trips * total


def _runs_bodies(name: str) -> bool:
    """Return True for a loop, a choice between branches or a call."""
    return name in CALLS or name.startswith(RULED)


def _has_no_products(name: str) -> bool:
    """Return True for a primitive that sums no products of arrays: most of `jax.lax`."""
    known = hasattr(jax.lax, f"{name.replace('-', '_')}_p") or name in FREE | PASSES
    return (known or name.startswith(("random_", "threefry", "debug_"))) and name not in PRODUCTS


def bodies_run(eqn: JaxprEqn, device: Device) -> list[ClosedJaxpr]:
    """The bodies that an equation runs on a device, or one of which it runs; none if not known."""
    name, p = eqn.primitive.name, eqn.params
    branches = jax_internals.platform_branches(eqn)
    if branches:
        names = p["branches_platforms"]
        for wanted in (lambda n: n is not None and device.platform in n, lambda n: n is None):
            found = [b for n, b in zip(names, branches, strict=True) if wanted(n)]
            if found:
                return found[:1]
        return list(branches)
    if name == "while":
        return [p["body_jaxpr"], p["cond_jaxpr"]]
    if name == "cond":
        return list(p["branches"])
    return jax_internals.bodies(eqn)[:1] if _runs_bodies(name) else []


def trips_of(eqn: JaxprEqn) -> Dim | None:
    """How often the bodies of an equation run; None where data decide."""
    if eqn.primitive.name == "scan":
        return from_jax(eqn.params["length"])
    if eqn.primitive.name != "while":
        return 1
    loop = read_loop(_on_its_own(eqn))
    return None if loop is None else loop.length


def _on_its_own(eqn: JaxprEqn) -> Equation:
    """An equation over values numbered from 0."""
    number: dict[Any, int] = {}
    invals = tuple(
        v if jax_internals.is_literal(v) else number.setdefault(v, len(number)) for v in eqn.invars
    )
    outvals = tuple(range(len(number), len(number) + len(eqn.outvars)))
    return Equation(eqn, invals, outvals)


def traffic(closed: ClosedJaxpr, device: Device, sample: dict[str, int]) -> Traffic:
    """Bytes that a program's kernels move, and its seconds at sample sizes."""
    if not closed.jaxpr.eqns:
        return Traffic()
    t = build(flatten(closed))
    need = needed(t)
    choice = {c: node_of(t.graph, c) for c in need.order}
    native = [c for c in need.order if choice[c].op == NATIVE]
    read = {a.cls for c in native for a in choice[c].args}
    roots = tuple(sorted(need.outside | read))
    model = CostModel(device, lambda d: value(d, sample))
    cost = model.evaluate(t.graph, choice, roots)
    total = Traffic(cost.bytes, cost.seconds)
    if t.dim_env:
        total = Traffic(model.symbolic(t.graph, choice, roots).bytes, cost.seconds)
    numbers = {t.made_by[c][0] for c in native}
    numbers |= {n for n, e in enumerate(t.program.equations) if e.eqn.effects}
    for number in sorted(numbers):
        total = total + _equation_traffic(t.program.equations[number].eqn, device, sample)
    return total


def _equation_traffic(eqn: JaxprEqn, device: Device, sample: dict[str, int]) -> Traffic:
    """Traffic of an equation that is no term."""
    name = eqn.primitive.name
    if name in FREE:
        return Traffic()
    if name == "pallas_call":
        estimate = eqn.params.get("cost_estimate")
        return Traffic(None if estimate is None else estimate.bytes_accessed, None)
    if _runs_bodies(name):
        return _bodies_traffic(eqn, device, sample)
    arrays = all(hasattr(v.aval, "dtype") for v in (*eqn.invars, *eqn.outvars))
    if not arrays or not _has_no_products(name):
        return UNKNOWN
    moved = _moved(eqn)
    return Traffic(moved, _pass_seconds(eqn, _at(moved, sample), device, sample))


def _pass_seconds(
    eqn: JaxprEqn, moved: float, device: Device, sample: dict[str, int]
) -> float | None:
    """Seconds of an operation that passes over its arrays once; None for any other."""
    name = eqn.primitive.name
    if name not in MOVES | PASSES:
        return None
    sizes = [_at(_size(v), sample) for v in (*eqn.invars, *eqn.outvars)]
    work = max(sizes) / device.elementwise_per_s if name in PASSES else 0.0
    return max(work, moved / device.bytes_per_s) + device.launch_s


def _bodies_traffic(eqn: JaxprEqn, device: Device, sample: dict[str, int]) -> Traffic:
    """Traffic of a loop, a call or the costliest branch."""
    bodies = [traffic(b, device, sample) for b in bodies_run(eqn, device)]
    if not bodies:
        return UNKNOWN
    if eqn.primitive.name == "cond":
        if any(b.bytes is None for b in bodies):
            return UNKNOWN
        return max(bodies, key=lambda b: _at(b.bytes or 0, sample))
    trips = trips_of(eqn)
    return UNKNOWN if trips is None else sum(bodies, start=Traffic()).times(trips, sample)


def _moved(eqn: JaxprEqn) -> Dim:
    """Bytes that an operation reads and writes at least."""
    name = eqn.primitive.name
    if name in TAKES:
        rest = sum((_bytes(v) for v in eqn.invars[1:]), start=0)
        return 2 * _bytes(eqn.outvars[0]) + rest
    if name == "dynamic_update_slice":
        return 2 * _bytes(eqn.invars[1])
    return sum((_bytes(v) for v in (*eqn.invars, *eqn.outvars)), start=0)


def _size(v: Any) -> Dim:
    return product(from_jax(d) for d in v.aval.shape)


def _bytes(v: Any) -> Dim:
    return itemsize(str(v.aval.dtype)) * _size(v)


def memory(closed: ClosedJaxpr, device: Device = CPU) -> tuple[float, float] | None:
    """Bytes alive at once at most, and of the largest value made, taking every equation as made.

    XLA fuses, so the true peak is lower; both sides of a comparison are counted alike.

    Returns:
        None where some size is a name.
    """
    jaxpr = closed.jaxpr
    avals = [v.aval for e in jaxpr.eqns for v in e.outvars]
    avals += [v.aval for v in (*jaxpr.invars, *jaxpr.constvars)]
    if any(not isinstance(d, int) for a in avals for d in getattr(a, "shape", ())):
        return None
    last = _last_reads(jaxpr)
    dead: dict[int, float] = {}
    for v, n in last.items():
        dead[n] = dead.get(n, 0.0) + _held(v)
    alive = sum(_held(v) for v in (*jaxpr.invars, *jaxpr.constvars))
    peak, largest = alive, 0.0
    for n, eqn in enumerate(jaxpr.eqns):
        inner = 0.0
        for body in bodies_run(eqn, device):
            found = memory(body, device)
            if found is None:
                return None
            # What a body is given lies where the equation's operands lie.
            inner = max(inner, found[0] - sum(map(_held, body.jaxpr.invars)))
            largest = max(largest, found[1])
        made = [_held(v) for v in eqn.outvars]
        largest = max([largest, *made])
        alive += sum(made)
        peak = max(peak, alive + inner)
        alive -= dead.get(n, 0.0) + sum(_held(v) for v in eqn.outvars if v not in last)
    return peak, largest


def _last_reads(jaxpr: Any) -> dict[Any, int]:
    """For every variable that is read the number of the last equation that reads it."""
    last: dict[Any, int] = {}
    for n, eqn in enumerate(jaxpr.eqns):
        last.update((v, n) for v in eqn.invars if not jax_internals.is_literal(v))
    last.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if not jax_internals.is_literal(v))
    return last


def _held(v: Any) -> float:
    if not hasattr(v.aval, "shape") or not hasattr(v.aval, "dtype"):
        return 0.0
    return float(_bytes(v))  # pyright: ignore[reportArgumentType]
