"""Prices of folds, and of the materialised pairwise terms that folds replace.

The device model prices both sides. A fold recomputes every tile that it reads and writes no tile.
The program as written computes each pairwise term once and reads it for every use.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from symjax_rewrite import jax_internals
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.node_steps import functions_of, weight
from symjax_rewrite.cost.profile_groups import FoldFacts
from symjax_rewrite.cost.term_cost import Cost, CostModel, itemsize
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.products import flattest
from symjax_rewrite.ir.term import ADD, CONTRACT, Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.clustering import Cluster, ClusterMember
from symjax_rewrite.kernel_selection.folds.feature_loops import loop_lengths, steps_of_loops
from symjax_rewrite.kernel_selection.folds.pairwise_terms import elements
from symjax_rewrite.kernel_selection.folds.written_price import (
    bytes_whole,
    gained_in_batches,
    seconds_streamed,
    seconds_whole,
)
from symjax_rewrite.kernel_selection.folds.written_terms import (
    across_pairs_seconds,
    copied_bytes,
    is_all_in_library,
    is_arithmetic,
    is_in_library,
    is_streamed,
    library_memory,
    orders_stored,
    stores_no_term,
    transposed_pairs_bytes,
    transposed_pairs_seconds,
    written_terms,
)
from symjax_rewrite.pallas_kernels.backend import Reason, bytes_of
from symjax_rewrite.pallas_kernels.fold import cost as fold_cost
from symjax_rewrite.pallas_kernels.fold.fold import cuda_backend
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    ColumnSums,
    Contraction,
    ExpSums,
    FoldSpec,
    KeyedSums,
    Output,
    Sums,
    TopK,
    in_two_parts,
    one_way,
    runs_across,
    terms_of,
)
from symjax_rewrite.pallas_kernels.fold.tiling import (
    MOST_SPLITS,
    Blocks,
    TritonBlocks,
    columns_visited,
    loop_axes,
    shared_axes,
    slices_of,
    xla_blocks,
)
from symjax_rewrite.pallas_kernels.triton_memory import fold_cut
from symjax_rewrite.rewriting.contraction_order import Pairs, best_order, rows_of
from symjax_rewrite.rules.separability import separable

MOST_PAIRS = 2000  # limit on subproducts tried in the search for the best order


def compared(
    t: TermGraph,
    cluster: Cluster,
    routes: list[FoldRoute],
    device: Device,
    beside_s: float = 0.0,
    in_call: bool = False,
) -> tuple[float, float, int]:
    """Return predicted seconds of a cluster's terms as written and of its folds, and `bytes_whole`.

    A cluster that XLA streams holds no bytes in memory. Its library stores the weights of a softmax
    of long rows. Unless the folds pay on a system at rest, where fresh memory takes less, the terms
    are priced there.

    beside_s: seconds of fresh memory that stored terms need beside other temporaries. in_call: True
    if a call of XLA's library computes the terms and reduces their results.
    """
    written = written_terms(t, cluster, device)
    library = is_in_library(t, cluster, written, device)
    inside = library and is_all_in_library(written)
    few = inside and stores_no_term(t, cluster, device)
    moved_s = transposed_pairs_seconds(t, cluster, device)
    streamed = not moved_s and (in_call or few or is_streamed(t, cluster, written, device))
    fresh = 0 if streamed else bytes_whole(t, written, device, library)
    copied = transposed_pairs_bytes(t, cluster) if moved_s else copied_bytes(t, cluster, device)
    copies = 0 if streamed else copied * (1 + library)
    fresh, apart = fresh + copies, inside and not copies
    fresh_s = device.page_seconds(fresh)
    if apart:  # the library allocates each term by itself
        fresh, fresh_s = library_memory(t, cluster, fresh, device)
    fast = with_temporaries(device, fresh)
    if streamed or apart:
        whole = seconds_streamed(t, cluster, written, fast, in_call)
    else:
        whole = seconds_whole(t, cluster, written, fast)
    whole -= gained_in_batches(t, written, device, fast)
    least_s = fresh_s
    if fresh and not apart:
        rested_s = fresh_s / max(device.margins.fresh, 1.0)
        least_s, fresh_s = max(rested_s, beside_s), max(fresh_s, beside_s)
    whole += 0.0 if streamed else across_pairs_seconds(t, cluster, device)
    if moved_s:  # a term is written and read once more for each order of its axes
        passes = orders_stored(t, cluster) * (1 + device.memory.passes_of_write)
        moved_s += passes * copied / fast.bytes_per_s
    folded = sum(seconds_folded(r, fast) for r in routes)
    whole += moved_s + least_s
    if margins.pays(whole, folded, "rested", device):
        whole += fresh_s - least_s
    return whole, folded, fresh


def with_temporaries(device: Device, fresh: float) -> Device:
    """Return the device model for a program that holds `fresh` bytes of temporaries at once."""
    memory = device.memory
    cached = 1.0 if fresh >= memory.kept_bytes else memory.cached_terms
    return replace(_fused(device), bytes_per_s=cached * device.bytes_per_s)


def cost_folded(route: FoldRoute, device: Device) -> Cost:
    """Return the cost of a fold, which stores no more than one block of its tile.

    Its FLOPs are the FLOPs of the visited blocks; NaN where data decide which blocks are visited.
    """
    spec, kernels = route.spec, gpu_kernels(route, device)
    return Cost(
        _visited_flops(spec, kernels),
        bytes=fold_cost.bytes_moved(spec),
        launches=sum(1 + (kernel.cut.splits > 1) for kernel in kernels) or 1,
        seconds=seconds_folded(route, device),
        largest=0 if kernels else fold_cost.block_bytes(spec),
    )


class GpuKernel(NamedTuple):
    """A fold as a kernel of a backend, with block sizes of Triton's."""

    spec: FoldSpec
    cut: TritonBlocks
    backend: str


