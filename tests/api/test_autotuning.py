"""`tune`: the search among candidates with planted times, its cache of files, and plans."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import options, sym_optimize
from symjax_rewrite.api import autotuning, tuning_cache
from symjax_rewrite.api.autotuning import ROUNDS, Trial, is_faster
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.usage_records import RouteUse
from tests.profiles import changed

SHAPES = ((64, 256), (256, 256), (256, 4), (4, 256))
SPECS = [jax.ShapeDtypeStruct(s, "float32") for s in SHAPES]
NEVER = changed(CPU, margins={"rewrite": 1e9, "dominating": 1e9})  # the model refuses every rewrite
Seconds = Callable[[set[str]], float]


def several(x: Any, W: Any, A: Any, B: Any) -> Any:
    """An adapter, and a sort of which little is read."""
    return jnp.sort(jnp.sin(x @ (W + A @ B)), axis=-1)[:, :4]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options, "CACHE_DIRECTORY", tmp_path / "cache")


def taken(trial: Trial) -> set[str]:
    """Return the names of the rules and kernels of a program."""
    result = trial.result
    return {u.name for u in result.routes if u.taken} | result.rules.keys()


def plant(monkeypatch: pytest.MonkeyPatch, seconds: Seconds) -> list[list[set[str]]]:
    """Let `seconds` of a program's rules and kernels be its time; return the timed programs."""
    measured: list[list[set[str]]] = []

    def samples(trials: Mapping[str, Trial], closed: Any) -> dict[str, list[float]]:
        measured.append([taken(t) for t in trials.values()])
        wave = [1 + 0.004 * (k % 3) for k in range(ROUNDS)]
        return {name: [w * seconds(taken(t)) for w in wave] for name, t in trials.items()}

    monkeypatch.setattr(autotuning, "samples", samples)
    return measured


def tune(fun: Any = several, specs: Any = SPECS, **settings: Any) -> tuple[Any, RouteUse, set[str]]:
    """Return the report of a tuned function, its entry of `tune`, and its rules and kernels."""
    report = sym_optimize(fun, tune=True, **settings).explain(*specs)
    (use,) = (r for r in report.routes if r.name == "tune")
    names = {u.name for u in report.routes if u.taken and u.name != "tune"}
    return report, use, names | {r.name for r in report.rules}


def gains(**factors: float) -> Seconds:
    """Times that are multiplied by a factor for each thing that is done."""
    return lambda done: 1e-3 * float(np.prod([factors.get(name, 1.0) for name in done]))


BOTH = {"lora", "selection"}


@pytest.mark.parametrize(
    ("seconds", "done"),
    [
        (gains(lora=0.5, selection=0.5), BOTH),
        (gains(lora=1.5, selection=0.5), {"selection"}),
        (gains(lora=0.5, selection=1.2), {"lora"}),
        (gains(lora=1.5, selection=1.5), set()),
        (gains(), set()),  # nothing is gained: as written
        (gains(lora=0.985, selection=0.995), set()),  # no more than noise
    ],
    ids=["both", "selection", "lora", "neither", "nothing", "noise"],
)
def test_candidates_that_measure_faster_are_kept(
    monkeypatch: pytest.MonkeyPatch, seconds: Seconds, done: set[str]
) -> None:
    plant(monkeypatch, seconds)
    report, use, found = tune()
    assert found == done
    assert use.taken == bool(done)
    assert str(report.after.jaxpr) != str(report.before.jaxpr) or not done


def test_a_refused_candidate_is_measured_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sym_optimize(several, device=NEVER).explain(*SPECS)
    assert not plain.rules
    plant(monkeypatch, gains(lora=0.5))
    _, use, found = tune(device=NEVER)
    assert "lora" in found
    assert "with lora" in use.reason


def test_the_report_tells_times_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, gains(lora=1.5, selection=0.5))
    report, use, _ = tune()
    assert f"\ntune: {use.reason}\n" in str(report)
    assert use.reason in report.to_html()
    assert use.reason == (
        "measured: without lora 502 µs ± 0%, as the model chooses 753 µs ± 0%, "
        "as written 1.00 ms ± 0%; every candidate is measured"
    )
    assert use.ratio == pytest.approx(2.0)


