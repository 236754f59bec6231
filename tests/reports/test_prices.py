"""The numbers of reports agree with counts of the operations that run."""

import json
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import pallas as pl

from symjax_rewrite import Budget, jax_internals, sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.optimizer import Optimiser
from symjax_rewrite.options import Options
from symjax_rewrite.reports.builder import make_report
from symjax_rewrite.reports.units import ratio, speed
from symjax_rewrite.rules import packs
from symjax_rewrite.text_tables import too_slow
from symjax_rewrite.usage_records import Change, RouteUse
from tests.fuzz.interpret import Machine
from tests.reports.examples import attention, chain, recurrence

NOT_PRICED = "not priced"
CACHED = 3.0  # times the memory's bandwidth of a CPU, while temporaries are few
ROWS, WIDTH = 1024, 16


def causal_attention(q, k, v):
    scores = q @ k.T
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def nearest(x, y):
    distances = jnp.sum(x * x, -1)[:, None] - 2 * x @ y.T + jnp.sum(y * y, -1)
    return lax.top_k(-distances, 4)


def norm(x, gain, w):
    scale = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return (x * scale * gain) @ w


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "attention": (attention, [(ROWS, WIDTH)] * 3),
    "causal attention": (causal_attention, [(ROWS, WIDTH)] * 3),
    "nearest neighbours": (nearest, [(ROWS, WIDTH)] * 2),
    "scan": (recurrence, [(ROWS // 4, WIDTH)] * 2),
    "norm": (norm, [(ROWS, 64), (64,), (64, 128)]),
}


class Counting(Machine):
    """Runs a program loop by loop and counts the FLOPs of the products that run."""

    flops = 0

    def equation(self, eqn, xs):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = [eqn.invars[0].aval.shape[i] for i in contracted]
            self.flops += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(sizes)
        return super().equation(eqn, xs)


def ends_bytes(closed):
    """Bytes of all inputs and outputs, which any form of the program moves at least."""
    avals = [v.aval for v in (*closed.jaxpr.invars, *closed.jaxpr.outvars)]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


def spec_list(shapes):
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]


def assert_text_agrees(report):
    """Ratios stand where both numbers do, and are theirs."""
    lines = str(report).splitlines()
    fields = {"FLOPs of products": "flops", "memory traffic": "bytes", "model time": "seconds"}
    for label, name in fields.items():
        before, after = (getattr(side, name) for side in (report.before, report.after))
        rows = [x for x in lines if x.startswith(f"  {label}   ")]
        if name == "flops" and before == after == 0:
            assert not rows  # no products
            continue
        (row,) = rows
        assert (NOT_PRICED in row) == (None in (before, after))
        if None in (before, after) or not before or not after or not report.changed:
            assert "×" not in row
        else:
            assert row.endswith(ratio(before / after))
    saved = json.loads(report.to_json())
    for side in ("before", "after"):
        for name in ("flops", "bytes", "seconds", "peak_bytes"):
            assert saved[side][name] == getattr(getattr(report, side), name)


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("kernels", ["auto", "always"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_costs_agree_with_counted_operations(name, kernels, device):
    fun, shapes = PROGRAMS[name]
    report = sym_optimize(fun, kernels=kernels, device=device).explain(*spec_list(shapes))
    assert_text_agrees(report)
    draw = np.random.default_rng(0)
    args = [draw.normal(size=s).astype(np.float32) for s in shapes]
    for side in (report.before, report.after):
        assert side.bytes is None or side.bytes >= ends_bytes(side.jaxpr)
        if device == "cpu" or not jax_internals.has_primitive(side.jaxpr, "pallas_call"):
            machine = Counting()
            machine.run(side.jaxpr, args)
            assert side.flops in (None, machine.flops)
    assert report.before.flops is not None and report.before.bytes is not None


@pytest.mark.parametrize(
    ("name", "least", "most"), [("attention", 1, 1), ("causal attention", 0.5, 0.7)]
)
def test_flops_of_a_kernel_are_those_of_the_blocks_it_visits(name, least, most):
    fun, shapes = PROGRAMS[name]
    report = sym_optimize(fun, kernels="always", device="h200").explain(*spec_list(shapes))
    whole = 2 * ROWS * ROWS * 2 * WIDTH
    assert least * whole <= report.after.flops <= most * whole
    assert report.after.bytes < report.before.bytes
    assert report.after.seconds < report.before.seconds


@pytest.mark.parametrize(("dtype", "shapes"), [("bfloat16", [(64, 512), (512,), (512, 512)])])
def test_kernel_of_a_norm_is_priced(dtype, shapes):
    specs = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in shapes]
    report = sym_optimize(norm, kernels="always", device="h200").explain(*specs)
    assert jax_internals.has_primitive(report.after.jaxpr, "pallas_call")
    assert report.after.flops >= 2 * 64 * 512 * 512
    assert report.after.bytes >= ends_bytes(report.after.jaxpr)


def decided_by_data(x, w):
    return lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ w, x)


def counted(x, w):
    state = lax.while_loop(lambda s: s[0] < 7, lambda s: (s[0] + 1, s[1] @ w), (0, x))
    return state[1]


def scanned(x, w):
    return lax.scan(lambda x, _: (x @ w, None), x, None, length=7)[0]


def custom_kernel(x, w):
    return pl.pallas_call(lambda a, o: None, out_shape=jax.typeof(x))(x) @ w


def scattered(x, w):
    return x.at[jnp.array([1, 1])].add(1.0) @ w


def factored(x, w):
    return jnp.linalg.cholesky(w) @ x


ONE = 2 * 8**3
PRICED = {
    "trips that data decide": (decided_by_data, None, False),
    "trips counted to a constant": (counted, 7 * ONE, True),
    "trips of a scan": (scanned, 7 * ONE, True),
    "a kernel without an estimate": (custom_kernel, None, False),
    "a scatter": (scattered, ONE, True),
    "a factorisation": (factored, None, False),
}


@pytest.mark.parametrize("name", PRICED)
def test_known_costs_are_given(name):
    fun, flops, has_bytes = PRICED[name]
    report = sym_optimize(fun).explain(*spec_list([(8, 8), (8, 8)]))
    assert report.before.flops == flops
    assert (report.before.bytes is not None) == has_bytes
    assert report.before.bytes is None or report.before.bytes >= ends_bytes(report.before.jaxpr)
    assert_text_agrees(report)


def test_loop_is_priced_as_often_as_it_runs():
    def before(n):
        def f(x, w):
            return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=n)[0]

        return sym_optimize(f).explain(*spec_list([(8, 8)] * 2)).before

    once, often = before(5), before(50)
    assert often.flops == 10 * once.flops
    assert often.bytes == pytest.approx(10 * once.bytes, rel=0.01)
    assert often.seconds == pytest.approx(10 * once.seconds, rel=0.01)