def _visited_flops(spec: FoldSpec, kernels: list[GpuKernel]) -> float:
    """Return the FLOPs of kernels with their block sizes, or of loops; NaN if data decide."""
    found = [fold_cost.visited_flops(p, c.rows, c.cols, slices_of(p, c)) for p, c, _ in kernels]
    if not kernels:
        blocks = xla_blocks(spec)
        found = [fold_cost.visited_flops(spec, blocks.rows, blocks.cols)]
    return sum(math.nan if f is None else f for f in found)


def reorders(t: TermGraph, cluster: Cluster, routes: list[FoldRoute], device: Device) -> bool:
    """Return True if reordering a cluster's products is cheaper, without materialised pairs."""
    ordered = 0.0
    for m in cluster.members:
        ordered += _seconds_ordered(t, m, cluster.pairs, device)
        if ordered == math.inf:  # no such order
            return False
    fast = _fused(device)
    folded = sum(seconds_folded(r, fast) for r in routes)
    return margins.pays(folded, ordered, "order", device)


def _fused(device: Device) -> Device:
    """Return the profile with the rates of arithmetic in loops that stay in cache."""
    folds = device.folds
    peaks = {dtype: folds.product_share * peak for dtype, peak in device.flops_per_s.items()}
    steps = folds.fused_steps_per_s / folds.chained
    return replace(device, elementwise_per_s=steps, flops_per_s=peaks)


