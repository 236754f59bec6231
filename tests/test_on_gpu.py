"""Measuring on a GPU, without one: every part runs dry, and the fit finds known profiles again."""

import importlib
import itertools
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.cost.device_profiles import DEVICES, Device

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
sys.path[:0] = [str(EXPERIMENTS), str(EXPERIMENTS / "selective_scan")]
on_gpu, fit, measuring, norms = (
    importlib.import_module(name)
    for name in ("on_gpu", "on_gpu_parts.fit", "on_gpu_parts.measuring", "on_gpu_parts.norms")
)
attention, scans = (importlib.import_module(f"on_gpu_parts.{n}") for n in ("attention", "scans"))
WAY = {"timed": True, "reference": lambda x: x + 1.0, "limit": 1e-6}


def run_here(out: Path, **options: Any) -> Any:
    return measuring.Run(out, time.monotonic() + 600, dry=True, rounds=1, **options)


def small_case(name: str = "sum", **contestants: Any) -> Any:
    return measuring.Case(name, {"kind": "test"}, lambda seed: [jnp.ones(8)], contestants, **WAY)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a dry run of all parts."""
    out = tmp_path_factory.mktemp("on_gpu")
    for part in on_gpu.PARTS:
        call_script(part, "--out", str(out), "--dry-run", "--deadline", "500")
    return out


def call_script(*arguments: str) -> None:
    before, sys.argv = sys.argv, ["on_gpu.py", *arguments]
    try:
        assert on_gpu.main() == 0
    finally:
        sys.argv = before


@pytest.mark.slow
@pytest.mark.parametrize("part", on_gpu.PARTS)
def test_part_runs_to_its_end(records: Path, part: str) -> None:
    lines = (records / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == sum(1 for _ in on_gpu.PARTS[part](True))
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
    timed = [c for p in on_gpu.PARTS.values() for c in p(True) if c.timed and c.reference is None]
    assert {c.facts["kind"] for c in timed} == {"copy", "product"}


def test_nothing_is_measured_without_a_gpu(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "norms", "--out", str(tmp_path / "made")])
    assert on_gpu.main() == 1
    assert "no GPU" in capsys.readouterr().out and not (tmp_path / "made").exists()


def test_failing_contestant_is_recorded_and_the_rest_runs(tmp_path: Path) -> None:
    def broken(x: Any) -> Any:
        raise RuntimeError("out of registers")

    cases = [small_case("one", good=lambda x: x + 1, bad=broken, wrong=lambda x: x + 2)]
    cases.append(small_case("two", good=lambda x: x + 1))
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
    clock = [0.0]

    def slow(x: Any) -> Any:
        clock[0] = 100.0
        return x + 1

    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock[0])
    cases = [small_case("one", slow=slow, late=lambda x: x + 1), small_case("two", late=slow)]
    run = measuring.Run(tmp_path, 50.0, dry=True, rounds=1)
    measuring.run_part("part", iter(cases), run)
    (record,) = measuring.read_part("part", tmp_path)
    assert record["contestants"]["slow"]["right"]
    assert record["contestants"]["late"] == {"not_run": "the deadline was over"}


def test_only_named_cases_run_and_the_last_record_counts(tmp_path: Path) -> None:
    for number in (1, 2):
        cases = [small_case(n, good=lambda x: x + 1) for n in ("one", "two")]
        measuring.run_part("part", iter(cases), run_here(tmp_path, only="tw"))
        assert len((tmp_path / "part.jsonl").read_text().splitlines()) == number
    assert [record["case"] for record in measuring.read_part("part", tmp_path)] == ["two"]


CHAINS = pytest.mark.parametrize(("calls", "copies"), [(50, 1), (50, 3), (50, 32), (2, 2), (1, 1)])


def chain(calls: int, copies: int) -> tuple[Any, int, int]:
    """A chain of products over sets, its loop's steps, and the calls in a step."""
    loops, repeats = measuring._loops(calls, copies)
    run = jax.jit(lambda sets: measuring.chained(jnp.dot, calls, sets))
    return run, loops, repeats * copies


@CHAINS
def test_chain_makes_at_least_the_calls_asked_for(calls: int, copies: int) -> None:
    run, loops, inside = chain(calls, copies)
    x = jnp.ones((16, 16))
    sets = [[x, (k + 1) * x] for k in range(copies)]
    number, made = run(sets)
    assert number == loops and len(made) == inside and loops * inside >= calls
    assert measuring.call_count(calls, copies) == 1 + loops * inside
    np.testing.assert_allclose(made[-1], jnp.dot(*sets[-1]))


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize(("calls", "copies"), [(50, 1), (50, 3), (50, 32)])
def test_gpu_compiler_keeps_every_call_of_a_chain(
    calls: int, copies: int, compile_h200: Any
) -> None:
    """The compiler keeps copies, and each of the calls with equal or constant operands."""
    kernel = norms.kernel(norms.layer(16, 1024), None, False)
    x, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16, 4096), (4096, 1024)))

    def run(*flat: Any) -> Any:
        return measuring.chained(kernel, calls, list(zip(flat[::2], flat[1::2], strict=True)))

    text = compile_h200(run, *[x, weight] * copies).as_text()
    _, inside = measuring._loops(calls, copies)
    bodies = [b for b in text.split("\n\n") if "custom-call(" in b and "ENTRY" not in b]
    (body,) = bodies
    assert body.count(" custom-call(") == inside * copies and " copy(" not in body, body


def test_copies_are_larger_than_a_cache(tmp_path: Path) -> None:
    run = measuring.Run(tmp_path, 0.0)
    assert run.copies(1 << 20) == measuring.MOST_COPIES and run.copies(1 << 30) == 1
    assert run.copies(1 << 25) * (1 << 25) >= measuring.CACHE_BYTES and run.calls >= 50


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
    np.testing.assert_allclose(measuring.error(jnp.array(got), jnp.array(want)), error)


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
}


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
    seen = [fit.Observation(str(n), f, 1.0) for n, f in enumerate(facts)]
    return [replace(o, measured_s=fit.predicted(device, o)) for o in seen]


def test_fit_finds_a_known_profile_again() -> None:
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
