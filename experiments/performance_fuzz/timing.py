"""Times of several forms of one program, taken in turn, that hold on a busy machine."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

SAMPLE_S = 1e-3  # a sample repeats its call until it is at least this long
LEAST_ROUNDS, MOST_ROUNDS = 7, 60
WAITS = 1.3  # times its core seconds that a form on a machine of its own may take
BOOKED_S = 0.1  # of fewer seconds in all, core seconds may be missing: they are booked in ticks
CLEAR = 0.02  # half the width of an interval of a ratio that is narrow enough
LARGE_BYTES = 31 << 20  # almost the largest block that glibc's allocator keeps once it was freed


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Seconds per call by form, one number per round: by the clock, and of all cores."""

    wall: dict[str, list[float]]
    cores: dict[str, list[float]]

    def seconds(self, name: str) -> float:
        """Return the median time of a call."""
        return statistics.median(self.wall[name])

    def ratio(self, form: str, plain: str) -> float:
        """Return how many times as long a form takes.

        It is the middle one of three estimates: the median of the rounds' ratios, the ratio of the
        shortest samples, and the ratio of core seconds. Where even the shortest sample waited for
        a core, threads wait for each other too, and only core seconds tell the forms apart.
        """
        if self.waits(form) or self.waits(plain):
            return self.of_cores(form, plain)
        rounds = statistics.median(self._ratios(form, plain))
        shortest = min(self.wall[form]) / min(self.wall[plain])
        return statistics.median((rounds, shortest, self.of_cores(form, plain)))

    def waits(self, name: str) -> bool:
        """Return True if other programs held the cores during every sample of a form.

        Of core seconds the median counts: the system books those of threads on another core late,
        so that a sample may lack them and the next one hold them twice. Of few short samples they
        say nothing.
        """
        if sum(max(wall, SAMPLE_S) for wall in self.wall[name]) < BOOKED_S:
            return False
        return min(self.wall[name]) > WAITS * statistics.median(self.cores[name])

    def of_cores(self, form: str, plain: str) -> float:
        """Return the ratio of core seconds: of medians and of means the nearer to 1."""
        middle, mean = (
            of(self.cores[form]) / max(of(self.cores[plain]), 1e-9)
            for of in (statistics.median, statistics.fmean)
        )
        if (middle - 1) * (mean - 1) <= 0:
            return 1.0
        return min(middle, mean, key=lambda r: abs(r - 1))

    def _ratios(self, form: str, plain: str) -> list[float]:
        return [a / b for a, b in zip(self.wall[form], self.wall[plain], strict=True)]

    def is_clear(self, form: str, plain: str) -> bool:
        """Return True if more rounds would hardly change what is concluded."""
        low, _, high = statistics.quantiles(self._ratios(form, plain), n=4)
        slack = (high - low) / len(self.wall[form]) ** 0.5
        middle = self.ratio(form, plain)
        return slack < CLEAR or middle > 1.5 + 3 * slack or middle < 0.6 - 3 * slack


def interleaved(
    calls: Mapping[str, Callable[[], Any]], plain: str, budget_s: float, rounds: int = MOST_ROUNDS
) -> Times:
    """Time callables in turn until the ratios to one of them are clear or the time is spent."""
    free_large_block()
    start = time.perf_counter()
    repeats = {name: _repeats(call) for name, call in calls.items()}
    times = Times({name: [] for name in calls}, {name: [] for name in calls})
    names = list(calls)
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            wall, cores = _sample(calls[name], repeats[name])
            times.wall[name].append(wall)
            times.cores[name].append(cores)
        spent = time.perf_counter() - start
        if number + 1 >= 3 and spent > 2 * budget_s:
            break
        if number + 1 >= LEAST_ROUNDS and (
            spent > budget_s or all(times.is_clear(n, plain) for n in names if n != plain)
        ):
            break
    return times


def free_large_block() -> None:
    """Free a large block of memory, so that the allocator keeps smaller ones from call to call.

    glibc keeps blocks that are no larger than one that was freed before. A block of temporaries
    which ends just below a page seems larger than itself, because of its alignment. In a process
    that freed no larger one its pages are new in every call, which can take as long as the program.
    """
    np.empty(LARGE_BYTES, np.uint8)


def _repeats(call: Callable[[], Any]) -> int:
    took, _ = _sample(call, 1)
    if took < SAMPLE_S:
        took, _ = _sample(call, 3)
    return max(1, round(SAMPLE_S / max(took, 1e-7)))


def _sample(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    cores, start = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / repeats, (time.process_time() - cores) / repeats


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled form. code: its machine-independent text, equal for equal machine code."""

    call: Any
    code: str
    compile_s: float  # seconds of all cores


def compiled(closed: Any, arguments: Sequence[jax.Array]) -> Compiled:
    """Compile a closed jaxpr for flat arguments."""
    lowered = jax.jit(jaxpr_as_fun(closed)).lower(*arguments)
    start = time.process_time()
    call = lowered.compile()
    took = time.process_time() - start
    return Compiled(call, normal(call.as_text() or ""), took)


def normal(text: str) -> str:
    """Return a module's text without source lines, with its values renumbered."""
    text = re.sub(r",? ?metadata=\{[^}]*\}", "", text)
    text = "\n".join(line for line in text.splitlines() if re.match(r"\s|ENTRY|%|}", line))
    number: dict[str, str] = {}
    return re.sub(r"%[\w.\-]+", lambda m: number.setdefault(m[0], f"%{len(number)}"), text)


def least_seconds(call: Callable[[], Any], samples: int = 7) -> float:
    """Return the seconds of a call in the shortest of some samples."""
    jax.block_until_ready(call())
    repeats = _repeats(call)
    return min(_sample(call, repeats)[0] for _ in range(samples))


def seconds_of(function: Any, *args: Any) -> float:
    """Return the least seconds of a call among some samples."""
    call = jax.jit(function).lower(*args).compile()
    return least_seconds(lambda: call(*args))


def array(*shape: int) -> jax.Array:
    """Return normal numbers in float32."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, dtype=np.float32))
