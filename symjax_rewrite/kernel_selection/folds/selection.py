"""Selection of folds: reductions over pairwise terms become folds, which never store the terms.

`pairwise_terms` and `clustering` find candidates in the whole program's terms. `reductions`
writes a reduction in terms of a fold's results. `builder` and `gathered_columns` emit. This module
decides.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found, Refusal, Terms
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.temporaries import (
    Temporaries,
    may_be_fresh,
    may_hold_fresh,
    temporaries_of,
)
from symjax_rewrite.cost.term_cost import is_dot
from symjax_rewrite.errors import KernelError, UsageError, choice
from symjax_rewrite.ir.dataflow import Needed, class_operands, cone, node_of
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.attention_gradients import with_gradient
from symjax_rewrite.kernel_selection.folds.builder import FoldBuilder, FoldRoute, name_addend
from symjax_rewrite.kernel_selection.folds.cluster_keys import in_equal_groups
from symjax_rewrite.kernel_selection.folds.clustering import (
    Cluster,
    ClusterMember,
    Scope,
    clusters,
    direction,
    frame,
    schedule,
)
from symjax_rewrite.kernel_selection.folds.concatenated_reductions import rereads, restated
from symjax_rewrite.kernel_selection.folds.epilogue import FoldSurroundings, Served
from symjax_rewrite.kernel_selection.folds.gathered_columns import Columns
from symjax_rewrite.kernel_selection.folds.mirrored_pairs import mirrored
from symjax_rewrite.kernel_selection.folds.named_sizes import (
    Comparisons,
    price_at,
    with_few,
)
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW, TileBuilder
from symjax_rewrite.kernel_selection.folds.widening import WideRow, wide_rows
from symjax_rewrite.kernel_selection.kernel_candidate import (
    ClassRoute,
    Proposal,
    candidates,
    classes_read,
)
from symjax_rewrite.obstacles import Obstacle, obstacle_of
from symjax_rewrite.pallas_kernels.fold.fold import BACKENDS
from symjax_rewrite.pallas_kernels.scan.scan import SCANS
from symjax_rewrite.rewriting.algebra import giving_way_to_rules
from symjax_rewrite.text_tables import too_slow
from symjax_rewrite.usage_records import ratio_of

Route = FoldRoute | ClassRoute


def known_kernels(kernels: object) -> str:
    """Return the setting `kernels` unchanged.

    Raises:
        UsageError: no such backend.
    """
    known = dict.fromkeys(("auto", "always", "off", *BACKENDS, *SCANS.backends))
    if not isinstance(kernels, str) or kernels not in known:
        raise UsageError("unknown kernels", **choice(kernels, known))
    return kernels


class Folds:
    """Pass that replaces reductions over pairwise terms by folds."""

    name = "fold"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        kernels = context.options.kernels
        if kernels not in ("auto", "always", *BACKENDS) or not context.reorders():
            return
        terms = context.terms(program)
        found = _FoldSelection(context, terms).found(terms.t, terms.need)
        compared = kernels == "auto" and not terms.t.dim_env
        yield from giving_way_to_rules(found, program, context) if compared else found


def taken_folds(program: Program, context: Context) -> Iterator[tuple[FoldRoute, Proposal]]:
    """Yield the folds that pay and stand alone, with their proposals."""
    terms = context.terms(program)
    for p in _FoldSelection(context, terms).decided(terms.t, terms.need)[0]:
        if len(p.routes) == 1 and isinstance(p.routes[0], FoldRoute):
            yield p.routes[0], p


class _FoldSelection:
    """Search for pairwise terms of one program, and the decision which of them become folds.

    samples: the numbers at which named sizes are priced. narrow: True if they stand for all sizes.
    scope: of the search. Loops (`scope.tables`) also support lookups and keyed sums.
    """

    def __init__(self, context: Context, terms: Terms) -> None:
        self.kernels, self.device, self.terms = context.options.kernels, context.device, terms
        self.samples, self.narrow, self.call_s = terms.samples, terms.narrow, context.call_s
        self.beside_s = dict[int, float]()  # of fresh memory, by the id of a cluster
        auto, folds = self.kernels == "auto", self.device.folds
        streamed = ("auto", "always") if folds.streams else ()
        self.scope = Scope(
            least=folds.least_pairs if auto else 0,
            single=not auto or folds.single_rows,
            tables=self.kernels in ("xla", "reference") or folds.streams,
            loops=self.kernels in ("xla", "reference", *streamed),
            sort_share=folds.least_of_sort,
            cancels=context.options.numerics.permits("cancels"),
            rounds=self.device.runs_on_gpu,
        )

    def found(self, t: TermGraph, need: Needed) -> list[Found]:
        """Return the folds and the refused candidates."""
        proposals, refused = self.decided(t, need)
        again = restated(t, need, self.scope.least)
        if again is not None:
            changed, need = again
            apart, refused_apart = self.decided(t, need)
            routes = [r for p in apart for r in p.routes]
            routed = {c for r in routes for c in r.classes()}
            if changed.wanted <= routed:
                hidden = routed - {c for r in routes for c in r.gives()}
                together = [*routes, *rereads(changed, routed, hidden)]
                also = tuple((p.reason, p.where) for p in apart[1:])
                proposals = [apart[0]._replace(routes=together, also=also)]
                refused = refused_apart
        return [*refused, *candidates(t, "fold", proposals)]

    def decided(self, t: TermGraph, need: Needed) -> tuple[list[Proposal], list[Refusal]]:
        """Return the folds of the clusters that are taken, and the refusals of the others."""
        found = clusters(t, need, self.scope)
        if self.kernels == "auto" and jax_internals.may_be_partitioned():
            reason = Obstacle.SHARDING("several devices: XLA might gather a fold's operands")
            for cluster in found:
                cluster.reason = reason
        self._refuse_equal(t, need, [c for c in found if not c.reason])
        made = self._settled(t, need, found, {})
        if self._reopen(t, [found[n] for n in made], found):
            made = self._settled(t, need, found, made)
        refused = [_refusal(cluster) for cluster in found if cluster.reason]
        declined = [Refusal("fold", found[n].declined, found[n].where) for n in sorted(made)]
        refused += [r for r in declined if r.reason]
        return [_proposal(found[n], made[n]) for n in sorted(made)], refused

    def _settled(
        self, t: TermGraph, need: Needed, found: list[Cluster], made: dict[int, list[Route]]
    ) -> dict[int, list[Route]]:
        """Return the routes of the clusters that are left once all others are refused."""
        while any(not c.reason and n not in made for n, c in enumerate(found)):
            # Terms of refused clusters are materialised, so that other folds need more.
            made = self._routes(t, need, found)
        return made

    def _reopen(self, t: TermGraph, taken: list[Cluster], found: list[Cluster]) -> bool:
        """Decide anew about clusters whose terms need fresh memory beside other temporaries.

        The memory of the terms of folds that are taken is gone already. Folds hold what they read
        and give in memory instead. Temporaries of the body of a loop or branch are in the block of
        the whole call.
        """
        terms, device = self.terms, self.device
        dear = [c for c in found if c.seconds and obstacle_of(c.reason) is Obstacle.COST]
        if t is not terms.t or t.dim_env or not (dear and self.call_s):
            return False
        if not (may_be_fresh(t.program, device) and may_hold_fresh(t.program, device)):
            return False
        known = terms.need.outside.union(t.leaf_value)

        def folded(block: Temporaries, c: Cluster) -> Temporaries:
            arrays = [(a, terms.model.class_bytes(t.graph, a)) for a in c.arrays - known]
            return block.replaced(c.classes()[0], dict(arrays))

        def least_s(block: Temporaries) -> float:
            """Return the seconds of a block that is fresh in every call, at rest."""
            return device.page_seconds(block.bytes()) / max(device.margins.fresh, 1.0)

        block = functools.reduce(folded, taken, temporaries_of(t, terms.need, terms.model))
        left_s = least_s(block)
        for c in sorted(dear, key=lambda c: -c.pairs):
            before_s, after_s = c.seconds or (0.0, 0.0)
            if not left_s or not margins.pays(before_s + left_s, after_s, "fold", device):
                continue  # not even if nothing were left
            without = folded(block, c)
            without_s = least_s(without)
            if margins.pays(before_s + left_s - without_s, after_s, "fold", device):
                self.beside_s[id(c)] = left_s - without_s
                c.reason, block, left_s = "", without, without_s
        return bool(self.beside_s)

    def _refuse_equal(self, t: TermGraph, need: Needed, found: list[Cluster]) -> None:
        """Decide one of every group of equal clusters, and refuse all of a group with it."""
        groups = in_equal_groups(t, need, found) if len(found) > 1 else []
        if len(groups) == len(found):
            return
        self._routes(t, need, [group[0] for group in groups])
        for first, *others in groups:
            for c in others if first.reason else ():
                c.reason, c.by_size = first.reason, first.by_size
                c.seconds, c.memory, c.arrays = first.seconds, first.memory, first.arrays

    def _routes(
        self, t: TermGraph, need: Needed, found: list[Cluster], also: frozenset[int] = frozenset()
    ) -> dict[int, list[Route]]:
        """Return the routes of every live cluster; no route at all where one cluster is refused.

        also: row values that folds must return though no fold reads them in the program's dtype.
        """
        asked = {n: c for n, c in enumerate(found) if not c.reason}
        depth = schedule(t, need, [*asked.values()])
        wide, narrow = wide_rows(t, need, asked)
        drafts = {
            n: Draft(t, c, depth, self.scope.tables, None if n in narrow else wide)
            for n, c in asked.items()
        }
        read = Counter(c for d in drafts.values() for each in d.reads() for c in each)
        read.update(also)
        made: dict[int, list[Route]] = {}
        for number in sorted(asked, key=lambda n: -asked[n].pairs):
            cluster = asked[number]
            if cluster.reason:
                continue
            decided = self._decide(t, drafts[number], need, read)
            if isinstance(decided, str):
                cluster.reason = decided
                continue
            made[number] = decided
            _refuse_in_conflict(cluster, found)
        if len(made) != len(asked):
            return {}
        folds = [r for routes in made.values() for r in routes]
        computed = {c for r in folds for c in r.classes()}
        rows = [WideRow.of(t.graph, c) for c in sorted(wide - computed)]
        hidden = computed - {c for r in folds for c in r.gives()}
        wanted = hidden & classes_read(t, [*folds, *rows])
        if not wanted <= also:
            return self._routes(t, need, found, also | wanted)
        made.setdefault(max(made, default=0), []).extend(rows)
        return made

    def _decide(
        self, t: TermGraph, draft: Draft, need: Needed, read: Counter[int]
    ) -> list[Route] | str:
        """Return the routes of a cluster, or the reason it is refused."""
        try:
            folds = draft.finish(self.kernels, need, read)
        except UsageError as error:
            return f"not a fold: {error.what}"
        if not folds:
            return "only one chosen column of each row is read"
        if self.device.folds.streams:
            by_rows = self.device.columns is not None
            folds = [replace(route.in_stored_order(t), by_rows=by_rows) for route in folds]
        if self.device.runs_on_gpu and not draft.choices:
            gradient = with_gradient(t, need, folds, self.scope.cancels)
            draft.cluster.declined = gradient if isinstance(gradient, str) else ""
            folds = gradient if isinstance(gradient, list) else folds
        for route in folds:
            backend = BACKENDS.get(route.backend)
            support = backend.supports(route.spec) if backend else True
            if backend is None and not (streams := BACKENDS["xla"].supports(route.spec)):
                return Obstacle.BACKEND(streams)
            if not support and not route.kernel:
                raise KernelError(f"the {self.kernels} backend cannot run this fold", got=support)
            route.price = functools.partial(price_at, route, t, self.samples[0])
        arrays = (c for route in folds for c in (*route.operands(), *route.gives()))
        draft.cluster.arrays = frozenset(arrays)
        why = self._refused(t, draft.cluster, folds)
        if why and self.kernels == "auto":
            return why
        if self.kernels in ("auto", "always") and self.device.folds.streams:
            device = self.device if self.kernels == "auto" else None
            folds = [mirrored(route, t.primitives, device) for route in folds]
            _note_seconds(draft.cluster, folds, self.device)
        return [*draft.choices, *folds]

    def _refused(self, t: TermGraph, cluster: Cluster, folds: list[FoldRoute]) -> str:
        """Return the reason to refuse folds for their price, or an empty string."""
        beside_s = self.beside_s.get(id(cluster), 0.0)
        in_call = t is self.terms.t and self._is_in_call(cluster)
        compare = Comparisons(t, cluster, folds, self.device, beside_s, in_call)
        found = [compare.at(sample) for sample in self.samples]
        cluster.seconds = found[0].before_s, found[0].after_s
        cluster.memory = margins.memory_note(found[0].saved, self.device)
        if any(c.reordered for c in found):
            return Obstacle.CONFLICT(
                "another order of the product costs less and makes no pairwise term"
            )
        few = compare.few(found) if t.dim_env else 0
        if any(c.pays(self.device) and c.pairs > few for c in found):
            with_few(folds, few if self.kernels == "auto" else 0)
            return ""
        pays = any(c.pays(self.device) for c in found)
        cluster.by_size = bool(t.dim_env) and (pays or not self.narrow)
        least = min(c.least(self.device) for c in found)
        gain = max(c.before_s / c.after_s for c in found)
        where = "" if not t.dim_env else f" at {', '.join(sorted({c.place() for c in found}))}"
        return Obstacle.COST(f"{too_slow(gain, least)}{cluster.memory}{where}")

    def _is_in_call(self, cluster: Cluster) -> bool:
        """Return True if a call of XLA's library computes a cluster's products and reduces them.

        The call cuts rows into tiles, and stores none of the cluster's terms.
        """
        made = {m.reduction.cls for m in cluster.members}
        if not all(is_dot(node_of(self.terms.t.graph, c)) for c in made):
            return False
        return self.terms.stored.isdisjoint(made | cluster.classes()[0])


def _refuse_in_conflict(taken: Cluster, found: list[Cluster]) -> None:
    """Refuse clusters that read pairs that an accepted cluster does not materialise, or vice versa.

    A value materialised for one fold and recomputed inside another is rounded in two ways. Softmax
    weights from one rounding and their sum from the other would not add up to one.
    """
    inner, read = taken.classes()
    for other in found:
        if other is taken or other.reason:
            continue
        inner_of_other, read_by_other = other.classes()
        if inner & read_by_other:
            other.reason = Obstacle.CONFLICT(
                "it reads a pairwise term that another fold does not store"
            )
        elif read & inner_of_other:
            other.reason = Obstacle.CONFLICT(
                "another fold reads the pairwise term it would not store"
            )


def _note_seconds(cluster: Cluster, folds: Sequence[FoldRoute], device: Device) -> None:
    """Note the seconds of a cluster's folds where some compute each pair once."""
    if cluster.seconds and any(route.compute for route in folds):
        prices = [route.price(device).seconds for route in folds if route.price]
        cluster.seconds = cluster.seconds[0], sum(prices)


