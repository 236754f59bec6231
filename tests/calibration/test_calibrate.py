"""Calibration: fits of planted times, refusals of noise, files that are read again."""

import argparse
import io
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from symjax_rewrite import __main__
from symjax_rewrite.calibration import command, machine_load, measurement
from symjax_rewrite.calibration.command import MEASUREMENTS, applicable, measured
from symjax_rewrite.calibration.measurement import Measurement, Reading
from symjax_rewrite.calibration.progress import Progress
from symjax_rewrite.calibration.timing import fitted_line, sampled, spread
from symjax_rewrite.cost.device_profiles import CPU, DEVICES, Device
from symjax_rewrite.cost.profile_file import read_profile
from symjax_rewrite.cost.profile_paths import figures, has, value_of
from symjax_rewrite.errors import CalibrationError, UsageError

BY_PATH = {m.path: m for m in MEASUREMENTS}
Found = dict[str, list[float]]


def planted(one: Measurement, truth: Callable[[float], float], noise: float = 0.0) -> Any:
    """A sampler whose times follow `truth` of the amounts; of `less`, nothing."""
    draw = random.Random(0)
    amounts = [c.amount for c in one.cases(CPU)]

    def sampler(calls: Mapping[str, Any], rounds: int, sample_s: float) -> Found:
        return {
            name: [
                0.0 if "less" in name else truth(amounts[int(name)]) * (1 + noise * draw.random())
                for _ in range(rounds)
            ]
            for name in calls
        }

    return sampler


def read(path: str, truth: Callable[[float], float], noise: float = 0.0) -> Reading:
    one = BY_PATH[path]
    return measurement.read(one, CPU, planted(one, truth, noise))


@pytest.mark.parametrize(
    ("path", "truth", "value"),
    [
        ("launch_s", lambda k: 5e-6 + 3e-6 * k, 3e-6 - 2 * 8 * 64 * 64 / CPU.peak("float32")),
        ("elementwise_per_s", lambda w: 1e-5 + w / 8e9, 8e9),
        ("half_steps", lambda w: w / 1e9, 4.0),
        ("half_steps", lambda w: w / 1e11, 1.0),
        ("folds.lookup", lambda n: n * 1e-9, 16.0),
        ("scans.steps.step_s", lambda n: 2e-6 * n, 2e-6 - 1024 * 0.4e-9),
    ],
)
def test_a_figure_is_the_slope_of_times(path: str, truth: Any, value: float) -> None:
    assert read(path, truth).value == pytest.approx(value, rel=1e-6)


def test_noise_is_told_and_hardly_moves_a_figure() -> None:
    reading = read("elementwise_per_s", lambda w: w / 8e9, noise=0.5)
    assert reading.value == pytest.approx(8e9, rel=0.25)
    assert 0.05 < reading.spread < 0.25


def test_a_figure_below_nothing_is_not_resolved() -> None:
    reading = read("launch_s", lambda k: 1e-9 * k)
    assert reading.spread == math.inf
    assert not command.is_steady(reading, math.inf)


def test_one_outlier_does_not_move_a_line() -> None:
    fit = fitted_line([1, 2, 3, 4, 5], [2.0, 3.0, 40.0, 5.0, 6.0])
    assert (fit.slope, fit.fixed_s) == (1.0, 1.0)
    assert spread([1.0, 1.1, 0.9, 30.0, 1.0]) == pytest.approx(0.1)


def test_programs_are_sampled_in_turn() -> None:
    order: list[str] = []
    ticks: Iterator[float] = iter(range(10_000))
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = sampled(calls, 3, 0.0, clock=lambda: float(next(ticks)))
    assert found == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert "".join(order[-6:]) == "ababab"


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_measurements_are_of_figures_with_a_unit(device: Device) -> None:
    units = {path: about["unit"] for path, _, about in figures(CPU)}
    for one in applicable(device):
        assert has(device, one.path)
        assert one.path.startswith("flops_per_s") or units[one.path] != "yes/no"
    assert {"launch_s", "bytes_per_s", "elementwise_per_s"} <= {m.path for m in applicable(device)}


@pytest.mark.parametrize("one", MEASUREMENTS, ids=lambda m: m.path)
def test_every_program_of_a_measurement_traces(one: Measurement) -> None:
    device = CPU if has(CPU, one.path) else DEVICES["h100"]
    with jax.enable_x64(one.wide):
        cases = one.cases(device)
        assert len({c.amount for c in cases}) >= 3
        for case in cases[:1]:
            out = jax.eval_shape(case.function, *case.arguments)
            assert jax.tree.leaves(out)
            if case.donates:
                assert out.shape == case.arguments[0].shape


