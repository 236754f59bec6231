"""Prices of whole programs: terms, loops by their trip counts, kernels by their own models.

Both sides of a report are priced by the same functions. A total is None if a part of it is unknown:
a trip count that depends on data, a kernel without an estimate, or an operation that no model
covers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import CPU, Device
from symjax_rewrite.cost.equation_cost import (
    replacement_cost,
    runs_apart,
    sorting_seconds,
    summed_sizes,
)
from symjax_rewrite.cost.placed_products import layout_seconds
from symjax_rewrite.cost.temporaries import fresh_seconds
from symjax_rewrite.cost.term_cost import CostModel, itemsize
from symjax_rewrite.ir.dataflow import Needed, needed, node_of, numbers
from symjax_rewrite.ir.flat_program import Equation, Program, flatten
from symjax_rewrite.ir.replacement import live_values
from symjax_rewrite.ir.sizes import Dim, from_jax, product, value
from symjax_rewrite.ir.term import CONST, NATIVE, Node
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.jax_kernels import LATE_KERNEL
from symjax_rewrite.loops.loop_reading import LOOPS, read_loop
from symjax_rewrite.rewriting.repeated_products import repeated_seconds

Sample = dict[str, int]  # a number for every named size
Memory = tuple[float, float]  # bytes: the peak of live values, and the largest value

# Operations that read at most as many elements of their first operand as they write.
TAKES = frozenset({"gather", "dynamic_slice", "slice", "squeeze", "reshape"})
MOVES = TAKES | frozenset(
    "broadcast_in_dim concatenate copy dynamic_update_slice pad reshape rev split"
    " squeeze tile transpose".split()
)
# Operations that cost one elementwise operation per element read or written.
PASSES = frozenset(
    "add_any cumlogsumexp cummax cummin cumprod cumsum iota reduce_and reduce_max reduce_min"
    " reduce_or reduce_prod reduce_sum argmax argmin select_n scatter scatter-add clamp".split()
)
CUMULATIVE = frozenset({"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"})
FREE = frozenset({"name", "optimization_barrier", "platform_index", "pvary", "stop_gradient"})
CALLS = jax_internals.CALLS | {"scan", "while", "cond", "sym_call"}
CALLS |= {jax_internals.REMAT, LATE_KERNEL}
RULED = ("custom_jvp_call", "custom_vjp_call")
# Sums of products whose FLOPs are not 2mnk.
PRODUCTS = frozenset({"fft", "ragged_dot_general", "scaled_dot"})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read and written by all kernels, modelled seconds, and kernels; None if unknown."""

    bytes: Dim | float | None = 0
    seconds: float | None = 0.0
    launches: float | None = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            _plus(self.bytes, other.bytes),
            _plus(self.seconds, other.seconds),
            _plus(self.launches, other.launches),
        )

    def times(self, n: Dim, sample: Sample) -> Traffic:
        """Return the traffic of n repetitions."""
        count = at_sample(n, sample)
        moved = None if self.bytes is None else n * self.bytes
        both = (self.seconds, self.launches)
        return Traffic(moved, *(None if x is None else count * x for x in both))


UNKNOWN = Traffic(None, None, None)


@dataclass(frozen=True, slots=True)
class ProgramTerms:
    """A program as index terms, every class computed as written: the input of all prices."""

    t: TermGraph
    need: Needed
    choice: dict[int, Node]

    @classmethod
    def of(cls, program: Program) -> ProgramTerms:
        """Build the terms of a program."""
        t = build(program)
        need = needed(t)
        return cls(t, need, {c: node_of(t.graph, c) for c in need.order})

    def native(self) -> list[int]:
        """Return the classes of equations that no term describes."""
        return [c for c in self.need.order if self.choice[c].op == NATIVE]

    def roots(self) -> tuple[int, ...]:
        """Return the classes that results and native equations read."""
        read = {a.cls for c in self.native() for a in self.choice[c].args}
        return tuple(sorted(self.need.outside | read))

    def equations(self) -> list[Equation]:
        """Return the equations of native classes, and those with effects."""
        places = {self.t.made_by[c][0] for c in self.native()}
        places |= {n for n, e in enumerate(self.t.program.equations) if e.eqn.effects}
        return [self.t.program.equations[n] for n in sorted(places)]

    def model(self, device: Device, sample: Sample) -> CostModel:
        """Return the cost model of a device at sample sizes."""
        return CostModel(device, lambda d: value(d, sample), terms=self.t, is_whole=True)


