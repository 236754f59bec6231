"""Affine loops run as kernels; other loops are refused with the reason."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.kernel_selection.scans import scan_builder
from symjax_rewrite.pallas_kernels.scan.triton import scan_triton
from tests.profiles import changed
from tests.programs import assert_close

L, D, N = 20, 6, 4


def draw(*shape: int, low: float = -1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).uniform(low, low + 1, shape), jnp.float32)


X, DT, A = draw(L, D), draw(L, D, low=0.01), draw(D, N, low=-2.0)
B, C, H = draw(L, N), draw(L, N, low=0), draw(D, N)


def scan(step: Callable, start: Any = H, xs: Any = (X, DT, B, C), **options: Any) -> Any:
    return lambda start, xs: lax.scan(step, start, xs, **options), (start, xs)


def mamba(h, given):
    x, dt, b, c = given
    h = jnp.exp(dt[:, None] * A) * h + (dt * x)[:, None] * b
    return h, h @ c


def by_sum(h, given):
    x, dt, b, c = given
    h = h * jnp.exp(jnp.einsum("d,dn->dn", jax.nn.softplus(dt), A)) + jnp.outer(dt * x, b)
    return h, jnp.sum(h * c[None, :], axis=-1)


def before(h, given):
    x, dt, b, _ = given
    return 0.9 * h - b * x[:, None], (h * dt[:, None]).sum(0)


def choice(h, given):
    x, _, b, _ = given
    return jnp.where(x[:, None] > 0, h * b, h + 1), h.T


def counted(carry, x):
    h, i = carry
    return (jnp.where(i == 3, x, 0.9 * h + i * x), i + 1), h


def running(h, given):
    return h + given[0][:, None], None


AFFINE = {
    "selective scan": scan(mamba),
    "selective scan, by sums": scan(by_sum),
    "state before the step": scan(before),
    "what is made of the state before the step": scan(
        lambda h, x: (h * x + 1, jnp.sin(h @ A)), draw(D), X
    ),
    "reversed": scan(mamba, reverse=True),
    "a choice that is given": scan(choice),
    "a running sum": scan(running),
    "steps that are counted": (
        lambda h, xs: lax.scan(counted, (h, 0), xs, reverse=True), (jnp.ones(D), X)
    ),
    "from zero": (lambda xs: lax.scan(mamba, jnp.zeros((D, N)), xs), ((X, DT, B, C),)),
    "exponential average": scan(lambda h, x: (0.9 * h + 0.1 * x, h), jnp.zeros(D), X),
    "one number": scan(lambda h, x: (h * x + 1, h), jnp.float32(1), X[:, 0]),
    "half": scan(
        lambda h, x: (h * x + x, h), jnp.zeros(D, jnp.bfloat16), X.astype(jnp.bfloat16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AFFINE)
def test_affine_loops_run_as_kernels(name: str) -> None:
    fun, args = AFFINE[name]
    optimised = sym_optimize(fun, kernels="xla", on_unsupported="error")
    routes = [r for r in optimised.explain(*args).routes if r.name == "scan"]
    assert [r.taken for r in routes] == [True], routes
    assert_close(fun(*args), optimised(*args), 2e-2 if name == "half" else 1e-5)


def test_kernels_of_loops_by_index_and_batches() -> None:
    def fun(x, a):
        def step(i, carry):
            h, out = carry
            h = a[i] * h + x[i]
            return h, out.at[i].set(h)

        return lax.fori_loop(0, L, step, (jnp.zeros(D), jnp.zeros((L, D))))

    twice = jax.tree.map(lambda v: jnp.stack([v, v + 1]), (H, (X, DT, B, C)))
    for f, args in ((fun, (X, DT)), (jax.vmap(AFFINE["reversed"][0]), twice)):
        optimised = sym_optimize(f, kernels="xla", on_unsupported="error")
        assert any(r.name == "scan" and r.taken for r in optimised.explain(*args).routes)
        assert_close(f(*args), optimised(*args))


def test_a_result_that_is_spread_over_an_axis() -> None:
    def step(h, x):
        h = 0.9 * h + x[:, None]
        return h, (jnp.broadcast_to(h.sum(1, keepdims=True), h.shape), jnp.full((D, 3), h.sum()))

    optimised = sym_optimize(lambda h, x: lax.scan(step, h, x), kernels="xla")
    (route,) = [r for r in optimised.explain(H, X).routes if r.name == "scan"]
    assert route.taken  # the kernel gives the sums, which are spread after it
    assert_close(lax.scan(step, H, X), optimised(H, X))


def test_a_sum_over_an_axis_that_nothing_has() -> None:
    def step(h, x):
        h = 0.9 * h + x
        return h, jnp.sum(jnp.broadcast_to(h[:, None], (D, 3)), 1)

    optimised = sym_optimize(lambda h, x: lax.scan(step, h, x), kernels="xla")
    assert_close(lax.scan(step, draw(D), X), optimised(draw(D), X))


def test_functions_of_results_run_after_the_kernel() -> None:
    def step(h, given):
        (h, y), x = mamba(h, given), given[0]
        return h, (y + 3 * x) * jax.nn.silu(x)  # a skip and a gate

    def greedy(h, given):
        h, y = step(h, given)
        return h, (y.sum(), (h * given[3]).max(-1))

    fun, args = scan(step)
    optimised = sym_optimize(fun, kernels="xla")
    assert [r.taken for r in optimised.explain(*args).routes if r.name == "scan"] == [True]
    assert_close(fun(*args), optimised(*args))
    fun, args = scan(greedy)
    (route,) = sym_optimize(fun, kernels="xla").explain(*args).routes
    assert not route.taken and "reduce in a result" in route.reason


W = draw(D, D)
OTHER = {
    "tanh": (lambda h, x: (jnp.tanh(h + x), h), "tanh of the carry"),
    "a gate of the carry": (lambda h, x: (jax.nn.sigmoid(x) * h * h, h), "with itself"),
    "relu of a scaled carry": (lambda h, x: (jnp.maximum(0.5 * h + x, 0), h), "scaled carry"),
    "a choice by the carry": (lambda h, x: (jnp.where(h > 0, h, x), h), "gt of the carry"),
    "a quotient": (lambda h, x: (x / (h + 1), h), "quotient"),
    "a matrix": (lambda h, x: (h @ W + x, h), "affine by a matrix"),
}


@pytest.mark.parametrize("name", OTHER)
def test_loops_that_are_not_affine_are_refused_with_the_reason(name: str) -> None:
    step, why = OTHER[name]
    optimised = sym_optimize(lambda x: lax.scan(step, x[0], x), kernels="xla")
    (route,) = [r for r in optimised.explain(X).routes if r.name == "scan"]
    assert not route.taken
    assert why in route.reason
    np.testing.assert_allclose(optimised(X)[1], lax.scan(step, X[0], X)[1], rtol=1e-5)


def test_on_a_cpu_the_loop_stays() -> None:
    fun, args = AFFINE["selective scan"]
    report = sym_optimize(fun, device="cpu").explain(*args)
    (route,) = report.routes
    assert not route.taken
    assert "affine" in route.reason


def test_on_a_cpu_narrow_states_run_with_their_longest_axis_innermost() -> None:
    def report(long: int, narrow: int, step: Callable = mamba) -> Any:
        def fun(x, dt, A, b, c):
            def inner(h, given):
                x, dt, b, c = given
                return step(jnp.exp(dt[:, None] * A) * h + (dt * x)[:, None] * b, c)

            return lax.scan(inner, jnp.zeros(A.shape), (x, dt, b, c))[1]

        sizes = ((256, long), (256, long), (long, narrow), (256, narrow), (256, narrow))
        specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes]
        (route,) = sym_optimize(fun, device="cpu").explain(*specs).routes
        return route

    assert report(256, 16, lambda h, c: (h, h @ c)).taken
    for long, narrow in ((256, 64), (4, 4), (16, 16), (1, 16)):
        assert not report(long, narrow, lambda h, c: (h, h @ c)).taken
    assert not report(256, 16, lambda h, c: (h, jnp.tanh(h) @ c)).taken  # no product of states


def test_wrapping_integers_and_exact_programs_have_no_kernel() -> None:
    fun, _ = scan(lambda h, x: (h * x + x, h))
    xs = jnp.arange(L * D, dtype=jnp.int32).reshape(L, D) * 99991
    optimised = sym_optimize(fun, kernels="xla")
    assert_close(fun(xs[0], xs), optimised(xs[0], xs), 0)
    exact = sym_optimize(fun, kernels="xla", numerics="exact")
    assert not any(r.taken for r in exact.explain(X[0], X).routes)


def gradients(step: Callable) -> tuple[Callable, Callable, tuple]:
    """The gradient of a loop, that of the optimised loop, and arguments."""

    def loss(x, dt, A, b, c):
        def inner(h, given):
            x, dt, b, c = given
            return step(jnp.exp(dt[:, None] * A) * h + (dt * x)[:, None] * b, c)

        last, y = lax.scan(inner, jnp.zeros(A.shape), (x, dt, b, c))
        return jnp.sum(jnp.sin(y)) + jnp.sum(last)

    args = (X, DT, A, B, C)
    outside = jax.grad(sym_optimize(loss, kernels="xla", on_unsupported="error"), range(5))
    return jax.grad(loss, range(5)), outside, args


def test_gradients_make_states_again() -> None:
    want, got, args = gradients(lambda h, c: (h, h @ c))
    assert f"{L},{D},{N}" in str(jax.make_jaxpr(want)(*args))  # states of all steps
    assert f"{L},{D},{N}" not in str(jax.make_jaxpr(got)(*args))
    assert_close(jax.jit(want)(*args), jax.jit(got)(*args))


def over_batch(x, dt, A, b, c):
    """A selective scan of [steps, batch, channels], as a loop."""

    def step(h, given):
        x, dt, b, c = given
        h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    return lax.scan(step, jnp.zeros((x.shape[1], *A.shape)), (x, dt, b, c))[1]


def in_half(x, dt, A, b, c):
    """The same of arrays in half precision, with states in f32."""
    halves = x, dt, b, c
    x, dt, b, c = (v.astype(jnp.bfloat16).astype(jnp.float32) for v in halves)
    return over_batch(x, dt, A, b, c).astype(jnp.bfloat16).astype(jnp.float32)


def in_a_tree(x, dt, A, b, c):
    """The same by `associative_scan`."""
    steps = jnp.exp(dt[..., None] * A), (dt * x)[..., None] * b[..., None, :]
    join = lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1])  # noqa: E731
    return jnp.einsum("lbdn,lbn->lbd", lax.associative_scan(join, steps)[1], c)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("fun", [over_batch, in_half, in_a_tree])
def test_gradients_run_as_kernels_for_a_gpu(
    fun: Callable, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward loop sums over every axis of its states; here the kernels are interpreted."""

    def interpreted(spec, *operands, backend):
        assert backend == "triton"
        readouts.append([r.over for r in spec.readouts])
        totals.append(sum(r.total for r in spec.readouts))
        return scan_triton(spec, *operands, interpret=True)

    def pulled(*args):
        args = [v if v.shape[0] != L or not reverse else v[::-1] for v in args]
        y, pull = jax.vjp(fun, *args[:-1])
        return y, pull(args[-1])

    readouts: list[list[tuple[str, ...]]] = []
    totals: list[int] = []
    monkeypatch.setattr(scan_builder, "scan", interpreted)
    small = changed(DEVICES["h200"], loops={"least_unwritten_bytes": 1})
    monkeypatch.setitem(DEVICES, "h200", small)
    x, dt, b, c = (jnp.stack([v, v[::-1]], 1) for v in (X, DT, B, C))
    args = (x, dt, A, b, c, jnp.cos(x))
    ours = sym_optimize(pulled, kernels="triton", device="h200")
    assert_close(jax.jit(pulled)(*args), ours(*args), 1e-2 if fun is in_half else 1e-5)
    assert len(readouts) == 2
    if fun is not in_a_tree:  # all that both loops need again is made of the state before each step
        assert [over for each in readouts for over in each].count(()) == 1
        assert totals == [0, 1]  # the gradient of A


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
@pytest.mark.parametrize("is_outside", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("fun", [over_batch, in_a_tree])
def test_gradients_on_a_gpu_have_no_step_that_is_a_launch(
    fun: Callable, is_outside: bool, one_device: None, lower: Callable
) -> None:
    optimised = sym_optimize(fun, device="h200") if is_outside else fun

    def pulled(*args):
        return jax.vjp(optimised, *args[:-1])[1](args[-1])

    wide, shared, A = (512, 1, 256), (512, 1, 16), (256, 16)
    args = [jax.ShapeDtypeStruct(s, "float32") for s in (wide, wide, A, shared, shared, wide)]
    ours = jax.jit(pulled) if is_outside else sym_optimize(pulled, device="h200")
    text = lower(ours, args).as_text()
    assert "triton" in text
    assert "stablehlo.while" not in text


def per_head(x, dt, A, b, c, skip):
    """A selective scan with one decay for all channels of a head, as in Mamba-2."""

    def step(h, given):
        x, dt, b, c = given
        decay = jnp.exp(dt * A)[..., None, None]
        h = decay * h + (dt[..., None] * x)[..., None] * b[:, None, None]
        return h, jnp.einsum("ehdn,en->ehd", h, c) + skip[:, None] * x

    return lax.scan(step, jnp.zeros((*x.shape[1:], b.shape[-1])), (x, dt, b, c))[1]


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
def test_running_sums_beside_a_state_are_kernels(one_device: None, lower: Callable) -> None:
    """The derivatives of a decay and of a skip are three carries with that of the state."""
    pulled = lambda *args: jax.vjp(per_head, *args[:-1])[1](args[-1])  # noqa: E731
    wide, shared = (256, 2, 4, 32), (256, 2, 16)
    shapes = wide, wide[:3], (4,), shared, shared, (4,), wide
    args = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    text = lower(sym_optimize(pulled, device="h200"), args).as_text()
    assert "triton" in text and "stablehlo.while" not in text


@pytest.mark.parametrize("between", [jnp.tanh, lambda y: y], ids=["nonlinear", "linear"])
def test_trees_of_several_layers_become_kernels_together(
    between: Callable, one_device: None
) -> None:
    """The loops of linear layers would wait for each other, so these stay trees."""

    def layers(x, dt, A, b, c, cotangent):
        twice = lambda x, *rest: in_a_tree(between(in_a_tree(x, *rest)), *rest)  # noqa: E731
        return jax.vjp(twice, x, dt, A, b, c)[1](cotangent)

    wide, shared, A = (512, 1, 256), (512, 1, 16), (256, 16)
    args = [jax.ShapeDtypeStruct(s, "float32") for s in (wide, wide, A, shared, shared, wide)]
    report = sym_optimize(layers, device="h200", on_unsupported="error").explain(*args)
    trees = [c for c in report.changes if "differentiated tree" in c.reason]
    assert len(trees) == (2 if between is jnp.tanh else 0)
    assert all(before > 1.25 * after for before, after in (c.seconds for c in trees))


def test_constants_of_every_step_may_be_flags_numbers_or_keys() -> None:
    keys, flags = jax.random.split(jax.random.key(0), L), np.arange(L) % 3 == 0

    def fun(x):
        def step(h, given):
            x, key, flag, number = given
            h = jnp.where(flag, x, 0.5 * h + number * x)
            return h, h * jax.random.uniform(key)

        return lax.scan(step, jnp.zeros(D), (x, keys, flags, np.arange(L)[::-1] ** 2))

    for kernels in ("auto", "xla"):
        assert_close(fun(X), sym_optimize(fun, kernels=kernels)(X))


DROPPING = {
    "held": lambda h, x: jnp.where(x > 0, x, h),
    "begun anew": lambda h, x: jnp.where(jnp.abs(x) < 1, 0, h) + x,
    "turned": lambda h, x: lax.select(x > 0, x, -h / 2),
    "decayed": lambda h, x: jnp.where(x > 0, h / 2 + x, h),
}


@pytest.mark.parametrize("name", DROPPING)
def test_selections_drop_infinite_states(name: str) -> None:
    def fun(start, xs):
        return lax.scan(lambda h, x: (DROPPING[name](h, x),) * 2, start, xs)

    xs = draw(40, 6).at[3::7, ::2].set(jnp.inf).at[5::9, 1::2].set(jnp.nan)
    routed = sym_optimize(fun, kernels="always")
    assert any(r.taken for r in routed.explain(xs[0], xs).routes)
    ours, written = jax.jit(lambda h, xs: (routed(h, xs), fun(h, xs)))(xs[3], xs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(written), strict=True):
        assert np.isfinite(y[-1]).any()
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize("rule", [lax.stop_gradient, jax.nn.relu], ids=["stop", "relu"])
def test_gradients_follow_rules_of_their_own(rule: Callable) -> None:
    want, got, args = gradients(lambda h, c: (h, rule(h @ c) * rule(c[0] - c[0])))
    assert_close(jax.jit(want)(*args), jax.jit(got)(*args))


WIDE = 64  # features, so that a product of a step takes some time
PROJECTIONS = draw(WIDE, 2, WIDE) / WIDE
WIDE_START, WIDE_SHAPE = draw(WIDE, N), draw(WIDE, N, low=-2.0)
WIDE_XS = (draw(L, WIDE), draw(L, WIDE, low=0.01))


def projected_before(h, given):
    return 0.9 * h + (given[0] @ PROJECTIONS[:, 0])[:, None] * WIDE_SHAPE, h


def projected_before_and_after(h, given):
    h = (
        jax.nn.sigmoid(given[1] @ PROJECTIONS[:, 0])[:, None] * h
        + (PROJECTIONS[:, 1].T @ given[0])[:, None]
    )
    return h, (PROJECTIONS[:, 0] @ h) * (given[0] @ PROJECTIONS[:, 1])[:, None]


@pytest.mark.parametrize("step", [projected_before, projected_before_and_after])
@pytest.mark.parametrize("reverse", [False, True])
def test_products_that_leave_an_affine_loop_leave_a_scan(step: Callable, reverse: bool) -> None:
    """The kernel was looked for only among loops as they are written."""
    f, args = scan(step, WIDE_START, WIDE_XS, reverse=reverse)
    routed = sym_optimize(f, kernels="always", on_unsupported="error")
    report = routed.explain(*args)
    assert [(r.name, r.taken) for r in report.routes] == [("scan", True)]
    assert_close(f(*args), routed(*args))


def test_products_that_leave_another_loop_leave_it_a_loop() -> None:
    step = lambda h, given: (jnp.tanh(h + (given[0] @ PROJECTIONS[:, 0])[:, None]), None)  # noqa: E731
    f, args = scan(step, WIDE_START, WIDE_XS)
    report = sym_optimize(f, kernels="always").explain(*args)
    assert [(r.name, r.taken) for r in report.routes] == [("scan", False)]
    assert "loop_batching" in [r.name for r in report.rules]


def test_a_loop_that_divides_by_zero_stays():
    """c/0 three times was (1/0)³·c + 0, which is NaN where c/0/0/0 is infinite."""

    def f(x):
        return jax.lax.fori_loop(0, 3, lambda i, c: c / 0.0, x)

    x = jnp.array([-1.0, 0.0, 2.0])
    np.testing.assert_array_equal(sym_optimize(f, kernels="always")(x), jax.jit(f)(x))


SCALED = {
    "divided": lambda c, d: c / d,
    "multiplied": lambda c, d: -(c * (1 / d)),
    "chosen": lambda c, d: jnp.where(d > 1, c * 2, c / d),
    "and added": lambda c, d: c / d + 1.0,
}


@pytest.mark.parametrize("name", SCALED)
def test_loops_that_divide_by_zero(name):
    """The carry plus nothing, divided by zero, was infinite plus 0/0."""

    def f(x, d):
        return jax.lax.fori_loop(0, 3, lambda i, c: SCALED[name](c, d), x)

    x, d = jnp.array([-1.0, 1.0, 2.0]), jnp.array([0.0, -0.0, 4.0])
    g = sym_optimize(f, kernels="always")
    assert [r.taken for r in g.explain(x, d).routes if r.name == "scan"] == [True]
    np.testing.assert_allclose(g(x, d), jax.jit(f)(x, d), rtol=1e-6)
    as_written = sym_optimize(f, kernels="always", numerics="exact").explain(x, d)
    assert str(as_written.after.jaxpr) == str(as_written.before.jaxpr)


def test_a_step_of_many_operations_is_read() -> None:
    """They were read by recursion, whose depth Python limits."""

    def f(x):
        def step(h, given):
            for _ in range(300):
                h = h * 0.99 + given
            return h, None

        return lax.scan(step, x[0], x)[0]

    sym_optimize(f, on_unsupported="error").explain(jax.ShapeDtypeStruct((32, 8), jnp.float32))
