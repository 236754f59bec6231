"""Measuring on a GPU, without one: every part runs dry, and the fit finds known profiles again."""

import importlib
import itertools
import json
import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.cost.device_profiles import DEVICES, Device

FOLDER = Path(__file__).parents[1] / "experiments" / "on_gpu"
measure, attention, chains, fit, measuring, norms, report, scans, whole_programs = (
    importlib.import_module(f"on_gpu.{name}")
    for name in "measure attention chains fit measuring norms report scans whole_programs".split()
)
WAY = {"timed": True, "reference": lambda x: x + 1.0, "limit": 1e-6}


def run_here(out: Path, **options: Any) -> Any:
    return measuring.Run(out, time.monotonic() + 600, dry=True, rounds=1, **options)


def small_case(name: str = "sum", **contestants: Any) -> Any:
    return measuring.Case(name, {"kind": "test"}, lambda seed: [jnp.ones(8)], contestants, **WAY)


def plus_one(x: Any) -> Any:
    return x + 1


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dry run of all parts."""
    out = tmp_path_factory.mktemp("on_gpu")
    for part in measure.PARTS:
        call_script(part, "--out", str(out), "--dry-run", "--deadline", "500")
    return out


def call_script(*arguments: str) -> None:
    before, sys.argv = sys.argv, ["measure.py", *arguments]
    try:
        assert measure.main() == 0
    finally:
        sys.argv = before


@pytest.mark.slow
@pytest.mark.parametrize("part", measure.PARTS)
def test_part_runs_to_its_end(records: Path, part: str) -> None:
    lines = (records / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == sum(1 for _ in measure.PARTS[part](True))
    for record in map(json.loads, lines):
        assert record["machine"]["device"] and record["machine"]["date"]
        assert "jax" in record["machine"]["versions"] and "reference" not in record
        for name, found in record["contestants"].items():
            if name in ("cudnn", "pallas-triton"):
                assert "failed" in found, name
            elif name in ("mosaic", "jax_triton"):
                assert found.keys() & {"refused", "error", "median_s"}, name
            elif name != "library":
                assert found.get("right", True) and found.keys() & {"error", "median_s"}, name


@pytest.mark.slow
def test_fit_of_a_dry_run_names_fields(records: Path, capsys: pytest.CaptureFixture) -> None:
    call_script("fit", "--out", str(records), "--profile", "h200")
    assert "launch_s" in capsys.readouterr().out
    found = json.loads((records / "fit.json").read_text(encoding="utf-8"))
    for path, field in found["fields"].items():
        assert field["was"] == fit.value_of(DEVICES["h200"], path)
        assert ("value" in field) != ("why" in field), path
    assert {"kind", "measured_s", "predicted_s"} <= found["residuals"][0].keys()
    assert all(row["blocks"].keys() >= {"rows", "stages"} for row in found["norm_blocks"])


def test_every_way_that_a_figure_decides_about_is_a_contestant() -> None:
    forms = norms.case(norms.layer(64, 1024, gain=True), None, dry=False).facts["forms"].values()
    assert {(cut["splits"] > 1, cut["scaled_before"]) for cut in forms} == {
        *itertools.product((False, True), repeat=2)
    }
    ways = [
        attention.forward_case(attention.SHAPES[0], dry=False),
        attention.backward_case(attention.SHAPES[0], dry=False),
        scans.case(scans.SelectiveScan(1, 2048, 2048, 16), False, "forward"),
    ]
    wanted = [("cudnn", attention.MOSAIC), ("cudnn",), (scans.ONE_PASS,)]
    for case, names in zip(ways, wanted, strict=True):
        assert {*names, *case.facts.get("others", {}).values()} <= case.contestants.keys()


def test_every_timed_kernel_is_compared_with_a_definition() -> None:
    """Only copies and products of XLA's own, which give the rates of the device, are not."""
    cases = [made for part in measure.PARTS.values() for made in part(True)]
    made = [c.make() if isinstance(c, measuring.Later) else c for c in cases]
    kinds = {c.facts["kind"] for c in made if c.timed and c.reference is None}
    assert kinds == {"copy", "product"}


def test_nothing_is_measured_without_a_gpu(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["measure.py", "norms", "--out", str(tmp_path / "made")])
    assert measure.main() == 1
    assert "no GPU" in capsys.readouterr().out and not (tmp_path / "made").exists()