def _refusal(c: Cluster) -> Refusal:
    ratio = c.seconds and ratio_of(*c.seconds)
    return Refusal("fold", c.reason, c.where, ratio=ratio, by_size=c.by_size)


def _proposal(cluster: Cluster, made: list[Route]) -> Proposal:
    backends = sorted({r.backend for r in made if isinstance(r, FoldRoute)} - {"auto"})
    by = f" ({', '.join(backends)})" if backends else ""
    stored = f"{cluster.extent()} pairs are never stored{by}{cluster.memory}"
    if any(isinstance(r, FoldRoute) and r.compute for r in made):
        stored += "; each is computed once"
    return Proposal(made, stored, cluster.where, cluster.seconds)


class Draft:
    """Folds of a cluster before their epilogues, which depend on the reads of all other folds.

    choices: the reductions that select a column. builders: the folds, with the number of folds that
    precede each.
    """

    def __init__(
        self,
        t: TermGraph,
        cluster: Cluster,
        depth: dict[int, int],
        both_ways: bool,
        wide: frozenset[int] | None,
    ) -> None:
        self.t, self.cluster, self.depth = t, cluster, depth
        self.choices = [_choice(t, m, wide) for m in cluster.members if m.reduction.kind == "at"]
        groups: dict[tuple, list[ClusterMember]] = {}
        for m in cluster.members:
            if m.reduction.kind != "at":
                groups.setdefault((m.level, *direction(cluster, m)), []).append(m)
        exchanged = _exchanged(groups) if both_ways else {}
        self.builders = [
            (key[0], _fold(t, cluster, group, groups.get(exchanged.get(key, ()), []), wide))
            for key, group in groups.items()
            if key not in exchanged.values()
        ]

    def reads(self) -> list[set[int]]:
        """Return the classes that each fold and each column selection reads."""
        return [
            *(b.reads() for _, b in self.builders),
            *(set(c.reads) for c in self.choices),
        ]

    def finish(self, kernels: str, need: Needed, read: Counter[int]) -> list[FoldRoute]:
        """Return the folds; their epilogues return the classes in `read` that they compute."""
        pairwise = self._never_made(read)
        out: list[FoldRoute] = []
        for level, builder in self.builders:
            elsewhere = set(read - Counter(builder.reads()))
            late = {c for c, before in self.depth.items() if before > level}
            around = FoldSurroundings(self.t, need, pairwise, elsewhere, late)
            out.append(builder.finish(kernels, around))
        return out

    def _never_made(self, read: Counter[int]) -> set[int]:
        """Return the pairwise classes that neither a fold nor an operand of a fold reads."""
        inner, _ = self.cluster.classes()
        operands = class_operands(self.t.graph)
        whole = [cls for cls in inner if cls in read]
        return inner - cone(whole, lambda cls: [a for a in operands(cls) if a in inner])


