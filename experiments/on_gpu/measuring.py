"""Cases and their contestants: compiled, compared with a definition, timed in turn, recorded.

A contestant is a function of the case's operands, timed by a chain of calls (`chains`). Several
processes may share the cases. They compile at the same time and take turns on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
from on_gpu.chains import UNROLLED, call_count, chained, error

from symjax_rewrite.errors import KernelError

CALLS = 50  # dependent calls in one program, at least, where a call is short
SLOW_CALLS = 2  # the same, where a call takes tens of milliseconds
CACHE_BYTES = 1 << 27  # copies of the operands are larger together than the largest L2
MOST_COPIES = 32
CASE_S = 8.0  # seconds for the samples of one case
BROKEN = 3  # the exit status of a process whose device answers no more
WHEELS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")

Contestant = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape and the contestants on it.

    Args:
        name: the key of its record.
        facts: what `fit` needs to price it, as JSON.
        operands: `operands(seed)` makes the arrays on the device.
        contestants: by name; all give the same tree of results.
        reference: gives what `part` cuts from a contestant's results, in f32; or the name of a
            contestant that the others are compared with.
        part: cuts out the part of the results that `reference` computes.
        flops: multiplications and additions of one call; 0 where bytes matter alone.
        timed: False where only errors are asked.
        limit: the largest error of right values; None where any is recorded.
        tuned: contestants for which the compiler runs trials: compiled while nothing else runs.
        slow: contestants of which few calls are chained: one takes tens of milliseconds.
        calls, unrolled: calls of the timed program and of one step of its loop, at least.
        most_copies: of the operands.
    """

    name: str
    facts: dict[str, Any]
    operands: Callable[[int], list[Any]]
    contestants: dict[str, Contestant]
    reference: Contestant | str | None = None
    part: Callable[[Any], Any] = lambda out: out
    flops: float = 0.0
    timed: bool = True
    limit: float | None = None
    tuned: frozenset[str] = frozenset()
    slow: frozenset[str] = frozenset()
    calls: int = CALLS
    unrolled: int = UNROLLED
    most_copies: int = MOST_COPIES

    @property
    def size(self) -> int:
        """Bytes of the operands."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.shapes)

    @functools.cached_property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the operands; those that are timed are large, and not made."""
        made = self.operands(0) if not self.timed else jax.eval_shape(lambda: self.operands(0))
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made]


