"""One plan for all sizes: made once, compared with every trace, and used at other shapes."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jaxtyping import Array, Float

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.program_key import program_key
from symjax_rewrite.jax_sizes import at_sizes
from symjax_rewrite.optimizer import Optimiser

F32 = jnp.float32


@pytest.fixture
def runs(monkeypatch):
    """Count the optimisations, on one device.

    Pallas, once loaded, adds settings that plans are kept by.
    """
    importlib.import_module("jax.experimental.pallas")
    monkeypatch.setattr(jax_internals, "may_be_partitioned", lambda: False)
    found, run = [], Optimiser.run

    def counted(self, closed, *args):
        found.append(closed)
        return run(self, closed, *args)

    monkeypatch.setattr(Optimiser, "run", counted)
    return found


def attention(q, k, v):
    s = jnp.einsum("btd,bsd->bts", q, k)
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(s, -1), v)


def rows(b, t, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((b, t, 8)), F32) for _ in range(3)]


def test_a_second_shape_is_not_optimised_again(runs):
    f = sym_optimize(attention, dims="b T 8, b T 8, b T 8", on_unsupported="error")
    for b, t in ((2, 6), (3, 11), (1, 1), (2, 1300)):
        args = rows(b, t)
        np.testing.assert_allclose(f(*args), attention(*args), rtol=1e-4, atol=1e-5)
    assert len(runs) == 1
    assert "while" in str(f.trace(*rows(16, 1300)).jaxpr)


def test_explain_shows_the_plan_for_all_sizes(runs):
    f = sym_optimize(attention, dims="b T 8, b T 8, b T 8")
    report = f.explain(*rows(2, 6))
    assert [r.name for r in report.routes if r.taken] == ["fold"]
    assert "T**2*b" in next(r.reason for r in report.routes if r.taken)


def test_explain_prices_at_the_sizes_of_the_arguments():
    f = sym_optimize(attention, dims="b T 8, b T 8, b T 8")
    small, large = (f.explain(*[jax.ShapeDtypeStruct((2, t, 8), F32)] * 3) for t in (16, 1500))
    assert (small.sample, large.sample) == ({"b": 2, "T": 16}, {"b": 2, "T": 1500})
    assert large.before.seconds / large.after.seconds > small.before.seconds / small.after.seconds


def test_explain_shows_what_runs_at_the_sizes_and_the_crossovers_of_all():
    f = sym_optimize(lambda x, w, a, b: x @ (w + a @ b), dims="T d, d d, d r, r d")
    few, many = (
        f.explain(*shaped((rows, 512), (512, 512), (512, 16), (16, 512))) for rows in (8, 4096)
    )
    assert [rule.name for rule in few.rules] == ["lora"]
    assert not many.rules
    for report in (few, many):
        assert "equal at T = d/2\n    chosen for sizes from half to twice" in str(report)


def annotated(
    q: Float[Array, "b T 8"], k: Float[Array, "b T 8"], v: Float[Array, "b T 8"]
) -> Float[Array, "b T 8"]:
    return attention(q, k, v)


def test_names_of_annotations(runs):
    f = sym_optimize(annotated, dims="annotations")
    for t in (4, 7):
        args = rows(2, t)
        np.testing.assert_allclose(f(*args), attention(*args), rtol=1e-4, atol=1e-5)
    assert len(runs) == 1


def by_length(x):
    return (x @ x.T) @ x if x.shape[0] == 4 else jnp.tanh(x @ x.T).sum(1)


def test_another_program_at_one_size_is_optimised_by_itself(runs):
    f = sym_optimize(by_length, dims="n 8")
    for n in (3, 4, 5):
        x = jnp.ones((n, 8))
        np.testing.assert_allclose(f(x), by_length(x), rtol=1e-5)
    assert f.explain(jnp.ones((4, 8))).before.flops == 2 * 2 * 4 * 4 * 8  # of the one that runs


def lora(x, w, a, b):
    return x @ (w + a @ b)


def test_an_undecided_plan_is_decided_at_each_shape(runs):
    f = sym_optimize(lora, dims="T d, d d, d r, r d")
    args = [jax.ShapeDtypeStruct(s, F32) for s in ((8, 2048), (2048, 2048), (2048, 4), (4, 2048))]
    text = str(f.trace(*args).jaxpr)
    assert "f32[8,4]" in text  # x @ a comes first
    args[0] = jax.ShapeDtypeStruct((8192, 2048), F32)
    assert "f32[8192,4]" not in str(f.trace(*args).jaxpr)


def shaped(*shapes):
    return [jax.ShapeDtypeStruct(s, F32) for s in shapes]


def gradient(x, w, y):
    return jax.grad(lambda w: ((jax.nn.relu(x @ w) @ w.T - y) ** 2).mean())(w)


def gated(a, x):
    return jax.lax.scan(lambda h, s: (s[0] * h + s[1],) * 2, jnp.zeros(x.shape[1:]), (a, x))[1]


UNDECIDED = {
    "an adapter": (lora, "T 2048, 2048 2048, 2048 4, 4 2048",
                   lambda n: [(n, 2048), (2048, 2048), (2048, 4), (4, 2048)]),
    "a chain": (lambda x, w, v: (x @ w) @ v, "n 256, 256 1024, 1024 k",
                lambda n: [(n, 256), (256, 1024), (1024, 8)]),
    "a gradient": (gradient, "n 64, 64 256, n 64", lambda n: [(n, 64), (64, 256), (n, 64)]),
    "a recurrence": (gated, "T b 64, T b 64", lambda n: [(n, 2, 64)] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDECIDED)
def test_sizes_near_those_of_a_call_are_not_optimised_again(name, runs):
    fun, dims, shapes = UNDECIDED[name]
    f = sym_optimize(fun, dims=dims)
    f.trace(*shaped(*shapes(48)))
    assert len(runs) == 3  # for all sizes, for those near, for these
    for n in (24, 50, 77, 96):
        f.trace(*shaped(*shapes(n)))
    assert len(runs) == 3
    f.trace(*shaped(*shapes(97)))
    assert len(runs) > 3
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(s) / 8, F32) for s in shapes(50)]
    np.testing.assert_allclose(f(*args), fun(*args), rtol=1e-4, atol=1e-5)


def test_a_choice_that_changes_within_the_range_is_made_at_each_shape(runs):
    f = sym_optimize(lora, dims="T 512, 512 512, 512 r, r 512")
    texts = {}
    for t in (40, 60, 80, 120, 200, 300, 500):
        args = shaped((t, 512), (512, 512), (512, 64), (64, 512))
        texts[t] = f"f32[{t},64]" in str(f.trace(*args).jaxpr)
        alone = sym_optimize(lora).trace(*args).jaxpr
        assert texts[t] == (f"f32[{t},64]" in str(alone)), t
    assert {*texts.values()} == {True, False}


def test_facts_that_do_not_hold_leave_the_plan_out(runs):
    f = sym_optimize(lora, dims="T d, d d, d r, r d", assume=("8*T <= d", "8*r <= d"))
    shapes = ((8, 2048), (2048, 2048), (2048, 4), (4, 2048))
    args = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    f.trace(*args)
    f.trace(jax.ShapeDtypeStruct((16, 2048), F32), *args[1:])
    assert len(runs) == 1
    f.trace(jax.ShapeDtypeStruct((8192, 2048), F32), *args[1:])
    assert len(runs) == 2


def positions(x, table, w):
    return jnp.tanh(x + table[: x.shape[1]]) @ w


TABLE = "b T 8, 512 8, 8 8"


def masked(q, k, v, table):
    s = jnp.einsum("btd,bsd->bts", q, k) + table[: q.shape[1], : q.shape[1]]
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(s, -1), v)


def test_a_program_that_no_trace_covers_at_all_sizes_is_planned_near_those_of_a_call(runs):
    f = sym_optimize(positions, dims=TABLE)
    for n in (48, 30, 96):
        x, table, w = (jnp.ones(s) for s in ((2, n, 8), (512, 8), (8, 8)))
        np.testing.assert_allclose(f(x, table, w), positions(x, table, w), rtol=1e-5)
        assert "gather" not in str(f.trace(x, table, w).jaxpr)
    assert len(runs) == 2  # for sizes near those of the first call, and for these


def test_facts_about_sizes_let_a_program_be_traced(runs):
    dims = "b T 8, b T 8, b T 8, 512 512"
    f = sym_optimize(masked, dims=dims, assume="T <= 512", kernels="always")
    for n in (7, 300):
        args = [*rows(2, n), jnp.tril(jnp.ones((512, 512)))]
        np.testing.assert_allclose(f(*args), masked(*args), rtol=1e-4, atol=1e-5)
    assert len(runs) == 1


def test_explain_falls_back_to_the_sizes_that_are_given(caplog):
    f = sym_optimize(positions, dims=TABLE)
    report = f.explain(*shaped((2, 48, 8), (512, 8), (8, 8)))
    assert report.before.flops == 2 * 2 * 48 * 8 * 8
    assert "at these sizes alone" in caplog.text


def test_gradients_of_a_planned_function(runs):
    f = sym_optimize(attention, dims="b T 8, b T 8, b T 8")
    args = rows(2, 6)
    f(*rows(1, 5))
    got = jax.grad(lambda *xs: jnp.sum(f(*xs) ** 2))(*args)
    wanted = jax.grad(lambda *xs: jnp.sum(attention(*xs) ** 2))(*args)
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dims", ["b T-1 8", "b ...", "annotations", b"b T", [8]])
def test_malformed_names_of_sizes_are_refused(dims):
    with pytest.raises(UsageError):
        sym_optimize(attention, dims=dims)


@pytest.mark.parametrize("dims", ["b T", "b T 9, b T 8, b T 8", "b T 8, b b 8, b T 8"])
def test_names_that_do_not_fit_change_nothing(dims, runs):
    args = rows(2, 6)
    with pytest.warns(UserWarning, match="'2 6 8, 2 6 8, 2 6 8'"):
        got = sym_optimize(attention, dims=dims)(*args)
    np.testing.assert_allclose(got, attention(*args), rtol=1e-4, atol=1e-5)


def looped(x, w):
    def step(h, row):
        h = jnp.tanh(h @ w) + row / x.shape[0]
        return h, h.sum()

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)


def slices(m, x):
    n = x.shape[0]
    return m[:n, :n], m[2:n], m[:, -n:], x[:-1], x[-1], x[0]


PROGRAMS = {
    "attention": (attention, "b T 8, b T 8, b T 8"),
    "a loop": (looped, "T 8, 8 8"),
    "branches": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), "n 8"),
    "concatenation": (lambda x: jnp.concatenate([x, x]).reshape(-1, 2, 4), "n 8"),
    "slices": (slices, "9 9, n 8"),
    "a mean": (lambda x: jax.nn.gelu(x - x.mean(0)), "n 8"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_for_names_give_the_program_of_these_numbers(name):
    fun, shapes = PROGRAMS[name]
    scope = export.SymbolicScope(["3 <= n", "n <= 9"])
    named = [
        jax.ShapeDtypeStruct(export.symbolic_shape(",".join(s.split()), scope=scope), F32)
        for s in shapes.split(",")
    ]
    sizes = {"b": 2, "T": 6, "n": 5}
    known = [jax.ShapeDtypeStruct(tuple(sizes.get(str(d), d) for d in a.shape), F32) for a in named]
    made = at_sizes(jax.make_jaxpr(fun)(*named), sizes)
    assert program_key(made) == program_key(at_sizes(jax.make_jaxpr(fun)(*known), {}))
    args = [np.random.default_rng(0).standard_normal(a.shape).astype(np.float32) for a in known]
    got = jax_internals.eval_jaxpr(made, *args)
    for x, y in zip(got, jax.tree.leaves(fun(*args)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
