"""Selection of norm kernels: a norm and the next linear layer become one matmul with sums.

`normalized_operand` reads the operand of every contraction. `row_statistics` builds programs of the
statistics and the epilogue. This module prices the kernel against the program as written.
`kernel_call` emits the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found, Refusal
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost, itemsize
from symjax_rewrite.errors import KernelError
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import (
    Needed,
    class_operands,
    cone,
    is_computed_from,
    is_float_cast,
    node_of,
    walk,
)
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.sizes import from_jax
from symjax_rewrite.ir.step_program import Step, key_of, place_in, pruned
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.pairwise_terms import bytes_of, elements
from symjax_rewrite.kernel_selection.folds.tile_program import precision_name
from symjax_rewrite.kernel_selection.kernel_candidate import Proposal, candidates
from symjax_rewrite.kernel_selection.norms.epilogue import NormEpilogue, epilogue
from symjax_rewrite.kernel_selection.norms.kernel_call import NormPart, NormRoute, axes_of
from symjax_rewrite.kernel_selection.norms.normalized_operand import (
    Column,
    Normed,
    normal_form,
)
from symjax_rewrite.kernel_selection.norms.row_statistics import (
    CENTRE,
    SQUARES,
    SUM,
    ProgramBuilder,
    program,
)
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.pallas_kernels.backend import Reason
from symjax_rewrite.pallas_kernels.norm.cost import on_gpu
from symjax_rewrite.pallas_kernels.norm.norm_linear import BACKENDS, cuda_backend
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec, RowProgram
from symjax_rewrite.text_tables import too_slow
from symjax_rewrite.usage_records import ratio_of

NAME = "norm_linear"
Compared = tuple[float, float] | None  # predicted seconds as written and with kernels
LIGHT = frozenset(
    {
        op.MAP,
        op.ADD,
        op.CONTRACT,
        op.SLICE,
        op.CONCAT,
        op.TAKE,
        op.DELTA,
        op.IOTA,
        op.CONST,
        op.LEAF,
    }
)
MOST_PARTS = 8  # limit on results of one kernel: each result adds code
STARTS = 8  # limit on products from which the chain of one epilogue is followed


class Norms:
    """Pass that replaces norms before linear layers by kernels."""

    name = NAME

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the products of normalised values that a kernel computes."""
        kernels = context.options.kernels
        if kernels not in ("auto", "always", *BACKENDS) or not context.reorders():
            return
        terms = context.terms(program)
        yield from _NormSelection(kernels, context.device).found(terms.t, terms.need)