def _seconds_ordered(t: TermGraph, m: ClusterMember, pairs: int, device: Device) -> float:
    """Return seconds of a reduction in the best order of its factors without a pairwise product."""
    g = t.graph
    terms = separable(g, m.reduction.cls) if m.reduction.kind == "sum" else None
    if terms is not None:  # each side is read for its mean, shifted, and summed
        read = [m.reduction.cls, *[a.cls for a in terms]]
        moved = sum(itemsize(g.classes[c].dtype) * elements(t, c) for c in read)
        return 3 * (moved / device.bytes_per_s + device.launch_s)
    if m.reduction.kind != "sum" or any(node_of(g, r.cls).op != CONTRACT for r in m.tile.inner):
        return math.inf
    p, dtype = flattest(g, m.reduction.cls), g.classes[m.reduction.cls].dtype
    sizes = [t.number(s) for s in (*g.classes[m.reduction.cls].sizes, *p.bound)]
    joins = CostModel(device, t.number, terms=t).joins(dtype)

    def count(mask: int) -> float:
        return math.prod(s for i, s in enumerate(sizes) if mask >> i & 1)

    def seconds(left: int, right: int, kept: int) -> float:
        if count(kept) >= pairs:
            return math.inf
        read, made = itemsize(dtype) * (count(left) + count(right)), itemsize(dtype) * count(kept)
        rows = rows_of(left, right, kept, count)
        return joins(2 * count(left | right), read, made, rows)

    masks = [sum(1 << i for i in {*f.axes}) for f in p.factors]
    found = best_order(masks, (1 << p.out) - 1, seconds, Pairs.of(MOST_PAIRS))
    return math.inf if found is None else found[1]


def seconds_folded(route: FoldRoute, device: Device) -> float:
    """Return seconds of a fold: its products, elementwise work, operands and results."""
    spec, folds = route.spec, device.folds
    kernels = gpu_kernels(route, device)
    if kernels:
        return sum(_kernel_seconds(route, kernel, device) for kernel in kernels)
    blocks = xla_blocks(spec)
    visited = fold_cost.looped_pairs(spec, blocks)
    pairs = math.prod(spec.batch_shape) * spec.rows * spec.cols
    share = visited / max(pairs, 1)
    kept = 4 * visited * _blocks_kept(route) if folds.writes_blocks else 0
    seconds = kept / device.bytes_per_s + _copy_seconds(spec, blocks, device)
    seconds += share * _block_seconds(spec, blocks, pairs, folds, steps_of_loops(route.steps))
    packed, rows = _packed(spec, blocks, device)
    seconds += share * device.packing_seconds(pairs * packed, pairs * rows)
    seconds += share * _product_seconds(spec, device, pairs)
    filled = min(blocks.cols / folds.lanes, 1.0)
    seconds += visited * _steps(route, spec, blocks, device) / (filled * folds.fused_steps_per_s)
    seconds += device.page_seconds(fold_cost.result_bytes(spec))
    return seconds + fold_cost.bytes_moved(spec) / device.bytes_per_s + device.launch_s


def _block_seconds(
    spec: FoldSpec, blocks: Blocks, pairs: int, folds: FoldFacts, loops: int
) -> float:
    """Return the seconds of all blocks beside their arithmetic; small ones take less.

    loops: steps of a block's loops over features.
    """
    count = blocks.steps(spec) * (1 + loops)
    weighted = any(t.weights is not None for o in spec.outputs for t in terms_of(o))
    small = 1.0 if spec.contractions or weighted else pairs / (count * folds.threaded_pairs)
    return folds.block_s * count * min(small, 1.0)


def _kernel_seconds(route: FoldRoute, kernel: GpuKernel, device: Device) -> float:
    """Return seconds of a fold as a GPU kernel, its columns split if that is predicted faster.

    The kernel ends with the longest of its programs, or once the multiprocessors have computed all
    of them. Splits are counted in fractions here, so that neighbouring sizes have like prices.
    """
    spec, cut, backend = kernel
    visited = fold_cost.visited_pairs(spec, cut.rows, cut.cols)
    steps = _steps(route, spec, xla_blocks(spec), device)
    share, steps_per_s = fold_cost.kernel_rates(spec, backend, device)
    busy = _product_seconds(spec, device, visited) / share + visited * steps / steps_per_s
    bytes_per_s = device.folds.kernel_bytes * device.bytes_per_s
    busy = max(busy, fold_cost.bytes_moved(spec) / bytes_per_s)
    columns = int(columns_visited(spec, cut.rows, cut.cols).max(initial=0))
    longest = min(cut.rows, spec.rows) * columns / max(visited, 1) * device.multiprocessors * busy
    fixed = device.launch_s + device.folds.kernel_s
    whole = max(busy, longest) + fixed
    most = min(spec.cols / cut.cols, MOST_SPLITS)
    if cut.features or longest <= busy or most <= 1:
        return whole
    splits = min(longest / busy, most)
    states = 2 * splits * fold_cost.state_bytes(spec) / device.bytes_per_s
    return min(whole, max(busy, longest / most) + states + fixed + device.launch_s)