def test_failing_contestant_is_recorded_and_the_rest_runs(tmp_path: Path) -> None:
    def broken(x: Any) -> Any:
        raise RuntimeError("out of registers")

    cases = [small_case("one", good=plus_one, bad=broken, wrong=lambda x: x + 2)]
    cases.append(small_case("two", good=plus_one))
    measuring.run_part("part", iter(cases), run_here(tmp_path))
    first, second = measuring.read_part("part", tmp_path)
    assert first["contestants"]["bad"] == {"failed": "RuntimeError: out of registers"}
    assert first["contestants"]["good"]["right"] and second["contestants"]["good"]["right"]
    assert not first["contestants"]["wrong"]["right"]
    assert first["contestants"]["good"]["median_s"] > 0


def test_interrupt_is_not_recorded_as_a_failure(tmp_path: Path) -> None:
    def interrupted(x: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measuring.run_part("p", iter([small_case(bad=interrupted)]), run_here(tmp_path))


def test_part_ends_at_its_deadline(tmp_path: Path, monkeypatch: Any) -> None:
    """A case whose contestants are compiled late has no record, and no case after it."""
    clock = [0.0]

    def slow(x: Any) -> Any:
        clock[0] = 100.0
        return x + 1

    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock[0])
    run = measuring.Run(tmp_path, 50.0, dry=True, rounds=1)
    prepared = measuring.prepare(small_case("one", slow=slow, late=plus_one), run)
    assert [*prepared.programs] == ["slow"]
    assert prepared.failures == {"late": {"not_run": "the deadline was over"}}
    clock[0] = 0.0
    cases = [small_case("one", good=plus_one), small_case("two", slow=slow, late=plus_one)]
    measuring.run_part("part", iter([*cases, small_case("three", good=plus_one)]), run)
    assert [record["case"] for record in measuring.read_part("part", tmp_path)] == ["one"]


def test_compiler_tunes_in_the_turn_of_a_case(tmp_path: Path) -> None:
    """Trials need the device alone: such contestants are compiled after the others."""
    case = replace(small_case(tuned=plus_one, other=plus_one), tuned=frozenset({"tuned"}))
    prepared = measuring.prepare(case, run_here(tmp_path))
    assert [*prepared.programs] == ["other"] and not prepared.failures
    found = measuring.measure(prepared, run_here(tmp_path))["contestants"]
    assert found["tuned"]["right"] and found["tuned"]["median_s"] > 0


def test_broken_device_ends_the_process_with_a_record(tmp_path: Path, monkeypatch: Any) -> None:
    def breaks(sets: Any) -> Any:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    runs = []
    case = small_case("one", first=plus_one, broken=plus_one, last=plus_one)
    prepared = measuring.prepare(case, run_here(tmp_path))
    about, first = prepared.programs["first"]
    prepared.programs["first"] = (about, lambda sets: runs.append(1) or first(sets))
    prepared.programs["broken"] = ({}, breaks)
    monkeypatch.setattr(measuring, "prepare", lambda *_: prepared)
    with pytest.raises(SystemExit) as ended:
        cases = [case, small_case("two", good=plus_one)]
        measuring.run_part("part", iter(cases), run_here(tmp_path))
    assert ended.value.code == measuring.BROKEN and len(runs) == 1  # checked, and not timed
    (record,) = measuring.read_part("part", tmp_path)
    assert record["contestants"]["first"]["right"]
    assert "ILLEGAL" in record["contestants"]["broken"]["failed"]
    assert record["contestants"]["last"] == {"not_run": "the device failed before"}


def test_parent_goes_on_after_a_broken_device(tmp_path: Path, monkeypatch: Any) -> None:
    """The share is run again without the cases that have a record; other shares are run too."""
    statuses, called = iter([measuring.BROKEN, 0]), []

    def run(command: list[str]) -> Any:
        called.append(command)
        mine = command[command.index("--share") + 1] == "1"
        return SimpleNamespace(returncode=next(statuses) if mine else 0)

    monkeypatch.setattr(measure.subprocess, "run", run)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    call_script("programs", "--out", str(tmp_path), "--workers", "2", "--dry-run")
    shares = [command[command.index("--share") + 1] for command in called]
    assert sorted(shares) == ["0", "1", "1"] and all("--resume" in command for command in called)


