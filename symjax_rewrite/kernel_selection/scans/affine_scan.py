"""From an affine loop to a scan kernel (a face).

The body is read as index terms, where axes of size one, transpositions and broadcasts are gone. One
carry moves as h ← a·h + b over its own indices: the kernel is given the body itself, run with pairs
(a, b) in place of what depends on h, so that coefficients in any spelling are made inside it.
Results of a step are the states, or a sum of products with them over some of their axes. What else
is done with those (skips, gates, projections) is done for all steps after the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.dataflow import makers_of, node_of
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, LEAF, MAP, REDUCE, Ref
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.kernel_selection.folds.epilogue import apply
from symjax_rewrite.kernel_selection.scans.matrix_scan import (
    MIN_GAIN,
    MatrixRoute,
    matrices_of,
    run_all,
    stacked_result,
)
from symjax_rewrite.loops.carry_dependence import DIAGONAL, NAMES, SUM, describe, groups_of, is_zero
from symjax_rewrite.loops.loop import Loop, Read
from symjax_rewrite.pallas_kernels.fold.spec import Operand
from symjax_rewrite.pallas_kernels.scan.backward import differentiable_scan
from symjax_rewrite.pallas_kernels.scan.cost import (
    runs_in_turns,
    seconds_turned,
    seconds_written,
    states_bytes,
)
from symjax_rewrite.pallas_kernels.scan.scan import BACKENDS, cuda_backend, scan
from symjax_rewrite.pallas_kernels.scan.spec import Readout, ScanProgram, ScanSpec

TIME = "t"
MAX_GROWTH = 2  # what the kernel writes for results, over their bytes
MIN_KEPT = 1 << 21  # bytes of all states, for them to be made again in a gradient


class NotAScanError(Exception):
    """Why a loop is no scan (internal)."""


class AffinePair(NamedTuple):
    """a·h + b; `a` is None where h does not occur, and `b` where nothing is added to it.

    A zero in place of the latter would be none any more once it is divided by zero.
    """

    a: Any
    b: Any


def scan_as_is(spec: ScanSpec, backend: str, *operands: Any) -> tuple[Any, ...]:
    """A scan, differentiated through its own steps."""
    return scan(spec, *operands, backend=backend)


@dataclass(slots=True)
class ScanRoute:
    """A loop as a scan.

    operands: body value and its axes by name, in the order of the kernel's operand. read_out: the
    body values that the kernel gives for all steps. tail: what is made of these. run_scan: the scan
    of a spec, a backend and operands.
    """

    loop: Loop
    spec: ScanSpec
    backend: str
    operands: list[tuple[int, tuple[str, ...]]]
    read_out: list[int]
    tail: list[Equation]
    run_scan: Callable[..., tuple[Any, ...]] = scan_as_is

    def run(self, read: Read) -> list[Any]:
        """What the loop gives, made by the kernel."""
        loop = self.loop
        known, steps = loop.constants(read), loop.stacks(read)
        final = self.advance(known, steps, read)
        stacked = [stacked_result(loop, v, known, steps) for v in loop.ys]
        return loop.finish([final], stacked, read)

    def advance(self, known: dict[int, Any], steps: dict[int, Any], read: Read) -> Any:
        """Add to `steps` what all steps give, of what they know and read; the last state."""
        loop, avals = self.loop, self.loop.body.avals
        (carry,) = loop.carries
        size = self.spec.size
        arrays = []
        for (v, axes), spec in zip(self.operands, self.spec.operands, strict=True):
            shape = tuple(size[a] for a in axes)
            if v == carry.inner:
                array = jnp.asarray(read(carry.start))
                if array.size != np.prod(shape, dtype=int):
                    array = jnp.broadcast_to(array, avals[v].shape)
            else:
                array = jnp.asarray(steps[v] if v in steps else known[v])
            arrays.append(lax.reshape(array, shape).astype(spec.dtype))
        kernel = jax_internals.sealed(lambda *xs: self.run_scan(self.spec, self.backend, *xs))
        *ys, last = kernel(*arrays)
        known.pop(loop.carries[0].inner, None)  # it was the first state, and is one of every step
        for v, y in zip(self.read_out, ys, strict=True):
            steps[v] = lax.reshape(y, (loop.length, *avals[v].shape))
        run_all(loop, self.tail, known, steps)
        return lax.reshape(last, avals[carry.inner].shape)


def route_loop(loop: Loop, kernels: str, device: str) -> tuple[ScanRoute | MatrixRoute | None, str]:
    """A scan kernel for a loop, or why there is none.

    Args:
        loop: a clean loop of a known number of steps.
        kernels: `"auto"`, `"always"`, `"off"`, or a backend's name.
        device: the name of the device's profile.
    """
    moves = describe(loop)
    matrices, why = matrices_of(loop, kernels, device)
    if matrices is not None:
        return matrices, f"{moves}; {why}"
    if kernels == "off" or not all(g.degree.kind in NAMES for g in groups_of(loop)):
        return None, moves
    route, reason = scan_of(loop, kernels, device)
    also = f" ({why})" if why and route is None else ""
    return route, f"{moves}; {reason}{also}"


def scan_of(
    loop: Loop, kernels: str, device: str, beside_s: float = 0.0
) -> tuple[ScanRoute | None, str]:
    """A loop of one affine carry as a scan kernel where one is best, and why.

    Args:
        loop: a loop; `kernels` and `device` as for `route_loop`.
        beside_s: seconds of what the kernel needs and the loop does not.
    """
    try:
        builder = _ScanBuilder(loop)
        spec = builder.build()
    except NotAScanError as error:
        return None, f"no kernel: {error}"
    except UsageError as error:
        return None, f"no kernel: {error.what}"
    backend = kernels if kernels in BACKENDS else "auto"
    if kernels == "auto" and device == "cpu":
        fused = any(e.name == "reduce_sum" for e in loop.body.equations)
        before, after = seconds_written(spec, fused), seconds_turned(spec) + beside_s
        if not runs_in_turns(spec) or spec.dtype != "float32" or before < MIN_GAIN * after:
            return None, "on a CPU the loop is cheapest as it is"
        reason = f"the longest axis of its states innermost, predicted {after:.1e} s"
        return builder.route(spec, "turns"), f"{reason} for {before:.1e} s"
    if kernels == "auto":
        found = cuda_backend(spec)
        if not hasattr(found, "run"):
            return None, f"no kernel: {found}"
    elif backend == "auto" and kernels != "always":
        return None, f"the {kernels} backend has no scan"
    elif backend != "auto" and not (support := BACKENDS[backend].supports(spec)):
        return None, f"no kernel: {support}"
    return builder.route(spec, backend), f"states of all steps are never made ({backend})"


def route_differentiated(
    loop: Loop, kernels: str, device: str
) -> tuple[ScanRoute | MatrixRoute | None, str]:
    """A kernel for a loop that is to be differentiated in reverse mode, or why there is none.

    What is read as terms is without rules of derivatives: a body that has any is left.
    """
    matrices, why = matrices_of(loop, kernels, device, gradient=True)
    if matrices is not None or device != "cpu" or kernels not in ("auto", "always", "xla"):
        return matrices, why
    if any(e.name == "stop_gradient" for e in loop.body.equations):
        return None, "its derivatives are not those of its values"
    try:
        builder = _ScanBuilder(loop)
        spec = builder.build()
    except NotAScanError as error:
        return None, str(error)
    except UsageError as error:
        return None, error.what
    if not all(o.dtype == spec.dtype == "float32" for o in spec.operands):
        return None, "operands of several dtypes"
    heavy = any(r.over for r in spec.readouts) and states_bytes(spec) >= MIN_KEPT
    if kernels == "auto" and not heavy:
        return None, "what its steps keep is small"
    return builder.route(spec, "xla", differentiable_scan), "states made again"


@dataclass(slots=True)
class _ScanBuilder:
    """Reads one loop as a scan."""

    loop: Loop
    t: TermGraph = field(init=False)
    carry: int = field(init=False)
    indices: tuple[int, ...] = field(init=False)
    operands: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    readouts: dict[int, Readout] = field(default_factory=dict)
    tail: list[Equation] = field(default_factory=list)

    def route(
        self, spec: ScanSpec, backend: str, run_scan: Callable[..., tuple[Any, ...]] = scan_as_is
    ) -> ScanRoute:
        """The loop as a scan that was built."""
        return ScanRoute(
            self.loop, spec, backend, self.operands, list(self.readouts), self.tail, run_scan
        )

    def build(self) -> ScanSpec:
        """The scan, with where its operands come from, what it gives and what is made of that."""
        loop = self.loop
        groups = groups_of(loop)
        if len(loop.carries) != 1 or any(e.eqn.effects for e in loop.body.equations):
            raise NotAScanError("several carries or effects")
        if groups[0].degree.kind not in (SUM, DIAGONAL):
            raise NotAScanError("its steps are not affine entry by entry")
        carry, body = loop.carries[0], loop.body
        dtype = str(body.avals[carry.inner].dtype)
        if not isinstance(carry.out, int) or not dtype.startswith(("float", "bfloat")):
            raise NotAScanError(f"states are {dtype}")
        body.inputs = [*loop.consts, *loop.sources, *loop.counters, carry.inner]
        self.t = build(body)
        start, out = self.t.view(carry.inner), self.t.view(carry.out)
        sizes = self.t.sizes[carry.inner]
        if self.t.sizes[carry.out] != sizes or sorted(start.axes) != list(range(len(sizes))):
            raise NotAScanError("states have an axis that is spread")
        numbers = [s for s in sizes if isinstance(s, int)]
        if len(numbers) < len(sizes):
            raise NotAScanError("a size of the state is a name")
        self.carry = start.cls
        self.indices = start.axes
        names = tuple(f"s{i}" for i in range(len(sizes)))
        number = None if is_zero(carry.start) else self._operand(start)
        coefficients = self._program(out, None)
        self._read_results(out)
        return ScanSpec(
            sizes=((TIME, loop.length), *zip(names, numbers, strict=True)),
            time=TIME,
            state=names,
            operands=tuple(Operand(axes, str(body.avals[v].dtype)) for v, axes in self.operands),
            coefficients=coefficients,
            readouts=tuple(self.readouts.values()),
            last=True,
            start=number,
            reverse=loop.reverse,
            dtype=dtype,
        )

    def _read_results(self, out: Ref) -> None:
        """Find what the kernel gives for all steps, by body value, and the equations after it."""
        body = self.loop.body
        makers = makers_of(body.equations)
        level = self.loop.levels()
        tail: set[int] = set()
        why = None
        stack: list[Any] = list(self.loop.ys)
        done: set[int] = set()
        while stack:
            y = stack.pop()
            if not isinstance(y, int) or y in done:
                continue
            done.add(y)
            if level.get(y) == 2:
                count = len(self.operands)
                try:
                    self.readouts[y] = self._readout(y, out)
                    continue
                except NotAScanError as error:
                    del self.operands[count:]
                    why = why or error
                    if y not in makers:  # the state before a step, which is not made again
                        raise
            if y in makers:
                tail.add(id(makers[y]))
                stack += makers[y].invals
        self.tail = [e for e in body.equations if id(e) in tail]
        given = sum(aval_bytes(body.avals[v]) for v in self.loop.ys if isinstance(v, int))
        written = sum(aval_bytes(body.avals[v]) for v in self.readouts)
        written = max([written, *[aval_bytes(body.avals[v]) for e in self.tail for v in e.outvals]])
        if why is not None and written > MAX_GROWTH * given:
            raise why

    def _operand(self, ref: Ref) -> int:
        """The number of a leaf's operand, read over the indices of the state."""
        v = self.t.leaf_value[ref.cls]
        view = self.t.view(v)
        slot_index = dict(enumerate(ref.axes))
        order = [slot_index[s] for s in view.axes]
        if len(set(order)) != len(order) or len(view.axes) != len(self.t.sizes[v]):
            raise NotAScanError("an operand is read along a diagonal")
        if any(i >= len(self.indices) for i in order):
            raise NotAScanError("an operand has an axis that the states have not")
        steps = v in self.loop.sources or v in self.loop.counters
        axes = (*[TIME] * steps, *[f"s{i}" for i in order])
        if (v, axes) not in self.operands:
            self.operands.append((v, axes))
        return self.operands.index((v, axes))

    def _counted(self, ref: Ref) -> tuple[int, int] | int | None:
        """A counter as its start and step, or as the only step where it holds."""
        numbers = self.loop.counters.get(self.t.leaf_value[ref.cls])
        if numbers is None or numbers.size != self.loop.length or numbers.dtype.kind not in "iub":
            return None
        numbers = numbers.reshape(-1)
        if numbers.dtype.kind == "b":
            return int(np.argmax(numbers)) if numbers.sum() == 1 else None
        first = int(numbers[0])
        step = int(numbers[1]) - first if len(numbers) > 1 else 1
        even = [first + k * step for k in range(len(numbers))] == numbers.tolist()
        return (first, step) if even and max(abs(first), abs(int(numbers[-1]))) < 1 << 31 else None

    def _program(self, ref: Ref, after: Ref | None) -> ScanProgram:
        """The term as a program of operands; `after` is the state it may read."""
        steps: list[tuple] = []
        known: dict[Ref, int] = {}
        reads: list[int] = []
        self._steps(ref, after, steps, known, reads)
        key = ("scan", after is None, tuple((k, repr(d), a, x) for k, d, a, x in steps))
        run = _coefficients if after is None else _reading
        return ScanProgram(run(steps, self.t.primitives), tuple(reads), key=key)

    def _steps(
        self, ref: Ref, after: Ref | None, steps: list, known: dict[Ref, int], reads: list[int]
    ) -> int:
        """Number of the step that computes a reference over the state's indices."""
        if ref in known:
            return known[ref]
        g = self.t.graph
        node, dtype = node_of(g, ref.cls), g.classes[ref.cls].dtype
        kind, data, args = "", None, ()
        if after is not None and ref == after:
            kind = "after"
        elif ref.cls == self.carry:
            if ref.axes != self.indices:
                raise NotAScanError("states are read with their axes turned")
            kind = "before"
        elif node.op == CONST:
            kind, data = "const", node.attr[0]
        elif node.op == LEAF and (counted := self._counted(ref)) is not None:
            kind, data = "count", counted
        elif node.op == LEAF:
            number = self._operand(ref)
            if number not in reads:
                reads.append(number)
            kind, data = "value", reads.index(number)
        elif node.op in (MAP, ADD) or (node.op == CONTRACT and not node.bound):
            inner = [Ref(a.cls, tuple(ref.axes[i] for i in a.axes)) for a in node.args]
            args = tuple([self._steps(a, after, steps, known, reads) for a in inner])
            kind, data = "apply", (node.op, node.attr)
        else:
            raise NotAScanError(f"{node.op} inside a step")
        steps.append((kind, data, args, dtype))
        known[ref] = len(steps) - 1
        return known[ref]

    def _readout(self, y: int, out: Ref) -> Readout:
        """A result of every step as a sum over axes of the state."""
        view, g = self.t.view(y), self.t.graph
        dtype = g.classes[view.cls].dtype
        node = node_of(g, view.cls)
        bound = node.bound if view.cls not in (out.cls, self.carry) else ()
        if bound and not (node.op == CONTRACT or (node.op == REDUCE and node.attr == "sum")):
            raise NotAScanError(f"{node.op} in a result")
        width = len(self.t.sizes[y])
        axes = (*view.axes, *range(width, width + len(bound)))
        tops = [view]
        if bound:
            tops = [Ref(a.cls, tuple(axes[i] for i in a.axes)) for a in node.args]
        place = self._place(tops, out)
        if not place.keys() >= set(range(width + len(bound))):
            raise NotAScanError("a result, or what it sums, is the same along an axis")
        turned = [Ref(a.cls, tuple(place[i] for i in a.axes)) for a in tops]
        after = Ref(out.cls, out.axes)
        program = self._product(turned, after, dtype)
        factor = self._factor(self._factors(turned, after), after) if bound else None
        over = tuple(f"s{place[width + k]}" for k in range(len(bound)))
        left = tuple(f"s{place[i]}" for i in range(width))
        return Readout(program, over, axes=(TIME, *left), dtype=dtype, factor=factor)

    def _place(self, tops: list[Ref], out: Ref) -> dict[int, int]:
        """Index of a result, or of its sum, to index of the state."""
        found: dict[int, int] = {}
        targets = {out.cls: out.axes, self.carry: self.indices}
        stack = list(tops)
        while stack:
            ref = stack.pop()
            if ref.cls in targets:
                for index, state in zip(ref.axes, targets[ref.cls], strict=True):
                    if found.setdefault(index, state) != state:
                        raise NotAScanError("states are read with their axes turned")
                continue
            node = node_of(self.t.graph, ref.cls)
            if node.op in (MAP, ADD, CONTRACT) and not node.bound:
                stack += [Ref(a.cls, tuple(ref.axes[i] for i in a.axes)) for a in node.args]
        wanted = {i for ref in tops for i in ref.axes}
        if not wanted <= set(found) or len(set(found.values())) != len(found):
            raise NotAScanError("a result has an axis that the states have not")
        return found

    def _product(self, refs: list[Ref], after: Ref, dtype: str) -> ScanProgram:
        """The product of some terms as one program."""
        steps: list[tuple] = []
        known: dict[Ref, int] = {}
        reads: list[int] = []
        numbers = tuple(self._steps(r, after, steps, known, reads) for r in refs)
        steps.append(("apply", (CONTRACT, None), numbers, dtype))
        key = ("scan", False, tuple((k, repr(d), a, x) for k, d, a, x in steps))
        return ScanProgram(_reading(steps, self.t.primitives), tuple(reads), key=key)

    def _factors(self, refs: list[Ref], after: Ref) -> list[Ref]:
        """What a product is of, where some of its operands are products themselves."""
        found, classes = [], self.t.graph.classes
        for ref in refs:
            node = node_of(self.t.graph, ref.cls)
            dtypes = {classes[a.cls].dtype for a in (ref, *node.args)}
            if node.op == CONTRACT and not node.bound and ref != after and len(dtypes) == 1:
                inner = [Ref(a.cls, tuple(ref.axes[i] for i in a.axes)) for a in node.args]
                found += self._factors(inner, after)
            else:
                found.append(ref)
        return found

    def _factor(self, refs: list[Ref], after: Ref) -> ScanProgram | None:
        """What the state after a step is multiplied by, where a product is that."""
        rest = [r for r in refs if r != after]
        dtypes = {self.t.graph.classes[r.cls].dtype for r in refs}
        if len(rest) != len(refs) - 1 or not rest or len(dtypes) > 1:
            return None
        steps: list[tuple] = []
        known: dict[Ref, int] = {}
        reads: list[int] = []
        numbers = tuple(self._steps(r, after, steps, known, reads) for r in rest)
        if any(kind in ("before", "after") for kind, *_ in steps):
            return None
        steps.append(("apply", (CONTRACT, None), numbers, dtypes.pop()))
        key = ("factor", tuple((k, repr(d), a, x) for k, d, a, x in steps))
        run = _reading(steps, self.t.primitives)
        factor = lambda values, t: run((None, None), values, t)  # noqa: E731
        return ScanProgram(factor, tuple(reads), key=key)


