"""The generator of performance fuzzing, the forcing of single candidates, and its judgements."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from performance_fuzz import (
    features,
    forms,
    generator,
    measurement,
    pairs,
    prediction,
    reductions,
    regressions,
    report,
    shrinking,
    timing,
)
from performance_fuzz.program import Input, Line, Program, Wrap

from symjax_rewrite.cost.device_profiles import device_profile

SEEDS = range(7000, 7030)
CPU = device_profile("cpu")


def small(program: Program, most: int = 12) -> Program:
    for name, value in program.sizes:
        program = program.with_size(name, min(value, most))
    return program


def close(x: Any, y: Any) -> bool:
    x, y = (np.asarray(z, np.float64) for z in (x, y))
    return bool(np.allclose(x, y, rtol=1e-3, atol=1e-3 * max(np.abs(y).max(), 1e-30)))


@pytest.mark.parametrize("seed", SEEDS)
def test_program_of_a_seed(seed: int) -> None:
    program = generator.generate(seed)
    assert generator.generate(seed).source() == program.source()
    assert generator.excess(program, max(generator.SECONDS)) <= 1
    assert all(size >= 1 for _, size in program.sizes)
    elements = [math.prod(spec.shape) for spec in program.specs()]
    assert 1 <= max(elements) <= generator.MOST_ELEMENTS * 4096


def test_a_while_loop_takes_all_its_steps_whatever_its_numbers() -> None:
    """A step written in another way may overflow where the program as written does not."""
    line = Line("t0", "x0 * c * 1e30", ("n",))
    inputs = (Input("x0", ("n",)), Input("c", ()))
    wraps = (Wrap("while", ("x0",), "T"),)
    p = Program((("n", 2), ("T", 5)), inputs, (line,), "t0", wraps)
    jaxpr = jax.make_jaxpr(p.function())(jnp.ones(2), jnp.asarray(1.0)).jaxpr
    (loop,) = (e for e in jaxpr.eqns if e.primitive.name == "while")
    goes_on = jaxpr_as_fun(loop.params["cond_jaxpr"])
    for x in (1.0, jnp.inf, -jnp.inf, jnp.nan):
        assert goes_on(4, jnp.full(2, x)) == [True] and goes_on(5, jnp.full(2, x)) == [False]


def test_programs_differ_and_every_block_occurs() -> None:
    made = [generator.compose(seed) for seed in range(1500)]
    assert len({p.source() for p in made}) > 1450
    words = {word for p in made for word in p.family.split()}
    blocks = {b.__name__ for b in (*features.BLOCKS, *pairs.BLOCKS, *reductions.BLOCKS)}
    assert blocks | {"grad", "vmap", "scan", "outputs", "fori", "while"} <= words


def test_sizes_are_log_uniform() -> None:
    made = [generator.compose(seed) for seed in range(400)]
    sizes = [math.log10(math.prod(p.size(s) for s in p.inputs[0].shape)) for p in made]
    shares = np.histogram(sizes, bins=[2.9, 4, 5, 6, 7, 8.1])[0] / len(sizes)
    assert (shares > 0.1).all() and sum(shares) > 0.98


@pytest.mark.parametrize("seed", [*SEEDS][:12])
def test_small_program_runs(seed: int) -> None:
    program = small(generator.generate(seed))
    out = jax.jit(program.function())(*program.arguments())
    assert jax.tree.leaves(out)


def test_records_are_judged_again_without_timing() -> None:
    p = generator.generate(7006)
    record: dict[str, Any] = {"seed": 7006, "harm": 0.5, "regret": 1.2, "best": "alone 0"}
    rows = forms.forms_of(jax.jit(p.function()).trace(*p.specs()).jaxpr)
    record["forms"] = {
        f.name: {"program": measurement.digest(f.closed), "same_as": f.name, "ratio": 0.5}
        for f in rows
    }
    found = prediction.again(record)
    assert (found["harm"], found["regret"]) == (0.5, 1.2)
    assert {f.name: f.predicted_s for f in rows}.items() <= {
        n: row.get("predicted_s") for n, row in found["forms"].items()
    }.items()
    record["forms"]["auto"]["program"] = "another"
    record["forms"] = {n: row for n, row in record["forms"].items() if n in ("plain", "auto")}
    found = prediction.again(record)
    assert "harm" not in found and found["untimed"] == rows[1].kinds


def test_parts_are_removed_and_sizes_halved() -> None:
    program = next(p for p in map(generator.compose, range(99)) if len(p.lines) > 3 and p.wraps)
    smaller = [*program.smaller()]
    assert any(len(p.wraps) < len(program.wraps) for p in smaller)
    assert any(len(p.lines) < len(program.lines) for p in smaller)
    assert any(p.lines == program.lines and p.sizes != program.sizes for p in smaller)


def test_shrinking_keeps_a_slow_program_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that multiply by a mask of 100 rows are slow; nothing else is left."""

    def measure(function: Any, specs: Any, arguments: Any, *_: Any, **__: Any) -> dict[str, Any]:
        text = str(jax.make_jaxpr(function)(*arguments))
        slow = "bool" in text and any(spec.shape and spec.shape[0] >= 100 for spec in specs)
        return {"harm": 1.4 if slow else 1.0, "regret": 1.0, "is_short": False}

    monkeypatch.setattr(measurement, "measure", measure)
    lines = (
        Line("t0", "x @ W", ("n", "d")),
        Line("t1", "jnp.where(m, t0, 0.0)", ("n", "d")),
        Line("t2", "jnp.tanh(t1 @ W)", ("n", "d")),
    )
    inputs = (Input("x", ("n", "d")), Input("W", ("d", "d")), Input("m", ("n", "d"), "mask"))
    wraps = (Wrap("vmap", ("x",), "b"), Wrap("grad", ("x", "W")))
    program = Program((("n", 1600), ("d", 8), ("b", 4)), inputs, lines, "t2", wraps)
    small, record = shrinking.shrunk(program, {"harm": 1.5, "regret": 1.0})
    assert record["harm"] == 1.4 and not small.wraps
    assert [line.text for line in small.lines] == ["jnp.where(m, x, 0.0)"]
    assert dict(small.sizes) == {"n": 100, "d": 1}