class _NormSelection:
    """Search for norms before linear layers, and the decision which of them become kernels."""

    def __init__(self, kernels: str, device: Device) -> None:
        self.kernels, self.device = kernels, device

    def found(self, t: TermGraph, need: Needed) -> Iterator[Found]:
        """Yield the kernels and the refused candidates."""
        groups: dict[tuple, list[Normed]] = {}
        cache: dict[int, bool] = {}
        for cls in need.order:
            if cls in need.known:
                continue
            found = normal_form(t.graph, cls, cache)
            if isinstance(found, Normed):
                groups.setdefault(found.key, []).append(found)
            elif found is not None:
                yield Refusal(NAME, found, t.where(cls))
            if found is not None and self.kernels == "auto" and not self.device.runs_pallas:
                break  # no kernel is taken: the reason is reported once, for the first class
        for members in groups.values():
            made, reason, seconds = self._group(t, need, members)
            where = t.where(members[0].cls)
            if made:
                yield from candidates(t, NAME, [Proposal(made, reason, where, seconds)])
            else:
                yield Refusal(NAME, reason, where, ratio=seconds and ratio_of(*seconds))

    def _group(
        self, t: TermGraph, need: Needed, members: list[Normed]
    ) -> tuple[list[NormRoute], str, Compared]:
        """Return the kernels of one normalised value, the reason, and the compared seconds."""
        auto, why = self.kernels == "auto", ""
        if auto and jax_internals.may_be_partitioned():
            why = Obstacle.SHARDING("several devices: XLA might gather the kernel's operands")
        elif any(c in need.outside for c in members[0].opened):
            why = Obstacle.READER("the normalised value is itself a result")
        elif auto and not self.device.runs_pallas:
            why = Obstacle.DEVICE(
                "this kernel runs on GPUs of compute capability 8.0 and above, on no CPU"
            )
        if why:
            return [], why, None
        parts: list[NormPart] = []
        for end, served in _epilogues(t, need, members):
            part = _NormBuilder(t, served, end, need.known).part()
            if isinstance(part, NormPart) and (refusal := self._refusal(part)):
                part = refusal
            if isinstance(part, str):
                if self.kernels not in ("auto", "always"):
                    raise KernelError(f"the {self.kernels} backend cannot run this", got=part)
                return [], part, None
            parts.append(part)
        backend = self.kernels if self.kernels in BACKENDS else "auto"
        made = [NormRoute(group, backend) for group in _together(t, need, parts)]
        if parts[0].spec.centred and _sum_is_read(t, need, members[0], made):
            text = "a sum of the centred values, zero but for rounding, is read too"
            return [], Obstacle.READER(text), None
        priced = [_numbered(t, route) for route in made]
        for route, numbers in zip(made, priced, strict=True):
            route.price = partial(kernel_cost, t, numbers)
        seconds, reason = self._compared(t, need, members, priced)
        if auto:
            is_taken = margins.pays(*seconds, "norm", self.device)
            return made if is_taken else [], reason, seconds
        return made, _count(made, members), seconds

    def _refusal(self, part: NormPart) -> str:
        """Return the reason no requested backend runs a part; empty if one does."""
        alone = NormGroup((part.spec,))
        if self.kernels == "auto":
            found = cuda_backend(alone)
        elif self.kernels in BACKENDS:
            found = BACKENDS[self.kernels].supports(alone)
        else:
            return ""
        return Obstacle.BACKEND(found) if isinstance(found, Reason) else ""

    def _compared(
        self, t: TermGraph, need: Needed, members: list[Normed], made: list[NormRoute]
    ) -> tuple[tuple[float, float], str]:
        """Return predicted seconds as written and with the kernels, and a sentence of both.

        As written, the norm is one kernel, each product one of the library, and the epilogue beyond
        a bias one more. XLA multiplies by a scale that is no sum over x where the product reads x.
        """
        d, x = self.device, members[0].x.cls
        size = partial(bytes_of, t)
        value = itemsize(members[0].dtype) * elements(t, x)
        factors = [*members[0].scale, *(r for s in members[0].shifts for r in s.rows)]
        own = any(is_computed_from(t.graph, r.cls, (x,)) for r in factors)
        norm = (size(x) + value) / d.bytes_per_s + d.launch_s if own else 0.0
        again = _read_elsewhere(t, need, members[0], made)
        before, after = norm, norm if again else 0.0
        for route in made:
            before += sum(self._written(p, value, size) for p in route.parts)
            after += _kernel_price(t, route, d)[0]
        gain = before / after
        text = _count(made, members)
        if not margins.pays(before, after, "norm", d):
            also = ": another value reads the normalised value" if again else ""
            least = margins.margin("norm", d)
            text = Obstacle.COST(f"{too_slow(gain, least)}{also}")
        return (before, after), text

    def _written(self, p: NormPart, value: int, size: Any) -> float:
        """Return seconds of a part's products and of its epilogue, as written."""
        d, spec = self.device, p.spec
        products = [size(m.cls) for m in p.members]
        total = 0.0
        for m, out in zip(p.members, products, strict=True):
            moved = value + size(m.weight.cls) + out
            work = 2 * spec.rows * spec.width * spec.outputs
            total += max(work / d.peak(m.dtype), moved / d.bytes_per_s) + d.launch_s
        if len(p.epilogue.inside) > 1 and (len(products) > 1 or spec.fulls):
            total += (sum(products) + size(p.epilogue.cls)) / d.bytes_per_s + d.launch_s
        return total


