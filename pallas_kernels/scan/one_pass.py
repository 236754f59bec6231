"""Scans as one kernel by jax-triton, with `tl.associative_scan` along time.

A program has a block of lanes and visits time in blocks. A block is a tile [states, steps, chunks,
lanes] in registers: time is cut into chunks of consecutive steps. The maps of the steps are
composed along each chunk, the maps of the chunks along the block (Blelloch 1990), and then each
chunk runs from its first state. The coefficients are computed once, and operands are read once.

A kernel is source text, written from the programs of the spec. jax-triton is imported where a
kernel is lowered. May import block.py and triton_source.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import metadata
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from packaging.requirements import Requirement

from symjax_rewrite.pallas_kernels.backend import (
    Reason,
    Support,
    first_reason,
    gpu_at_hand,
    power_of_two,
)
from symjax_rewrite.pallas_kernels.fold.tile import accumulator
from symjax_rewrite.pallas_kernels.named_axes import Operand
from symjax_rewrite.pallas_kernels.scan.block import carried, within_limits, without_ones
from symjax_rewrite.pallas_kernels.scan.spec import (
    KINDS,
    ScanProgram,
    ScanSpec,
    readout_axes,
    result_axes,
    result_shapes,
    roles,
)
from symjax_rewrite.pallas_kernels.scan.xla import scan_xla
from symjax_rewrite.pallas_kernels.triton_programs import keeping_nan
from symjax_rewrite.pallas_kernels.triton_source import (
    DTYPES,
    TYPES,
    Expression,
    TritonSource,
    compiled,
    literal,
)

Array = Any
Told = TypeVar("Told")
MOST_STATES = 64  # the most elements along a state's summed axis
MOST_LANES, MOST_WARPS = 8, 4
RESIDENT = 4  # programs of a multiprocessor that share its memory for prefetched operands
TILE = range(4)  # the places of a tile: states, steps, chunks, lanes
# A function that returns, at each place of the second axis, the element before; the first stays.
SHIFTED = """@triton.jit
def shifted(x):
    place = tl.arange(0, x.shape[1]).reshape([1, x.shape[1]] + [1] * (len(x.shape) - 2))
    return tl.gather(x, tl.broadcast_to(tl.maximum(place - 1, 0), x.shape), 1)
"""
# The PTX of 0.4, by Triton 3.9, is newer than CUDA 12 assembles.
LIBRARY = "jax-triton>=0.3.1,<0.4"
ABSENT = "jax-triton is not installed (the extras cuda12 and cuda13 have it)"


@dataclass(frozen=True, slots=True)
class ScanBlock:
    """The tile of a program, every size a power of two, and the warps that hold it.

    states: elements of the summed axis at a time; the others follow, on the same block of time.
    steps: consecutive steps of a chunk.
    chunks: chunks of a block of time.
    lanes: elements of the lane axis.
    """

    states: int
    steps: int
    chunks: int
    lanes: int
    warps: int

    @property
    def length(self) -> int:
        """Return the steps of a block of time."""
        return self.steps * self.chunks


def supports(spec: ScanSpec) -> Support:
    """Return `YES` if jax-triton is installed with its Triton and this backend runs the scan."""
    if importlib.util.find_spec("jax_triton") is None:
        return Reason(ABSENT)
    return first_reason((bool(unmet()), unmet())) and expressible(spec)


@cache
def unmet() -> str:
    """Return what this backend or jax-triton requires and the environment lacks; empty: nothing.

    With an older Triton than it asks for, jax-triton can be imported, and fails where a kernel is
    lowered.
    """
    for wanted in map(Requirement, (LIBRARY, *(_told(metadata.requires, "jax-triton") or ()))):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _told(metadata.version, wanted.name) or "none"
        if found == "none" or not wanted.specifier.contains(found, prereleases=True):
            return f"{wanted.name}{wanted.specifier} is needed; {found} is installed"
    return ""


def _told(read: Callable[[str], Told], name: str) -> Told | None:
    """Return what a package's metadata tell; None where it has none."""
    try:
        return read(name)
    except metadata.PackageNotFoundError:
        return None


