"""The profile of a device: by its cores, by its name, or from a file."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost import core_scaling, device_profiles, profile_file
from symjax_rewrite.cost.core_scaling import BANDWIDTH, COMPUTE, LAUNCH, SERIAL
from symjax_rewrite.cost.device_profiles import CPU, DEVICES, Device, device_profile
from symjax_rewrite.cost.profile_file import read_profile, selected_device, write_profile
from symjax_rewrite.cost.profile_paths import figures, value_of
from symjax_rewrite.errors import ProfileError, UsageError

THIS = SimpleNamespace(device_kind="cpu", platform="cpu")


def on(monkeypatch: pytest.MonkeyPatch, cores: int, vectors: str = "avx512") -> Device:
    """The profile that is chosen on a machine with so many cores."""
    monkeypatch.setattr(device_profiles, "_this_cpu", lambda: (cores, vectors))
    return device_profile(None, THIS)


@pytest.mark.parametrize("vectors", ["avx512", "avx2"])
def test_two_cores_have_the_figures_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, vectors: str
) -> None:
    assert on(monkeypatch, 2, vectors) is CPU
    assert device_profile("cpu") is CPU
    assert device_profile("cpu-2") is CPU


def test_sixteen_cores_are_not_priced_as_two(monkeypatch: pytest.MonkeyPatch) -> None:
    many = on(monkeypatch, 16)
    assert many.name == "cpu-16"
    assert many.peak("float32") > 5 * CPU.peak("float32")
    assert 2 * CPU.bytes_per_s < many.bytes_per_s < 5 * CPU.bytes_per_s
    assert many.launch_s > CPU.launch_s
    assert many.source_of("launch_s").startswith("scaled from 2 cores")
    assert many.source_of("margins.fold") == CPU.source_of("margins.fold")


def test_one_core_was_measured() -> None:
    one, narrow = device_profile("cpu-1"), device_profile("cpu-1-neon")
    assert all(one.is_measured(path) for path in core_scaling.ONE_CORE)
    assert not one.is_measured("launch_s")
    assert narrow.peak("float32") == core_scaling.VECTORS["neon"] * one.peak("float32")


def test_a_profile_is_scaled_once() -> None:
    assert device_profile("cpu-16") is device_profile("cpu-16")


def test_processes_of_one_program_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert on(monkeypatch, 16) is CPU


@pytest.mark.parametrize("law", [COMPUTE, BANDWIDTH, LAUNCH, SERIAL])
def test_laws_grow_with_the_cores_and_are_one_for_two(law: str) -> None:
    factors = [core_scaling.factor(law, n) for n in (1, 2, 3, 4, 8, 16, 64, 256)]
    assert factors[1] == 1
    assert factors == sorted(factors)
    assert (factors[0] < 1 < factors[-1]) == (law != SERIAL)
    assert core_scaling.factor(BANDWIDTH, 1024) < 1 / core_scaling.BANDWIDTH_LOSS


def test_every_unit_of_seconds_has_a_law() -> None:
    units = {path: about["unit"] for path, _, about in figures(CPU)}
    timed = {u for u in units.values() if u == "s" or u.startswith("s/") or u.endswith("/s")}
    assert timed <= core_scaling.LAWS_BY_UNIT.keys()
    assert core_scaling.LAWS_BY_PATH.keys() <= units.keys()


@pytest.mark.parametrize("name", ["cpu-1", "cpu-4", "cpu-8-avx2", "cpu-16-neon", "cpu-64-sse"])
def test_scaled_profiles_say_so(name: str) -> None:
    device = device_profile(name)
    for path, value, _ in figures(device):
        if path.partition(".")[0] in ("name", "provenance"):
            continue
        differs = value != value_of(CPU, path)
        source = device.source_of(path)
        assert (source.startswith("scaled") or source == core_scaling.MEASURED_ALONE) == differs, (
            path
        )


def test_narrow_vectors_do_less_work_and_move_as_many_bytes() -> None:
    wide, narrow = device_profile("cpu-4"), device_profile("cpu-4-sse")
    assert narrow.peak("float32") < 0.5 * wide.peak("float32")
    assert narrow.bytes_per_s == wide.bytes_per_s


@pytest.mark.parametrize("name", ["cpu-0", "cpu-x", "cpu-2-mmx", "cpu-99999", "m4"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(UsageError, match="cpu-N for N cores"):
        device_profile(name)


def test_cores_are_limited_by_affinity_quota_and_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core_scaling.os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.setattr(core_scaling, "cgroup_cores", lambda: None)
    assert core_scaling.usable_cores() == 12
    monkeypatch.setattr(core_scaling, "NAMED_THREADS", "7")
    assert core_scaling.usable_cores() == 7
    monkeypatch.setattr(core_scaling, "cgroup_cores", lambda: 3)
    assert core_scaling.usable_cores() == 3
    monkeypatch.undo()
    for text, cores in (("250000 100000\n", 3), ("max 100000\n", None), ("?", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert core_scaling.cgroup_cores(tmp_path) == cores
    assert core_scaling.cgroup_cores(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("machine", "found", "vectors"),
    [
        ("x86_64", ["X86_V3", "X86_V4"], "avx512"),
        ("x86_64", ["AVX512F"], "avx512"),
        ("AMD64", ["AVX2", "FMA3"], "avx2"),
        ("x86_64", ["SSE42"], "sse"),
        ("x86_64", [], "avx2"),
        ("arm64", ["NEON"], "neon"),
    ],
)
def test_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, machine: str, found: list[str], vectors: str
) -> None:
    config = {"SIMD Extensions": {"baseline": [], "found": found}} if found else {}
    monkeypatch.setattr(core_scaling.platform, "machine", lambda: machine)
    monkeypatch.setattr(core_scaling.np, "show_config", lambda mode: config)
    assert core_scaling.instruction_set() == vectors


@pytest.mark.parametrize("device", [d for d in DEVICES.values() if d.runs_on_gpu], ids=str)
def test_figures_of_gpus_say_datasheet_measured_or_estimate(device: Device) -> None:
    for path, _, about in figures(device):
        if about["source"] == "datasheet":
            assert device.source_of(path).startswith(("datasheet", "measured")), path
    assert DEVICES["h200"].source_of("flops_per_s.bfloat16") == "measured"


def record(**changes: Any) -> dict[str, Any]:
    figure = {"unit": "s", "value": 2e-6, "residual": 0.01}
    return {"name": "mine", "base": "cpu", "figures": {"launch_s": figure}} | changes


def test_a_file_changes_the_figures_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    rate = {"unit": "FLOP/s", "value": 3e11}
    write_profile(path, record(figures={**record()["figures"], "flops_per_s.float32": rate}))
    device = read_profile(path)
    assert (device.name, device.launch_s, device.flops_per_s["float32"]) == ("mine", 2e-6, 3e11)
    assert device.flops_per_s["float64"] == CPU.flops_per_s["float64"]
    assert device.folds == CPU.folds
    assert device.source_of("launch_s").startswith("measured")
    assert device.source_of("bytes_per_s") == CPU.source_of("bytes_per_s")
    assert selected_device(path) == selected_device(str(path)) == device
    assert [f.name for f in tmp_path.iterdir()] == ["mine.json"]


@pytest.mark.parametrize(
    ("figure", "field", "expected"),
    [
        ({"launch_t": {"value": 1e-6}}, "launch_t", "a figure of a device profile"),
        ({"launch_s": 1e-6}, "launch_s", "{'value': ..., 'unit': ...}"),
        ({"launch_s": {"value": "fast"}}, "launch_s.value", "a finite number above 0, in s"),
        ({"launch_s": {"value": -1e-6}}, "launch_s.value", "a finite number above 0, in s"),
        ({"launch_s": {"value": float("nan")}}, "launch_s.value", "a finite number above 0, in s"),
        ({"launch_s": {"value": 1.0, "unit": "us"}}, "launch_s.unit", "'s'"),
        ({"layouts.long_sum": {"value": 2.5}}, "layouts.long_sum.value", "an integer"),
        ({"slow_across": {"value": 1}}, "slow_across", "a figure that can be measured"),
    ],
)
def test_a_wrong_figure_is_named(tmp_path: Path, figure: Any, field: str, expected: str) -> None:
    path = tmp_path / "wrong.json"
    write_profile(path, record(figures=figure))
    with pytest.raises(ProfileError) as raised:
        read_profile(path)
    text = str(raised.value)
    assert str(path) in text and repr(field) in text and expected in text, text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not JSON"),
        ("[]", "'kind'"),
        (json.dumps({"kind": "model"}), "'kind'"),
        (json.dumps({"kind": profile_file.KIND, "format": 2}), "'format'"),
        (json.dumps({"kind": profile_file.KIND, "format": 1}), "'base'"),
        (json.dumps({"kind": profile_file.KIND, "format": 1, "base": "cpu"}), "'figures'"),
        (
            json.dumps({"kind": profile_file.KIND, "format": 1, "base": "m4", "figures": {}}),
            "'base'",
        ),
    ],
)
def test_a_corrupt_or_foreign_file_is_named(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(content)
    with pytest.raises(ProfileError) as raised:
        read_profile(path)
    assert str(path) in str(raised.value) and told in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot read"):
        selected_device(tmp_path / "none.json")


def test_the_environment_names_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "DEVICE", "cpu-4")
    assert selected_device(None).name == "cpu-4"
    assert selected_device("h100").name == "h100"
    with pytest.raises(UsageError, match="not a device"):
        selected_device(3)


def test_sym_optimize_takes_names_files_and_devices(tmp_path: Path) -> None:
    def lora(x: Any, W: Any, A: Any, B: Any) -> Any:
        return x @ (W + A @ B)

    shapes = ((8, 256), (256, 256), (256, 4), (4, 256))
    args = [jnp.ones(s) for s in shapes]
    path = tmp_path / "slow.json"
    slow = {"launch_s": {"value": 10.0, "unit": "s"}}  # a further launch is worth no gain
    write_profile(path, record(figures=slow))
    expensive = dataclasses.replace(CPU, launch_s=10.0)
    found = [
        bool(sym_optimize(lora, device=d).explain(*args).rules)
        for d in ("cpu", CPU, path, str(path), expensive)
    ]
    assert found == [True, True, False, False, False]