def _copy_seconds(spec: FoldSpec, blocks: Blocks, device: Device) -> float:
    """Return the seconds in which loops copy the blocks of arrays, and transpose operands.

    A block is sliced, so that it is written and read again, piece by piece. An array that no loop
    cuts is copied as a whole if blocks have its axes in another order.
    """
    pairs = [k for k, o in enumerate(spec.operands) if {spec.row, spec.col} <= {*o.axes}]
    copied = 2 * bytes_of([spec.avals[k] for k in pairs]) / device.bytes_per_s
    transposed = 2 * bytes_of([spec.avals[k] for k in pairs if runs_across(spec, k)])
    pieces = device.folds.piece_s * fold_cost.pieces_moved(spec, blocks)
    if device.layouts is not None:
        for shape, order in fold_cost.orders_moved(spec, blocks):
            pieces += math.prod(shape) * device.layouts.moved_each(shape, order)
    return copied + transposed / device.folds.transposed_bytes_per_s + pieces


def gpu_kernels(route: FoldRoute, device: Device) -> list[GpuKernel]:
    """Return the kernels that compute a fold, with block sizes; empty where loops compute it."""
    if not device.runs_on_gpu or route.backend not in ("auto", *fold_cost.RATES):
        return []
    if route.kernel:
        return [GpuKernel(route.spec, TritonBlocks(), route.kernel)]
    made = []
    for _, part in one_way(route.spec):
        best, cut = cuda_backend(part), fold_cut(part)
        if isinstance(best, Reason):
            return []
        cut = TritonBlocks() if isinstance(cut, Reason) else cut
        made.append(GpuKernel(part, cut, best.name if route.backend == "auto" else route.backend))
    return made


def promote(one: str, other: str) -> str:
    """Return the dtype in which operands of two dtypes are multiplied."""
    return str(jax_internals.joint_dtype(one, other))


def _product_seconds(spec: FoldSpec, device: Device, pairs: int) -> float:
    """Return the seconds of the products of all pairs at the rates of their operands' dtypes."""
    seconds = 0.0
    for c in spec.contractions:
        dtype = promote(spec.operands[c.row].dtype, spec.operands[c.col].dtype)
        rate = device.peak(dtype, c.precision)
        seconds += 2 * pairs * _share_made(spec, c, device) * spec.width(c.row) / rate
    for t in (t for o in spec.outputs for t in terms_of(o)):
        if t.weights is None:
            continue
        weights = spec.operands[t.weights].dtype
        if in_two_parts(spec, t):
            rate = device.peak(weights) / 2
        else:
            rate = device.peak(promote(t.round_to or "float32", weights), t.precision)
        seconds += 2 * pairs * spec.width(t.weights) / rate
    return seconds


def _packed(spec: FoldSpec, blocks: Blocks, device: Device) -> tuple[float, float]:
    """Return what the products of a block copy per pair: bytes of operands, and rows of these."""
    rows, cols = max(blocks.rows, 1), max(blocks.cols, 1)
    total = count = 0.0
    for c in spec.contractions if min(rows, cols) > 1 else ():
        share = _share_made(spec, c, device)
        count += share / min(rows, cols)
        for k, many in ((c.row, cols), (c.col, rows)):
            total += share * spec.width(k) * itemsize(spec.operands[k].dtype) / many
    weights = [t.weights for o in spec.outputs for t in terms_of(o) if t.weights is not None]
    for k in weights if rows > 1 else ():
        width = spec.width(k)
        total += (1 + width / rows) * itemsize(spec.operands[k].dtype) if width > 1 else 0.0
    return total, count


