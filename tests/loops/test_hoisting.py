"""Equations that leave a loop and equations that stay; the values are the original program's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, packs, sym_optimize
from symjax_rewrite.cost.device_profiles import device_profile
from symjax_rewrite.loops import hoisting
from tests.equal_forms import agree
from tests.profiles import use_on_cpu
from tests.programs import assert_close

STEPS, ROWS, WIDTH = 24, 4, 64


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[-1])
    return jnp.asarray(values.astype(dtype))


XS, WX, WH = draw(STEPS, ROWS, WIDTH), draw(WIDTH, WIDTH, seed=1), draw(WIDTH, WIDTH, seed=2)
H0 = jnp.zeros((ROWS, WIDTH))


def rnn(xs, wx, wh, **options):
    def step(h, x):
        h = jnp.tanh(x @ wx + h @ wh)
        return h, h

    return lax.scan(step, H0, xs, **options)


def lstm(xs, wx, wh):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ jnp.tile(wx, 4) + h @ jnp.tile(wh, 4), 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (H0, H0), xs)


def gru(xs, wx, wh):
    def step(h, x):
        z = jax.nn.sigmoid(x @ wx + h @ wh)
        n = jnp.tanh(x @ wx.T + z * (h @ wh.T))
        return (1 - z) * n + z * h, None

    return lax.scan(step, H0, xs)[0]


def backwards(xs, wx, wh):
    return rnn(xs, wx, wh, reverse=True)


def by_index(xs, wx, wh):
    def step(i, carry):
        h, out = carry
        h = jnp.tanh(jnp.sin(xs[i]) @ wx + h @ wh)
        return h, out.at[i].set(h)

    return lax.fori_loop(0, STEPS, step, (H0, jnp.zeros_like(xs)))


def from_the_end(xs, wx, wh):
    def step(i, h):
        return jnp.tanh(jnp.sin(xs[STEPS - 1 - i]) @ wx + h @ wh)

    return lax.fori_loop(0, STEPS, step, H0)


def every_other(xs, wx, wh):
    def step(i, carry):
        h, out = carry
        h = jnp.tanh(jnp.sin(xs[2 * i + 1]) @ wx + h @ wh)
        return h, out.at[2 * i].set(h)

    return lax.fori_loop(0, STEPS // 2, step, (H0, xs + 1))


def counting_while(xs, wx, wh):
    def step(carry):
        i, h, out = carry
        x = lax.dynamic_index_in_dim(xs, i, 0, keepdims=False)
        h = jnp.tanh(jnp.sin(x) @ wx + h @ wh)
        return i + 1, h, lax.dynamic_update_index_in_dim(out, h, i, 0)

    return lax.while_loop(lambda c: c[0] <= STEPS - 3, step, (2, H0, xs * 0 + 7))


def outputs(xs, wx, wh):
    def step(h, x):
        h = jnp.tanh(jnp.sin(x) + h @ wh)
        return h, jax.nn.relu(h @ wx + 1)

    return lax.scan(step, H0, xs)


def twice_projected(xs, wx, wh):
    def step(h, x):
        h = jnp.tanh(jnp.tanh(x @ wx) @ wx + h @ wh)
        return h, h

    return lax.scan(step, H0, xs)


def invariant(xs, wx, wh):
    def step(h, x):
        return jnp.tanh(h @ jnp.tanh(wx @ wh) + x), None

    return lax.scan(step, H0, xs)[0]


def until(xs, wx, wh):
    def step(carry):
        h, total = carry
        h = jnp.tanh(h @ jnp.tanh(wx @ wh) + 0.1)
        return h, total + jnp.abs(h).sum()

    return lax.while_loop(lambda c: c[1] < 50, step, (H0, jnp.float32(0)))


LEAVES = [rnn, gru, backwards, by_index, from_the_end, every_other, counting_while,
          outputs, twice_projected, invariant, until]  # fmt: skip


def inside(closed: Any, name: str, looped: bool = False) -> int:
    """Count the equations of that name inside loops."""
    count = 0
    for e in closed.jaxpr.eqns:
        count += looped and e.primitive.name == name
        inner = looped or e.primitive.name in ("scan", "while")
        count += sum(inside(body, name, inner) for body in jax_internals.bodies(e))
    return count


def check_equal(fun: Callable, *args: Any, rtol: float = 2e-5, **options: Any) -> Any:
    optimised = sym_optimize(fun, **options)
    assert_close(jax.jit(fun)(*args), optimised(*args), rtol)
    return optimised.explain(*args)


@pytest.mark.parametrize("fun", LEAVES, ids=lambda f: f.__name__)
def test_loop_invariant_and_batched_products_leave_the_loop(
    fun: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_on_cpu(monkeypatch, loops={"hoists_invariants": False})
    report = check_equal(fun, XS, WX, WH)
    before = inside(jax.make_jaxpr(fun)(XS, WX, WH), "dot_general")
    assert inside(report.after.jaxpr, "dot_general") < before
    assert {r.name for r in report.rules} & {"loop_invariant", "loop_batching"}


def test_sums_that_are_cut_in_parts_keep_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU only: there XLA reads the parts of a step's entry element by element."""
    use_on_cpu(monkeypatch, margins={"hoist": 1.0})
    check_equal(lstm, XS, WX, WH)
    apart = packs.default - "repeated_work"  # its gates have equal weights
    report = sym_optimize(lstm, rules=apart).explain(XS, WX, WH)
    assert inside(report.after.jaxpr, "dot_general") == 2
    assert any("cut in parts" in r.reason for r in report.routes)
    elsewhere = sym_optimize(lstm, device="h200", kernels="off").explain(XS, WX, WH)
    assert inside(elsewhere.after.jaxpr, "dot_general") == 1