def _numbered(t: TermGraph, route: NormRoute) -> NormRoute:
    """Return a kernel with the sample's number in place of a named number of rows, for a price."""
    rows = t.number(from_jax(route.parts[0].spec.rows))
    return replace(route, parts=[replace(p, spec=replace(p.spec, rows=rows)) for p in route.parts])


def _kernel_price(t: TermGraph, route: NormRoute, d: Device) -> tuple[float, int]:
    """Return predicted seconds and launches of a kernel and of the sums over x that it reads."""
    x, sums = route.parts[0].members[0].x.cls, len(_sums_of_x(t, route))
    seconds, launches = on_gpu(route.group, d)
    return seconds + sums * (bytes_of(t, x) / d.bytes_per_s + d.launch_s), launches + sums


def _sums_of_x(t: TermGraph, route: NormRoute) -> set[Ref]:
    """Return the vectors over rows that a kernel reads and that are computed from x."""
    x = route.parts[0].members[0].x.cls
    rows = (r for p in route.parts for r in p.operands["rows"])
    return {r for r in rows if is_computed_from(t.graph, r.cls, (x,))}


def kernel_cost(t: TermGraph, route: NormRoute, device: Device) -> Cost | None:
    """Return the cost of a norm kernel on a GPU; elsewhere XLA runs its operations separately."""
    if not device.runs_pallas:
        return None
    sums = len(_sums_of_x(t, route)) * bytes_of(t, route.parts[0].members[0].x.cls)
    seconds, launches = _kernel_price(t, route, device)
    return Cost(
        sum(p.spec.flops for p in route.parts),
        bytes=route.group.bytes_moved + sums,
        launches=launches,
        seconds=seconds,
    )


def _count(made: list[NormRoute], members: list[Normed]) -> str:
    kernels, products = len(made), len(members)
    return f"{kernels} kernel{'s' * (kernels > 1)} for {products} product{'s' * (products > 1)}"


def _read_elsewhere(t: TermGraph, need: Needed, m: Normed, made: list[NormRoute]) -> bool:
    """Return True if something besides these kernels' products reads the normalised value."""
    read = {c for route in made for p in route.parts for c in p.needs()}
    return bool(m.opened & read or _other_users(t, need, m.opened, made))


def _other_users(
    t: TermGraph, need: Needed, classes: Iterable[int], made: list[NormRoute]
) -> set[int]:
    """Return the users of classes that are not computed inside these kernels."""
    parts = [p for route in made for p in route.parts]
    given = {p.epilogue.cls for p in parts}
    read = {c for p in parts for c in p.needs()}
    inside = cone(given, class_operands(t.graph), read - given)
    return {u for c in classes for u in need.users.get(c, ()) if u not in inside}


def _sum_is_read(t: TermGraph, need: Needed, m: Normed, made: list[NormRoute]) -> bool:
    """Return True if something besides these kernels reads a sum of the centred values alone.

    Such a sum corrects the rounding error of the mean. The kernel rounds a mean of its own.
    """
    g = t.graph

    def is_sum(cls: int) -> bool:
        node = node_of(g, cls)
        return node.op == op.CONTRACT and bool(node.bound) and len(node.args) == 1

    def readers(cls: int) -> Iterable[int]:
        node = node_of(g, cls)
        is_linear = node.op in (op.ADD, op.CONTRACT) and not node.bound
        return need.users.get(cls, ()) if is_linear or is_float_cast(g, cls) else ()

    return any(map(is_sum, walk(_other_users(t, need, m.opened, made), readers)))


def _epilogues(
    t: TermGraph, need: Needed, members: list[Normed]
) -> Iterable[tuple[NormEpilogue, list[Normed]]]:
    """Yield members in kernels: members of one elementwise result share a kernel.

    A chain is followed from the member that reaches most others: `a / (1 + exp(b))` from b.
    """
    left = list(members)
    while left:
        tried = [(epilogue(t.graph, need, m, left), m) for m in left[:STARTS]]
        end, start = max(tried, key=lambda pair: len(pair[0].products))
        served = [start, *(m for m in left if m.cls in end.products and m is not start)]
        left = [m for m in left if m not in served]
        yield end, served


