"""Prices of folds whose sizes are names: the same comparison at several samples of the sizes.

A fold of few pairs gains nothing, and one of many pairs is several times faster. The emitted fold
therefore computes few pairs in one block, as the program is written, and streams more. The number
that divides both is read from the samples. A fold is taken if it pays at some sample and loses at
none. Otherwise the refusal names a fact about the sizes that would decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.profile_groups import Kind
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.sizes import from_jax
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.clustering import Cluster
from symjax_rewrite.kernel_selection.folds.fold_price import (
    compared,
    cost_folded,
    gpu_kernels,
    reorders,
)
from symjax_rewrite.pallas_kernels.fold.tiling import xla_blocks

Sample = Mapping[str, int]
MOST_DOUBLINGS = 12  # of one size, to find the number of pairs from which folds pay


class Comparison(NamedTuple):
    """Predicted seconds of pairwise terms as written and as folds, at one sample of the sizes.

    pairs: of the fold with fewest. saved: bytes of the terms in memory. reordered: another order
    of the products costs less. kind: selects the margin.
    """

    sample: Sample
    before_s: float
    after_s: float
    pairs: int
    saved: float
    reordered: bool
    kind: Kind

    def place(self) -> str:
        """Return the sample as text."""
        return " ".join(f"{name} = {size}" for name, size in sorted(self.sample.items()))

    def pays(self, device: Device) -> bool:
        """Return True if the folds are predicted enough faster."""
        return margins.pays(self.before_s, self.after_s, self.kind, device, self.saved)

    def least(self, device: Device) -> float:
        """Return the least predicted speedup for which the folds are taken."""
        return margins.margin(self.kind, device, self.saved)

    def loses(self, device: Device) -> bool:
        """Return True if the folds are predicted slower."""
        return not margins.pays(self.before_s, self.after_s, "even", device, self.saved)


class Comparisons:
    """The comparisons of one cluster with its folds at the samples of the named sizes.

    beside_s: seconds of fresh memory that its terms need beside other temporaries. in_call: True if
    a call of XLA's library computes its terms and reduces its results.
    """

    def __init__(
        self,
        t: TermGraph,
        cluster: Cluster,
        folds: Sequence[FoldRoute],
        device: Device,
        beside_s: float = 0.0,
        in_call: bool = False,
    ) -> None:
        self.t, self.cluster, self.folds, self.device = t, cluster, folds, device
        self.beside_s, self.in_call = beside_s, in_call

    def at(self, sample: Sample) -> Comparison:
        """Compare the cluster as written with its folds at one sample."""
        t, device = self.t, self.device
        with t.at(sample):
            routes = [at_sample(r, t) for r in self.folds]
            reordered = reorders(t, self.cluster, routes, device)
            beside = self.beside_s, self.in_call
            before, after, saved = compared(t, self.cluster, routes, device, *beside)
            if all(r.spec.named and xla_blocks(r.spec).steps(r.spec) == 1 for r in routes):
                after = before  # one block holds all pairs: the operations are those written
            pairs = min(math.prod((*r.spec.batch_shape, r.spec.rows, r.spec.cols)) for r in routes)
            looped = device.runs_on_gpu and not all(gpu_kernels(r, device) for r in routes)
        kind: Kind = "streamed" if looped else "fold"
        return Comparison(sample, before, after, pairs, saved, reordered, kind)

    def few(self, found: Sequence[Comparison]) -> int:
        """Return the number of pairs up to which folds lose; 0 if they lose nowhere."""
        lost = [c for c in found if c.loses(self.device)]
        if not lost:
            return 0
        start = max(lost, key=lambda c: c.pairs)
        return max([start.pairs, *(c.pairs for c in self._beyond(start))])

    def _beyond(self, start: Comparison) -> Iterator[Comparison]:
        """Yield larger comparisons in which the folds lose too, one size doubled at a time."""
        for name in start.sample:
            size = start.sample[name]
            for _ in range(MOST_DOUBLINGS):
                size *= 2
                larger = self.at({**start.sample, name: size})
                if not larger.loses(self.device):
                    break
                yield larger


def at_sample(route: FoldRoute, t: TermGraph) -> FoldRoute:
    """Return a fold with the sample's numbers in place of named sizes, for a price."""
    spec = route.spec
    if not spec.named:
        return route
    sizes = tuple([(a, t.number(from_jax(n))) for a, n in spec.sizes])
    return replace(route, spec=replace(spec, sizes=sizes))


def price_at(route: FoldRoute, t: TermGraph, sample: Sample, device: Device) -> Cost:
    """Return the cost of a fold at a sample of the named sizes."""
    with t.at(sample):
        return cost_folded(at_sample(route, t), device)


def with_few(routes: Sequence[FoldRoute], few: int) -> None:
    """Compute few pairs of named sizes in one block."""
    for route in routes:
        if route.spec.named:
            route.spec = replace(route.spec, few=few)