@pytest.mark.parametrize("path", ["launch_s", "half_steps", "scans.steps.step_s"])
def test_programs_run(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "ROUNDS", 1)
    monkeypatch.setattr(measurement, "SAMPLE_S", 0.0)
    assert math.isfinite(measurement.read(BY_PATH[path], CPU).value)


def steady(one: Measurement, device: Device) -> Reading:
    return Reading(1.3 * value_of(device, one.path), 0.01, 0.02)  # most are then no whole numbers


def noisy(one: Measurement, device: Device) -> Reading:
    return Reading(2 * value_of(device, one.path), 0.01, 0.9)


def test_later_figures_read_the_measured_ones() -> None:
    seen: dict[str, float] = {}

    def record(one: Measurement, device: Device) -> Reading:
        seen[one.path] = device.bytes_per_s
        return steady(one, device)

    measured(CPU, [BY_PATH["bytes_per_s"], BY_PATH["memory.cached_step"]], read=record)
    assert seen == {"bytes_per_s": CPU.bytes_per_s, "memory.cached_step": 1.3 * CPU.bytes_per_s}


def test_a_noisy_machine_is_refused() -> None:
    four = applicable(CPU)[:4]
    with pytest.raises(CalibrationError) as raised:
        measured(CPU, four, read=noisy)
    assert "too noisy: 4 of 4" in str(raised.value) and "90%" in str(raised.value)
    assert len(measured(CPU, four, math.inf, noisy)) == 4


def test_a_figure_that_is_noisy_once_is_measured_again() -> None:
    tries = iter((noisy, steady))
    again = lambda one, device: next(tries)(one, device)  # noqa: E731
    (reading,) = measured(CPU, MEASUREMENTS[:1], read=again).values()
    assert reading.spread == 0.02


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "usable_cores", lambda: 8)
    command.check_load(None)
    command.check_load(1.0)
    with pytest.raises(CalibrationError, match="busy"):
        command.check_load(3.0)
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 0 900 0 0 0 0\n")
    monkeypatch.setattr(machine_load.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine_load, "usable_cores", lambda: 3)
    later = lambda s: stat.write_text("cpu  150 0 0 950 0 0 0 0\n")  # noqa: E731
    monkeypatch.setattr(machine_load.time, "sleep", later)
    taken = machine_load.taken_cores(1.0, stat)  # half of four are busy, one is not ours
    assert taken is not None and 0.8 < taken <= 1.0
    assert machine_load.taken_cores(1.0, tmp_path / "none") is None


def test_the_command_writes_a_profile_that_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "taken_cores", lambda: 0.0)
    monkeypatch.setattr(command, "device_profile", lambda name, place: CPU)
    monkeypatch.setattr(command.measured, "__defaults__", (0.15, steady))
    file = tmp_path / "mine.json"
    assert __main__.main(["calibrate", "--save", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "launch_s" in printed and "steps/s" in printed and str(file) in printed
    device = read_profile(file)
    assert device.name == "mine" and device.launch_s == 1.3 * CPU.launch_s
    assert device.flops_per_s["float64"] == 1.3 * CPU.flops_per_s["float64"]
    assert device.source_of("launch_s").startswith("measured")


def test_the_command_refuses_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "taken_cores", lambda: 1e9)
    assert __main__.main(["calibrate"]) == 2
    assert "error: this machine is busy" in capsys.readouterr().err
    assert __main__.main(["calibrate", "--save", str(tmp_path / "no" / "folder.json")]) == 2
    assert __main__.main(["calibrate", "--only", "nothing"]) == 2
    with pytest.raises(UsageError, match="has this text"):
        command.calibrate(argparse.Namespace(save=None, only="nothing", force=False))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "lines"), [(io.StringIO(), 1), (Terminal(), 0)])
def test_progress_is_silent_at_first_and_short(stream: io.StringIO, lines: int) -> None:
    now = [0.0]
    shown = Progress("tuning", stream, clock=lambda: now[0])
    shown.show(0, 9, "first")
    assert stream.getvalue() == ""
    now[0] = 3.0
    for k in range(5):
        shown.show(k, 9, f"part {k}")
    shown.close()
    assert stream.getvalue().count("\n") == lines
    assert ("part 4" in stream.getvalue()) == (lines == 0)


@pytest.mark.slow
def test_a_real_calibration_is_near_the_shipped_figures() -> None:
    """Within a factor of 30 on whatever machine: units and amounts are right."""
    paths = ("bytes_per_s", "elementwise_per_s", "flops_per_s.float32", "folds.sort")
    found = measured(CPU, [BY_PATH[path] for path in paths], math.inf)
    for path, reading in found.items():
        assert 1 / 30 < reading.value / value_of(CPU, path) < 30, path
