"""Routes: bundles of reductions over one pairwise index become folds (a face).

Recognition works on the whole program's terms. A *sink* reduces a term that is pairwise in a row
index m and a column index n: Σ_n e^(t−r)·w, Σ_n e^(t−r), max_n t. Its log-linear form (`analysis`)
splits what depends on n, the tile t, from row algebra: user-made shifts and normalisers stay
outside, as they are written. Sinks with the same tile are one bundle, and one fold serves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from symjax_rewrite import compat
from symjax_rewrite.analysis import LogLinear, log_linear, sum_terms
from symjax_rewrite.canonical import TermGraph
from symjax_rewrite.config import Numerics, log
from symjax_rewrite.egraph import EGraph
from symjax_rewrite.errors import KernelError, UsageError
from symjax_rewrite.fold_route import FoldRoute, build_fold
from symjax_rewrite.fold_rows import dependents
from symjax_rewrite.ir import ADD, CONTRACT, MAP, REDUCE, Node, Ref
from symjax_rewrite.loops import Loop
from symjax_rewrite.pallas_kernels.fold import BACKENDS
from symjax_rewrite.record import RouteUse
from symjax_rewrite.regions import Needed, node_of
from symjax_rewrite.scan_route import ScanRoute, route_loop

MIN_COLUMNS = 1024  # shorter rows stay as they are: measured in experiments/attention
MIN_PAIRS = 1 << 20


@dataclass(slots=True)
class Sink:
    """One reduction over a pairwise term.

    cls: its class. tile: the tile over the sink's indices. index: the column index. weights: the
    operand that the exponential is multiplied with, if any. rest: row algebra outside the sum.
    """

    cls: int
    tile: Ref
    index: int
    weights: Ref | None
    rest: LogLinear
    is_max: bool = False


@dataclass(slots=True)
class Bundle:
    """Sinks of one tile over one of its slots.

    others: classes of further sinks of the tile, whose weights need this bundle's results first.
    routed: classes that depend on any sink of the program.
    """

    tile: int
    slot: int
    sinks: list[Sink] = field(default_factory=list)
    others: set[int] = field(default_factory=set)
    routed: set[int] = field(default_factory=set)


class Router:
    """Finds bundles and decides which become folds.

    Args:
        kernels: `"auto"`, `"always"`, `"off"`, or a backend's name.
        numerics: folds change the order of sums, so they need `reassoc`.

    Raises:
        UsageError: no such backend.
    """

    def __init__(self, kernels: str, numerics: Numerics) -> None:
        if kernels not in ("auto", "always", "off", *BACKENDS):
            known = ["auto", "always", "off", *BACKENDS]
            raise UsageError("unknown kernels", expected=known, got=repr(kernels))
        self.kernels = kernels if numerics.permits("reassoc") else "off"

    def find(self, t: TermGraph, need: Needed) -> tuple[list[FoldRoute], list[RouteUse]]:
        """The folds to route, and what was considered."""
        if self.kernels == "off" or t.dim_env:
            return [], []
        taken: list[FoldRoute] = []
        uses: list[RouteUse] = []
        every = bundles(t.graph, need)
        routed = dependents(t.graph, need, {s.cls for b in every for s in b.sinks})
        for bundle in every:
            bundle.routed = routed
            found, reason = self._decide(t, need, bundle)
            if found is not None:
                taken.append(found)
            log("route", "fold: %s", reason)
            uses.append(RouteUse("fold", found is not None, reason))
        return taken, uses

    def route_loop(self, loop: Loop, device: str) -> tuple[ScanRoute | None, str]:
        """A scan kernel for a loop, or None, and why."""
        kernels = self.kernels
        if kernels == "auto" and device != "cpu" and compat.may_be_partitioned():
            return None, "several devices: XLA might gather a scan's operands"
        return route_loop(loop, kernels, device)

    def _decide(self, t: TermGraph, need: Needed, bundle: Bundle) -> tuple[FoldRoute | None, str]:
        sizes = t.graph.classes[bundle.tile].sizes
        numbers = [s for s in sizes if isinstance(s, int)]
        if len(numbers) < len(sizes):
            return None, "a size of the tile is a name"
        columns, pairs = numbers[bundle.slot], math.prod(numbers)
        if all(s.is_max for s in bundle.sinks):
            return None, "a maximum alone is already one pass"
        small = columns < MIN_COLUMNS or pairs < MIN_PAIRS
        if self.kernels == "auto" and compat.may_be_partitioned():
            return None, "several devices: XLA might gather a fold's operands"
        if small and self.kernels == "auto":
            return None, f"{columns} columns are too few to gain"
        held = used_elsewhere(t.graph, need, bundle)
        if held is not None:
            return None, held
        found = build_fold(t, need, bundle, self.kernels)
        if isinstance(found, str):
            if self.kernels not in ("auto", "always"):
                raise KernelError(f"the {self.kernels} backend cannot run this fold", got=found)
            return None, found
        return found, f"{pairs} pairs are never made whole ({found.backend})"


def bundles(g: EGraph, need: Needed) -> list[Bundle]:
    """Sinks of the program, those with one tile together, in program order."""
    found: dict[tuple[int, int], Bundle] = {}
    for cls in need.order:
        for sink in _sinks(g, cls):
            slot = sink.tile.axes.index(sink.index)
            key = (sink.tile.cls, slot)
            found.setdefault(key, Bundle(*key)).sinks.append(sink)
            break
    parts = [part for b in found.values() for part in _in_turn(g, need, b)]
    return [b for b in parts if any(not s.is_max for s in b.sinks)]


def _in_turn(g: EGraph, need: Needed, bundle: Bundle) -> list[Bundle]:
    """The bundle cut where a sink's weights depend on another sink: p·(p·v) is two folds."""
    left, out = bundle.sinks, []
    everything = {s.cls for s in bundle.sinks}
    while left:
        after = dependents(g, need, {s.cls for s in left})
        ready = [s for s in left if s.weights is None or s.weights.cls not in after]
        part = Bundle(bundle.tile, bundle.slot, ready)
        part.others = everything - {s.cls for s in ready}
        out.append(part)
        left = [s for s in left if s not in ready]
    return out