def test_results_of_a_branch_are_held_once():
    x = jnp.ones((100, 100))

    def branches(p, x):
        return lax.cond(p, jnp.exp, lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), x) + 1

    before = sym_optimize(branches).explain(True, x).before
    assert 2 * x.nbytes <= before.peak_bytes < 2.1 * x.nbytes


def test_program_that_was_not_read_has_no_price():
    specs = spec_list([(8, 8), (8, 8)])
    report = sym_optimize(lambda x, w: jnp.tanh(x @ w), budget=Budget(equations=1)).explain(*specs)
    assert report.before.flops == ONE
    assert report.before.bytes is None
    assert_text_agrees(report)


def attention_heads(q, k, v):
    return jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k)) @ v


def test_model_time_of_named_sizes_says_at_which():
    n, d = export.symbolic_shape("n, d")
    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, d), (d, d))]
    report = sym_optimize(lambda x, w: jnp.tanh(x @ w)).explain(*specs)
    (line,) = (x for x in str(report).splitlines() if x.startswith("  numbers are those at"))
    assert all(f"{name} = {size}" in line for name, size in report.sample.items())
    assert set(report.sample) == {"n", "d"}
    assert report.before.largest_intermediate == 4 * math.prod(report.sample.values())


@pytest.mark.usefixtures("one_device")
def test_fold_of_named_sizes_is_compared_at_numbers():
    """A kernel's own price holds at the sample, so no formula stands beside a number."""
    (n,) = export.symbolic_shape("n")
    specs = [jax.ShapeDtypeStruct((8, n, 64), jnp.float32)] * 3
    report = sym_optimize(attention_heads, device="cpu", kernels="always").explain(*specs)
    assert report.changes[0].name == "fold"
    for side in (report.before, report.after):
        assert isinstance(side.flops, (int, float)) and isinstance(side.bytes, (int, float))
    assert_text_agrees(report)


