"""The cost of a choice of nodes: a roofline per kernel, over a DAG.

`seconds = Σ kernels max(flops/peak + packing, bytes/bandwidth) + pages + launches·overhead`.
Elementwise terms and reductions are fused into their consumer as XLA does; a value used twice is
computed once. FLOPs are 2mnk for contractions, the usual convention; elementwise operations are
counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import cache
from typing import Any, NamedTuple

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.library_calls import is_known
from symjax_rewrite.data_classes import dataclass
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import postorder
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.sizes import Dim, product
from symjax_rewrite.ir.term import Node, Ref

FREE = frozenset({op.LEAF, op.CONST, op.NATIVE})
LIBRARY = frozenset({op.INVERSE, op.SOLVE, op.CONV})
CALLED = frozenset({op.CONTRACT, op.REDUCE})
HALF = ("bfloat16", "float16")  # a step of float32 is several of their steps


@cache
def itemsize(dtype: str) -> int:
    """Return the bytes of one element."""
    if dtype == "bool":
        return 1
    digits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return max(1, int(digits or 32) // 8)


@dataclass(frozen=True, slots=True)
class Cost:
    """Resources of a program; flops, elementwise and bytes may be symbolic (`Dim`).

    flops: of contractions, 2mnk. elementwise: operations of everything else.
    bytes: read and written by all kernels. launches: kernels. seconds: by the device model.
    largest: bytes of the largest value in memory, inputs included.
    """

    flops: Any = 0
    elementwise: Any = 0
    bytes: Any = 0
    launches: int = 0
    seconds: float = 0.0
    largest: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """Return the resources of both programs, one after the other."""
        *both, largest = zip(astuple(self), astuple(other), strict=True)
        return Cost(*(b + a for a, b in both), largest=max(largest))


def is_dot(node: Node) -> bool:
    """Return True if a node runs as a matrix product rather than as a fused loop.

    A product needs an index of its own on some side; `Σ_k a_ik·b_ik` is a multiplication fused into
    a reduction.
    """
    if node.op != op.CONTRACT or len(node.args) != 2 or not node.bound:
        return False
    a, b = node.args
    return any(i < node.out for i in set(a.axes) ^ set(b.axes))


def is_thin(node: Node) -> bool:
    """Return True if a product is a batch of matrix-vector products, as slow as a fused loop.

    One side has no index of its own, and both sides share one index of the result: `Σ_k
    a_bk·b_bkn`.
    """
    if not is_dot(node):
        return False
    a, b = (set(x.axes) for x in node.args)
    return (a < b or b < a) and any(i < node.out for i in a & b)


class Facts(NamedTuple):
    """The cost of one node by itself: operand classes, bytes written, elementwise work, FLOPs.

    is_kernel: True if it is a kernel of its own, not fused into its consumer. peak: FLOP/s.
    packing: seconds beside the arithmetic of a product. pages: seconds beside both arithmetic and
    traffic, for fresh memory, if its value is written. is_called: True for a reduction that a call
    of the library computes. function: name of its function, or "".
    """

    node: Node
    args: tuple[int, ...]
    is_kernel: bool
    is_free: bool
    bytes: float
    work: float
    flops: float | None  # None for a fused loop
    peak: float
    packing: float
    pages: float
    is_called: bool
    function: str


class CostModel:
    """The prices of nodes of one e-graph on one device at one sample of the named sizes.

    computed: leaves that the rest of a program computes. inlined: those of them that one term
    reads, and that XLA computes in the kernel of that term unless it is a product.
    """

    def __init__(
        self,
        device: Device,
        at: Callable[[Dim], int],
        computed: frozenset[int] = frozenset(),
        inlined: frozenset[int] = frozenset(),
    ) -> None:
        self.device, self.at, self.computed, self.inlined = device, at, computed, inlined
        self.fused: set[int] = set()  # roots that one elementwise term elsewhere reads
        self.has_calls = device.fusions is not None
        self._bytes: dict[tuple[tuple[Dim, ...], str], float] = {}
        self._facts: dict[int, Facts] = {}  # by the id of a node, which stays alive

    def join_seconds(
        self, flops: float, read_bytes: float, made_bytes: float, dtype: str, rows: float
    ) -> float:
        """Return the seconds of one matrix product.

        rows: the length of its longest axis, times its batch; 0 beside a vector.
        """
        d = self.device
        busy = flops / d.peak(dtype) + (d.packing_seconds(read_bytes, rows) if rows else 0.0)
        return max(busy, (read_bytes + made_bytes) / d.bytes_per_s) + d.launch_s

    def node_seconds(self, g: EGraph, cls: int, node: Node) -> float:
        """Return the seconds of a node with every operand in memory: the greedy estimate."""
        f, d = self.facts_of(g, cls, node), self.device
        if f.is_free:
            return 0.0
        if f.flops is None:
            return f.work / d.elementwise_per_s + f.bytes / d.bytes_per_s
        moved = 3 * f.bytes
        if is_dot(node):
            moved = f.bytes + sum(self.class_bytes(g, a.cls) for a in node.args)
        return max(f.flops / f.peak + f.packing, moved / d.bytes_per_s) + d.launch_s

    def product_seconds(self, g: EGraph, cls: int, node: Node) -> float:
        """Return the seconds of a node that is a matrix product; 0 for any other node."""
        return self.node_seconds(g, cls, node) if is_dot(node) else 0.0

    def _peak(self, g: EGraph, node: Node) -> float:
        """Return the FLOP/s of a product at the widest dtype of its operands."""
        d = self.device
        dtype = max((g.classes[a.cls].dtype for a in node.args), key=itemsize)
        peak = d.peak(dtype, node.attr if node.op == op.CONTRACT else None)
        return min(peak, d.elementwise_per_s) if is_thin(node) else peak

    def _packing(self, g: EGraph, sizes: tuple[Dim, ...], node: Node) -> float:
        """Return the seconds in which a product copies its operands.

        Beside a vector it copies none, and takes some time for each row that it sums down.
        """
        a, b = node.args
        free = []
        for x, y in ((a, b), (b, a)):
            mine = {i for i in x.axes if i < node.out}.difference(y.axes)
            free.append(self._count(tuple([sizes[i] for i in mine])))
        if not all(free):
            return 0.0
        batch = self._count(sizes) / math.prod(free)
        if min(free) <= 1:
            matrix = a if free[0] > free[1] else b
            if batch > 1 or max(free) <= 1 or self._is_along_rows(g, node, matrix):
                return 0.0
            return self.device.packing_seconds(0.0, self._count(node.bound))
        rows = batch * max(*free, self._count(node.bound))
        read = self.class_bytes(g, a.cls) + self.class_bytes(g, b.cls)
        return self.device.packing_seconds(read, rows)

    def _is_along_rows(self, g: EGraph, node: Node, matrix: Ref) -> bool:
        """Return True if a product sums along the rows of an input; others may lie in any order."""
        is_input = matrix.cls not in self.computed and any(g.nodes(matrix.cls, op.LEAF))
        return is_input and matrix.axes[-1] >= node.out

    def _library_flops(self, g: EGraph, cls: int, node: Node) -> float:
        """Return FLOPs of a solve (factorise, two triangular solves a column) or convolution."""
        sizes = g.classes[cls].sizes
        if node.op == op.CONV:
            features = self._count(tuple(sizes[i] for i in node.attr[2] if i < node.out))
            return 2 * self._count(sizes) * self._count(node.attr[4]) / max(features, 1)
        matrix = self._count(g.classes[node.args[0].cls].sizes)
        return 2 / 3 * matrix**1.5 + 2 * self._count((*sizes, *node.bound))

    def _count(self, sizes: tuple[Dim, ...]) -> float:
        out = 1.0
        for s in sizes:
            out *= s if isinstance(s, int) else max(self.at(s), 0)  # `n - 3` where n is a sample
        return out

    def class_bytes(self, g: EGraph, cls: int) -> float:
        """Return the bytes of a class's value."""
        c = g.classes[cls]
        key = (c.sizes, c.dtype)
        if key not in self._bytes:
            self._bytes[key] = self._count(c.sizes) * itemsize(c.dtype)
        return self._bytes[key]

    def evaluate(
        self,
        g: EGraph,
        choice: Mapping[int, Node],
        roots: tuple[int, ...],
        free: Callable[[int], bool] | None = None,
    ) -> Cost:
        """Return the cost of computing the roots once, with sharing and fusion, in numbers."""
        order = reachable(choice, roots, free)
        facts = {cls: self.facts_of(g, cls, choice[cls]) for cls in order}
        given = set() if free is None else set(filter(free, order))
        written = self.written(facts, roots, given)
        flops = elementwise = moved = seconds = largest = 0.0
        launches = 0
        for cls, f in facts.items():
            if not f.is_free and cls not in written:
                continue
            largest = max(largest, f.bytes)
            if f.is_free or cls in given:
                continue
            kernel_bytes, work, fresh_s = self._kernel(facts, cls, written, given)
            if f.flops is None:
                elementwise += work
            else:
                flops += f.flops
            launches += not self._is_fused(cls, f)
            moved += kernel_bytes
            seconds += self._seconds(cls, f, kernel_bytes, work, fresh_s)
        return Cost(flops, elementwise, moved, launches, seconds, largest)

    def kernel_seconds(
        self, facts: dict[int, Facts], root: int, written: set[int], given: set[int]
    ) -> float:
        """Return the seconds of the kernel that writes a class.

        facts: of every class. written: the classes written to memory. given: those known before.
        """
        return self._seconds(root, facts[root], *self._kernel(facts, root, written, given))

    def kernel_limits(
        self, facts: dict[int, Facts], root: int, written: set[int], given: set[int]
    ) -> tuple[float, float, float, float]:
        """Return the seconds of a kernel's arithmetic, traffic, fresh memory and launch.

        The arguments are those of `kernel_seconds`.
        """
        return self._limits(root, facts[root], *self._kernel(facts, root, written, given))

    def _limits(
        self, cls: int, f: Facts, kernel_bytes: float, work: float, fresh_s: float
    ) -> tuple[float, float, float, float]:
        d = self.device
        moved = kernel_bytes / d.bytes_per_s
        if self._is_fused(cls, f):
            return work / d.folds.fused_steps_per_s, moved, 0.0, 0.0
        least = work / d.elementwise_per_s if f.flops is None else f.flops / f.peak + f.packing
        return least, moved, fresh_s, d.launch_s

    def _is_fused(self, cls: int, f: Facts) -> bool:
        """Return True if an elementwise value is computed in the kernel of its reader."""
        return cls in self.fused and not f.is_kernel

    def _seconds(
        self, cls: int, f: Facts, kernel_bytes: float, work: float, fresh_s: float
    ) -> float:
        """Return the seconds of a kernel by the facts of the class that it writes."""
        arithmetic, memory, fresh, launch = self._limits(cls, f, kernel_bytes, work, fresh_s)
        return max(arithmetic, memory) + fresh + launch

    def facts_of(self, g: EGraph, cls: int, node: Node) -> Facts:
        """Return the cost of a node by itself, whatever its neighbours are; cached in the model."""
        found = self._facts.get(id(node))
        if found is not None:
            return found
        c, kind = g.classes[cls], node.op
        count = self._count(c.sizes)
        written = count * itemsize(c.dtype)
        work = count * self._count(node.bound) if node.bound and kind != op.TAKE else count
        work *= steps_of(node, self.device)
        if c.dtype in HALF:
            work *= self.device.half_steps
        flops, peak, packing = None, 1.0, 0.0
        if is_dot(node):
            flops = 2 * count * self._count(node.bound)
            packing = self._packing(g, c.sizes, node)
        elif kind in LIBRARY:
            flops = self._library_flops(g, cls, node)
        if flops is not None:
            peak = self._peak(g, node)
        args = tuple([a.cls for a in node.args])
        args = args if len(args) < 2 else tuple(dict.fromkeys(args))
        is_kernel = flops is not None or kind == op.CUMSUM
        pages = self.device.page_seconds(written)
        is_called = self.has_calls and bool(node.bound) and kind in CALLED and not is_kernel
        is_called = is_called and c.dtype == "float32"
        function = node.attr[0] if kind == op.MAP else ""
        found = Facts(
            node, args, is_kernel, kind in FREE, written, work, flops, peak, packing, pages,
            is_called, function,
        )  # fmt: skip
        self._facts[id(node)] = found
        return found

    @staticmethod
    def written(facts: dict[int, Facts], roots: tuple[int, ...], given: set[int]) -> set[int]:
        """Return the classes whose values are written to memory."""
        seen: set[int] = set()
        written = set(roots)
        for cls, f in facts.items():
            if cls in given:
                continue
            if f.is_kernel:
                written.add(cls)
                written.update(f.args)
            for arg in f.args:
                (written if arg in seen else seen).add(arg)
        return written

    def _kernel(
        self, facts: dict[int, Facts], root: int, written: set[int], given: set[int]
    ) -> tuple[float, float, float]:
        """Return the bytes moved and the elementwise work of the kernel that writes `root`.

        The third is the seconds of fresh memory. An elementwise kernel needs none where XLA writes
        its result over an operand: an array of its size that the program has computed. A product
        needs more where it reads a value that would else be inlined, and so does a reduction by the
        library of what it cannot compute.
        """
        read: dict[tuple[int, bool], float] = {}
        called: dict[int, int] = {}  # what calls compute, with what is stored where they cannot
        stored: set[int] = set()
        work = fresh_s = 0.0
        stack = [root]  # an unwritten class has one reader, so this is a tree
        for cls in stack:
            f = facts[cls]
            work += f.work
            if cls in called and f.function:
                inner = [facts[a].function for a in f.args]
                stored.update(() if is_known(f.function, inner) else (called[cls],))
            for arg in f.args:
                below = facts[arg]
                if below.node.op == op.CONST:
                    continue
                if arg in written or below.is_free or arg in given:
                    is_part = f.node.op in (op.SLICE, op.TAKE)
                    size = min(below.bytes, f.bytes) if is_part else below.bytes
                    if arg in self.inlined:
                        if not f.is_kernel:
                            continue
                        fresh_s += below.pages
                        size += below.bytes  # written too
                    read[arg, f.node.op == op.SLICE] = size
                else:
                    stack.append(arg)
                    if f.is_called or cls in called:
                        whole = called.get(cls, arg)
                        is_part = f.is_called or below.bytes < facts[whole].bytes
                        called[arg] = arg if is_part else whole
        made, flops = facts[root].bytes, facts[root].flops
        if self._is_fused(root, facts[root]):  # its reader would read it, and reads that instead
            return max(sum(read.values()) - made, 0.0), work, 0.0
        apart = (c for c, _ in read if c not in given)
        computed = (c for c in apart if c in self.computed or not facts[c].is_free)
        in_place = flops is None and any(facts[c].bytes == made for c in computed)
        fresh_s += 0.0 if in_place else facts[root].pages
        fresh_s += sum([facts[c].pages for c in stored])
        moved = sum(read.values()) + sum([2 * facts[c].bytes for c in stored])
        return made + moved, work, fresh_s

    def symbolic(self, g: EGraph, choice: Mapping[int, Node], roots: tuple[int, ...]) -> Cost:
        """Return the same totals with symbolic sizes, as polynomials."""
        order = reachable(choice, roots)
        facts = {cls: self.facts_of(g, cls, choice[cls]) for cls in order}
        written = self.written(facts, roots, set())
        flops: Dim = 0
        elementwise: Dim = 0
        moved: Dim = 0
        launches = 0
        for cls in order:
            node, c = choice[cls], g.classes[cls]
            if node.op in FREE:
                continue
            space = product((*c.sizes, *node.bound))
            if is_dot(node):
                flops = 2 * space + flops
            else:
                elementwise = int(weight(node) or 1) * space + elementwise
            if cls in written:
                launches += 1
                moved = itemsize(c.dtype) * product(c.sizes) + moved
                for arg in {a.cls for a in node.args}:
                    a = g.classes[arg]
                    moved = itemsize(a.dtype) * product(a.sizes) + moved
        return Cost(flops, elementwise, moved, launches)


