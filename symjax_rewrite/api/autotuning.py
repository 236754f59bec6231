"""Autotuning: the choice among candidates by time measured on the device.

With `tune=True` the program that the model chooses is the start. Each candidate, taken or predicted
to be a little too expensive, is switched in turn. A switch stays if the program is faster by more
than noise. At the end the best program and the program as written are timed once more, and the
original is kept unless the other is faster. The search ends at the device's bandwidth, or where the
other candidates could gain no more than noise. Follows the search of autotuners that keep the best
set so far (CubeCL's autotune ends at the measured roofline; cuTENSOR's plan cache keeps measured
plans).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.api import tuning_cache
from symjax_rewrite.api.tuning_cache import WRITTEN
from symjax_rewrite.calibration.progress import Progress
from symjax_rewrite.calibration.timing import sampled, spread
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.cost.near_margins import near
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.optimizer import Optimiser, Result
from symjax_rewrite.options import log, logger
from symjax_rewrite.signatures import Seen, Selection
from symjax_rewrite.text_tables import duration
from symjax_rewrite.usage_records import RouteUse, fingerprint

ROUNDS = 7
SAMPLE_S = 5e-3  # minimum time of a sample; a sample repeats its call
MOST_TRIALS, MOST_S = 32, 120.0  # programs that are measured, and seconds of a search
SHORT_S = 20e-6  # a faster program is a call and little beside it
AT_ROOFLINE = 1.1  # times the least time of any form
OFF = 3.0  # times the gain that the model predicts, a real gain may be
MODEL, BEST, OTHER = "as the model chooses", "best", "other"
Choices = frozenset[str]
Times = dict[str, list[float]]


def unmeasurable(closed: ClosedJaxpr) -> str | None:
    """Return the reason why a program can't be run on generated inputs, or None."""
    if jax.process_count() > 1:
        return "all processes of a program must choose alike"
    if jax_internals.jaxpr_effects(closed):
        return "it has effects"
    if jax_internals.has_primitive(closed, "while"):
        return "how often its loops run depends on the inputs"
    for v in closed.jaxpr.invars:
        aval = v.aval
        if any(jax_internals.is_symbolic(d) for d in aval.shape):
            return "it has symbolic sizes"
        if getattr(aval.dtype, "kind", "?") not in "fciubV":
            return f"no inputs are made up for {aval.dtype}"
    return None


@dataclass(slots=True)
class Trial:
    """A program that is measured.

    choices: signatures of its candidates; None for those of the model. text: of the program; equal
    programs are measured once.
    """

    choices: Choices | None
    result: Result
    text: str


def samples(trials: Mapping[str, Trial], closed: ClosedJaxpr) -> Times:
    """Return seconds of a call of each program, one number per round, in turn on the same inputs.

    Float inputs are normally distributed. Other inputs are zeros, which are in range as indices.
    """
    with jax.ensure_compile_time_eval():
        inputs = _inputs([v.aval for v in closed.jaxpr.invars])
        calls: dict[str, Callable[[], object]] = {}
        for name, trial in trials.items():
            compiled = jax.jit(trial.result.emit()).lower(*inputs).compile()
            calls[name] = lambda compiled=compiled: jax.block_until_ready(compiled(*inputs))
        return sampled(calls, ROUNDS, SAMPLE_S)