def _share_made(spec: FoldSpec, c: Contraction, device: Device) -> float:
    """Return the share of a product's pairs that are computed, where loops run a fold.

    A block computes a product once for the batch axes that it holds and neither operand has.
    """
    if not device.folds.streams:
        return 1.0
    blocks = xla_blocks(spec)
    mine = {*spec.operands[c.row].axes, *spec.operands[c.col].axes}
    once = math.prod(n for a, n in blocks.held(spec).items() if a not in mine)
    return _share_in_loops(spec, blocks, mine) / once


def _share_in_loops(spec: FoldSpec, blocks: Blocks, axes: set[str]) -> float:
    """Return the share of a fold's blocks that compute a value of some axes of their tile.

    XLA moves it out of the loops where none of them selects what it reads.
    """
    looped = set(spec.batch).difference(blocks.inner)
    whole = blocks.rows >= spec.rows and blocks.cols >= spec.cols
    return 1 / math.prod(spec.size[a] for a in looped) if whole and not looped & axes else 1.0


def _steps(route: FoldRoute, spec: FoldSpec, blocks: Blocks, device: Device) -> float:
    """Return the elementwise steps per pair of a fold, or of a part of its outputs."""
    folds, kinds = device.folds, Counter(kind for kind, *_ in route.steps)
    once = kinds["lookup"] * folds.fold_lookup
    once += sum(isinstance(o, KeyedSums) for o in spec.outputs) * folds.fold_keyed
    held = set(blocks.inner) & {*shared_axes(spec)}
    steps = kinds["scattered"] + once / math.prod(spec.size[a] for a in held)
    chained = folds.chained_step(kinds["value"])
    is_double = "float64" in {x.dtype for x in spec.operands}
    wide = device.double_steps if is_double else 1.0
    nodes: list[Node | None] = []
    lengths = loop_lengths(route.steps)
    for kind, data, args, _ in route.steps:
        added = (ADD, (1, 1)) if kind == "summed" else (None, None)
        op, attr = data if kind == "apply" else added
        nodes.append(None if op is None else Node(op, attr, (Ref(-1, ()),) * len(args), 0, ()))
    shares = _shares(route, spec, nodes, blocks) if folds.streams else [1.0] * len(nodes)
    times = _kernels(route, spec, nodes) if folds.streams else [1] * len(nodes)
    for k, node in enumerate(nodes):
        if node is not None:
            length, each = lengths[k], folds.looped if lengths[k] > 1 else chained
            own = length * (each * weight(node) + functions_of(node, device))
            steps += times[k] * shares[k] * own * device.steps_of(route.steps[k].dtype) / wide
    if any(isinstance(o, TopK) for o in spec.outputs):
        steps *= 2  # a search reads a block twice, and XLA computes it twice
    along = sum(share for share, s in zip(shares, route.steps, strict=True) if s.kind == "along")
    steps += folds.stored_tile * (_stored(spec) + along)
    if spec.tile.whole == spec.row:
        steps += folds.down_tile * along
    steps += along * folds.row_sum / max(blocks.cols, 1)
    steps += sum(_output_steps(o, blocks.cols, folds) for o in spec.outputs)
    if loop_axes(spec):
        sums = (o for o in spec.outputs if isinstance(o, (Sums, ColumnSums)))
        steps += folds.held_sum * sum(t.weights is None for o in sums for t in terms_of(o))
    if spec.contractions:
        exponentials = sum(isinstance(o, ExpSums) for o in spec.outputs)
        steps += exponentials * _unrolled(blocks.cols, device)
    return steps * wide


def _stored(spec: FoldSpec) -> int:
    """Return how many sums read a stored block of a tile that another sum reads too."""
    read = Counter(o.tile for o in spec.outputs for _ in terms_of(o))
    sums = ((o.tile, t) for o in spec.outputs if isinstance(o, Sums) for t in o.terms)
    return sum(read[tile] > 1 for tile, t in sums if t.weights is None)