def weight(node: Node) -> float:
    """Return the operations per element of an elementwise node; a function is one operation."""
    if node.op == op.MAP:
        return 1.0
    if node.op in (op.ADD, op.CONTRACT):
        scales = sum(c not in (1, -1) for c in node.attr) if node.op == op.ADD else 0
        return max(len(node.args) - 1, 0) + scales + (1 if node.bound else 0)
    return 1.0 if node.op == op.REDUCE else 0.5


def steps_of(node: Node, device: Device) -> float:
    """Return the elementwise steps per element of a node, by the rate `elementwise_per_s`."""
    rate = device.elementwise_per_s / device.folds.fused_steps_per_s
    return weight(node) + functions_of(node, device) * rate


def functions_of(node: Node, device: Device) -> float:
    """Return the steps of a node's function beside its arithmetic, by `folds.fused_steps_per_s`."""
    if node.op != op.MAP:
        return 0.0
    if node.attr[0] != "integer_pow":
        return device.functions.of(node.attr[0])
    division = device.functions.of("div") if is_inverse_power(node) else 0.0
    return (_multiplications(node) - 1.0) * device.folds.chained + division


def _multiplications(node: Node) -> int:
    """Return the multiplications of an integer power, by squaring; at least one."""
    power = abs(dict(node.attr[1])["y"])
    return max(power.bit_length() + power.bit_count() - 2, 1)


def is_inverse_power(node: Node) -> bool:
    """Return True for an integer power that divides."""
    return node.op == op.MAP and node.attr[0] == "integer_pow" and dict(node.attr[1])["y"] < 0


def reachable(
    choice: Mapping[int, Node], roots: tuple[int, ...], free: Callable[[int], bool] | None = None
) -> list[int]:
    """Return the classes that the roots need, operands first.

    Raises:
        CycleError: the choice has a cycle.
    """
    stops = free or (lambda c: False)
    return postorder(roots, lambda c: () if stops(c) else [a.cls for a in choice[c].args])
