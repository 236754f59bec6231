"""Prices of folds, and of the materialised pairwise terms that folds replace.

The device model prices both sides. A fold recomputes every tile that it reads and writes no tile.
The program as written computes each pairwise term once and reads it for every use.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.profile_groups import FoldFacts
from symjax_rewrite.cost.term_cost import Cost, CostModel, itemsize, weight
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.products import flattest
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.ir.term import CONTRACT, NATIVE, Node, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.clustering import Cluster, ClusterMember
from symjax_rewrite.kernel_selection.folds.pairwise_terms import elements, is_elementwise
from symjax_rewrite.pallas_kernels.fold import cost as fold_cost
from symjax_rewrite.pallas_kernels.fold.fold import cuda_backend
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    ExpSums,
    FoldSpec,
    KeyedSums,
    Output,
    TopK,
    one_way,
)
from symjax_rewrite.pallas_kernels.fold.tiling import Blocks, shared_axes, xla_blocks
from symjax_rewrite.rewriting.contraction_order import Pairs, best_order
from symjax_rewrite.rules.separability import separable

MOST_PAIRS = 2000  # limit on subproducts tried in the search for the best order


def compared(
    t: TermGraph, cluster: Cluster, routes: list[FoldRoute], device: Device
) -> tuple[float, float]:
    """Return predicted seconds of a cluster's terms as written, and of its folds."""
    fresh = bytes_whole(t, cluster, device)
    fast = with_temporaries(device, fresh)
    whole = seconds_whole(t, cluster, fast) + page_seconds(device, fresh)
    return whole, sum(seconds_folded(r, fast) for r in routes)


def with_temporaries(device: Device, fresh: float) -> Device:
    """Return the device model for a program that holds `fresh` bytes of temporaries at once."""
    memory = device.memory
    cached = 1.0 if fresh >= memory.kept_bytes else memory.cached_terms
    return replace(_fused(device), bytes_per_s=cached * device.bytes_per_s)


def page_seconds(device: Device, fresh: float) -> float:
    """Return the seconds spent on memory pages that every call requests from the system again."""
    memory = device.memory
    return max(fresh - memory.kept_bytes, 0) / memory.fresh_bytes_per_s


def sorting_seconds(name: str, count: float, places: float, device: Device) -> float:
    """Return seconds of XLA's own `sort` or `top_k`.

    Args:
        name: of the primitive.
        count: elements that are sorted, or searched.
        places: of a top-k: k times the number of rows.
        device: where it runs.
    """
    folds = device.folds
    steps = (folds.sort if name == "sort" else folds.top_k) * count
    return (steps + folds.top_k_place * places) / device.elementwise_per_s


def cost_folded(route: FoldRoute, device: Device) -> Cost:
    """Return the cost of a fold, which stores no more than one block of its tile.

    Its FLOPs are the FLOPs of the visited blocks; NaN where data decide which blocks are visited.
    """
    spec, blocks = route.spec, xla_blocks(route.spec)
    flops = fold_cost.visited_flops(spec, blocks.rows, blocks.cols)
    is_kernel = not device.folds.streams and route.backend == "triton"
    if not device.folds.streams and route.backend == "auto":
        is_kernel = all(hasattr(cuda_backend(part), "run") for _, part in one_way(spec))
    return Cost(
        math.nan if flops is None else flops,
        bytes=fold_cost.bytes_moved(spec),
        launches=1,
        seconds=seconds_folded(route, device),
        largest=0 if is_kernel else fold_cost.block_bytes(spec),
    )


def reorders(t: TermGraph, cluster: Cluster, routes: list[FoldRoute], device: Device) -> bool:
    """Return True if reordering a cluster's products is cheaper, without materialised pairs."""
    seconds = [_seconds_ordered(t, m, cluster.pairs, device) for m in cluster.members]
    fast = _fused(device)
    folded = sum(seconds_folded(r, fast) for r in routes)
    return margins.pays(folded, sum(seconds), "order", device)


def _fused(device: Device) -> Device:
    """Return the profile with the elementwise rate of loops that stay in cache."""
    return replace(device, elementwise_per_s=device.folds.fused_steps_per_s)