@pytest.mark.slow
def test_processes_share_the_cases(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    arguments = ("--out", str(tmp_path), "--workers", "2", "--dry-run", "--only", "of")
    call_script("norms", *arguments)
    records = [*map(json.loads, (tmp_path / "norms.jsonl").read_text().splitlines())]
    wanted = [case.name for case in measure.PARTS["norms"](True) if "of" in case.name]
    assert sorted(record["case"] for record in records) == sorted(wanted)
    assert all("median_s" in record["contestants"]["xla"] for record in records)


@pytest.mark.parametrize(("count", "of"), [(7, 3), (2, 5), (6, 1)])
def test_every_case_is_in_one_share_and_made_there(tmp_path: Path, count: int, of: int) -> None:
    made: list[str] = []

    def make(name: str) -> Any:
        made.append(name)
        return small_case(name)

    names = [f"case {n}" for n in range(count)]
    for k in range(of):
        cases = [measuring.Later(name, partial(make, name)) for name in names]
        run = run_here(tmp_path, share=(k, of))
        before = len(made)
        assert [c.name for c in run.chosen(iter(cases), tmp_path / "part.jsonl")] == made[before:]
    assert made == names


def test_cases_with_a_record_are_left_out_if_asked(tmp_path: Path) -> None:
    cases = [small_case(name, good=plus_one) for name in ("one", "two")]
    measuring.run_part("part", iter(cases[:1]), run_here(tmp_path))
    measuring.run_part("part", iter(cases), run_here(tmp_path, resume=True))
    lines = (tmp_path / "part.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines] == ["one", "two"]


def test_only_named_cases_run_and_the_last_record_counts(tmp_path: Path) -> None:
    for number in (1, 2):
        cases = [small_case(n, good=plus_one) for n in ("one", "two")]
        measuring.run_part("part", iter(cases), run_here(tmp_path, only="tw"))
        assert len((tmp_path / "part.jsonl").read_text().splitlines()) == number
    assert [record["case"] for record in measuring.read_part("part", tmp_path)] == ["two"]


CHAINS = pytest.mark.parametrize(("calls", "copies"), [(50, 1), (50, 3), (50, 32), (2, 2), (1, 1)])


def chain(calls: int, copies: int) -> tuple[Any, int, int]:
    """A chain of products over sets, its loop's steps, and the calls in a step."""
    loops, repeats = chains.steps_of(calls, copies)
    run = jax.jit(lambda sets: chains.chained(jnp.dot, calls, sets))
    return run, loops, repeats * copies


@CHAINS
def test_chain_makes_at_least_the_calls_asked_for(calls: int, copies: int) -> None:
    run, loops, inside = chain(calls, copies)
    x = jnp.ones((16, 16))
    sets = [[x, (k + 1) * x] for k in range(copies)]
    number, made = run(sets)
    assert number == loops and len(made) == inside and loops * inside >= calls
    assert chains.call_count(calls, copies) == 1 + loops * inside
    np.testing.assert_allclose(made[-1], jnp.dot(*sets[-1]))


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize(("calls", "copies"), [(50, 1), (50, 3), (50, 32)])
def test_gpu_compiler_keeps_every_call_of_a_chain(
    calls: int, copies: int, compile_h200: Any
) -> None:
    """The compiler keeps copies, and each of the calls with equal or constant operands."""
    kernel = norms.kernel(norms.layer(16, 1024), norms.NormBlocks(16, 32, 128, 4, 3), False)
    x, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 4096), (4096, 1024)))

    def run(*flat: Any) -> Any:
        return chains.chained(kernel, calls, list(zip(flat[::2], flat[1::2], strict=True)))

    text = compile_h200(run, *[x, weight] * copies).as_text()
    _, inside = chains.steps_of(calls, copies)
    bodies = [b for b in text.split("\n\n") if "custom-call(" in b and "ENTRY" not in b]
    (body,) = bodies
    assert body.count(" custom-call(") == inside * copies and " copy(" not in body, body