WRAPPED = {
    "jit": lambda f: jax.jit(f),
    "vmap": lambda f: lambda xs, wx, wh: jax.vmap(f, (1, None, None))(xs[:, None], wx, wh),
    "remat": lambda f: jax.checkpoint(f),
    "scan": lambda f: (
        lambda xs, wx, wh: lax.scan(lambda c, x: (c, f(x, wx, wh)), 0, jnp.stack([xs, xs]))
    ),
    "grad": lambda f: jax.grad(lambda *a: jax.tree.leaves(f(*a))[0].sum(), argnums=(0, 1, 2)),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("fun", [rnn, outputs], ids=lambda f: f.__name__)
def test_under_transformations(fun: Callable, name: str) -> None:
    check_equal(WRAPPED[name](fun), XS, WX, WH, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64", "int32"])
def test_dtypes(dtype: str) -> None:
    def fun(xs, wx, wh):
        def step(h, x):
            h = x @ wx + h @ wh
            return h, h

        return lax.scan(step, jnp.zeros((ROWS, WIDTH), dtype), xs)

    args = [(x * 30).astype(dtype) if dtype == "int32" else x.astype(dtype) for x in (XS, WX, WH)]
    tol = {"int32": 0, "complex64": 1e-4}.get(dtype, 5e-2)
    assert_close(jax.jit(fun)(*args), sym_optimize(fun)(*args), tol, scaled=True)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("fun", [lstm, outputs], ids=lambda f: f.__name__)
def test_few_steps(fun: Callable, length: int) -> None:
    check_equal(fun, XS[:length], WX, WH)


def test_exact_keeps_products_of_steps() -> None:
    report = check_equal(rnn, XS, WX, WH, rtol=0, numerics="exact")
    assert inside(report.after.jaxpr, "dot_general") == 2


def test_batched_result_is_bounded_in_size() -> None:
    wide = draw(8, 4096)

    def fun(xs, wide):
        return lax.scan(lambda h, x: (h + jnp.sin(x @ wide).sum() * h, None), jnp.zeros(8), xs)[0]

    report = check_equal(fun, draw(4096, 8), wide)
    assert inside(report.after.jaxpr, "dot_general") == 1
    assert any("too large" in r.reason for r in report.routes)


def test_order_of_products_is_priced_first() -> None:
    a, b, h = draw(200, 200), draw(200, 200, seed=1), draw(200, seed=2)

    def fun(a, b, h):
        return lax.scan(lambda h, _: (jnp.tanh((a @ b) @ h), None), h, None, length=3)[0]

    report = check_equal(fun, a, b, h)
    assert report.after.flops < report.before.flops / 50


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_sums_of_products_are_one_product(dtype: str) -> None:
    def sums(xs, ys, start):
        def step(total, given):
            x, y = given
            return total + jnp.einsum("rd,re->ed", x, y), None

        return lax.scan(step, start, (xs, ys), reverse=True)[0]

    scale = 50 if dtype == "int32" else 1
    args = [(scale * v).astype(dtype) for v in (XS, jnp.cos(XS), WX)]
    optimised = sym_optimize(sums)
    report = optimised.explain(*args)
    assert inside(report.after.jaxpr, "dot_general") == 0
    tol = {"float32": 1e-5, "int32": 0, "bfloat16": 0.1}[dtype]
    assert_close(jax.jit(sums)(*args), optimised(*args), tol)


def test_gradients_of_weights_leave_the_loop() -> None:
    def loss(wx, wh, xs):
        return (rnn(xs, wx, wh)[1] ** 2).sum()

    grad = jax.grad(loss, argnums=(0, 1))
    report = check_equal(grad, WX, WH, XS, rtol=1e-4)
    assert inside(report.after.jaxpr, "dot_general") == 2  # h·wh, and its transpose backwards
    gradients = [e for e in report.after.jaxpr.eqns if e.primitive.name == "dot_general"][-2:]
    for e in gradients:  # over two axes XLA's CPU backend would copy an operand first
        assert e.params["dimension_numbers"] == (((0,), (0,)), ((), ()))


def test_a_step_also_adds_its_product_to_the_sum() -> None:
    def sums(xs, ys):
        return lax.scan(lambda c, x: (c + x[0].T @ x[1], None), jnp.zeros((128, 128)), (xs, ys))[0]

    x = jax.ShapeDtypeStruct((128, 16, 128), jnp.float32)
    report = sym_optimize(sums, device="cpu-1").explain(x, x)
    assert inside(report.after.jaxpr, "dot_general") == 0


RESULTS: dict[str, tuple[Callable[..., Any], int]] = {
    "of a sum over steps": (lambda c, x: (c + jnp.einsum("rd,re->ed", x, x), np.float32(1)), 0),
    "of a product afterwards": (lambda c, x: (c, (2, jnp.tanh(x) @ WX, np.float32(1))), 0),
    "beside a carry": (lambda c, x: (jnp.tanh(c @ WX), (x @ WH, np.float32(3))), 1),
}


@pytest.mark.parametrize("name", RESULTS)
def test_loops_with_literal_results_are_rewritten(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_on_cpu(monkeypatch, margins={"share_of_loop": 0.0})  # its own product takes most of a step
    step, left = RESULTS[name]
    report = check_equal(lambda start, xs: lax.scan(step, start, xs), WX, XS)
    assert inside(report.after.jaxpr, "dot_general") == left


@pytest.mark.parametrize("width", [3, 64])
def test_sums_of_small_outer_products_stay(width: int) -> None:
    """XLA adds an outer product in the operation that reads it: no product starts in a step."""

    def sums(xs, ys):
        def step(carry, pair):
            h, total = carry
            h = jnp.tanh(h * pair[0])
            return (h, total + jnp.tensordot(pair[1], h, 0)), None

        start = jnp.zeros(width), jnp.zeros((width, width))
        return lax.scan(step, start, (xs, ys))[0][1]

    xs = jax.ShapeDtypeStruct((50, width), "float32")
    report = sym_optimize(sums, device="cpu").explain(xs, xs)
    assert ("loop_batching" in [r.name for r in report.rules]) == (width == 64)


def test_a_sum_of_products_that_is_a_small_share_of_a_loop_stays() -> None:
    """The gradient through 500 steps of three states took 1.6 times as long with the product."""

    def likelihood(turns: Any, seen: Any, first: Any, places: Any) -> Any:
        def step(a: Any, place: Any) -> Any:
            a = (a @ turns) * seen[:, place]
            return a / jnp.sum(a), jnp.log(jnp.sum(a))

        return jnp.sum(jax.lax.scan(step, first, places)[1])

    specs = [jax.ShapeDtypeStruct(s, "float32") for s in ((3, 3), (3, 5), (3,))]
    places = jax.ShapeDtypeStruct((500,), "int32")
    report = sym_optimize(jax.grad(likelihood, (0, 1)), device="cpu").explain(*specs, places)
    assert "loop_batching" not in [r.name for r in report.rules], report


def test_sums_that_are_read_on_the_way_stay() -> None:
    def fun(xs, wx):
        def step(total, x):
            total = total + x.T @ jnp.sin(x)
            return total, total[0]

        return lax.scan(step, wx, xs)

    report = check_equal(fun, XS, WX)
    assert inside(report.after.jaxpr, "dot_general") == 1


DECOYS = {
    "elementwise": lambda h, x: (h * 0.5 + jnp.exp(x), h),
    "carried": lambda h, x: (jnp.tanh(h @ WH), h),
    "moving weights": lambda h, x: (jnp.tanh(h + x @ x.T @ x), h),
}


@pytest.mark.parametrize("name", DECOYS)
def test_loops_without_invariant_work_are_unchanged(name: str) -> None:
    def fun(xs):
        return lax.scan(DECOYS[name], H0, xs)

    report = check_equal(fun, XS)
    assert not {r.name for r in report.rules} & {"loop_invariant", "loop_batching"}


def test_carries_that_are_equal_or_constant_are_found() -> None:
    def fun(xs, wx, wh):
        def step(carry, x):
            h, same, weights, unused = carry
            new = jnp.tanh(x @ weights + h @ wh)
            other = jnp.tanh(x @ weights + same @ wh)
            return (new, other, weights, unused + 1), new + other

        (h, same, weights, _), ys = lax.scan(step, (H0, H0, wx, jnp.ones(5)), xs)
        return h, same, weights, ys

    report = check_equal(fun, XS, WX, WH)
    assert inside(report.after.jaxpr, "dot_general") == 1


def test_effects_keep_their_place(capfd: pytest.CaptureFixture) -> None:
    def fun(xs, wx, wh):
        def step(carry, x):
            h, i = carry
            h = jnp.tanh(x @ wx + h @ wh)
            jax.debug.print("step {i} {s}", i=i, s=x[0, 0], ordered=True)
            return (h, i + 1), h

        return lax.scan(step, (H0, 0), xs)

    def printed(run: Callable) -> str:
        jax.block_until_ready(run(XS, WX, WH))
        jax.effects_barrier()
        return capfd.readouterr().out

    want = printed(jax.jit(fun))
    assert want.count("step") == STEPS
    assert printed(sym_optimize(fun)) == want


def test_mutable_arrays_stay() -> None:
    def fun(xs, wx):
        def step(c, x):
            ref = jax.new_ref(jnp.zeros(()))
            ref[...] = (x @ wx).sum()
            return c + ref[...], None

        return lax.scan(step, jnp.float32(0), xs)[0]

    check_equal(fun, XS, WX, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16"])
def test_small_floats_are_stacked_as_bits_on_a_cpu(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_on_cpu(monkeypatch, loops={"least_packed": 1})

    def fun(x):
        def step(h, x):
            h = (h.astype("float32") * 0.9 + x.astype("float32")).astype(dtype)
            return h, (h, h.sum(dtype="float32"), x)

        last, ys = lax.scan(step, x[0], x)
        return last, ys, lax.fori_loop(0, 9, lambda i, y: y.at[i].set(x[i] + x[0]), x[:9])

    x = jnp.linspace(-3, 3, 60).reshape(12, 5).astype(dtype)
    optimised = sym_optimize(fun, device="cpu", on_unsupported="error")
    names = [r.name for r in optimised.explain(x).rules]
    assert ("loop_packing" in names) == (dtype != "float16")
    assert_close(fun(x), optimised(x), 0)


def test_products_of_small_floats_may_leave_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoisting, "_gains", lambda *_: True)
    use_on_cpu(monkeypatch, margins={"share_of_loop": -1e9})

    def fun(x, w):
        step = lambda h, x: ((h + x) * 0.5, jnp.tanh(h @ w))  # noqa: E731
        return lax.scan(step, x[0], x)

    x, w = (jnp.ones(s, jnp.bfloat16) / 4 for s in ((64, 4, 128), (128, 128)))
    optimised = sym_optimize(fun, device="cpu", on_unsupported="error")
    assert "loop_batching" in [r.name for r in optimised.explain(x, w).rules]
    assert_close(fun(x, w), optimised(x, w), 2e-2)


@pytest.mark.parametrize("name", ["xs", "fori"])
def test_invariants_leave_a_loop_of_symbolic_length(name):
    """`lax.scan` refuses a length that is a name (InconclusiveDimensionOperation)."""
    n = jax.export.symbolic_shape("n")[0]

    def f(x, t):
        if name == "xs":
            return jax.lax.scan(lambda c, u: (c * 0.5 + t @ (x @ x.T) @ x, u), x[0], x)
        return jax.lax.fori_loop(0, x.shape[0], lambda i, c: c * 0.5 + (t @ (x @ x.T)) @ x, x[0])

    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, 4), (n,))]
    g = sym_optimize(f, on_unsupported="error", assume="n >= 1", kernels="always")
    args = [jnp.ones((5, 4)), jnp.arange(5.0)]
    ours, theirs = (jax.export.export(jax.jit(h))(*specs).call(*args) for h in (g, f))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), ours, theirs)


