"""The limit of each part of a program: arithmetic, memory or launches, by the cost model.

A part is a source line. The kernels are those of the model: elementwise terms are fused into their
readers, and every kernel takes the longer of its arithmetic and its traffic, the time to get fresh
memory for its result, and a launch. Fresh memory counts as memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import reachable
from symjax_rewrite.ir.flat_program import Equation, flatten
from symjax_rewrite.reports.program_cost import (
    ProgramTerms,
    Sample,
    at_sample,
    bodies_run,
    equation_traffic,
    traffic,
    trips_of,
)

COMPUTE, MEMORY, LAUNCHES = "compute", "memory", "launches"


class KernelTime(NamedTuple):
    """Seconds of a kernel's arithmetic, traffic, fresh memory and launches, with repetitions."""

    where: str
    compute_s: float
    memory_s: float
    fresh_s: float
    launch_s: float

    @property
    def seconds(self) -> float:
        """Return the modelled seconds."""
        return max(self.compute_s, self.memory_s) + self.fresh_s + self.launch_s

    @property
    def limit(self) -> str:
        """Return the resource that takes most of the time."""
        memory = self.memory_s + self.fresh_s
        named = ((self.compute_s, COMPUTE), (memory, MEMORY), (self.launch_s, LAUNCHES))
        return max(named)[1]


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A source line: its modelled seconds, its share of the program, and its limit.

    limit: `compute`, `memory` or `launches`: the limit of the kernels that take most of its time.
    """

    where: str
    seconds: float
    share: float
    limit: str


def bottlenecks(times: Iterable[KernelTime]) -> list[Bottleneck]:
    """Return the parts of a program, the slowest first."""
    by_line: dict[str, dict[str, float]] = {}
    for k in times:
        line = by_line.setdefault(k.where, {})
        line[k.limit] = line.get(k.limit, 0.0) + k.seconds
    whole = sum(sum(line.values()) for line in by_line.values())
    found = []
    for where, line in by_line.items() if whole else ():
        seconds, limit = sum(line.values()), max(line, key=line.__getitem__)
        found.append(Bottleneck(where, seconds, seconds / whole, limit))
    return sorted(found, key=lambda p: -p.seconds)


def kernel_times(terms: ProgramTerms, device: Device, sample: Sample) -> Iterator[KernelTime]:
    """Yield the kernels of a program as the model has them, without unpriced equations."""
    t, choice, model, roots = terms.t, terms.choice, terms.model(device, sample), terms.roots()
    if not t.program.equations:
        return
    facts = {c: model.facts_of(t.graph, c, choice[c]) for c in reachable(choice, roots)}
    written = model.written(facts, roots, set())
    readers: dict[int, int] = {a.cls: c for c in terms.need.order for a in choice[c].args}
    for cls, f in facts.items():
        if f.is_free or cls not in written:
            continue
        line, at = t.where(cls), cls
        while not line and at in readers:
            at = readers[at]
            line = t.where(at)
        yield KernelTime(line, *model.kernel_limits(facts, cls, written, set()))
    for e in terms.equations():
        yield from _equation_times(e, device, sample)


def _equation_times(e: Equation, device: Device, sample: Sample) -> Iterator[KernelTime]:
    bodies = bodies_run(e.eqn, device)
    if not bodies:
        found = equation_traffic(e.eqn, device, sample)
        if found.seconds is not None and found.bytes is not None:
            launch = min(device.launch_s, found.seconds)
            rest = found.seconds - launch
            memory = min(at_sample(found.bytes, sample) / device.bytes_per_s, rest)
            yield KernelTime(e.where(), rest if rest > memory else 0.0, memory, 0.0, launch)
        return
    trips = trips_of(e.eqn)
    if trips is None:
        return
    times = at_sample(trips, sample)
    if e.name == "cond":
        bodies = [max(bodies, key=lambda b: traffic(b, device, sample).seconds or 0)]
    for body in bodies:
        for k in kernel_times(ProgramTerms.of(flatten(body)), device, sample):
            where = k.where or e.where()
            yield KernelTime(where, *(times * seconds for seconds in k[1:]))