def several(x: Any, W: Any, A: Any, B: Any) -> Any:
    """An adapter, a fold, a sort of which little is read, and an invariant product in a loop."""
    y = jnp.tanh(x @ (W + A @ B))
    z = jnp.sum((y[:, None] - x[None]) ** 2, -1)
    last = jax.lax.scan(lambda h, t: (jnp.tanh(h @ (A @ B)) + t, None), y[0], y)[0]
    return jnp.min(z, axis=1), last, jnp.sort(jnp.sin(x), axis=-1)[:, :4]


SHAPES = ((512, 256), (256, 256), (256, 4), (4, 256))


@pytest.fixture(scope="module")
def closed() -> Any:
    specs = [jax.ShapeDtypeStruct(s, "float32") for s in SHAPES]
    return jax.jit(several).trace(*specs).jaxpr


def test_forcing_takes_exactly_one(closed: Any) -> None:
    device = forms.opened(CPU)
    found = forms.candidates(closed, device)
    assert len(found) >= 3
    taken = [forms.forced(closed, device, place, c.group)[1].taken for place, c in found]
    names = [{(t.name, t.where, t.group) for t in each} for each in taken]
    assert names == [{(c.name, c.where, c.group)} for _, c in found]
    assert all(len(each) == 1 for (_, c), each in zip(found, taken, strict=True) if not c.group)
    assert len({str(f.closed.jaxpr) for f in forms.forms_of(closed)}) >= 3


def test_nothing_admitted_is_the_program_as_written(closed: Any) -> None:
    assert not forms.optimised(closed, forms.opened(CPU), lambda c: False).taken


def test_equal_candidates_are_forced_together() -> None:
    def layers(x: Any, W: Any, A: Any, B: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x @ (W + A @ B))
        return x

    specs = [jax.ShapeDtypeStruct(s, "float32") for s in SHAPES]
    closed = jax.jit(layers).trace(*specs).jaxpr
    (place, c), *_ = forms.candidates(closed, CPU)
    _, only = forms.forced(closed, CPU, place, c.group)
    assert len({t.group for t in only.taken}) == 1


def test_every_form_has_the_same_values(closed: Any) -> None:
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.standard_normal(s) / 16, "float32") for s in SHAPES]
    first, *others = forms.forms_of(closed)
    expected = jaxpr_as_fun(first.closed)(*values)
    for form in others:
        got = jaxpr_as_fun(form.closed)(*values)
        assert all(map(close, got, expected)), form.name


