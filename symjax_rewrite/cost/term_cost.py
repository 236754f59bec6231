"""The cost of a choice of nodes: a roofline per kernel, over a DAG.

`seconds = Σ kernels max(flops/peak + packing, bytes/bandwidth) + pages + launches·overhead`.
Elementwise terms and reductions are fused into their consumer as XLA does; a value used twice is
computed once. FLOPs are 2mnk for contractions, the usual convention; elementwise operations are
counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

from symjax_rewrite.cost.crossings import crossed_steps, is_turned
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.library_calls import LEAST_ELEMENTS, is_followed, is_outside
from symjax_rewrite.cost.node_facts import Facts, work_of
from symjax_rewrite.cost.node_steps import (
    VECTORISED,
    ElementwiseWork,
    diagonals,
    functions_of,
    weight,
)
from symjax_rewrite.cost.row_steps import BY_ORDER, REDUCED, RowSteps, reduces_rows, row_steps
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import makers_of, numbers, postorder
from symjax_rewrite.ir.egraph import EClass, EGraph
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.sizes import Dim, product
from symjax_rewrite.ir.term import Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph

FREE = frozenset({op.LEAF, op.CONST, op.NATIVE})
LIBRARY = frozenset({op.INVERSE, op.SOLVE, op.CONV})
ELEMENTWISE = frozenset({op.MAP, op.ADD, op.CONTRACT})
CALLED = frozenset({op.CONTRACT, op.REDUCE})
CALLED_DTYPES = ("float32", "float64")
PARTS = frozenset({op.SLICE, op.TAKE})


def shape_of(atom: Any) -> tuple[Any, ...]:
    """Return the shape of a variable or literal of a jaxpr."""
    return atom.aval.shape


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


class CostModel:
    """The prices of nodes of one e-graph on one device at one sample of the named sizes.

    computed: leaves that the rest of a program computes. inlined: for those of them that XLA
    computes in the kernel that reads them, unless it is a product or there are several, the
    operations for each element. alone: those of these that one term of the program reads. terms:
    of the program, if they are its equations: by these the order of axes in memory is known.
    is_whole: True if a whole program is priced, so that all readers of a product are known.
    """

    def __init__(
        self,
        device: Device,
        at: Callable[[Dim], int],
        computed: frozenset[int] = frozenset(),
        inlined: Mapping[int, float] = MappingProxyType({}),
        alone: frozenset[int] = frozenset(),
        terms: TermGraph | None = None,
        is_whole: bool = False,
    ) -> None:
        self.device, self.at, self.computed, self.terms = device, at, computed, terms
        self.is_whole = is_whole
        self.inlined, self.alone = inlined, alone
        self.fused: set[int] = set()  # roots that one elementwise term elsewhere reads
        self.has_calls = device.fusions is not None
        self._bytes: dict[tuple[tuple[Dim, ...], str], float] = {}
        self._facts: dict[int, Facts] = {}  # by the id of a node, which stays alive
        self._alike: dict[tuple, tuple] = {}  # the same but operands, by what these follow from

    def joins(self, dtype: str) -> Callable[[float, float, float, float], float]:
        """Return a function of FLOPs, bytes read, bytes made and rows: the seconds of one product.

        Its rows are the length of its longest axis, times its batch; 0 beside a vector.
        """
        d = self.device
        peak, rate, launch_s, packing = d.peak(dtype), d.bytes_per_s, d.launch_s, d.packing_seconds

        def seconds(flops: float, read_bytes: float, made_bytes: float, rows: float) -> float:
            busy = flops / peak + (packing(read_bytes, rows) if rows else 0.0)
            return max(busy, (read_bytes + made_bytes) / rate) + launch_s

        return seconds

    def node_seconds(self, g: EGraph, cls: int, node: Node) -> float:
        """Return the seconds of a node with every operand in memory: the greedy estimate."""
        f, d = self.facts_of(g, cls, node), self.device
        if f.is_free:
            return 0.0
        if f.flops is None:
            return self.step_seconds(f.work) + f.bytes / d.bytes_per_s
        moved = 3 * f.bytes
        if is_dot(node):
            moved = f.bytes + sum(self.class_bytes(g, a.cls) for a in node.args)
        return max(f.flops / f.peak + f.packing, moved / d.bytes_per_s) + d.launch_s

    def step_seconds(self, work: ElementwiseWork) -> float:
        """Return the seconds of elementwise work in one kernel.

        The first operation on an element waits for its operands, and further ones find theirs in
        registers. Those of a reduction are slower, since its loops use shorter vectors.
        """
        first = min(work.widest, work.operations) / self.device.elementwise_per_s
        return first + self.chained_seconds(work, first=False)

    def chained_seconds(self, work: ElementwiseWork, first: bool = True) -> float:
        """Return the seconds of elementwise work in a kernel that does more.

        first: True to count each element's first operation too.
        """
        d = self.device
        rate = d.folds.fused_steps_per_s
        each = max(d.elementwise_per_s, rate if work.reduces else rate / d.folds.chained)
        operations = work.operations - (0.0 if first else min(work.widest, work.operations))
        return operations / each + work.functions / rate

    def _slower_seconds(self, operations: float) -> float:
        """Return the seconds that operations take longer in a reduction than in another kernel."""
        inside, alone = (
            self.chained_seconds(ElementwiseWork(operations, reduces=r)) for r in (True, False)
        )
        return inside - alone

    def product_seconds(self, g: EGraph, cls: int, node: Node) -> float:
        """Return the seconds of a node that is a matrix product; 0 for any other node."""
        return self.node_seconds(g, cls, node) if is_dot(node) else 0.0

    def _peak(self, g: EGraph, node: Node) -> float:
        """Return the FLOP/s of a product at the widest dtype of its operands."""
        d = self.device
        dtype = max((g.classes[a.cls].dtype for a in node.args), key=itemsize)
        peak = d.peak(dtype, node.attr if node.op == op.CONTRACT else None)
        return min(peak, d.folds.fused_steps_per_s) if is_thin(node) else peak

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
            rows, width = self._count(node.bound), max(free)
            return self.device.summed_rows_seconds(rows, width, self.class_bytes(g, matrix.cls))
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

    def spread_bytes(self, t: TermGraph) -> float:
        """Return the bytes of results along axes on which their values do not depend."""
        extra = 0.0
        for v in set(numbers(t.program.outputs)):
            whole = self._count(t.sizes[v]) * itemsize(t.dtypes[v])
            extra += max(whole - self.class_bytes(t.graph, t.view(v).cls), 0.0)
        return extra

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
            kernel_bytes, work, fresh_s, products = self._kernel(facts, cls, written, given)
            if f.flops is None:
                elementwise += work.operations + work.functions
            flops += sum([p.flops or 0.0 for p in (f, *products)])
            launches += not self._is_fused(cls, f)
            moved += kernel_bytes
            seconds += self._seconds(cls, f, kernel_bytes, work, fresh_s, products)
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
        self,
        cls: int,
        f: Facts,
        kernel_bytes: float,
        work: ElementwiseWork,
        fresh_s: float,
        products: list[Facts],
    ) -> tuple[float, float, float, float]:
        d = self.device
        moved = kernel_bytes / d.bytes_per_s
        if self._is_fused(cls, f):
            return self.chained_seconds(work), moved, 0.0, 0.0
        least = self.step_seconds(work) if f.flops is None else f.flops / f.peak + f.packing
        share = d.folds.product_share
        least += sum([(p.flops or 0.0) / (share * p.peak) + p.packing for p in products])
        return least, moved, fresh_s, d.launch_s

    def _is_fused(self, cls: int, f: Facts) -> bool:
        """Return True if an elementwise value is computed in the kernel of its reader."""
        return cls in self.fused and not f.is_kernel

    def _seconds(self, cls: int, f: Facts, *kernel: Any) -> float:
        """Return the seconds of a kernel (`_kernel`) by the facts of the class that it writes."""
        arithmetic, memory, fresh, launch = self._limits(cls, f, *kernel)
        beside = 0.0 if f.is_kernel else self.device.memory.beside * min(arithmetic, memory)
        return max(arithmetic, memory) + beside + fresh + launch

    def facts_of(self, g: EGraph, cls: int, node: Node) -> Facts:
        """Return the cost of a node by itself, whatever its neighbours are; cached in the model."""
        found = self._facts.get(id(node))
        if found is None:
            args = tuple([a.cls for a in node.args])
            args = args if len(args) < 2 else tuple(dict.fromkeys(args))
            parts = args if node.op in PARTS else diagonals(node)
            own = args, parts, is_turned(node)
            found = self._facts[id(node)] = Facts(node, *own, *self._numbers(g, cls, node))
        return found

    def _numbers(self, g: EGraph, cls: int, node: Node) -> tuple[Any, ...]:
        """Return the facts about a node but its operands; found once for elementwise nodes alike.

        Products depend on their operands too, and functions and reductions on their equations.
        """
        made = None if self.terms is None else self.terms.maker_of(cls)
        is_own = is_dot(node) or node.op in LIBRARY
        if is_own or (made is not None and made.name in BY_ORDER):
            return self._numbers_of(g, cls, node, made)
        c = g.classes[cls]
        key = (node.op, node.attr, len(node.args), node.bound, c.sizes, c.dtype)
        found = self._alike.get(key)
        if found is None:
            found = self._alike[key] = self._numbers_of(g, cls, node, made)
        return found

    def _numbers_of(
        self, g: EGraph, cls: int, node: Node, made: Equation | None
    ) -> tuple[Any, ...]:
        """Return the facts about a node that an equation makes, but its operands."""
        c, kind = g.classes[cls], node.op
        count = self._count(c.sizes)
        written = count * itemsize(c.dtype)
        reduces = bool(node.bound) and kind != op.TAKE
        space = count * self._count(node.bound) if reduces else count
        slow = self.device.steps_of(c.dtype)
        functions = space * functions_of(node, self.device)
        flops, peak, packing = None, 1.0, 0.0
        if is_dot(node):
            flops = 2 * count * self._count(node.bound)
            packing = self._packing(g, c.sizes, node)
        elif kind in LIBRARY:
            flops = self._library_flops(g, cls, node)
        if flops is not None:
            peak = self._peak(g, node)
        elif kind == op.CUMSUM:
            flops, packing = 0.0, self.device.tree_seconds(count)
        is_called = self.has_calls and bool(node.bound) and kind in CALLED and flops is None
        is_called = is_called and c.dtype in CALLED_DTYPES
        in_calls = self.has_calls and space >= LEAST_ELEMENTS and is_followed(node, is_called)
        rows = RowSteps()
        if made is not None and made.name in (REDUCED if is_called else VECTORISED):
            found = row_steps(made, functions, space, self._count, self._makers, self.device)
            rows = RowSteps(*(slow * x for x in found))
        functions = slow * functions + rows.alone
        work = ElementwiseWork(space * slow * weight(node), functions, space * slow, reduces)
        return (
            flops is not None, kind in FREE, written, work, flops, peak, packing,
            self.device.page_seconds(written),
            is_called, reduces or kind not in ELEMENTWISE, in_calls,
            is_called and reduces_rows(node, made), node.attr[0] if kind == op.MAP else "",
            rows, flops is not None and self._joins(c, node), self._count(c.sizes[-1:]),
        )  # fmt: skip

    def _joins(self, c: EClass, node: Node) -> bool:
        """Return True for a product that a call of the library which reduces it computes too.

        A product with a vector is no part of a call, and one of a single tile gains nothing there.
        What a call stores by itself of batches and of square results depends on the device
        (`FoldFacts.streams_batches`).
        """
        fusions = self.device.fusions
        if fusions is None or not (self.is_whole and is_dot(node)) or c.dtype not in CALLED_DTYPES:
            return False
        if self._count(c.sizes) <= fusions.tile:
            return False
        a, b = ({i for i in x.axes if i < node.out} for x in node.args)
        left, right = (self._count(tuple([c.sizes[i] for i in x])) for x in (a - b, b - a))
        if min(left, right) <= 1:
            return False
        folds = self.device.folds
        is_plain = left != right or self._count(node.bound) <= folds.square_features
        return folds.streams_batches or (is_plain and not a & b)

    def ordered_seconds(self, g: EGraph, cls: int, node: Node) -> float:
        """Return the most seconds that a node takes for the order of its axes in memory."""
        found = self.facts_of(g, cls, node)
        plain = Facts(node, (), (), False, *self._numbers_of(g, cls, node, None))
        steps = found.work.functions - plain.work.functions + sum(found.rows[1:])
        return (1 + self.device.memory.beside) * steps / self.device.folds.fused_steps_per_s

    @cached_property
    def _makers(self) -> dict[int, Equation]:
        return {} if self.terms is None else self.terms.program.once(makers_of)

    def written(self, facts: dict[int, Facts], roots: tuple[int, ...], given: set[int]) -> set[int]:
        """Return the classes whose values are written to memory.

        A kernel computes a value that it reads several times once.

        Args:
            facts: of every class, operands first.
            roots: classes that are written in any case.
            given: classes that are known before.
        """
        return self.grouped(facts, roots, given)[0]

    def grouped(
        self, facts: dict[int, Facts], roots: tuple[int, ...], given: set[int]
    ) -> tuple[set[int], dict[int, int]]:
        """Return the classes that are written, and the group for which each reads its operands.

        The arguments are those of `written`.
        """
        groups: dict[int, set[int]] = {}  # that read a class
        mine: dict[int, int] = {}
        written, ended = set(roots), set[int]()  # the second: read by what no call computes
        reduced, cut = set[int](), set[int]()  # what a call reduces; read in parts, from memory
        for cls in reversed(facts):
            f, readers = facts[cls], groups.get(cls, {cls})
            is_reduced = cls in reduced and cls not in written and cls not in cut
            joins = f.joins and is_reduced and len(readers) == 1
            if (f.is_kernel and not joins) or len(readers) > 1:
                written.add(cls)
            if cls in given:
                continue
            if f.is_kernel and not joins:
                written.update(f.args)
            if not (f.in_calls or joins):
                ended.update(f.args)
            if self._goes_on(f, facts, is_reduced and len(readers) == 1):
                reduced.update(f.args)
            cut.update(f.parts)
            group = next(iter(readers))
            is_with = cls not in written and self.is_with(f, facts[group], cls in ended)
            mine[cls] = group if is_with or joins else cls
            for arg in f.args:
                groups.setdefault(arg, set()).add(mine[cls])
        return written, mine

    def _goes_on(self, f: Facts, facts: Mapping[int, Facts], is_reduced: bool) -> bool:
        """Return True if a call reduces the operands of a class, which it reads or computes.

        is_reduced: whether the call computes the class to reduce it.
        """
        if f.is_called:
            return f.in_calls
        if not is_reduced or (f.is_group and not f.joins):
            return False
        return not is_outside(f.node, [facts[a].function for a in f.args if a in facts])

    def is_with(self, f: Facts, group: Facts, is_ended: bool) -> bool:
        """Return True if the operands of a class are computed for the one group that reads it.

        A call of the library goes on after sums of rows to what reads them, row by row, and from
        one reduction to the next if the device says so.

        is_ended: whether something reads the class that no call computes.
        """
        if not f.is_group:
            return True
        if not f.is_called or is_ended or group is f or not group.in_calls:
            return False
        return self.device.folds.calls_go_on if group.is_called else f.reduces_rows

    def _kernel(
        self, facts: dict[int, Facts], root: int, written: set[int], given: set[int]
    ) -> tuple[float, ElementwiseWork, float, list[Facts]]:
        """Return the bytes moved and the elementwise work of the kernel that writes `root`.

        The third is the seconds of fresh memory. An elementwise kernel needs none where XLA writes
        its result over an operand: an array of its size that the program has computed. A product
        needs more where it reads a value that would else be inlined, and so does a library's
        reduction of a value that the library cannot compute. Inlined operands make a reduction
        take longer. The last are the products that a call computes to reduce them.
        """
        read: dict[tuple[int, bool], float] = {}
        called: set[int] = set()  # values of calls
        stored: set[int] = set()  # values that calls cannot compute
        inlined = fresh_s = 0.0
        stack = [root]
        inside = {root}
        for cls in stack:
            f = facts[cls]
            in_call = f.is_called or cls in called
            if cls in called and is_outside(f.node, [facts[a].function for a in f.args]):
                stored.add(cls)
                in_call = False
            for arg in f.args:
                below = facts[arg]
                if below.node.op == op.CONST:
                    continue
                if arg in written or below.is_free or arg in given:
                    size = min(below.bytes, f.bytes) if arg in f.parts else below.bytes
                    is_written = f.is_kernel or arg in written
                    if arg in self.inlined and not is_written:
                        inlined += self.inlined[arg] * below.work.widest
                    if arg in self.alone:
                        if not is_written:
                            continue
                        fresh_s += below.pages
                        size += below.bytes  # written too
                    read[arg, f.node.op == op.SLICE] = size
                elif arg not in inside:
                    inside.add(arg)
                    stack.append(arg)
                    called.update((arg,) if in_call else ())
        made, flops = facts[root].bytes, facts[root].flops
        work, products = work_of(stack, facts, [facts[c] for c, _ in read])
        if self.device.layouts and flops is None and any(facts[c].is_turned for c in stack):
            steps = crossed_steps(facts, stack, self.device)
            work = work._replace(functions=work.functions + steps)
        if self._is_fused(root, facts[root]):  # its reader would read it, and reads that instead
            return max(sum(read.values()) - made, 0.0), work, 0.0, products
        apart = (c for c, _ in read if c not in given)
        computed = (c for c in apart if c in self.computed or not facts[c].is_free)
        in_place = flops is None and any(facts[c].bytes == made for c in computed)
        fresh_s += 0.0 if in_place else facts[root].pages
        fresh_s += sum([facts[c].pages for c in stored])
        if inlined and work.reduces:
            fresh_s += self._slower_seconds(inlined)
        if self._reduces_again(facts, called) and max(read.values(), default=0) < work.widest:
            work = work._replace(widest=0.0, reduces=False)  # reduced in registers
        moved = sum(read.values()) + sum([2 * facts[c].bytes for c in stored])
        return made + moved, work, fresh_s, products

    def _reduces_again(self, facts: Mapping[int, Facts], called: set[int]) -> bool:
        """Return True if a call computes values of which one is a reduction: see `is_with`."""
        return self.device.folds.calls_go_on and any(facts[c].is_called for c in called)

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


def reachable(
    choice: Mapping[int, Node], roots: tuple[int, ...], free: Callable[[int], bool] | None = None
) -> list[int]:
    """Return the classes that the roots need, operands first.

    Raises:
        CycleError: the choice has a cycle.
    """
    stops = free or (lambda c: False)
    return postorder(roots, lambda c: () if stops(c) else [a.cls for a in choice[c].args])