def is_faster(one: Sequence[float], other: Sequence[float], device: Device) -> bool:
    """Return True if `one` is faster by more than noise: by the margin, and in most rounds."""
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    enough = margins.pays(1.0, statistics.median(ratios), "measured", device)
    return enough and ratios[3 * len(ratios) // 4] < 1


def tuned(result: Result, optimiser: Optimiser, known: dict[str, tuning_cache.Entry]) -> Result:
    """Return the fastest program that is found, with a record of the measurements.

    result: of the model; kept where nothing can be measured. known: the measurements
    of this process, by program; an entry is added.
    """
    if (reason := unmeasurable(result.closed)) is not None:
        result.declined(RouteUse("tune", False, Obstacle.MEASUREMENT(f"not measured: {reason}")))
        return result
    search = _Tuning(result, optimiser)
    program = fingerprint(result.closed)
    kept = known.get(program) or tuning_cache.load(result.closed, optimiser)
    if kept is not None and (found := search.replayed(kept)) is not None:
        return found
    search.find()
    if not search.seen:
        result.declined(RouteUse("tune", False, "not measured: there is no other form"))
        return result
    best, times = search.run()
    measured = {name: (statistics.median(t), spread(t)) for name, t in times.items()}
    known[program] = entry = tuning_cache.Entry(best.choices, measured)
    tuning_cache.store(result.closed, optimiser, entry)
    return search.reported(best, measured, "measured", search.stop)


@dataclass(slots=True)
class _Tuning:
    """The search among the candidates of one program.

    model: the result of the model. seen: candidates by signature. preferred: those of the model.
    stop: the reason why the search ended.
    """

    model: Result
    optimiser: Optimiser
    tuner: Optimiser = field(init=False)
    seen: dict[str, Seen] = field(default_factory=dict)
    preferred: Choices = frozenset()
    texts: set[str] = field(default_factory=set)
    stop: str = ""

    def __post_init__(self) -> None:
        of = self.optimiser
        self.tuner = Optimiser(of.options, of.rules, near(of.device))

    def find(self) -> None:
        """Find the candidates of the model, and those that it refuses for a small loss."""
        of = self.optimiser
        plain = Optimiser(of.options, of.rules, of.device)
        self.preferred = self._run(plain, None)[1]
        self._run(self.tuner, None)

    def _run(self, optimiser: Optimiser, choices: Choices | None) -> tuple[Result, Choices]:
        """Return the result with some candidates, or all; and the candidates that were found."""
        selection = optimiser.selection = Selection(choices)
        result = optimiser.run(self.model.closed)
        self.seen = {**selection.seen, **self.seen}
        return result, frozenset(selection.seen)

    def trial(self, choices: Choices) -> Trial:
        """Return the program with these candidates and no others."""
        result, _ = self._run(self.tuner, choices)
        return Trial(choices, result, _text(result))

    def start(self) -> dict[str, Trial]:
        """Return the program as written, and as the model chooses where that differs."""
        written = self.trial(frozenset())
        chosen, text = self.trial(self.preferred), _text(self.model)
        if chosen.text != text:  # margins decide about a part of a candidate
            chosen = Trial(None, self.model, text)
        trials = {WRITTEN: written} | ({MODEL: chosen} if text != written.text else {})
        self.texts = {t.text for t in trials.values()}
        return trials

    def run(self) -> tuple[Trial, Times]:
        """Return the best program, and the times of it, of the model's, and as written."""
        closed, shown = self.model.closed, Progress("tuning")
        first = self.start()
        times = samples(first, closed)
        best = first[self._fastest(times)]
        least_s, began = min(map(statistics.median, times.values())), time.perf_counter()
        done: set[str] = set()
        while (name := self._next(done, least_s)) is not None:
            done.add(name)
            if len(done) > MOST_TRIALS or time.perf_counter() - began > MOST_S:
                self.stop = "the limit of a search is reached"
                break
            shown.show(len(done), len(self.seen), self.seen[name].name)
            trial = self.trial((self.preferred if best.choices is None else best.choices) ^ {name})
            if trial.text in self.texts:
                continue
            self.texts.add(trial.text)
            try:
                found = samples({BEST: best, OTHER: trial}, closed)
            except jax.errors.JaxRuntimeError as error:  # it needs more memory than there is, say
                logger.info("tune: %s is left out: %s", self.seen[name].name, error)
                continue
            log("cost", "tune: %s: %s", self.seen[name].name, found)
            if is_faster(found[OTHER], found[BEST], self.optimiser.device):
                best, least_s = trial, statistics.median(found[OTHER])
        shown.close()
        return self._confirmed(best, first, times)

    def _fastest(self, times: Times) -> str:
        """Return the name of the program to start from: the model's unless slower than written."""
        if MODEL not in times:
            return WRITTEN
        slower = is_faster(times[WRITTEN], times[MODEL], self.optimiser.device)
        return WRITTEN if slower else MODEL

    def _next(self, done: set[str], least_s: float) -> str | None:
        """Return the candidate to switch next, the one of the highest predicted effect.

        least_s: of the best program so far.
        """
        if least_s < SHORT_S:
            self.stop = "the program is too short"
            return None
        if least_s < AT_ROOFLINE * self.roofline_s():
            self.stop = "its inputs and outputs take as long"
            return None
        left = {name: seen for name, seen in self.seen.items() if name not in done}
        device = self.optimiser.device
        worth = {
            name: seen
            for name, seen in left.items()
            if seen.saved_s is None
            or margins.pays(least_s, least_s - OFF * abs(seen.saved_s), "measured", device)
        }
        if not worth:
            self.stop = (
                "nothing can gain more than noise" if left else "every candidate is measured"
            )
            return None
        infinite = float("inf")
        effect = lambda n: infinite if (s := worth[n].saved_s) is None else abs(s)  # noqa: E731
        return max(worth, key=lambda n: (effect(n), n))

    def roofline_s(self) -> float:
        """Return the seconds in which inputs and outputs move at the rate of caches."""
        closed, device = self.model.closed, self.optimiser.device
        moved = sum(map(aval_bytes, (*closed.in_avals, *closed.out_avals)))
        fastest = device.bytes_per_s
        if moved <= device.memory.step_cache_bytes:
            fastest *= max(device.memory.cached_terms, device.memory.cached_step)
        return moved / fastest

    def _confirmed(self, best: Trial, first: dict[str, Trial], times: Times) -> tuple[Trial, Times]:
        """Return the best program if it is faster than as written in a second measurement."""
        written = first[WRITTEN]
        if best.text == written.text:
            return written, times
        same = next((name for name, t in first.items() if t.text == best.text), None)
        name = same or self._difference(best)
        again = samples({name: best, **first}, self.model.closed)
        if is_faster(again[name], again[WRITTEN], self.optimiser.device):
            return best, again
        return written, again

    def _difference(self, best: Trial) -> str:
        """Return in words how a program differs from the model's choice."""
        named = lambda some: [self.seen[c].name for c in sorted(some)]  # noqa: E731
        chosen = best.choices or frozenset()
        words = [f"with {name}" for name in named(chosen - self.preferred)]
        words += [f"without {name}" for name in named(self.preferred - chosen)]
        return " and ".join(dict.fromkeys(words))

    def replayed(self, kept: tuning_cache.Entry) -> Result | None:
        """Return the program of a stored choice, or None if its candidates are not found."""
        best = Trial(None, self.model, "") if kept.choices is None else self.trial(kept.choices)
        if best.choices is not None and not best.choices <= self.seen.keys():
            path = tuning_cache.place(self.model.closed, self.optimiser)
            tuning_cache.ignored(path, "it names candidates that this program does not have")
            return None
        return self.reported(best, kept.measured, "measured before")

    def reported(
        self, best: Trial, measured: tuning_cache.Measured, how: str, stop: str = ""
    ) -> Result:
        """Return the result of a trial, with the measurements in its record."""
        ordered = sorted(measured.items(), key=lambda item: item[1][0])
        parts = [f"{name} {duration(s)} ± {by:.0%}" for name, (s, by) in ordered]
        text = f"{how}: {', '.join(parts)}" + (f"; {stop}" if stop else "")
        result, taken = best.result, best.choices != frozenset() and best.result.taken
        if not taken:
            result = Result(self.model.closed, stop="measured: nothing is faster")
            result.choices = frozenset()
        seconds = None
        if taken:
            least = min(s for name, (s, _) in measured.items() if name != WRITTEN)
            seconds = (measured[WRITTEN][0], least)
        result.routes.append(RouteUse("tune", taken, text, seconds=seconds))
        return result


def _text(result: Result) -> str:
    """Return the text of the program that a result emits."""
    if not result.taken:
        return str(result.closed.jaxpr)
    if result.emitted is None:
        result.emitted = jax_internals.make_jaxpr(result.emit(), *result.closed.in_avals)[0]
    return str(result.emitted.jaxpr)


def _inputs(avals: Sequence[Any]) -> list[Any]:
    draw = np.random.default_rng(0)
    out = []
    for aval in avals:
        inexact = jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)
        values = draw.standard_normal(aval.shape) if inexact else np.zeros(aval.shape)
        out.append(jax.numpy.asarray(values.astype(aval.dtype)))
    return out