def test_a_lucky_measurement_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the search a rewrite looks twice as fast, and in the last measurement it does not."""

    def samples(trials: Mapping[str, Trial], closed: Any) -> dict[str, list[float]]:
        last = autotuning.WRITTEN in trials and any(n.startswith("with ") for n in trials)
        fast = 1.0 if last else 0.5
        return {n: [fast if taken(t) else 1.0] * ROUNDS for n, t in trials.items()}

    monkeypatch.setattr(autotuning, "samples", samples)
    _, use, found = tune(lambda x, W, A, B: x @ (W + A @ B), device=NEVER)
    assert not found and not use.taken


def test_every_program_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = plant(monkeypatch, gains(lora=0.5, selection=0.5))
    tune()
    search = measured[1:-1]
    assert measured[0] == [set(), BOTH]
    assert [pair[0] for pair in search] == [BOTH] * len(search)
    others = [frozenset(pair[1]) for pair in search]
    assert len(others) == len(set(others)) >= 2


@pytest.mark.parametrize(
    ("seconds", "stop"),
    [
        (lambda done: 1e-6, "the program is too short"),
        (lambda done: 1e-4 if done else 2e-4, "its inputs and outputs take as long"),
        (lambda done: 60.0, "nothing can gain more than noise"),
    ],
)
def test_a_search_ends_where_nothing_can_gain(
    monkeypatch: pytest.MonkeyPatch, seconds: Seconds, stop: str
) -> None:
    slow = changed(CPU)
    if "inputs" in stop:  # two passes over the arrays are all that a second allows
        slow = changed(CPU, memory={"cached_terms": 1e-9, "cached_step": 1e-9})
    fun = several if "noise" not in stop else lambda x, W, A, B: x @ (W + A @ B)
    measured = plant(monkeypatch, seconds)
    _, use, _ = tune(fun, device=slow)
    assert stop in use.reason or (not use.taken and stop), use.reason
    assert len(measured) <= 2


def test_measurements_end_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuning, "MOST_TRIALS", 1)
    plant(monkeypatch, gains(lora=0.5, selection=0.5))
    assert "the limit of a search" in tune()[1].reason


def test_a_candidate_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, gains(selection=0.5))
    planted = autotuning.samples

    def samples(trials: Mapping[str, Trial], closed: Any) -> dict[str, list[float]]:
        if any("lora" in taken(t) for t in trials.values()):
            raise jax.errors.JaxRuntimeError("out of memory")
        return planted(trials, closed)

    monkeypatch.setattr(autotuning, "samples", samples)
    assert tune(device=NEVER)[2] == {"selection"}


def test_faster_needs_a_margin_in_most_rounds() -> None:
    assert is_faster([0.5] * 7, [1.0] * 7, CPU)
    assert not is_faster([0.99] * 7, [1.0] * 7, CPU)
    assert not is_faster([0.5, 0.5, 0.5, 0.5, 1.2, 1.2, 1.2], [1.0] * 7, CPU)
    assert is_faster([0.9, 1.9, 0.9, 0.9, 1.8, 0.9, 2.7], [1, 2, 1, 1, 2, 1, 3], CPU)


def test_a_choice_is_measured_once_per_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = plant(monkeypatch, gains(lora=1.5, selection=0.5))
    first, _, done = tune()
    count = len(measured)
    again, use, found = tune()  # a new function, as in a new process
    assert len(measured) == count
    assert found == done == {"selection"}
    assert use.reason.startswith("measured before: without lora 502 µs")
    assert str(again.after.jaxpr) == str(first.after.jaxpr)
    tune(numerics="finite")
    assert len(measured) > count, "other options are another choice"


def stored() -> Path:
    (path,) = (options.CACHE_DIRECTORY / "tune").iterdir()
    return path


def with_changes(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **changes})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "\x00",
        lambda text: "[]",
        with_changes(format=2),
        with_changes(key={"program": "another"}),
        with_changes(choices=[1]),
        with_changes(choices=["lora 0123456789ab"]),
        with_changes(measured={"as written": 1.0}),
        with_changes(measured={}),
    ],
)
def test_a_corrupt_or_foreign_entry_is_ignored_with_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    measured = plant(monkeypatch, gains(lora=0.5, selection=0.5))
    tune()
    path, count = stored(), len(measured)
    path.write_text(spoil(path.read_text()))
    with caplog.at_level(logging.WARNING, "symjax_rewrite"):
        _, use, found = tune()
    assert f"ignored {path}" in caplog.text
    assert len(measured) > count and found == BOTH and use.reason.startswith("measured: ")
    assert json.loads(path.read_text())["format"] == tuning_cache.FORMAT, "it is written anew"


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(options, "CACHE_DIRECTORY", blocked)
    measured = plant(monkeypatch, gains(lora=0.5, selection=0.5))
    f = sym_optimize(several, tune=True)
    with caplog.at_level(logging.WARNING, "symjax_rewrite"):
        assert f.explain(*SPECS).rules
    assert "nothing is stored" in caplog.text
    count = len(measured)
    assert f.explain(*SPECS).rules
    assert len(measured) == count, "the process remembers"


def test_entries_differ_by_sizes_constants_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(fun: Any, *shapes: tuple[int, ...], device: Any = CPU) -> Path:
        closed = jax.jit(fun).trace(*[jax.ShapeDtypeStruct(s, "float32") for s in shapes]).jaxpr
        worker = sym_optimize(fun, device=device)
        return tuning_cache.place(closed, optimiser_of(worker))

    def optimiser_of(f: Any) -> Any:
        from symjax_rewrite.optimizer import Optimiser

        given = f.remake.args[1]
        return Optimiser(given, given.rules, given.device)

    ones, twos = jnp.ones((300, 300)), 2 * jnp.ones((300, 300))
    places = [
        key(lambda x: x @ ones, (8, 300)),
        key(lambda x: x @ ones, (9, 300)),
        key(lambda x: x @ twos, (8, 300)),
        key(lambda x: x @ ones, (8, 300), device=changed(CPU)),
    ]
    assert len(set(places)) == 3 and places[0] == places[3]
    monkeypatch.setattr(tuning_cache, "usable_cores", lambda: 64)
    assert key(lambda x: x @ ones, (8, 300)) not in places


def test_a_measured_choice_is_replayed_as_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, gains(lora=0.5, selection=1.2))
    report, _, found = tune(device=NEVER)
    assert found == {"lora"}
    plan = json.loads(json.dumps(report.plan))
    again = sym_optimize(several, plan=plan, device=NEVER).explain(*SPECS)
    assert [r.name for r in again.rules] == ["lora"]
    assert str(again.after.jaxpr) == str(report.after.jaxpr)
    assert again.plan == report.plan
    args = [jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.float32) for s in SHAPES]
    got = sym_optimize(several, plan=plan, device=NEVER)(*args)
    np.testing.assert_allclose(got, several(*args), rtol=1e-4, atol=1e-4)


def test_equal_layers_are_chosen_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(x: Any, W: Any, A: Any, B: Any) -> Any:
        for k in range(4):
            x = jnp.tanh(x @ (W[k] + A[k] @ B[k]))
        return x

    stacked = [SPECS[0], *(jax.ShapeDtypeStruct((4, *s), "float32") for s in SHAPES[1:])]

    measured = plant(monkeypatch, gains(lora=0.5))
    _, _, found = tune(layers, stacked)
    assert found == {"lora"}
    assert len(measured) <= 4


def test_loops_are_tuned_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(x: Any, W: Any, A: Any, B: Any) -> Any:
        step = lambda h, _: (jnp.sort(jnp.sin(h))[:, :4].sum() + jnp.tanh(h), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=8)[0]

    for factor, done in ((0.5, {"selection"}), (2.0, set())):
        plant(monkeypatch, gains(selection=factor))
        assert tune(loop, numerics="reassoc" if factor < 1 else "finite")[2] == done


def test_processes_of_one_program_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    _, use, found = tune()
    assert use.reason == "not measured: all processes of a program must choose alike"
    assert found == BOTH


def test_a_program_without_another_form_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = plant(monkeypatch, gains())
    _, use, _ = tune(lambda x, W, A, B: jnp.sin(x))
    assert use.reason == "not measured: there is no other form"
    assert not measured


@pytest.mark.slow
def test_a_real_measurement() -> None:
    """Selection of 4 of 2048 sorted places is several times faster than the sort on any CPU."""
    f = sym_optimize(lambda x: jnp.sort(x, axis=-1)[:, :4], tune=True)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((32, 2048)), jnp.float32)
    (use,) = (r for r in f.explain(x).routes if r.name == "tune")
    assert use.taken and use.reason.startswith("measured: ")
    np.testing.assert_array_equal(f(x), jnp.sort(x, axis=-1)[:, :4])