def bytes_of(shape):
    return 4 * math.prod(shape)


def priced(fun, shapes, device, kernels="always"):
    return sym_optimize(fun, kernels=kernels, device=device).explain(*spec_list(shapes))


H200 = DEVICES["h200"]
FOLDS = ("attention", "causal attention", "nearest neighbours")


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_routed_program_has_a_ratio(name, device):
    report = priced(*PROGRAMS[name], device)
    assert any(r.taken for r in report.routes)
    for side in (report.before, report.after):
        assert None not in (side.seconds, side.flops, side.bytes, side.largest_intermediate)
        assert side.seconds >= ends_bytes(side.jaxpr) / (CACHED * DEVICES[device].bytes_per_s)
        assert side.seconds >= side.flops / DEVICES[device].peak("float32")


@pytest.mark.parametrize(
    ("name", "device"),
    [*((n, d) for n in FOLDS for d in ("cpu", "h200")), ("norm", "h200")],
)
def test_ratio_of_a_program_follows_that_of_its_candidate(name, device):
    """The rest of the program costs the same before and after: it only draws the ratio to one."""
    report = priced(*PROGRAMS[name], device)
    (use,) = (r for r in report.routes if r.taken)
    ratio = report.before.seconds / report.after.seconds
    assert 0.5 * use.ratio <= ratio <= 1.6 * use.ratio


def test_routed_norm_is_a_kernel_in_one_pass():
    rows = 16 * ROWS  # enough programs to draw the whole bandwidth
    fun, shapes = norm, [(rows, 64), (64,), (64, 128)]
    report = priced(fun, shapes, "h200")
    ends = bytes_of((rows, 128)) + sum(map(bytes_of, shapes))
    flops = 2 * rows * 64 * 128
    roofline = max(flops / H200.peak("float32"), ends / H200.bytes_per_s)
    assert report.after.bytes == pytest.approx(ends, rel=0.01)
    assert report.after.flops == flops
    own_s = report.after.seconds - H200.launch_s - H200.norms.kernel_s
    assert roofline <= own_s <= 2 * roofline
    assert report.after.largest_intermediate == bytes_of((rows, 128))


@pytest.mark.parametrize("name", ["attention", "causal attention"])
def test_routed_attention_stores_no_pairs(name):
    report = priced(*PROGRAMS[name], "h200")
    assert report.before.largest_intermediate == bytes_of((ROWS, ROWS))
    assert report.after.largest_intermediate == bytes_of((ROWS, WIDTH))
    assert report.after.bytes == 4 * bytes_of((ROWS, WIDTH))