def _sinks(g: EGraph, cls: int) -> Iterator[Sink]:
    node = node_of(g, cls)
    if len(node.bound) != 1:
        return
    index = node.out
    if node.op == REDUCE and node.attr == "max":
        terms = sum_terms(g, node.args[0], 1.0)
        tile = _tile(g, [t for t in terms if index in t[0].axes], g.classes[cls].dtype, node)
        rest = [t for t in terms if index not in t[0].axes]
        if tile is not None and not rest:
            yield Sink(cls, tile, index, None, LogLinear((), ()), is_max=True)
    elif node.op == CONTRACT and len(node.args) <= 2:
        for k, arg in enumerate(node.args):
            sink = _exp_sink(g, cls, node, arg, node.args[1 - k] if len(node.args) == 2 else None)
            if sink is not None:
                yield sink


def _exp_sink(g: EGraph, cls: int, node: Node, arg: Ref, weights: Ref | None) -> Sink | None:
    """`Σ_n e^t·w` with row algebra, if the operand reads so."""
    index = node.out
    if index not in arg.axes or len(set(arg.axes)) != len(arg.axes):
        return None
    form = log_linear(g, _through_casts(g, arg).cls)
    form = form.over(_through_casts(g, arg).axes)
    inside = [t for t in form.exponent if index in t[0].axes]
    if not inside or any(index in ref.axes for ref, _ in form.factors):
        return None
    if weights is not None and index not in weights.axes:
        return None
    dtype = g.classes[inside[0][0].cls].dtype
    tile = _tile(g, inside, dtype, node)
    if tile is None or len(set(tile.axes)) != len(tile.axes) or len(tile.axes) < 2:
        return None
    if weights is not None and not set(tile.axes) - set(weights.axes):
        return None
    rest = LogLinear(form.factors, tuple(t for t in form.exponent if index not in t[0].axes))
    return Sink(cls, tile, index, weights, rest)


def _through_casts(g: EGraph, ref: Ref) -> Ref:
    """The value before casts between floating types: probabilities rounded for the product."""
    node = node_of(g, ref.cls)
    while node.op == MAP and node.attr[0] == "convert_element_type":
        arg = node.args[0]
        ref = Ref(arg.cls, tuple(ref.axes[i] for i in arg.axes))
        node = node_of(g, ref.cls)
    return ref


def _tile(g: EGraph, terms: list, dtype: str, node: Node) -> Ref | None:
    """The sum of the terms as one class, so that equal tiles meet."""
    if not terms or any(g.classes[r.cls].dtype != dtype for r, _ in terms) or "complex" in dtype:
        return None
    if len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    used = sorted({i for r, _ in terms for i in r.axes})
    local = {i: n for n, i in enumerate(used)}
    size_of = {i: s for r, _ in terms for i, s in zip(r.axes, g.classes[r.cls].sizes, strict=True)}
    args = tuple(Ref(r.cls, tuple(local[i] for i in r.axes)) for r, _ in terms)
    coefficients = tuple(int(c) if c == int(c) else c for _, c in terms)
    sizes = tuple(size_of[i] for i in used)
    ref = g.add(ADD, coefficients, args, sizes, (), dtype)
    return Ref(ref.cls, tuple(used[i] for i in ref.axes))


def used_elsewhere(g: EGraph, need: Needed, bundle: Bundle) -> str | None:
    """Why the pairwise terms must exist anyway, or None: all users are among themselves."""
    sinks = {s.cls for s in bundle.sinks} | bundle.others
    count = len(g.classes[bundle.tile].sizes)
    inner: set[int] = set()
    stack = [a.cls for s in bundle.sinks for a in node_of(g, s.cls).args]
    columns = g.classes[bundle.tile].sizes[bundle.slot]
    while stack:
        cls = stack.pop()
        node = node_of(g, cls)
        wide = len(g.classes[cls].sizes) >= count and columns in g.classes[cls].sizes
        if cls in inner or not wide or (node.bound and node.op != CONTRACT):
            continue
        if node.op not in (MAP, ADD, CONTRACT):
            continue
        inner.add(cls)
        if not node.bound:
            stack.extend(a.cls for a in node.args)
    for cls in inner:
        if cls in need.outside:
            return "the pairwise term is itself a result"
        outside = [u for u in need.users.get(cls, ()) if u not in inner and u not in sinks]
        if outside:
            return f"the pairwise term is also used by {node_of(g, outside[0]).op}"
    return None