@pytest.mark.lowering
@pytest.mark.parametrize(("calls", "copies"), [(16, 1), (50, 4)])
def test_first_copy_of_a_chain_writes_all_that_it_carries(
    calls: int, copies: int, compile_h200: Any
) -> None:
    def run(*flat: Any) -> Any:
        return chains.chained(plus_one, calls, [[x] for x in flat])

    text = compile_h200(run, *[jax.ShapeDtypeStruct((1 << 20,), jnp.bfloat16)] * copies).as_text()
    (first,) = (line for line in text[text.index("ENTRY") :].split("\n") if " fusion(" in line)
    written = first.split(" fusion(")[0].count("bf16[")
    count = chains.call_count(calls, copies)
    assert chains.arrays_moved(count, copies) == 1 + written + 2 * (count - 1)


def sized_case(size: int, **options: Any) -> Any:
    make = lambda seed: [jnp.zeros(size, jnp.int8)]  # noqa: E731
    return measuring.Case("sized", {"kind": "test"}, make, {"xla": plus_one}, **options)


def test_copies_are_larger_than_a_cache(tmp_path: Path) -> None:
    run = measuring.Run(tmp_path, 0.0)
    copies = {power: run.copies(sized_case(1 << power)) for power in (20, 25, 30)}
    assert copies[20] == measuring.MOST_COPIES and copies[30] == 1
    assert copies[25] * (1 << 25) >= measuring.CACHE_BYTES
    assert run.copies(sized_case(1 << 20, most_copies=2)) == 2
    assert run.copies(sized_case(1 << 20, timed=False)) == 1


def test_fewer_calls_of_a_slow_contestant_are_chained(tmp_path: Path) -> None:
    assert measuring.Run(tmp_path, 0.0).calls(sized_case(8), "xla") == measuring.CALLS >= 50
    run = measuring.Run(tmp_path, math.inf, rounds=2)
    case = replace(small_case(good=plus_one, slow=plus_one), slow=frozenset({"slow"}))
    case = replace(case, calls=7, unrolled=2, most_copies=1)
    found = measuring.measure(measuring.prepare(case, run), run)["contestants"]
    assert {name: one["calls"] for name, one in found.items()} == {"good": 9, "slow": 3}
    assert all(len(one["seconds"]) == 2 for one in found.values())


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([np.nan, -np.inf, 1.0], [np.nan, -np.inf, 1.0], 0.0),
        ([np.nan, 1.0], [1.0, 1.0], np.nan),
        ([1.0, 1.0], [np.nan, 1.0], np.nan),
        ([np.inf, 1.0], [-np.inf, 1.0], np.inf),
    ],
)
def test_error(got: list[float], want: list[float], error: float) -> None:
    np.testing.assert_allclose(chains.error(jnp.array(got), jnp.array(want)), error)