def test_routed_scan_is_no_loop_of_launches():
    report = priced(*PROGRAMS["scan"], "h200")
    assert report.before.seconds >= ROWS // 4 * H200.launch_s
    assert report.after.seconds <= 10 * H200.launch_s
    assert report.after.bytes >= 3 * bytes_of((ROWS // 4, WIDTH))


def layers(x, w, count=3):
    for _ in range(count):
        x = attention(x @ w, x @ (w + 1), x)
    return x


@pytest.mark.usefixtures("one_device")
def test_equal_refusals_are_one_entry():
    report = priced(layers, [(ROWS, WIDTH), (WIDTH, WIDTH)], "cpu", "auto")
    refused = [(r.name, r.reason) for r in report.routes if not r.taken]
    assert len(set(refused)) == len(refused)
    (fold,) = (r for r in report.routes if r.name == "fold" and r.count == 3)
    assert not fold.taken
    (line,) = fold.places
    assert str(report).count(f"fold: {fold.reason}") == 1
    assert f"examples.py:{line.split(':')[1].split()[0]} (attention) ×3" in str(report)


@pytest.mark.usefixtures("one_device")
def test_refused_candidate_has_a_ratio():
    fun, shapes = PROGRAMS["nearest neighbours"]
    report = priced(fun, shapes, "cpu", "auto")
    forced = priced(fun, shapes, "cpu")
    (use,) = (r for r in report.routes if r.name == "fold")
    assert not use.taken and use.ratio < 1.25
    (taken,) = (r for r in forced.routes if r.name == "fold")
    assert taken.taken and use.ratio == pytest.approx(taken.ratio)
    assert f"predicted {speed(use.ratio)}" in str(report)


@pytest.mark.usefixtures("one_device")
def test_program_left_as_written_names_the_best_alternative():
    report = priced(*PROGRAMS["nearest neighbours"], "cpu", "auto")
    (use,) = (r for r in report.routes if r.name == "fold")
    assert report.best_alternative is use
    for gain, said in ((0.8, "no form considered is predicted faster"),
                       (1.2, "best alternative: fold, predicted 1.20× as fast there")):  # fmt: skip
        use.ratio = gain
        assert str(report).splitlines()[0] == f"left as written: nearest on cpu; {said}"
    saved = json.loads(report.to_json())
    assert saved["best_alternative"]["ratio"] == use.ratio
    assert [r["ratio"] for r in saved["routes"]] == [r.ratio for r in report.routes]


def test_report_names_operations_without_a_price():
    report = sym_optimize(lambda x: jnp.fft.fft(x @ x), device="cpu").explain(
        *spec_list([(64, 64)])
    )
    assert report.before.seconds is None
    assert "  without a price: fft\n" in str(report)
    assert "without a price: fft" in report.to_html()


def test_operations_without_flops_are_named():
    report = sym_optimize(lambda a, b: jnp.linalg.inv(a) + b @ b, device="cpu").explain(
        *spec_list([(64, 64), (64, 64)])
    )
    assert report.before.flops is None
    assert "  without a price: lu" in str(report)
    assert "an operation has no price" in report.to_html()


def test_refused_form_is_written_out():
    report = sym_optimize(lambda a, b, c: (a @ b) @ c, device="cpu").explain(
        *spec_list([(256, 256), (256, 256), (256, 200)])
    )
    assert not report.changed
    lines = [line.strip() for line in str(report).splitlines()]
    at = lines.index(
        "to change: no option takes it: write that form yourself if it measures faster"
    )
    assert lines[at + 2] == "= Σ_j a[i,j]·(Σ_k b[j,k]·c[k,l])"
    (route,) = json.loads(report.to_json())["routes"]
    assert f"= {route['steps'][0]['after']}" == lines[at + 2]
    assert "parts" not in route and lines[at + 2] in report.to_html()


@pytest.mark.usefixtures("one_device")
def test_gain_of_a_lone_change_is_that_of_the_program():
    report = sym_optimize(
        lambda p: ((p[:, None] - p[None]) ** 2).sum((1, 2)), device="cpu"
    ).explain(*spec_list([(2048, 3)]))
    (change,) = report.changes
    whole = report.before.seconds / report.after.seconds
    for ratio_there, is_told in ((0.9 * whole, False), (1.1 * whole, True)):
        change.seconds = (ratio_there, 1.0)
        assert ("as fast there" in str(report)) == is_told


@pytest.mark.usefixtures("one_device")
def test_conflicts_with_changes_are_not_listed():
    report = sym_optimize(jnp.sin, device="cpu").explain(*spec_list([(8,)]))
    report.routes += [
        RouteUse("fold", False, Obstacle.CONFLICT("the rules save as much"), "f.py:1 (f)"),
        RouteUse("search", False, Obstacle.SHARE("no rule was tried: one product"), "f.py:2 (f)"),
    ]
    assert "  fold: the rules save as much" in str(report)
    report.changes.append(Change("fold", (), "", {"f.py:1 (f)": 1}, None, "", ()))
    assert "the rules save as much" not in str(report)
    assert "nothing to do, without 1 line (one product)" in str(report)


def test_program_without_candidates_names_no_alternative():
    report = sym_optimize(jnp.sin).explain(*spec_list([(8,)]))
    assert report.best_alternative is None
    first = str(report).splitlines()[0]
    assert first.startswith("left as written: sin on ")
    assert first.endswith("; no cheaper form is known")


@pytest.mark.usefixtures("one_device")
def test_model_times_differ_as_the_change_was_decided():
    report = sym_optimize(lambda x: jnp.cumsum(x, 0), device="cpu").explain(
        *spec_list([(2000, 300)])
    )
    (change,) = report.changes
    assert change.seconds is not None
    written, changed = change.seconds
    # The pass prices rows by its own figure, the report the loop, where XLA compiles it as one.
    near = 0.1 if math.isinf(DEVICES["cpu"].loops.inlined_bytes) else 1e-6
    saved = report.before.seconds - report.after.seconds
    assert saved == pytest.approx(written - changed, rel=near)
    gain = f"predicted {ratio(report.before.seconds / report.after.seconds)} as fast ("
    assert gain in str(report).splitlines()[0]


def test_model_times_of_a_slower_change_differ_as_it_was_decided():
    """The pass priced both loops higher than the model prices the whole program."""
    cpu = DEVICES["cpu"]
    device = replace(cpu, margins=replace(cpu.margins, scan=0.0, faster=math.inf))
    optimiser = Optimiser(Options(rules=packs.default), packs.default, device)
    loop = lambda x: lax.scan(lambda h, y: (0.9 * h + y, h), jnp.zeros(3), x)[1]  # noqa: E731
    report = make_report(optimiser.run(jax.make_jaxpr(loop)(*spec_list([(600, 3)]))), optimiser)
    (change,) = report.changes
    assert change.seconds is not None
    written, changed = change.seconds
    assert written < changed
    before, after = report.before.seconds, report.after.seconds
    assert before and after and before - after == pytest.approx(written - changed)


FUSIONS = DEVICES["cpu"].fusions


@pytest.mark.skipif(not (FUSIONS and FUSIONS.sorts_parts), reason="this XLA keeps top-ks whole")
def test_unchanged_equations_count_in_both_model_times():
    """The last product takes longer than the top-k, of which only a part was sorted as written."""

    def codes(x, d):
        values, places = jax.lax.top_k(x @ d, 32)
        values = values - values[:, -1:]
        rows = jnp.arange(len(x))[:, None]
        return jnp.zeros((len(x), d.shape[1])).at[rows, places].set(values) @ d.T

    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 768), (768, 16384))]
    report = sym_optimize(codes, device="cpu", kernels="off").explain(*specs)
    least_s = report.after.flops / DEVICES["cpu"].peak("float32")
    assert report.before.seconds > report.after.seconds > least_s