@dataclasses.dataclass(frozen=True)
class Later:
    """A case that is made when it is run: making it takes time."""

    name: str
    make: Callable[[], Case]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case with the programs that are compiled before its turn, or why one is not."""

    case: Case
    copies: int
    programs: dict[str, Any]
    failures: dict[str, dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The setting of a run: the file of records, the deadline, and the size of the cases.

    only: a case is run if its name contains this text.
    share: which of how many parts of the cases this process runs.
    resume: cases that have a record are not run again.
    """

    out: Path
    ends: float
    dry: bool = False
    rounds: int = 5
    only: str = ""
    share: tuple[int, int] = (0, 1)
    resume: bool = False

    def calls(self, case: Case, name: str) -> int:
        """Return how many calls of a contestant are chained, at least."""
        return SLOW_CALLS if self.dry or name in case.slow else case.calls

    def chosen(self, cases: Iterator[Case | Later], path: Path) -> list[Case]:
        """Return the cases of this process."""
        done = {r["case"] for r in read_part(path.stem, self.out)} if self.resume else ()
        named = [c for c in cases if self.only in c.name]
        (k, of), count = self.share, len(named)
        mine = [c for c in named[count * k // of : count * (k + 1) // of] if c.name not in done]
        return [c.make() if isinstance(c, Later) else c for c in mine]

    @contextlib.contextmanager
    def turn(self, alone: bool = True) -> Iterator[None]:
        """Have the device alone, or with others that compile."""
        with (self.out / "turn.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield

    def is_over(self) -> bool:
        return time.monotonic() > self.ends

    def copies(self, case: Case) -> int:
        """Return how many copies of the operands are rotated."""
        if self.dry or not case.timed:
            return 1 + case.timed
        return min(max(-(-CACHE_BYTES // max(case.size, 1)), 1), case.most_copies)


def run_part(part: str, cases: Iterator[Case | Later], run: Run, together: bool = False) -> Path:
    """Measure the cases of a part in order; append one record after each.

    Args:
        part: names the file of records.
        cases: all cases; those of `run`'s share are measured.
        run: the setting.
        together: compile all cases before the first is timed, while other processes do so too.
    """
    path = run.out / f"{part}.jsonl"
    run.out.mkdir(parents=True, exist_ok=True)
    where = machine()
    chosen = run.chosen(cases, path)
    if together:
        with run.turn(alone=False):
            todo = [prepare(case, run) for case in chosen if not run.is_over()]
    else:
        todo = chosen
    for case in todo:
        made = case if isinstance(case, Prepared) else prepare(case, run)
        if run.is_over():
            print(f"{part}: the deadline is over before {made.case.name}", flush=True)
            break
        with run.turn() if made.case.timed else contextlib.nullcontext():
            found = measure(made, run)
        about = {"part": part, "case": made.case.name, "facts": made.case.facts}
        line = json.dumps({**about, **found, "machine": where}, ensure_ascii=False) + "\n"
        with path.open("ab", buffering=0) as file:
            file.write(line.encode())
        print(f"{part}: {made.case.name}: {summary(found['contestants'])}", flush=True)
        if any(_is_broken(record) for record in found["contestants"].values()):
            raise SystemExit(BROKEN)
    return path


def read_part(part: str, out: Path) -> list[dict[str, Any]]:
    """Return the records of a part, the last one of every case; empty where it was not run."""
    path = out / f"{part}.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return list({record["case"]: record for record in map(json.loads, lines)}.values())


def machine() -> dict[str, Any]:
    """Return date, device and versions, those of the GPU's libraries too."""
    found = harness.machine()
    for wheel in WHEELS:
        try:
            found["versions"][wheel] = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return found


def prepare(case: Case, run: Run) -> Prepared:
    """Compile the contestants of a case, but those that the compiler tunes on the device."""
    made = Prepared(case, run.copies(case), {}, {})
    for name in case.contestants:
        if name not in case.tuned:
            _compile(made, name, run)
    return made


def _compile(made: Prepared, name: str, run: Run) -> None:
    """Compile a contestant of a case, or note why not."""
    if run.is_over():
        made.failures[name] = {"not_run": "the deadline was over"}
        return
    program, failure = _attempt(_compiled, made, name, run)
    if failure:
        made.failures[name] = failure
    else:
        made.programs[name] = program


def _compiled(made: Prepared, name: str, run: Run) -> tuple[dict, Callable]:
    """Return what is known of a program before it runs, and the program of sets of operands."""
    case, fun = made.case, made.case.contestants[name]
    record: dict[str, Any] = {}
    if hasattr(fun, "explain"):
        report = fun.explain(*case.shapes)
        routes = report.routes
        record["predicted_s"] = {"written": report.before.seconds, "chosen": report.after.seconds}
        record["changes"] = sorted({change.name for change in report.changes})
        record["taken"] = [f"{r.name}: {r.reason}" for r in routes if r.taken]
        record["not_taken"] = [f"{r.name}: {r.reason}" for r in routes if not r.taken]
    start = time.monotonic()
    if case.timed:
        run_all = functools.partial(chained, fun, run.calls(case, name), unrolled=case.unrolled)
    else:
        run_all = lambda sets: (0, [fun(*sets[0])])  # noqa: E731  one call, as a chain's results
    program = jax.jit(run_all).lower([case.shapes] * made.copies).compile()
    record["compile_s"] = time.monotonic() - start
    record["temporaries"] = program.memory_analysis().temp_size_in_bytes
    return record, program


def measure(made: Prepared, run: Run) -> dict[str, Any]:
    """Return the record of a case: every contestant's samples and error, or why it has none.

    `temporaries` are bytes of the program that was run: of the whole chain where times are taken.
    """
    case, copies = made.case, made.copies
    sets = [case.operands(seed) for seed in range(copies)]
    for name in case.contestants:
        if name in case.tuned:
            _compile(made, name, run)
    told: dict[str, Any] = {"bytes": case.size, "copies": copies}
    want, failure = _attempt(_wanted, made, sets)
    told |= {"reference": failure} if failure else {}
    records, calls = {}, {}
    for name in case.contestants:
        if name in made.failures:
            records[name] = made.failures[name]
            continue
        if any(_is_broken(record) for record in records.values()):
            records[name] = {"not_run": "the device failed before"}
            continue
        record, program = made.programs[name]
        error_of, failure = _attempt(_checked, program, sets, want, case)
        records[name] = failure or record | error_of
        if not failure and case.timed:
            calls[name] = functools.partial(program, sets)
    if any(_is_broken(record) for record in records.values()):
        calls = {}
    samples, failure = _attempt(_samples, calls, run, CASE_S)
    for name in calls if failure else ():
        records[name] |= failure
    for name, seconds in (samples or {}).items():
        count = call_count(run.calls(case, name), copies, case.unrolled)
        each = [s / count for s in seconds]
        records[name] |= {"calls": count, "seconds": each, "median_s": statistics.median(each)}
        if case.flops:
            records[name]["tflops"] = case.flops / statistics.median(each) / 1e12
    return {**told, "contestants": records}


def _is_broken(record: dict[str, Any]) -> bool:
    """Return True if an error leaves the process without its device."""
    return any(
        word in record.get("failed", "") for word in ("ILLEGAL", "MISALIGNED", "LAUNCH_FAIL")
    )


def _attempt(fun: Callable, *args: Any) -> tuple[Any, dict[str, str] | None]:
    """Return a result, or what is recorded of the error: one contestant's, the part goes on."""
    try:
        return fun(*args), None
    except KernelError as reason:  # the backend says that it does not run the case
        return None, {"refused": str(reason)[:500]}
    except Exception as reason:
        return None, {"failed": f"{type(reason).__name__}: {str(reason)[:500]}"}


def _wanted(made: Prepared, sets: list[list[Any]]) -> Any:
    """Return the values of a case's reference; None where it has none, or none that compiled."""
    reference = made.case.reference
    if callable(reference):
        with jax.default_matmul_precision("highest"):
            return jax.block_until_ready(jax.jit(reference)(*sets[0]))
    found = made.programs.get(reference or "")
    return found and _first(found[1], sets, made.case)


def _first(program: Callable, sets: list[list[Any]], case: Case) -> Any:
    """Return the results of the call on the first set, as the reference has them."""
    _, made = program(sets)
    return jax.block_until_ready(case.part(made[0]))


def _checked(program: Callable, sets: list[list[Any]], want: Any, case: Case) -> dict[str, Any]:
    """Run a program once; return the error of its results."""
    got = _first(program, sets, case)
    if want is None:
        return {}
    found: dict[str, Any] = {"error": float(error(got, want))}
    if case.limit is not None:
        found["right"] = found["error"] <= case.limit  # False for a NaN
    return found


def _samples(calls: dict[str, Callable], run: Run, budget_s: float) -> dict[str, list[float]]:
    """Return the seconds of every program's samples, taken in turn within the budget."""
    if not calls:
        return {}
    start = time.monotonic()
    for call in calls.values():
        jax.block_until_ready(call())
    rounds = int(budget_s / max(time.monotonic() - start, 1e-6))
    return harness.interleave(calls, max(1, min(rounds, run.rounds)), sample_s=0).seconds


def summary(contestants: dict[str, dict[str, Any]]) -> str:
    """Return a line on the contestants, the fastest first."""
    order = sorted(contestants.items(), key=lambda item: item[1].get("median_s", math.inf))
    return "; ".join(f"{name} {_told(record)}" for name, record in order)


def _told(record: dict[str, Any]) -> str:
    for kind in ("failed", "refused", "not_run"):
        if kind in record:
            return f"{kind} ({record[kind][:60]})"
    parts = [harness.duration(record["median_s"])] if "median_s" in record else []
    if "tflops" in record:
        parts.append(f"{record['tflops']:.3g} TFLOP/s")
    if "error" in record:
        parts.append(f"error {record['error']:.1e}")
    return ", ".join(parts)


def draw(shapes: list[tuple[tuple[int, ...], Any]], seed: int) -> list[Any]:
    """Return normal values of some shapes and dtypes, made on the device."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, (shape, dtype) in zip(keys, shapes, strict=True)
    ]