def _coefficients(steps: list[tuple], primitives: dict[str, Any]) -> Callable[..., Any]:
    """The steps as `fun(values, t) -> (a, b)`."""

    def run(values: tuple, t: Any) -> tuple[Any, Any]:
        made: list[AffinePair] = []
        dtype = steps[-1][3]
        for kind, data, args, dtype in steps:
            if kind == "before":
                made.append(AffinePair(np.ones((), dtype), None))
            elif kind == "const":
                made.append(AffinePair(None, np.asarray(data).astype(np.dtype(dtype))))
            elif kind == "value":
                made.append(AffinePair(None, values[data]))
            elif kind == "count":
                made.append(AffinePair(None, _count(data, t, dtype)))
            else:
                made.append(_apply_pairs(data, [made[a] for a in args], dtype, primitives))
        zero = np.zeros((), dtype)
        a, b = (zero if x is None else x for x in made[-1])
        return a, b

    return run


def _count(counted: tuple[int, int] | int, t: Any, dtype: str) -> Any:
    """A counter at the steps of these numbers."""
    if isinstance(counted, int):
        return t == counted
    first, step = counted
    return (first + step * t).astype(dtype)


def _apply_pairs(
    what: tuple, args: list[AffinePair], dtype: str, primitives: dict[str, Any]
) -> AffinePair:
    """A term of a·h + b's: sums and products with what has no h go through both."""
    op, attr = what

    def of(values: list[Any]) -> Any:
        return apply(what, values, dtype, primitives)

    if all(p.a is None for p in args):
        return AffinePair(None, of([p.b for p in args]))
    if op == ADD or (op == MAP and attr[0] == "select_n"):
        zero = np.zeros((), dtype)
        first = [args[0].b] if op == MAP else []
        slopes, offsets = (
            [zero if x is None else x for x in part]
            for part in zip(*args[len(first) :], strict=True)
        )
        scaled = all(p.b is None for p in args[len(first) :])
        return AffinePair(of([*first, *slopes]), None if scaled else of([*first, *offsets]))
    slope = of([p.b if p.a is None else p.a for p in args])
    return AffinePair(slope, None if any(p.b is None for p in args) else of([p.b for p in args]))


def _reading(steps: list[tuple], primitives: dict[str, Any]) -> Callable[..., Any]:
    """The steps as `fun((before, after), values, t)`."""

    def run(states: tuple, values: tuple, t: Any) -> Any:
        before, after = states
        made: list[Any] = []
        for kind, data, args, dtype in steps:
            if kind == "before":
                made.append(before.astype(dtype))
            elif kind == "after":
                made.append(after.astype(dtype))
            elif kind == "const":
                made.append(np.asarray(data).astype(np.dtype(dtype)))
            elif kind == "value":
                made.append(values[data])
            elif kind == "count":
                made.append(_count(data, t, dtype))
            else:
                made.append(apply(data, [made[a] for a in args], dtype, primitives))
        return made[-1]

    return run