def test_refusals_at_lines_of_little_time_are_counted():
    report = sym_optimize(chain, device="cpu").explain(*spec_list([(512, 512), (512, 512), (512,)]))
    longest, shortest = (f(report.details.bottlenecks, key=lambda b: b.seconds) for f in (max, min))
    assert shortest.share < 0.03 < longest.share
    for name, line in (("fold", longest), ("scan", shortest)):
        report.routes.append(RouteUse(name, False, Obstacle.READER("used twice"), line.where))
    assert "  fold: used twice" in str(report) and "scan: used twice" not in str(report)
    more = "1 more, at lines of less than 3 % of the program"
    assert f"\n  {more}" in str(report) and more in report.to_html()


@pytest.mark.usefixtures("one_device")
def test_refusals_that_differ_by_their_gain_are_one():
    report = sym_optimize(jnp.sin, device="cpu").explain(*spec_list([(8,)]))
    reasons = {0.5: too_slow(0.5, 1.25), 0.25: too_slow(0.25, 1.25), 1.1: too_slow(1.1, 1.25)}
    uses = [
        RouteUse("fold", False, Obstacle.COST(reason), f"f.py:{k} (f)", ratio=gain)
        for k, (gain, reason) in enumerate(reasons.items(), start=1)
    ]
    report.routes += [*uses, RouteUse("scan", False, uses[0].reason, "f.py:9 (f)", ratio=0.5)]
    lines = str(report).splitlines()
    assert [line for line in lines if line.startswith(("  fold", "  scan"))] == [
        "  fold: predicted 1.10× as fast, below the 1.25× required",
        "  fold: predicted 2.00× to 4.00× slower",
        "  scan: predicted 2.00× slower",
    ]
    assert "    at f.py:1 (f)" in lines and "    at f.py:2 (f)" in lines
    assert report.to_html().count("2.00× to 4.00× slower") == 1
    assert len(json.loads(report.to_json())["routes"]) == 4  # the record keeps all


def test_products_that_read_across_rows_take_longer():
    x, rows, g = spec_list([(20_000, 500), (500, 20_000), (20_000, 8)])
    transposed = sym_optimize(lambda x, g: x.T @ g, device="cpu").explain(x, g)
    along = sym_optimize(lambda x, g: x @ g, device="cpu").explain(rows, g)
    assert transposed.before.seconds > 1.5 * along.before.seconds


def test_results_are_written_along_all_axes():
    x = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    spread = lambda x: jnp.broadcast_to(jnp.exp(x)[:, None], (ROWS, 4 * ROWS))  # noqa: E731
    report = sym_optimize(spread, device="cpu").explain(x)
    assert report.before.bytes == ends_bytes(jax.make_jaxpr(spread)(x))