def test_open_margins_show_refused_candidates() -> None:
    def f(x: Any, A: Any, B: Any) -> Any:
        return x @ A @ B

    specs = [jax.ShapeDtypeStruct(s, "float32") for s in ((512, 512), (512, 512), (512, 480))]
    closed = jax.jit(f).trace(*specs).jaxpr
    assert not forms.candidates(closed, CPU)
    assert forms.candidates(closed, forms.opened(CPU))


def test_record_of_a_program() -> None:
    program = small(generator.generate(7001), 40)
    r = measurement.measure(program.function(), program.specs(), program.arguments(), 0.05)
    assert {"plain", "auto", "all"} <= {*r["forms"]} or r["is_short"]
    assert r["regret"] >= 1 - 1e-9 and r["harm"] > 0


@pytest.mark.parametrize(
    ("wall", "cores", "ratio"),
    [
        ([2.0, 2.2, 9.0], 3.0, 2.2),
        ([2.0, 2.2, 9.0], 2.0, 2.0),
        ([1.2, 3.0, 3.0], 1.0, 1.2),
        ([9.0, 30.0, 30.0], 1.5, 1.5),  # it waited for cores in every sample
    ],
)
def test_ratio(wall: list[float], cores: float, ratio: float) -> None:
    times = timing.Times({"a": wall, "b": [1.0, 1.0, 1.0]}, {"a": [cores] * 3, "b": [1.0] * 3})
    assert times.ratio("a", "b") == ratio
    again = timing.Times(
        {"a": [1.0] * 3, "b": [1.0] * 3}, {"a": [1.0, 1.0, 2.0], "b": [1.0, 0.9, 3.0]}
    )
    assert again.ratio("a", "b") == 1.0
    short = timing.Times({"a": [8e-4] * 7, "b": [1e-3] * 7}, {"a": [1e-3] * 7, "b": [1e-4] * 7})
    assert short.ratio("a", "b") == pytest.approx(0.8)  # seconds on another core are not booked yet


def test_equal_machine_code_is_timed_once() -> None:
    x = jnp.ones((8, 8))
    f, g = (jax.jit(h).trace(x).jaxpr for h in (lambda x: jnp.sin(x) @ x, lambda y: jnp.sin(y) @ y))
    assert timing.compiled(f, [x]).code == timing.compiled(g, [x]).code
    h = jax.jit(lambda x: jnp.cos(x) @ x).trace(x).jaxpr
    assert timing.compiled(h, [x]).code != timing.compiled(f, [x]).code


def test_harm_needs_two_processes() -> None:
    first = {"harm": 1.5, "regret": 1.6}
    assert measurement.confirmed(first, {"harm": 0.9, "regret": 1.4})["harm"] == 1.0
    assert measurement.confirmed(first, {"harm": 1.2, "regret": 1.4})["harm"] == 1.2


def test_rank_correlation() -> None:
    assert report.spearman([1, 2, 3, 4], [2, 4, 9, 30]) == pytest.approx(1)
    assert report.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert report.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)


@pytest.mark.parametrize("row", regressions.known(), ids=lambda r: r.name)
def test_known_programs_trace_and_hand_written_forms_have_their_shape(
    row: regressions.Row,
) -> None:
    expected = jax.eval_shape(row.function(), *row.specs())
    for other in row.functions_by_hand():
        assert jax.eval_shape(other, *row.specs()) == expected


def test_found_rows_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regressions, "FOUND", tmp_path / "found.json")
    program = small(generator.generate(7002))
    row = regressions.of_program("one", program)
    regressions.add([row])
    regressions.add([row])
    (again,) = regressions.found()
    assert again == row
    got, expected = again.function()(*again.arguments()), program.function()(*program.arguments())
    assert all(map(close, jax.tree.leaves(got), jax.tree.leaves(expected)))


@pytest.mark.usefixtures("one_device")
def test_a_move_may_need_a_class_for_a_reader_that_it_leaves_unread() -> None:
    """Such a class stayed among those needed in `choice_cost.py`, and its operands had no price."""
    p = generator.generate(200174)
    found = forms.forms_of(jax.jit(p.function()).trace(*p.specs()).jaxpr, 6)
    assert any("contraction_order" in form.kinds for form in found)