def _plus(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b


def at_sample(size: Dim | float, sample: Sample) -> float:
    """Return a number, at the sample of the named sizes if it has names."""
    return size if isinstance(size, (int, float)) else value(size, sample)


def flops(closed: ClosedJaxpr, device: Device = CPU) -> Dim | None:
    """Return the FLOPs of the contractions of a jaxpr: 2mnk each, times the trip counts of loops.

    They are None if the trip count of an equation with products is unknown.
    """
    return _total(_equation_flops(eqn, device) for eqn in closed.jaxpr.eqns)


def program_flops(program: Program, device: Device) -> Dim | None:
    """Return FLOPs of a program's contractions, and of its kernels by their own models."""
    return _total(_equation_flops(e.eqn, device) for e in program.equations)


def _total(parts: Iterable[Any]) -> Any:
    return functools.reduce(_plus, parts, 0)


def _equation_flops(eqn: JaxprEqn, device: Device) -> Dim | None:
    name = eqn.primitive.name
    if name in ("dot_general", "conv_general_dilated"):
        return 2 * _size(eqn.outvars[0]) * product(map(from_jax, summed_sizes(eqn)))
    if jax_internals.is_replacement(eqn):
        cost = replacement_cost(eqn, device)  # staging a kernel takes a hundred times longer
        if cost is None or math.isnan(cost.flops):
            return flops(_staged(eqn), device)
        return int(cost.flops)
    if name == "pallas_call":
        estimate = eqn.params.get("cost_estimate")
        return None if estimate is None else estimate.flops
    if not _runs_bodies(name):
        return 0 if _has_no_products(name) else None
    bodies: list[Any] = [flops(body, device) for body in bodies_run(eqn, device)]
    if not bodies or None in bodies:
        return None
    if name == "cond":
        return max(bodies, key=lambda f: value(f, {}))
    total = _total(bodies)
    trips = 0 if total == 0 else trips_of(eqn)
    return None if trips is None else trips * total


def _runs_bodies(name: str) -> bool:
    """Return True for a loop, a conditional or a call."""
    return name in CALLS or name.startswith(RULED)


def _has_no_products(name: str) -> bool:
    """Return True for a primitive that contracts nothing: most of `jax.lax`."""
    known = hasattr(jax.lax, f"{name.replace('-', '_')}_p") or name in FREE | PASSES
    return (known or name.startswith(("random_", "threefry", "debug_"))) and name not in PRODUCTS


def bodies_run(eqn: JaxprEqn, device: Device) -> list[ClosedJaxpr]:
    """Return the bodies that an equation runs on a device, or its branches; empty if unknown."""
    name, p = eqn.primitive.name, eqn.params
    if branches := jax_internals.platform_branches(eqn):
        named = list(zip(p["branches_platforms"], branches, strict=True))
        mine = [b for names, b in named if names is not None and device.platform in names]
        default = [b for names, b in named if names is None]
        return (mine or default)[:1] or list(branches)
    if name == "while":
        return [p["body_jaxpr"], p["cond_jaxpr"]]
    if name == "cond":
        return list(p["branches"])
    return jax_internals.bodies(eqn)[:1] if _runs_bodies(name) else []


def trips_of(eqn: JaxprEqn) -> Dim | None:
    """Return the trip count of an equation's bodies; None if it depends on data."""
    if eqn.primitive.name == "scan":
        return from_jax(eqn.params["length"])
    if eqn.primitive.name != "while":
        return 1
    number: dict[Any, int] = {}
    invals = tuple(
        v if jax_internals.is_literal(v) else number.setdefault(v, len(number)) for v in eqn.invars
    )
    outvals = tuple(range(len(number), len(number) + len(eqn.outvars)))
    loop = read_loop(Equation(eqn, invals, outvals))
    return None if loop is None else loop.length


def temporary_bytes(terms: ProgramTerms, device: Device, sample: Sample) -> float:
    """Return the bytes of the largest value that a program writes, inputs and results excluded."""
    t, need, choice = terms.t, terms.need, terms.choice
    model = terms.model(device, sample)
    facts = {c: model.facts_of(t.graph, c, node) for c, node in choice.items()}
    written = model.written(facts, tuple(sorted(need.outside)), set())
    made = [c for c in written if c not in need.outside and c not in t.leaf_value]
    return max((facts[c].bytes for c in made if choice[c].op != CONST), default=0.0)


def traffic(closed: ClosedJaxpr, device: Device, sample: Sample) -> Traffic:
    """Return the bytes that a jaxpr's kernels move, its seconds at sample sizes, its kernels."""
    return program_traffic(flatten(closed), device, sample)


def program_traffic(program: Program, device: Device, sample: Sample) -> Traffic:
    """Return the traffic of a program, as of a jaxpr."""
    return terms_traffic(ProgramTerms.of(program), device, sample)


def terms_traffic(terms: ProgramTerms, device: Device, sample: Sample) -> Traffic:
    """Return the traffic of a program whose terms are built."""
    t = terms.t
    if not t.program.equations:
        return Traffic()
    model, roots = terms.model(_kept(device), sample), terms.roots()
    cost = model.evaluate(t.graph, terms.choice, roots)
    fresh_s = fresh_seconds(t, terms.need, model, device)
    spread = model.spread_bytes(t)
    beside_s = repeated_seconds(t, terms.need, model) + _layout_seconds(t.program, device)
    beside_s += device.spread_seconds(spread)
    moved = model.symbolic(t.graph, terms.choice, roots).bytes if t.dim_env else cost.bytes + spread
    natives = (equation_traffic(e.eqn, device, sample) for e in terms.equations())
    return sum(natives, start=Traffic(moved, cost.seconds + fresh_s + beside_s, cost.launches))


def _layout_seconds(program: Program, device: Device) -> float:
    """Return the seconds of products across rows, and of transposed copies."""
    live = live_values(program, ())
    kept = [e for e in program.equations if not live.isdisjoint(e.outvals)]
    return layout_seconds(program, device, kept)


def equation_traffic(eqn: JaxprEqn, device: Device, sample: Sample) -> Traffic:
    """Return the traffic of an equation that no term describes."""
    name = eqn.primitive.name
    if name in FREE:
        return Traffic()
    if jax_internals.is_replacement(eqn):
        cost = replacement_cost(eqn, device)
        found = cost and Traffic(cost.bytes, cost.seconds, max(1, cost.launches))
        return found or traffic(_staged(eqn), device, sample)
    if name == "pallas_call":
        return _kernel_traffic(eqn, device)
    if _runs_bodies(name):
        return _bodies_traffic(eqn, device, sample)
    arrays = all(hasattr(v.aval, "dtype") for v in (*eqn.invars, *eqn.outvars))
    if not arrays or not _has_no_products(name):
        return UNKNOWN
    moved = _moved(eqn)
    return Traffic(moved, _pass_seconds(eqn, at_sample(moved, sample), device, sample), 1)


def unpriced(terms: ProgramTerms, device: Device, sample: Sample) -> Iterator[JaxprEqn]:
    """Yield the equations of a program whose FLOPs are unknown, or that no term or price covers."""
    native = {id(e) for e in terms.equations()}
    for e in terms.t.program.equations:
        found = equation_traffic(e.eqn, device, sample) if id(e) in native else Traffic()
        if None in (found.bytes, found.seconds, _equation_flops(e.eqn, device)):
            yield e.eqn


def _staged(eqn: JaxprEqn) -> ClosedJaxpr:
    return jax_internals.make_avals_jaxpr(eqn.params["run"], [v.aval for v in eqn.invars])


def _kernel_traffic(eqn: JaxprEqn, device: Device) -> Traffic:
    """Return the traffic of a Pallas kernel by the roofline of its own estimate."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is None:
        return UNKNOWN
    avals: list[Any] = [v.aval for v in eqn.invars]
    dtype = next((str(a.dtype) for a in avals if hasattr(a, "dtype")), "float32")
    products = estimate.flops / device.peak(dtype)
    steps = estimate.transcendentals * device.scans.kernel_instructions  # of a scan
    others = steps / device.elementwise_per_s
    moved = estimate.bytes_accessed
    return Traffic(moved, max(products, others, moved / device.bytes_per_s) + device.launch_s, 1)


def _pass_seconds(eqn: JaxprEqn, moved: float, device: Device, sample: Sample) -> float | None:
    """Return the seconds of an operation that reads its arrays once; None for any other."""
    name = eqn.primitive.name
    if name in ("sort", "top_k"):
        return sorting_seconds(eqn, device) + moved / device.bytes_per_s + device.launch_s
    if name not in MOVES | PASSES:
        return None
    sizes = [at_sample(_size(v), sample) for v in (*eqn.invars, *eqn.outvars)]
    work = max(sizes) / device.elementwise_per_s if name in PASSES else 0.0
    if name in CUMULATIVE:
        work = max(work, device.tree_seconds(max(sizes)))
    return max(work, moved / device.bytes_per_s) + device.launch_s


def _kept(device: Device) -> Device:
    """Return the profile of a device that keeps all memory: pages are counted apart."""
    return replace(device, memory=replace(device.memory, kept_bytes=math.inf))


def _bodies_traffic(eqn: JaxprEqn, device: Device, sample: Sample) -> Traffic:
    fresh_s = step_s = 0.0
    if eqn.primitive.name in LOOPS:
        fresh_s = sum(device.page_seconds(at_sample(_bytes(v), sample)) for v in eqn.outvars)
        step_s = device.loops.step_s if device.loops.steps_are_launches else 0.0
        device = _kept(device.in_step())
    bodies = [traffic(b, device, sample) for b in bodies_run(eqn, device)]
    if not bodies:
        return UNKNOWN
    if eqn.primitive.name == "cond":
        if any(b.bytes is None for b in bodies):
            return UNKNOWN
        return max(bodies, key=lambda b: at_sample(b.bytes or 0, sample))
    trips = trips_of(eqn)
    if trips is None:
        return UNKNOWN
    step = sum(bodies, start=Traffic(0, step_s))
    if eqn.primitive.name in LOOPS and step.seconds is not None and step.bytes is not None:
        saved_s = device.inlined_seconds(step.launches or 0.0, at_sample(step.bytes, sample))
        if saved_s and not any(runs_apart(e) for b in bodies_run(eqn, device) for e in b.eqns):
            step = replace(step, seconds=step.seconds - saved_s)
    return step.times(trips, sample) + Traffic(0, fresh_s)


def _moved(eqn: JaxprEqn) -> Dim:
    """Return a lower bound of the bytes that an operation reads and writes."""
    if eqn.primitive.name in TAKES:
        return 2 * _bytes(eqn.outvars[0]) + _total(map(_bytes, eqn.invars[1:]))
    if eqn.primitive.name == "dynamic_update_slice":
        return 2 * _bytes(eqn.invars[1])
    return _total(map(_bytes, (*eqn.invars, *eqn.outvars)))


def _size(v: Any) -> Dim:
    return product(from_jax(d) for d in v.aval.shape)


def _bytes(v: Any) -> Dim:
    return itemsize(str(v.aval.dtype)) * _size(v)


def memory(program: Program, device: Device = CPU, sample: Sample | None = None) -> Memory:
    """Return the peak of live bytes, and the bytes of the largest value, at sample sizes.

    Every equation counts as materialised. XLA fuses, so the true peak is lower; the same convention
    holds for both sides of a comparison.
    """
    given = (*program.inputs, *program.consts)
    last = _last_reads(program)
    held = [_held(aval, sample or {}) for aval in program.avals]
    dead: dict[int, float] = {}
    for v, n in last.items():
        dead[n] = dead.get(n, 0.0) + held[v]
    peak = alive = sum(held[v] for v in given)
    largest = 0.0
    for n, e in enumerate(program.equations):
        inside = _inside_memory(e.eqn, device, sample or {})
        made = {v: held[v] for v in e.outvals}
        largest = max([largest, inside[1], *made.values()])
        alive += sum(made.values())
        peak = max(peak, alive + inside[0])
        alive -= dead.get(n, 0.0) + sum(size for v, size in made.items() if v not in last)
    return peak, largest


def _inside_memory(eqn: JaxprEqn, device: Device, sample: Sample) -> Memory:
    """Return the peak memory and the largest value inside one equation, results excluded."""
    is_staged = jax_internals.is_replacement(eqn)
    cost = replacement_cost(eqn, device) if is_staged else None
    if cost is not None:
        return cost.largest, cost.largest
    peak = largest = 0.0
    for body in [_staged(eqn)] if is_staged else bodies_run(eqn, device):
        program = flatten(body)
        found = memory(program, device, sample)
        # The inputs of a body are the equation's operands, and the outputs of a call its results.
        shared = {*program.inputs}
        if eqn.primitive.name not in LOOPS:
            shared.update(numbers(program.outputs))
        peak = max(peak, found[0] - sum(_held(program.avals[v], sample) for v in shared))
        largest = max(largest, found[1])
    return peak, largest


def _last_reads(program: Program) -> dict[int, int]:
    """Return, for every value that is read, the number of its last reader."""
    reads = [*(e.invals for e in program.equations), program.outputs]
    return {v: n for n, values in enumerate(reads) for v in numbers(values)}


def _held(aval: Any, sample: Sample) -> float:
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0.0
    shape, dtype = jax_internals.kind_of(aval)
    return itemsize(dtype) * float(math.prod(at_sample(from_jax(d), sample) for d in shape))