def _exchanged(groups: dict[tuple, list[ClusterMember]]) -> dict[tuple, tuple]:
    """Map groups of candidates to groups that sum the same pairs in the other direction.

    Sums over rows cost a fold slightly more than sums over columns, so the smaller group is reduced
    over rows.
    """
    out: dict[tuple, tuple] = {}
    for key in groups:
        level, row, column, others, along = key
        back = (level, column, row, others, along)
        if along or back not in groups or {key, back} & {*out, *out.values()}:
            continue
        fewer, more = sorted((key, back), key=lambda k: (not _sums(groups[k]), len(groups[k])))
        if _sums(groups[fewer]):
            out[more] = fewer
    return out


def _sums(group: list[ClusterMember]) -> bool:
    """Return True if all candidates are plain sums of the tile."""
    return all(addend.kind in ("sum", "count") for m in group for addend in m.form)


def _fold(
    t: TermGraph,
    cluster: Cluster,
    group: list[ClusterMember],
    exchanged: list[ClusterMember],
    wide: frozenset[int] | None,
) -> FoldBuilder:
    """Return one fold for candidates that wait for the same results.

    The candidates in `exchanged` reduce in the other direction than the group.
    """
    first, pair, found = frame(cluster, group[0]), group[0].pair, group[0].reduction
    name = {first.get(pair.row): ROW, first[pair.column]: COLUMN}
    for i in group[0].space:
        name.setdefault(first[i], f"b{len(name) - 2}")
    batch = tuple(n for n in name.values() if n not in (ROW, COLUMN))
    sizes = {name[first[i]]: t.jax_size(found.sizes[i]) for i in group[0].space}
    tiles = TileBuilder(t, pair, sizes={ROW: 1, **sizes}, wide=wide)
    builder = FoldBuilder(t, (*batch, ROW), tiles)
    for m in (*group, *exchanged):
        ids = frame(cluster, m)
        full: dict[int, Any] = {i: name[ids[i]] for i in m.space}
        form = tuple(name_addend(p, full, tiles) for p in m.form)
        for before, after in zip(m.form, form, strict=True):
            if before.weights is not None and after.weights is not None:
                full.update(zip(before.weights.axes, after.weights.axes, strict=True))
        builder.add(Served(m.reduction, form, full, (*batch, ROW if m in group else COLUMN)))
    return builder


def _choice(t: TermGraph, m: ClusterMember, wide: frozenset[int] | None) -> ClassRoute:
    choice = m.reduction.choice
    assert choice is not None
    count = len(t.graph.classes[m.reduction.cls].sizes)
    names: dict[Any, Any] = {i: f"b{i}" for i in range(count)}
    names |= {m.pair.row: ROW, m.pair.column: COLUMN}
    sizes = {name: t.jax_size(m.reduction.sizes[i]) for i, name in names.items()}
    builder = TileBuilder(t, m.pair, sizes=sizes, wide=wide)
    root = builder.build(choice.table.over(names))
    columns = Columns(builder, tuple(names.values())[:count], choice.place.over(names))
    return columns.chosen(m.reduction.cls, root, choice.fill)