def _seconds_ordered(t: TermGraph, m: ClusterMember, pairs: int, device: Device) -> float:
    """Return seconds of a reduction in the best order of its factors without a pairwise product."""
    g = t.graph
    terms = separable(g, m.exit.cls) if m.exit.kind == "sum" else None
    if terms is not None:  # each side is read for its mean, shifted, and summed
        read = [m.exit.cls, *[a.cls for a in terms]]
        moved = sum(itemsize(g.classes[c].dtype) * elements(t, c) for c in read)
        return 3 * (moved / device.bytes_per_s + device.launch_s)
    if m.exit.kind != "sum" or any(node_of(g, r.cls).op != CONTRACT for r in m.tile.inner):
        return math.inf
    p, dtype = flattest(g, m.exit.cls), g.classes[m.exit.cls].dtype
    sizes = [value(s, {}) for s in (*g.classes[m.exit.cls].sizes, *p.bound)]
    model = CostModel(device, lambda d: value(d, {}))

    def count(mask: int) -> float:
        return math.prod(s for i, s in enumerate(sizes) if mask >> i & 1)

    def seconds(left: int, right: int, kept: int) -> float:
        if count(kept) >= pairs:
            return math.inf
        moved = itemsize(dtype) * (count(left) + count(right) + count(kept))
        return model.join_seconds(2 * count(left | right), moved, dtype)

    masks = [sum(1 << i for i in {*f.axes}) for f in p.factors]
    found = best_order(masks, (1 << p.out) - 1, seconds, Pairs.of(MOST_PAIRS))
    return math.inf if found is None else found[1]


def _choice(t: TermGraph, cluster: Cluster) -> tuple[dict[int, Node], set[int], list[int]]:
    """Return a cluster's nodes as written, its classes, and its reductions."""
    exits = sorted({m.exit.cls for m in cluster.members})
    mine = {*exits, *(r.cls for m in cluster.members for r in m.tile.inner)}
    mine |= {x for m in cluster.members for x in m.exit.through}
    reached = {a.cls for c in mine for a in node_of(t.graph, c).args}
    return {c: node_of(t.graph, c) for c in mine | reached}, mine, exits


def _roots(t: TermGraph, mine: set[int], exits: list[int]) -> tuple[int, ...]:
    """Return the classes a cluster always writes: reductions, and inputs of XLA's own routines."""
    native = [node_of(t.graph, c) for c in exits if node_of(t.graph, c).op == NATIVE]
    return (*exits, *sorted({a.cls for n in native for a in n.args if a.cls in mine} - {*exits}))


def seconds_whole(t: TermGraph, cluster: Cluster, device: Device) -> float:
    """Return seconds of the pairwise terms and their reductions as written."""
    choice, mine, exits = _choice(t, cluster)
    model, folds = CostModel(device, lambda d: value(d, {})), device.folds
    roots = _roots(t, mine, exits)
    seconds = model.evaluate(t.graph, choice, roots, lambda c: c not in mine).seconds
    # Values and indices of one sort are two members; the sort is priced once.
    once = {(m.exit.kind, m.exit.args, m.exit.keys): m for m in cluster.members}
    steps = float(sum(folds.plain_steps(m.exit.kind) * _reduced(m) for m in once.values()))
    steps += sum(folds.top_k_place * m.exit.places * _rows(m) for m in once.values())
    looked = {r.cls for m in cluster.members for r in m.tile.looked}
    steps += sum(folds.lookup * elements(t, cls) for cls in looked)
    inner = ((m, r) for m in cluster.members for r in m.tile.inner)
    summed = {r.cls for m, r in inner if _is_short_sum(t, m, r, folds.long_sum)}
    steps += sum(folds.short_sum * elements(t, cls) for cls in summed)
    return seconds + steps / device.elementwise_per_s


def _is_short_sum(t: TermGraph, m: ClusterMember, ref: Ref, long: int) -> bool:
    """Return True for a sum over a few features of pairs, as of differences of points."""
    node = node_of(t.graph, ref.cls)
    count = math.prod(b for b in node.bound if isinstance(b, int))
    if node.op != CONTRACT or not 1 < count < long:
        return False
    paired = [{ref.axes[i] for i in a.axes if i < node.out} for a in node.args]
    return any({m.pair.row, m.pair.column} <= axes for axes in paired)


def _reduced(m: ClusterMember) -> int:
    """Return the elements that a reduction reduces; a sum by key first sums over other indices."""
    if m.exit.kind != "keyed":
        return m.pairs
    out = min(m.exit.bound)
    mine = {i for i in m.space if i < out} | {i for k in m.exit.keys for i in k.axes}
    return math.prod(int(m.exit.sizes[i]) for i in mine)  # pyright: ignore[reportArgumentType]