def test_a_batch_of_loops_ends_one_by_one():
    """The condition of a batched `while` is no scalar (TypeError)."""

    def f(x, w):
        step = lambda c: c * 2 + 1 + 0 * (w @ w @ c)  # noqa: E731
        return jax.lax.while_loop(lambda c: jnp.sum(c**2) < 50, step, x)

    agree(f, (3,), (3, 3), transform="in_vmap")
    agree(f, (3,), (3, 3), transform="vmap")


def test_products_that_xla_moves_before_a_loop_are_not_split_in_its_steps():
    """`(A @ B) @ h` in a batched `while`: XLA computes A @ B once, and A @ (B @ h) in each step."""

    def f(a, b, h):
        step = lambda c: (c[0] + 1 + jnp.abs(c[1][0]), jnp.tanh((a @ b) @ c[1]))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 40, step, (0 * h[1], h))

    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(256, 256)).astype("float32") / 16 for _ in range(2))
    h = draw.normal(size=(8, 256)).astype("float32")
    batched = jax.vmap(f, in_axes=(None, None, 0))
    optimised = sym_optimize(batched, device="cpu", on_unsupported="error")
    report = optimised.explain(a, b, h)
    assert not report.rules
    assert any("takes work out of the loop as written" in r.reason for r in report.routes)
    assert_close(batched(a, b, h), optimised(a, b, h))