def _kernels(route: FoldRoute, spec: FoldSpec, nodes: Sequence[Node | None]) -> list[int]:
    """Return in how many kernels of a block XLA computes each step of a tile.

    The kernels are those of different tiles that are summed, and of functions that several of them
    read. XLA repeats the arithmetic that they read in each, also a distance that no loop sums.
    """
    tiles = {o.tile for o in spec.outputs if isinstance(o, (Sums, ColumnSums))}
    if len(tiles) < 2 or not route.roots:
        return [1] * len(nodes)
    readers = Counter(a for _, _, args, _ in route.steps for a in {*args})
    found: list[set[int]] = [set() for _ in nodes]
    for tile in tiles:
        found[route.roots[tile]].add(route.roots[tile])
    for k in reversed(range(len(nodes))):
        node = nodes[k]
        called = node is not None and not is_arithmetic(node)
        if (called and max(readers[k], len(found[k])) > 1) or route.steps[k].kind == "summed":
            found[k] = {k}
        for a in route.steps[k].args:
            found[a] |= found[k]
    return [max(len(kernels), 1) for kernels in found]


def _shares(
    route: FoldRoute, spec: FoldSpec, nodes: Sequence[Node | None], blocks: Blocks
) -> list[float]:
    """Return the share of a block's elements for which loops compute each step of a tile.

    A function is computed once for the axes of a block that it does not depend on, and so is a
    reduction, a sum over features, and the arithmetic that these alone read, or that does not
    depend on the column. Other arithmetic is repeated for each element. What no loop selects is
    computed before the loops.
    """
    extents = {spec.row: max(blocks.rows, 1), spec.col: max(blocks.cols, 1)}
    extents |= blocks.held(spec)
    axes: list[set[str]] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for k, (kind, data, args, _) in enumerate(route.steps):
        match kind:
            case "const" | "apply" | "summed" | "along":
                own = set()
            case "value" | "feature":
                own = {*spec.operands[data].axes}
            case "index":
                own = {spec.row if data else spec.col}
            case "delta":
                own = {spec.row, spec.col}
            case "dot":
                c = spec.contractions[data]
                own = {*spec.operands[c.row].axes, *spec.operands[c.col].axes}
            case _:
                own = {*spec.batch, spec.row, spec.col}
        axes.append(own.union(*(axes[a] for a in args)))
        for a in args:
            readers[a].append(k)
    shares = [1.0] * len(nodes)
    for k in reversed(range(len(nodes))):
        node = nodes[k]
        own = 1 / math.prod(size for a, size in extents.items() if a not in axes[k])
        once = spec.col not in axes[k] or route.steps[k].kind in ("along", "summed")
        once = once or (node is not None and not is_arithmetic(node))
        read = 0.0 if once else 1.0
        shares[k] = max(own, min(read, max((shares[r] for r in readers[k]), default=1.0)))
    return [s * _share_in_loops(spec, blocks, mine) for s, mine in zip(shares, axes, strict=True)]


def _blocks_kept(route: FoldRoute) -> int:
    """Return how often a tile block is written or read where no GPU kernel holds it."""
    spec = route.spec
    reductions = sum(kind == "along" for kind, *_ in route.steps)
    return 2 * len(spec.contractions) + reductions + 2 * len(spec.outputs)


def _output_steps(output: Output, columns: int, folds: FoldFacts) -> float:
    """Return the steps per pair of one output of a fold; products sum weighted rows."""
    start = folds.row_sum / max(columns, 1)
    match output:
        case ExpSums():
            return 7 + 2 * start
        case ArgExtremum():
            return 16 + start
        case TopK(k=k):
            return 9 + min((folds.fold_row + folds.fold_place * k) / columns, folds.fold_search)
        case KeyedSums():
            return 0  # counted with the output that shares them
        case Sums(terms=terms):
            return 1 + start * sum(t.weights is None for t in terms)
        case _:
            return 1 + start


def _unrolled(columns: int, device: Device) -> float:
    """Return the further steps of an exponential in a stored block of short rows.

    LLVM unrolls the loop that subtracts the maximum of a row. The steps are for full vectors, by
    which rows of few columns are priced.
    """
    steps = device.functions.unrolled_steps(columns, device.folds.lanes)
    return max(steps - device.functions.short, 0.0) * min(columns / device.folds.lanes, 1.0)