def _together(t: TermGraph, need: Needed, parts: list[NormPart]) -> list[list[NormPart]]:
    """Group parts by kernel: parts that can run once x is known share one with the common operands.

    A part that reads an operand of its own (a residual, for example) might have to wait for a class
    that reads another part.
    """
    g = t.graph
    common = set.intersection(*(set(p.needs()) for p in parts))
    x = parts[0].members[0].x.cls
    operands = class_operands(g)
    before = cone([x, *common, *need.known], operands)
    groups: dict[tuple, list[NormPart]] = {}
    late: list[list[NormPart]] = []
    for p in parts:
        if all(_is_light(g, c) for c in cone(p.needs(), operands) - before):
            groups.setdefault(p.spec.of_x, []).append(p)
        else:
            late.append([p])
    cuts = range(0, len(parts), MOST_PARTS)
    return [c for ps in groups.values() for k in cuts if (c := ps[k : k + MOST_PARTS])] + late


def _is_light(g: EGraph, cls: int) -> bool:
    """Return True if a class only rearranges or maps its operands' elements."""
    node = node_of(g, cls)
    return node.op in LIGHT and not node.bound


class _NormBuilder:
    """Builder of the spec of one result."""

    def __init__(
        self, t: TermGraph, members: list[Normed], end: NormEpilogue, known: frozenset[int]
    ) -> None:
        self.t, self.members, self.epilogue = t, members, end
        m = self.first = members[0]
        read = [*m.columns, *(w.weight.cls for w in members)]
        self.folded = known.issuperset(read) and m.dtype != "float16"  # γ·W may overflow
        sizes = t.graph.classes[m.x.cls].sizes
        slots = tuple(m.x.axes.index(i) for i in m.contracted)
        self.sizes = [t.jax_size(s) for s in sizes]
        self.count = math.prod(t.number(sizes[s]) for s in slots)
        self.slots = slots
        centred = any(map(m.moves_value, m.shifts))
        x = Ref(m.x.cls, tuple(range(len(m.x.axes))))
        self.program = ProgramBuilder(t.graph, x, slots, self.count, centred)
        self.columns: list[tuple[Column, ...]] = []
        self.sums: list[int | None] = []
        self.given: list[tuple[tuple[Column, ...] | None, int]] = []

    def column(self, terms: tuple[Column, ...]) -> int:
        return place_in(self.columns, terms)

    def column_sum(self, terms: tuple[Column, ...] | None, k: int) -> int:
        """Return the step of `Σ_k terms·W_k` (None: γ·W_k).

        The sum is computed before the kernel where the weights are known, else inside it.
        """
        if self.folded:
            return self.program.add("given", place_in(self.given, (terms, k)))
        number = None if terms is None else self.column(terms)
        return self.program.add("column", (place_in(self.sums, number), k))

    def part(self) -> NormPart | str:
        m, b = self.first, self.program
        classes = self.t.graph.classes
        ends = [classes[w.cls].sizes[i] for w in self.members for i in w.ends]
        if 0 in self.sizes or 0 in ends:
            return "an axis is empty"
        if not all(isinstance(n, int) for n in (*ends, *(self.sizes[s] for s in self.slots))):
            return "the number of features is a name"
        if b.centred and not b.is_of_mean(self.moved()):
            return "the value subtracted is not the mean: digits would be lost after the product"
        trivial = m.gain == ((1.0, ()),)
        gain = None if trivial or self.folded else self.column(m.gain)
        made = {w.cls: self.product(k) for k, w in enumerate(self.members)}
        root = self.epilogue.build(b, made)
        steps, (root,) = pruned(b.steps, (root,))
        used = {step.data for step in steps if step.kind == "sides"}
        sides = tuple(s for s in (SUM, SQUARES) if s in used)
        return self._finished(steps, root, sides, gain)

    def moved(self) -> int:
        """Return the step of the shift added to x besides its mean."""
        m, b = self.first, self.program
        offset = [(1.0, b.add(CENTRE, None))] if b.centred else []
        for s in m.shifts:
            if (rest := m.added_rows(s)) is not None:
                ratio = s.coefficient / m.gain[0].coefficient
                offset.append((ratio, b.times(*(b.row(r) for r in rest))))
        return b.plus(*offset)

    def product(self, k: int) -> int:
        """Return the step of one contraction's value, in its dtype."""
        m, b = self.first, self.program
        scale = b.times(*(b.row(r) for r in m.scale))
        inner = [(1.0, b.add("product", k))]
        outer: list[tuple[float, int]] = []
        for s in m.shifts:
            if m.added_rows(s) is None:
                rows = b.times(*(b.row(r) for r in s.rows))
                total = self.column_sum((Column(s.coefficient, s.columns),), k)
                outer.append((1.0, b.times(rows, total)))
        moved = self.moved()
        if not b.equals(moved, 0.0):
            inner.append((1.0, b.times(moved, self.column_sum(None, k))))
        value = b.plus((1.0, b.times(scale, b.plus(*inner))), *outer)
        return b.add("cast", None, (value,), self.t.graph.classes[m.cls].dtype)

    def _finished(
        self, steps: tuple[Step, ...], root: int, sides: tuple, gain: int | None
    ) -> NormPart:
        g, m, operands = self.t.graph, self.first, self.program.operands
        centred, given = self.program.centred, len(self.given)
        place = {"given": 0, "ends": given}
        steps = tuple(
            s._replace(kind="ends", data=s.data + place[s.kind]) if s.kind in place else s
            for s in steps
        )

        def dtypes(refs: Iterable[Ref]) -> tuple[str, ...]:
            return tuple(g.classes[r.cls].dtype for r in refs)

        (pair,) = dtypes([m.x])
        accumulator = "float64" if "float64" in (pair, m.dtype) else "float32"
        across, down = axes_of(m)
        spec = NormSpec(
            math.prod(n for s, n in enumerate(self.sizes) if s not in self.slots),
            self.count,
            math.prod(self.t.number(g.classes[m.cls].sizes[i]) for i in m.ends),
            pairs=(pair,),
            weights=(m.dtype,) * len(self.members),
            columns=tuple(self._column_dtype(c) for c in self.columns),
            row_vectors=dtypes(operands["rows"]),
            ends=(accumulator,) * given + dtypes(operands["ends"]),
            fulls=dtypes(operands["fulls"]),
            left=RowProgram(_left(sides, centred), ("left", sides, centred)),
            finish=RowProgram(
                program(steps, root, self.t.primitives, sides), (key_of(steps), root, sides)
            ),
            dtype=g.classes[self.epilogue.cls].dtype,
            centred=centred,
            gain=gain,
            column_sums=tuple(self.sums),
            precision=precision_name(node_of(g, m.cls).attr),
            pairs_swapped=bool(down) and (*across, *down) == tuple(range(len(m.x.axes))),
            weights_swapped=all(w.weight.axes == (*w.ends, *w.contracted) for w in self.members),
        )
        parts = (self.members, self.epilogue, self.columns, self.folded, self.given, operands)
        return NormPart(spec, *parts)

    def _column_dtype(self, terms: tuple[Column, ...]) -> str:
        classes = self.t.graph.classes
        dtypes = [classes[f.cls].dtype for c in terms for f in c.columns]
        if len(terms) == 1 and terms[0].coefficient == 1 and len(dtypes) == 1:
            return dtypes[0]
        return str(jax_internals.joint_dtype(jnp.float32, *dtypes))


def _left(sides: tuple[str, ...], centred: bool) -> Any:
    """Return a function that computes the left operand and the summands from x."""

    def left(pairs: tuple, columns: tuple, centre: Any) -> tuple[Any, tuple[Any, ...]]:
        del columns
        x = pairs[0] - centre if centred else pairs[0]
        return x, tuple(x * x if s == SQUARES else x for s in sides)

    return left