def test_a_number_that_xla_repeats_before_a_loop_is_no_work_of_its_steps():
    """`where(p, …, 0.0)` repeats 0.0 in the body, and every reader computes it."""

    def f(h, x):
        step = lambda h, _: (jnp.sin(jnp.sum(jnp.where(x > h, x * h, 0.0), axis=0)), None)  # noqa: E731
        return jax.lax.scan(step, h, None, length=3)[0]

    specs = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((40000,), (10, 40000)))
    report = sym_optimize(f, device="cpu").explain(*specs)
    assert not any("takes work out of the loop" in r.reason for r in report.routes)
    if device_profile("cpu").columns is not None:
        assert [r.name for r in report.rules] == ["column_reductions"]


def test_products_with_joined_weights_stay_where_xla_joins_these_once():
    """An LSTM whose cell joins its weights: apart, the products would run in every step."""

    def lstm(ws, us, xs):
        def step(carry, x):
            h, c = carry
            given = jnp.split(x @ jnp.concatenate(ws, 1), 4, 1)
            i, f, g, o = map(jnp.add, given, jnp.split(h @ jnp.concatenate(us, 1), 4, 1))
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((8, 256))
        return jax.lax.scan(step, (start, start), xs)[1]

    weights = [jax.ShapeDtypeStruct((256, 256), "float32")] * 4
    xs = jax.ShapeDtypeStruct((64, 8, 256), "float32")
    report = sym_optimize(lstm, device="cpu").explain(weights, weights, xs)
    assert not {"block_products", "partial_access"} & {r.name for r in report.rules}


@pytest.mark.parametrize("size", [4, 4096])
def test_motion_must_gain_a_share_of_the_program(size, monkeypatch):
    """A sum of four numbers in every step of a loop with a large product may stay there."""
    use_on_cpu(monkeypatch, loops={"hoists_invariants": False})

    def f(w, v, h):
        return jax.lax.fori_loop(0, 50, lambda _, h: jnp.tanh(w @ h + jnp.sum(v * v)), h)

    args = [
        jnp.ones(s, jnp.float32) / 512 for s in ((256, 256), (size, 256 if size > 4 else 1), (256,))
    ]
    report = sym_optimize(f, device="cpu", on_unsupported="error").explain(*args)
    assert ("loop_invariant" in [r.name for r in report.rules]) == (size > 4)
    assert any("of the program" in r.reason for r in report.routes) == (size == 4)