def expressible(spec: ScanSpec) -> Support:
    """Return `YES` if a scan can be written as a kernel, installed or not."""
    refusal = within_limits(spec, DTYPES)
    if not refusal:
        return refusal
    spec, _ = without_ones(spec)
    summed = {a for r in spec.readouts for a in r.over}
    refusal = first_reason(
        (len(summed) > 1, "readouts sum over more than one axis"),
        (any(r.total for r in spec.readouts), "a readout sums over the steps"),
        (any(spec.size[a] > MOST_STATES for a in summed), f"a sum over more than {MOST_STATES}"),
    )
    if not refusal:
        return refusal
    foreign = unlowered(spec)
    return first_reason((bool(foreign), f"Triton cannot lower {', '.join(foreign)}"))


@lru_cache(maxsize=256)
def unlowered(spec: ScanSpec) -> tuple[str, ...]:
    """Return the operations of a scan's programs that have no form in a kernel."""
    return tuple(sorted(OnePassKernel(spec, block_of(spec)).write().unlowered))


def block_of(spec: ScanSpec) -> ScanBlock:
    """Return the tile of a scan, with more warps along time where lanes are few.

    A thread has one element of each (state, step). Registers bound these, the carries of all
    groups among them.
    """
    outer, lane, summed = roles(spec)
    width = power_of_two(spec.size[summed]) if summed else 1
    lanes = min(MOST_LANES, power_of_two(spec.size[lane])) if lane else 1
    blocks = -(-spec.size[lane] // lanes) if lane else 1
    programs = math.prod(spec.size[a] for a in outer) * blocks
    warps = min(power_of_two(-(-4 * gpu_at_hand().multiprocessors // programs)), MOST_WARPS)
    steps = 8 if width <= 16 else 4
    return ScanBlock(min(width, 4), steps, 32 * warps // lanes, lanes, warps)


def programs_of(spec: ScanSpec) -> int:
    """Return the programs of a scan's kernel."""
    spec, _ = without_ones(spec)
    return OnePassKernel(spec, block_of(spec)).programs


def scan_one_pass(
    spec: ScanSpec, *operands: Any, block: ScanBlock | None = None
) -> tuple[Any, ...]:
    """Run a scan that `supports` accepts as one kernel.

    block: the tile; chosen from the sizes if left out.
    """

    @jax.custom_batching.custom_vmap
    def run(*operands: Any) -> tuple[Any, ...]:
        return _call(spec, operands, block)

    @run.def_vmap
    def run_batch(size: int, is_batched: Sequence[bool], *operands: Any) -> Any:
        """Run all elements as one scan, whose states have one more axis."""
        wider = with_batch(spec, size, is_batched)
        batched = scan_one_pass if expressible(wider) else scan_xla
        return batched(wider, *operands), (True,) * len(result_axes(spec))

    return run(*operands)


def with_batch(spec: ScanSpec, size: int, is_batched: Sequence[bool]) -> ScanSpec:
    """Return a scan of `size` scans: a leading axis of the states, results and some operands."""
    axis = f"batch of {spec.sizes}"  # no axis of the scan has this name

    def more(axes: tuple[str, ...]) -> tuple[str, ...]:
        return (axis, *axes)

    return replace(
        spec,
        sizes=((axis, size), *spec.sizes),
        state=more(spec.state),
        operands=tuple(
            Operand(more(o.axes) if b else o.axes, o.dtype)
            for o, b in zip(spec.operands, is_batched, strict=True)
        ),
        readouts=tuple(replace(r, axes=more(readout_axes(spec, r))) for r in spec.readouts),
    )


def _call(spec: ScanSpec, operands: Sequence[Array], block: ScanBlock | None) -> tuple[Any, ...]:
    """Bind the kernel of a scan."""
    shapes = result_shapes(spec)
    spec, operands = without_ones(spec, operands)
    block = block or block_of(spec)
    results = importlib.import_module("jax_triton").triton_call(
        *operands,
        kernel=kernel_of(spec, block),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in result_shapes(spec)],
        grid=(OnePassKernel(spec, block).programs,),
        name="scan_one_pass",
        num_warps=block.warps,
        num_stages=1,
        compute_capability=round(10 * gpu_at_hand().capability),
    )
    return tuple(x.reshape(shape) for x, (shape, _) in zip(results, shapes, strict=True))


@lru_cache(maxsize=256)
def kernel_of(spec: ScanSpec, block: ScanBlock) -> Any:
    """Return the kernel of a scan without axes of size 1, as a function of Triton."""
    paths = ("triton", "triton.language", "triton.language.extra.libdevice")
    names = ("triton", "tl", "libdevice")
    modules: dict[str, Any] = dict(zip(names, map(importlib.import_module, paths), strict=True))
    return compiled(OnePassKernel(spec, block).text(), modules, "scan")


@dataclass(frozen=True, slots=True)
class OnePassKernel:
    """The kernel of a scan, written as text once. `spec` has no axes of size 1.

    The summed axis is cut into groups of `block.states` elements. The programs of the spec are
    evaluated on tiles [states, steps, chunks, lanes], with size 1 for axes that a value lacks.
    """

    spec: ScanSpec
    block: ScanBlock
    source: TritonSource = field(default_factory=TritonSource)
    loaded: dict[tuple[int, str], Expression] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """Return the programs along each axis, the axis that varies fastest last."""
        outer, lane, _ = roles(self.spec)
        counts = {a: self.spec.size[a] for a in outer}
        return counts | ({lane: -(-self.spec.size[lane] // self.block.lanes)} if lane else {})

    @property
    def programs(self) -> int:
        return math.prod(self.counts.values())

    def text(self) -> str:
        """Return the source of the kernel and of the functions that it calls."""
        source = self.write()
        names = [f"p{k}" for k in range(len(self.spec.operands))]
        names += [f"r{k}" for k in range(len(result_axes(self.spec)))]
        span = f"0, {self.spec.length}, {self.block.length}"
        lines = [
            *self.composition("compose", is_guarded=False),
            *self.composition("join", is_guarded=True),
            SHIFTED,
            "@triton.jit",
            f"def scan({', '.join(names)}):",
            *(f"    {line}" for line in source.before),
            f"    for start in tl.range({span}, num_stages={self.stages}):",
            *(f"        {line}" for line in source.inside),
            *(f"    {line}" for line in source.after),
        ]
        return "\n".join(lines) + "\n"

    def composition(self, name: str, is_guarded: bool) -> list[str]:
        """Return the function that composes two maps: the first map's (a, b), then the second's.

        is_guarded: True where `a` is a product of decays. The product may overflow where the state
        is 0, and 0·inf would be NaN.
        """
        kind, source = KINDS[self.spec.kind], TritonSource()

        def combine(*maps: Array) -> Any:
            a, b = keeping_nan(kind.monoid.combine)(maps[:2], maps[2:])
            is_product = is_guarded and kind.multiplies
            return a, jnp.where(maps[1] == 0, maps[3], b) if is_product else b

        names = ("a0", "b0", "a1", "b1")
        a, b = source.evaluate(combine, *(Expression(n, self.dtype, False) for n in names))
        head = ["@triton.jit", f"def {name}({', '.join(names)}):"]
        body = [*source.before, *source.inside, f"return {a}, {b}"]
        return [*head, *(f"    {line}" for line in body), ""]

    @property
    def groups(self) -> int:
        """Return the parts that the summed axis is cut into."""
        _, _, summed = roles(self.spec)
        return -(-self.spec.size[summed] // self.block.states) if summed else 1

    @property
    def stages(self) -> int:
        """Return 2 if operands of the next block are prefetched into shared memory, else 1."""
        _, _, summed = roles(self.spec)
        size = 0
        for operand in (o for o in self.spec.operands if self.spec.time in o.axes):
            count = self.groups if summed in operand.axes else 1
            elements = math.prod(self.tile[k] for k in self.places(operand.axes))
            size += count * elements * jnp.dtype(operand.dtype).itemsize
        return 2 if RESIDENT * size <= gpu_at_hand().shared_bytes else 1

    @property
    def tile(self) -> list[int]:
        """Return the shape of a tile."""
        return [self.block.states, self.block.steps, self.block.chunks, self.block.lanes]

    @property
    def dtype(self) -> str:
        """Return the dtype of carried states."""
        return str(carried(self.spec))

    def write(self) -> TritonSource:
        """Write the statements of the kernel."""
        spec, block, source = self.spec, self.block, self.source
        _, lane, summed = roles(spec)
        source.before.append("program = tl.program_id(0)")
        for axis, count in reversed(self.counts.items()):
            source.before += [
                f"{self.index(axis)} = program % {count}",
                f"program = program // {count}",
            ]
        if lane:
            at = self.index(lane)
            source.before.append(f"{at} = {at} * {block.lanes} + tl.arange(0, {block.lanes})")
        source.before += [
            f"near = tl.arange(0, {block.steps})[None, :, None, None]",
            f"far = tl.arange(0, {block.chunks})[None, None, :, None]",
            f"steps = tl.arange(0, {block.chunks})[None, :] * {block.steps}",
            f"steps = steps + tl.arange(0, {block.steps})[:, None]",
        ]
        source.inside += [
            f"time = {f'{spec.length - 1} - start - steps' if spec.reverse else 'start + steps'}",
            f"t = time[{spread({1, 2}, TILE)}]",
        ]
        sums: dict[int, Expression] = {}
        for group in range(self.groups):
            if summed:
                n = self.index(summed, group)
                source.before.append(f"{n} = {group * block.states} + tl.arange(0, {block.states})")
            before, after = self.advance(group)
            self.read_out(group, before, after, sums)
            if spec.last:
                self.store(len(spec.readouts), group, Expression(f"h{group}", self.dtype, False))
        for number, total in sums.items():
            self.finish(number, 0, total)
        return source

    def index(self, axis: str, group: int = 0) -> str:
        """Return the name of the index along an axis."""
        outer, lane, summed = roles(self.spec)
        names = {axis: f"i{k}" for k, axis in enumerate(outer)}
        names |= {lane: "lane", summed: f"n{group}", self.spec.time: "time"}
        return names[axis]

    def places(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the places of an array's axes in a tile; time has two, and outer axes none."""
        _, lane, summed = roles(self.spec)
        found = {summed: (0,), self.spec.time: (1, 2), lane: (3,)}
        return tuple(sorted(k for a in axes for k in found.get(a, ())))

    def address(self, axes: Sequence[str], group: int) -> tuple[str, str]:
        """Return the offsets of a tile in an array, over its own places, and their mask or ""."""
        spec, block, (_, lane, summed) = self.spec, self.block, roles(self.spec)
        stride, terms, masks, places = 1, [], [], self.places(axes)
        whole = {lane: block.lanes, summed: block.states, spec.time: block.length}
        for axis in reversed(axes):
            at, size = self.index(axis, group), spec.size[axis]
            if own := self.places([axis]):
                at = f"{at}[{spread(own, places)}]"
                if size % whole[axis]:
                    masks.append(f"({at} < {size})")
                    masks += [f"({at} >= 0)"] if axis == spec.time and spec.reverse else []
            terms.append(f"{at} * {stride}" if stride > 1 else at)
            stride *= size
        return " + ".join(reversed(terms)) or "0", " & ".join(masks)

    def load(self, number: int, group: int) -> Expression:
        """Load an operand's part of a tile, with 0 past the ends of the array."""
        operand = self.spec.operands[number]
        offset, mask = self.address(operand.axes, group)
        if (number, offset) not in self.loaded:
            masked = f", mask={mask}, other=0" if mask else ""
            places = self.places(operand.axes)
            shown = f"[{spread(places, TILE)}]" if places else ""
            is_fixed = self.spec.time not in operand.axes
            text = f"tl.load(p{number} + {offset}{masked}){shown}"
            self.loaded[number, offset] = self.source.let(text, operand.dtype, is_fixed)
        return self.loaded[number, offset]

    def store(self, number: int, group: int, value: Expression) -> None:
        """Store a tile of a result: of a readout, or the last state after the loop."""
        axes, (_, dtype) = result_axes(self.spec)[number], result_shapes(self.spec)[number]
        offset, mask = self.address(axes, group)
        places = self.places(axes)
        shape = [n if k in places else 1 for k, n in enumerate(self.tile)]
        text = f"tl.broadcast_to({value}, {shape}).to(tl.{TYPES[dtype]})"
        for k in sorted({*TILE} - {*places}, reverse=True):  # of size 1
            text = f"tl.sum({text}, {k})"
        line = f"tl.store(r{number} + {offset}, {text}{f', mask={mask}' if mask else ''})"
        (self.source.inside if self.spec.time in axes else self.source.after).append(line)

    def evaluate(self, program: ScanProgram, group: int, *given: Any) -> Any:
        """Write a program of the spec, on the operands of these steps after its other arguments."""
        values = tuple(self.load(k, group) for k in program.reads)
        return self.source.evaluate(program.fun, *given, values, Expression("t", "int32", False))

    def start(self, group: int) -> Expression:
        """Write the state before the first step."""
        spec, block = self.spec, self.block
        given = literal(KINDS[spec.kind].empty, self.dtype)
        if spec.start is not None:
            given = str(self.load(spec.start, group))
        shape = [block.states, 1, 1, block.lanes]
        text = f"tl.broadcast_to({given}, {shape}).to(tl.{TYPES[self.dtype]})"
        return self.source.let(text, self.dtype, True, name=f"h{group}")

    def advance(self, group: int) -> tuple[Expression, Expression]:
        """Write the states before and after each step of a block, and the carry to the next."""
        block, let, dtype = self.block, self.source.let, self.dtype
        h, size = self.start(group), self.spec.length
        one = jax.ShapeDtypeStruct((), dtype)
        with jax.ensure_compile_time_eval():  # numbers, also where a program is traced
            identity = KINDS[self.spec.kind].monoid.identity([one, one])
        maps = self.evaluate(self.spec.coefficients, group)
        for k, (x, empty) in enumerate(zip(maps, identity, strict=True)):
            text = f"tl.broadcast_to({x}, {self.tile}).to(tl.{TYPES[dtype]})"
            if size % block.length:
                text = f"tl.where((t >= 0) & (t < {size}), {text}, {literal(empty, dtype)})"
            let(text, dtype, name="ab"[k])
        is_last, is_end = f"near == {block.steps - 1}", f"far == {block.chunks - 1}"
        lines = (
            ("pa, pb", "tl.associative_scan((a, b), 1, compose)"),
            ("pa", f"tl.sum(tl.where({is_last}, pa, 0), 1, keep_dims=True)"),
            ("pb", f"tl.sum(tl.where({is_last}, pb, 0), 1, keep_dims=True)"),
            ("_, first", f"join(pa, {h}, pa, pb)"),
            ("_, ends", "tl.associative_scan((pa, tl.where(far == 0, first, pb)), 2, join)"),
            ("starts", "shifted(tl.sum(ends, 1))[:, None, :, :]"),
            ("starts", f"tl.where(far == 0, {h}, starts)"),
            ("_, first", "compose(a, starts, a, b)"),
            ("_, after", "tl.associative_scan((a, tl.where(near == 0, first, b)), 1, compose)"),
            ("before", "tl.where(near == 0, starts, shifted(after))"),
            (str(h), f"tl.sum(tl.where({is_end}, ends, 0), 2, keep_dims=True)"),
        )
        for name, text in lines:
            let(text, dtype, name=name)
        return Expression("before", dtype, False), Expression("after", dtype, False)

    def read_out(
        self, group: int, before: Expression, after: Expression, sums: dict[int, Expression]
    ) -> None:
        """Write the readouts of a group; those that are sums are added to `sums`, by number."""
        spec, block, (_, _, summed) = self.spec, self.block, roles(self.spec)
        for number, readout in enumerate(spec.readouts):
            made = after
            if readout.program is not None:
                made = self.evaluate(readout.program, group, (before, after))
            if not readout.over:
                self.finish(number, group, made)
                continue
            dtype = str(accumulator(made.dtype))
            text = f"tl.broadcast_to({made}, {self.tile}).to(tl.{TYPES[dtype]})"
            if summed and spec.size[summed] % block.states:
                n = self.index(summed, group)
                text = f"tl.where({n}[{spread((0,), TILE)}] < {spec.size[summed]}, {text}, 0)"
            text = f"tl.sum({text}, 0, keep_dims=True)"
            earlier = f"{sums[number]} + " if number in sums else ""
            sums[number] = self.source.let(earlier + text, dtype)

    def finish(self, number: int, group: int, made: Expression) -> None:
        """Write the end of a readout, and store it."""
        finish = self.spec.readouts[number].finish
        if finish is not None:
            made = self.evaluate(finish, group, made)
        self.store(number, group, made)


def spread(places: Collection[int], among: Collection[int]) -> str:
    """Return the index that gives an array of some places of a tile size 1 at the others.

    Example:
        >>> spread((1, 2), (0, 1, 2))
        'None, :, :'
    """
    return ", ".join(":" if k in places else "None" for k in among)
