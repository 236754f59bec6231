"""Measuring, for every experiment: interleaved timing, results as JSON, Markdown and PNG.

Two programs are only compared inside one run, sample by sample in turn, so that whatever else the
machine does falls on both. A script finds this file through the folder above its own:

    sys.path.insert(0, str(Path(__file__).parents[1]))
    import harness
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

CPU_SECONDS = time.process_time
CPU_NOTE = "CPU seconds of the process, all threads together, which leave other processes out"


@dataclasses.dataclass(frozen=True, slots=True)
class Ratio:
    """The median of a ratio over the rounds, and its quartiles; of `Draws`, its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_digits(self.median)} [{_digits(self.low)}–{_digits(self.high)}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Samples:
    """Seconds per call of each contestant, one number per round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, numerator: str, denominator: str) -> Ratio:
        """Return the ratios of times `numerator` / `denominator`, round by round."""
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        low, median, high = np.quantile([a / b for a, b in pairs], (0.25, 0.5, 0.75))
        return Ratio(float(median), float(low), float(high))

    def speedups(self) -> dict[str, Ratio]:
        """Return the speed of each contestant relative to the first."""
        first = next(iter(self.seconds))
        return {name: self.ratio(first, name) for name in self.seconds}


def interleave(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int = 15,
    sample_s: float = 1e-2,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time callables in turn, in a new order every round.

    Args:
        calls: what to time, without arguments; each call is waited for.
        rounds: samples per callable.
        sample_s: a sample repeats its call until it is at least this long.
        seed: of the orders.
        clock: what tells the seconds; `time.process_time` leaves other processes out.
    """
    repeats = {name: _repeats(call, sample_s) for name, call in calls.items()}
    order = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            if repeats[name] > 1:
                _sample(calls[name], 1)  # caches hold this program's data, not the last one's
            seconds[name].append(_sample(calls[name], repeats[name], clock))
    return Samples(seconds)


def calls_of(
    programs: Mapping[str, Callable[..., Any]], arguments: Sequence[Any]
) -> dict[str, Callable[[], Any]]:
    """Return programs as calls without arguments, for `interleave`."""
    return {name: functools.partial(f, *arguments) for name, f in programs.items()}


def compiled(programs: Mapping[str, Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """Compile jitted programs for their arguments."""
    return {name: f.lower(*arguments).compile() for name, f in programs.items()}


def temporaries(programs: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that XLA sets aside for compiled programs, beside arguments and results."""
    return {n: int(f.memory_analysis().temp_size_in_bytes) for n, f in programs.items()}


def difference(got: Any, want: Any) -> float:
    """Return the largest difference over the largest wanted value, of the worst array of floats."""
    worst = 0.0
    for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = map(np.asarray, pair)
        if y.dtype.kind in "fc" and y.size:
            worst = max(worst, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)))
    return worst


@dataclasses.dataclass(frozen=True, slots=True)
class Draws:
    """Samples of the same contestants, a run for every draw of the places of their arrays."""

    runs: list[Samples]

    def ratio(self, numerator: str, denominator: str) -> Ratio:
        """The median over the draws of each one's median, and the interval it lies in at 95 %."""
        medians = sorted(run.ratio(numerator, denominator).median for run in self.runs)
        outside = _outside_interval(len(medians))
        return Ratio(statistics.median(medians), medians[outside], medians[-1 - outside])


def _outside_interval(count: int) -> int:
    """Of so many ordered samples, how many at either end the interval of the median leaves out.

    The median lies below the k-th smallest where fewer than k of `count` fair coins fall on heads.
    """
    below, outside = 0.5**count, 0
    while below <= 0.025:
        outside += 1
        below += math.comb(count, outside) * 0.5**count
    return max(outside - 1, 0)


def draw_anew(script: Path, draws: int, *options: str) -> Iterator[dict[str, Samples]]:
    """Return the records of `script --draw N`, in one process per N (see `tell_draw`).

    A product that streams its weights is up to twice as fast or slow by the place of its arrays
    alone, and the places of one process are alike.
    """
    for number in range(draws):
        command = [sys.executable, str(script), "--draw", str(number), *options]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        yield {name: Samples(seconds) for name, seconds in json.loads(told).items()}


def tell_draw(samples: Mapping[str, Samples]) -> None:
    """Print samples for `draw_anew`."""
    print(json.dumps({name: each.seconds for name, each in samples.items()}))


def _sample(
    call: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    start = clock()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (clock() - start) / repeats


def _repeats(call: Callable[[], Any], sample_s: float) -> int:
    _sample(call, 1)  # compiles
    repeats = 1
    while (took := _sample(call, repeats) * repeats) < sample_s:
        repeats = max(repeats + 1, int(1.2 * repeats * sample_s / max(took, 1e-7)))
    return repeats


@dataclasses.dataclass(frozen=True, slots=True)
class BuildTime:
    """Seconds spent before a program first runs: medians, every cache cleared before each round."""

    optimise_s: float  # from the jaxpr to the chosen one: Report.time_s
    optimise_first_s: float  # the same in the first round
    trace_lower_s: float  # the plain program, Python to StableHLO
    compile_s: float  # the plain program, StableHLO to machine code
    compile_after_s: float  # the rewritten program

    @property
    def share(self) -> float:
        return self.optimise_s / self.compile_s


def build_time(
    fun: Callable, transform: Callable, specs: Sequence[Any], rounds: int = 3
) -> BuildTime:
    """Optimiser time against XLA's compile time of the same function.

    Args:
        fun: the function as written.
        transform: `sym_optimize`, or anything that gives a jit object with `.explain`.
        specs: what `fun` takes, as arrays or shapes.
        rounds: how often; each starts from a new function object.
    """
    optimise, lower, compile_, compile_after = [], [], [], []
    for _ in range(rounds):
        jax.clear_caches()
        plain, optimised = jax.jit(_anew(fun)), transform(_anew(fun))
        optimise.append(optimised.explain(*specs).time_s)
        lower.append(seconds_of(lambda plain=plain: plain.lower(*specs)))
        compile_.append(seconds_of(plain.lower(*specs).compile))
        compile_after.append(seconds_of(optimised.lower(*specs).compile))
    medians = (statistics.median(column) for column in (lower, compile_, compile_after))
    return BuildTime(statistics.median(optimise), optimise[0], *medians)


def _anew(fun: Callable) -> Callable:
    return lambda *args: fun(*args)


def seconds_of(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call, which is not waited for."""
    start = clock()
    call()
    return clock() - start


def fitted_power(seconds: Mapping[float, float]) -> tuple[float, float]:
    """Fit seconds = eᵇ·nᵖ by least squares on logarithms; return p and b."""
    p, b = np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)
    return float(p), float(b)


def parser(doc: str, rounds: int = 9, named: str = "") -> argparse.ArgumentParser:
    """Return the options that scripts share; files are written only under `--write`.

    named: what `--only` chooses by name, for scripts that have it.
    """
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="small sizes, a smoke test")
    options.add_argument("--write", action="store_true", help="write table, figure and results")
    options.add_argument("--rounds", type=int, default=rounds)
    if named:
        options.add_argument("--only", default="", help=f"{named} whose names contain this")
    return options


def specs_of(tree: Any) -> Any:
    """The shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def machine() -> dict[str, Any]:
    """Return the machine and the versions of a measurement."""
    names = ("jax", "jaxlib", "numpy", "symjax_rewrite", "enzyme_ad")
    device = jax.devices()[0]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "device": f"{device.platform}: {device.device_kind}",
        "python": platform.python_version(),
        "versions": {name: version for name in names if (version := _version(name))},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((ln.split(":")[1].strip() for ln in lines if ln.startswith("model name")), "?")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def write_json(path: Path, results: Any) -> None:
    """Results, with the machine they were measured on, as a committable file."""
    record = {"machine": machine(), "results": results}
    text = json.dumps(record, indent=1, default=_plain, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.item() if hasattr(value, "item") else str(value)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells)


def write_table(readme: Path, *parts: str, name: str = "table") -> None:
    """Replace what stands between the markers of a table in a README, machine line included."""
    where = machine()
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    note = f"{where['date']}, {where['cores']} cores of {where['cpu']}, {versions}."
    write_between(readme, name, *parts, note)


def write_between(readme: Path, name: str, *parts: str) -> None:
    """Replace what stands between the markers `<!-- name -->` and `<!-- /name -->`."""
    text = readme.read_text(encoding="utf-8")
    opens, closes = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = text.split(opens, 1)
    after = rest.split(closes, 1)[1]
    body = "\n\n".join(parts)
    readme.write_text(f"{before}{opens}\n{body}\n{closes}{after}", encoding="utf-8")


def bars(path: Path, title: str, values: Mapping[str, Mapping[str, float]], log: bool = True):
    """Grouped horizontal bars, `values[series][label]`, as a PNG."""
    plt = pyplot()
    labels = list(dict.fromkeys(label for series in values.values() for label in series))
    height = 0.8 / len(values)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.2 * len(labels) * len(values)))
    for rank, (name, series) in enumerate(values.items()):
        places = [labels.index(label) + rank * height for label in series]
        axes.barh(places, list(series.values()), height, label=name)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(labels))], labels)
    axes.invert_yaxis()
    axes.axvline(1, color="black", lw=0.8)
    _finish(figure, axes, path, title, "log" if log else "linear", None)


def lines(
    path: Path,
    title: str,
    values: Mapping[str, Mapping[float, float]],
    labels,
    log=True,
    level: float | None = None,
):
    """One line per series, `values[series][x] = y`; `labels` names both axes; `level` is a y."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, series in values.items():
        axes.plot(list(series), list(series.values()), "o-", label=name)
    if level is not None:
        axes.axhline(level, color="black", lw=0.8)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    scale = "log" if log else "linear"
    _finish(figure, axes, path, title, scale, scale)


def pyplot():
    """Return matplotlib for files, not windows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _finish(figure, axes, path: Path, title: str, x_scale: str, y_scale: str | None) -> None:
    axes.set_xscale(x_scale)
    if y_scale:
        axes.set_yscale(y_scale)
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """Seconds for a reader: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def quantity(value: float, unit: str) -> str:
    """A count for a reader: 1.23 GFLOP."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