def _rows(m: ClusterMember) -> int:
    """Return the rows that a top-k or a sort searches: its pairs without the reduced index."""
    return m.pairs // math.prod(int(m.exit.sizes[i]) for i in m.exit.bound)  # pyright: ignore[reportArgumentType]


def bytes_whole(t: TermGraph, cluster: Cluster, device: Device) -> int:
    """Return the peak bytes of pairwise terms in memory when the program runs as written."""
    choice, mine, exits = _choice(t, cluster)
    order = sorted(mine)
    model = CostModel(device, lambda d: value(d, {}))
    facts = {c: model.facts_of(t.graph, c, node) for c, node in choice.items()}
    roots = _roots(t, mine, exits)
    written = model.written(facts, roots, facts.keys() - mine)
    last: dict[int, int] = {}
    for c in reversed(order):
        until = c if c in written else last.get(c, c)
        for a in node_of(t.graph, c).args:
            last[a.cls] = max(last.get(a.cls, -1), until)
    held = [c for c in order if c in written and c not in exits]
    size = {c: itemsize(t.graph.classes[c].dtype) * elements(t, c) for c in held}
    in_place = {c for c in {*held, *roots} if is_elementwise(choice[c])}
    users = Counter(a.cls for c in order for a in node_of(t.graph, c).args)

    def overwritten(c: int, x: int) -> bool:
        """Return True if x can be computed in c's buffer.

        It cannot if c is also reduced on the way to x.
        """
        return x in in_place and (x in roots or users[c] == 1)

    def lives(c: int, x: int) -> bool:
        until = last.get(c, c)
        return c <= x and (x < until or (x == until and (c == x or not overwritten(c, x))))

    return max((sum(size[c] for c in held if lives(c, x)) for x in order), default=0)


def seconds_folded(route: FoldRoute, device: Device) -> float:
    """Return seconds of a fold: its products, elementwise work, operands and results."""
    spec, folds = route.spec, device.folds
    dtype = spec.contractions[0].dtype if spec.contractions else "float32"
    pairs = math.prod(spec.batch_shape) * spec.rows * spec.cols
    unread = Ref(-1, ())
    steps = float(sum(kind == "hit" for kind, *_ in route.steps))
    once = sum(kind == "lookup" for kind, *_ in route.steps) * folds.fold_lookup
    once += sum(isinstance(o, KeyedSums) for o in spec.outputs) * folds.fold_keyed
    blocks = xla_blocks(spec)
    held = set(blocks.inner) & {*shared_axes(spec)}
    steps += once / math.prod(spec.size[a] for a in held)
    for kind, data, args, _ in route.steps:
        if kind == "apply":
            op, attr = data
            steps += weight(Node(op, attr, (unread,) * len(args), 0, ()))
    if any(isinstance(o, TopK) for o in spec.outputs):
        steps *= 2  # a search reads a block twice, and XLA computes it twice
    steps += sum(_output_steps(o, blocks.cols, folds) for o in spec.outputs)
    products = fold_cost.flops(spec) / device.peak(dtype)
    kept = 4 * pairs * _blocks_kept(route) if folds.writes_blocks else 0
    moved = (fold_cost.bytes_moved(spec) + kept) / device.bytes_per_s
    if spec.contractions:
        moved += folds.block_s * _loop_steps(spec, blocks)
    return products + pairs * steps / device.elementwise_per_s + moved + device.launch_s


def _loop_steps(spec: FoldSpec, blocks: Blocks) -> int:
    """Return the number of blocks that a fold's loops visit."""
    looped = math.prod(spec.size[a] for a in spec.batch if a not in blocks.inner)
    return looped * -(-spec.rows // max(blocks.rows, 1)) * -(-spec.cols // max(blocks.cols, 1))


def _blocks_kept(route: FoldRoute) -> int:
    """Return how often a tile block is written or read where no GPU kernel holds it."""
    spec = route.spec
    if spec.tile.whole is None:
        return 0
    reductions = sum(kind == "along" for kind, *_ in route.steps)
    return 2 * len(spec.contractions) + reductions + 2 * len(spec.outputs)


def _output_steps(output: Output, columns: int, folds: FoldFacts) -> float:
    """Return the steps per pair of one output of a fold."""
    match output:
        case ExpSums():
            return 7
        case ArgExtremum():
            return 16
        case TopK(k=k):
            return 9 + (folds.fold_row + folds.fold_place * k) / columns
        case KeyedSums():
            return 0  # counted with the output that shares them
        case _:
            return 1