def timed(*seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "seconds": [*seconds],
        "median_s": sorted(seconds)[len(seconds) // 2],
        "calls": 9,
    } | more


def write_records(out: Path, part: str, cases: dict[str, Any], kind: str = "test") -> None:
    machine = {"date": "2026-01-02", "device": "gpu: NVIDIA X", "cpu": "Y", "cores": 3}
    machine |= {"python": "3.12", "versions": {"jax": "1.2"}}
    about = {"part": part, "facts": {"kind": kind}, "bytes": 8, "machine": machine}
    lines = [json.dumps({**about, "case": n, "contestants": c}) for n, c in cases.items()]
    (out / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_report_tells_slower_failed_and_missing_cases(tmp_path: Path) -> None:
    price = {"predicted_s": {"written": 1e-3, "chosen": None}, "changes": ["fold"], "error": 2e-3}
    programs = {
        "slower": {"xla": timed(1.0, 1.0, 1.0), "auto": timed(2.0, 3.0, 4.0, **price)},
        "faster": {"xla": timed(1.0, 1.0, 1.0), "auto": timed(1e-3, 1e-3, 1e-3, changes=[])},
        "broken": {"xla": timed(1.0), "auto": {"failed": "RuntimeError: no | memory"}},
        "late": {"xla": {"not_run": "the deadline was over"}, "auto": timed(1.0)},
    }
    write_records(tmp_path, "programs", programs)
    cases = {"programs": [small_case(name) for name in (*programs, "left out")]}
    found = report.tables(tmp_path, cases)
    table, totals, kinds, failed, missing = found["programs"]
    first, second = table.splitlines()[2:4]
    assert first.startswith("| faster | 9 | 1 s | 1 ms | 0.001 [0.001–0.001] | – | as written |")
    assert second.startswith(
        "| slower | 9 | 1 s | 3 s | 3.00 [2.50–3.50] | 2.0e-03 | fold | 1 ms | – |"
    )
    assert "| broken | – | 1 s | failed | – |" in table
    assert "| late | 9 | not measured | 1 s | – |" in table
    assert totals.startswith("auto / plain: 2 measured, 1 faster") and " 1 slower" in totals
    assert "| fold | 1 | 0 | 1 | 3.00 |" in kinds
    assert failed.splitlines()[0] == "- broken, auto: failed, RuntimeError: no / memory"
    assert missing == "Not measured, 1: left out."
    assert found["rates"][1] == "The shortest chain: 9 ms, 9 calls of faster, auto."
    assert found["machine"] == ["2026-01-02, NVIDIA X, 3 cores of Y, Python 3.12, jax 1.2."]


def test_report_judges_values_by_the_limit_of_today(tmp_path: Path) -> None:
    answers = {
        "auto": {"error": 2e-3, "right": False},
        "triton": {"error": math.nan, "right": False},
        "mosaic": {"refused": "does not run\n  got:      no product"},
        "triton 64x64 w4 s2": {"error": 2e-2, "right": True},
    }
    write_records(tmp_path, "correct", {"fold: sum, a NaN": answers, "gone": answers})
    known = replace(small_case("fold: sum, a NaN"), limit=1e-2)
    values, reasons = report.tables(tmp_path, {"correct": [known]})["correct"]
    assert "| test, a NaN | auto | 1 |" in values and "| test | auto |  | 1 |" in values
    assert "| test, a NaN | triton |  | 1 |  |  |  | nan |" in values
    assert "| test, a NaN | triton, other blocks |  | 1 |" in values
    assert "| mosaic | refused | no product | 2 |" in reasons


def test_report_names_the_best_blocks(tmp_path: Path) -> None:
    ways = {
        "xla": timed(4.0, 4.0, 4.0, tflops=1.0, error=1e-3),
        "auto": timed(1.0, 1.0, 1.0, tflops=4.0, error=1e-3),
        "ours, triton": timed(2.0, 2.0, 2.0, tflops=2.0, error=1e-3),
        "triton 64x64 w4 s2": {"failed": "ValueError: shared memory"},
        "triton 64x32 w4 s2": timed(1.0, 1.0, 1.0, tflops=4.0, error=1e-3),
    }
    write_records(tmp_path, "attention", {"shape": ways})
    _, rates, _, ratios, *_ = report.tables(tmp_path, {"attention": []})["attention"]
    assert "| shape | 1 (1.0e-03) | 4 (1.0e-03) | 2 (1.0e-03) | 4 (1.0e-03): triton 64x32" in rates
    assert "| shape | 0.25 [0.25–0.25] | 0.50 [0.50–0.50] |" in ratios
    write_records(tmp_path, "norms", {"layer": ways}, kind="norm")
    table, *_ = report.tables(tmp_path, {"norms": []})["norms"]
    assert "| 1 s: triton 64x32 w4 s2 | 0.25 [0.25–0.25] | 0.50 [0.50–0.50] | 0.25" in table


def test_tables_are_those_of_the_committed_records() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    known = {part: [] for part in measure.PARTS} | {"correct": [*measure.PARTS["correct"](False)]}
    for part, made in report.tables(FOLDER / "results", known).items():
        there = text.split(f"<!-- {part} -->\n")[1].split(f"\n<!-- /{part} -->")[0]
        for one in made:
            anew = (
                "run: python experiments/on_gpu/measure.py report --out experiments/on_gpu/results"
            )
            assert one in there or one.startswith("Not measured"), anew


def test_committed_values_are_right() -> None:
    """Products of f32 are rounded to TF32, in XLA's own too: the limit leaves room for both."""
    limits = {case.name: case.limit for case in measure.PARTS["correct"](False)}
    errors = {
        (record["case"], name): (found["error"], limits[record["case"]])
        for record in measuring.read_part("correct", FOLDER / "results")
        for name, found in record["contestants"].items()
        if "error" in found and record["case"] in limits
    }
    assert len(errors) > 300 and all(error <= limit for error, limit in errors.values())


TRUTH = {
    "launch_s": 2e-6,
    "bytes_per_s": 3e12,
    "flops_per_s.bfloat16": 6e14,
    "norms.kernel_share": 0.4,
    "norms.scaled_share": 0.2,
    "norms.drawn": 2.5,
    "folds.kernel_share": 0.3,
    "folds.library_share": 0.8,
    "folds.mosaic_share": 0.7,
    "scans.kernel_instructions": 7.0,
    "scans.step_latency_s": 2e-8,
    "scans.one_pass_instructions": 8.0,
    "loops.step_s": 2e-5,
    "folds.single_steps": 0.3,
    "folds.kernel_s": 2e-5,
}


def fold_of_distances(n: int) -> dict[str, Any]:
    def fun(x: Any, y: Any) -> Any:
        return jnp.sum(jnp.exp(-jnp.abs(x[:, None] - y)), 1)

    specs = [jax.ShapeDtypeStruct((n,), jnp.float32)] * 2
    found = whole_programs.folded(fun, specs, DEVICES["h200"])
    assert found is not None
    return found


def made_records(device: Device) -> list[Any]:
    """Return the times that a device of a known profile would measure at the parts' sizes."""
    facts = [{"kind": "copy", "bytes": 4 * n} for n in norms.COPIED]
    facts += [{"kind": "product bfloat16", "side": 8192, "dtype": "bfloat16"}]
    for m, n, gain in itertools.product((1, 4096), (1024, 14336), (False, True)):
        known = norms.case(norms.layer(m, n, gain=gain), None, dry=False).facts
        facts += [{**known, "cut": cut} for cut in [*known["forms"].values()][:2]]
    facts += [
        {"kind": kind, "shape": norms.dataclasses.asdict(s)}
        for kind in attention.KINDS.values()
        for s in attention.SHAPES[:5]
    ]
    sizes = [{"batch": b, "length": n, "channels": 2048, "states": 16} for b, n in scans.SHAPES]
    sizes.append({"batch": 1, "length": 4096, "channels": 16, "states": 1})
    facts += [{"kind": kind, "scan": size} for kind in scans.KINDS for size in sizes]
    facts += [whole_programs.loop_facts(name, sizes[0]) for name in whole_programs.LOOPS]
    facts += [fold_of_distances(n) for n in (256, 1024, 4096)]
    seen = [fit.Observation(str(n), f, 1.0) for n, f in enumerate(facts)]
    return [replace(o, measured_s=fit.predicted(device, o)) for o in seen]


@pytest.mark.usefixtures("one_device")
def test_fit_finds_a_known_profile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "POINTS", 17)  # grids of half the points: within 1 % all the same
    device = DEVICES["h200"]
    for path, value in TRUTH.items():
        device = fit.with_value(device, path, value)
    seen = made_records(device)
    # A tenth of the kernels' cases are outliers.
    seen = [
        replace(o, measured_s=o.measured_s * (5 if n % 10 == 9 else 1)) for n, o in enumerate(seen)
    ]
    after, fields = fit.fitted(DEVICES["h200"], seen)
    for path, value in TRUTH.items():
        assert math.isclose(fields[path]["value"], value, rel_tol=0.05), (path, fields[path])
        assert fit.value_of(after, path) == fields[path]["value"]
    share = fields["bytes_per_s"]["share_of_datasheet"]
    assert math.isclose(share, 3e12 / 4.8e12, rel_tol=0.05)


@pytest.mark.usefixtures("one_device")
def test_fit_omits_undetermined_constants() -> None:
    seen = [o for o in made_records(DEVICES["h200"]) if o.kind in ("copy", "norm")]
    few = [o for o in seen if o.kind == "copy" or o.facts["layer"]["rows"] == 1]
    after, fields = fit.fitted(DEVICES["h200"], few)
    assert fields["folds.kernel_share"]["why"] == "0 cases of attention"
    assert fields["scans.step_latency_s"]["why"] == "0 cases of scan"
    assert fit.value_of(after, "folds.kernel_share") == DEVICES["h200"].folds.kernel_share


@pytest.mark.parametrize("device", [d for d in DEVICES.values() if d.runs_on_gpu], ids=str)
def test_fitted_fields_are_fields_of_every_profile(device: Device) -> None:
    for path in (f.path for group in fit.ORDER for f in group if fit.has(device, f.path)):
        changed = fit.with_value(device, path, 0.125)
        assert (fit.value_of(changed, path) == 0.125 and changed != device) or "flops" in path
