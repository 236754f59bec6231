"""Norms before linear layers are recognised however they are spelled; look-alikes are not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.errors import KernelError
from tests.fuzz.check import Mode, check_function

# Small programs: most of their time is LLVM's.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

M, K, N = 6, 96, 40
draw = np.random.default_rng(0).standard_normal
X = jnp.asarray(3 + draw((M, K)), jnp.float32)
G, B = (jnp.asarray(1 + 0.1 * draw(K), jnp.float32) for _ in range(2))
W, V, U = (jnp.asarray(draw((K, N)) / 10, jnp.float32) for _ in range(3))
C = jnp.asarray(draw(N), jnp.float32)
BACK = jnp.asarray(draw((N, K)) / 10, jnp.float32)


def mean_square(x):
    return jnp.mean(x * x, -1, keepdims=True)


def rms(x, g: Any = G, eps=1e-6):
    return x * lax.rsqrt(mean_square(x) + eps) * g


def layer(x, g=G, b=B):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-5) * g + b


def moments(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt((x**2).mean(-1, keepdims=True) - mean**2 + 1e-5)


def variance(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * (
        1 + G
    ) + B


def cast_down(x):
    f = x.astype(jnp.float32)
    return (f * lax.rsqrt(mean_square(f) + 1e-6)).astype(x.dtype) * G.astype(x.dtype)


FOUND = {
    "RMSNorm": lambda x: rms(x) @ W,
    "1 + gain": lambda x: rms(x, 1 + G) @ W,
    "no gain": lambda x: rms(x, 1.0) @ W,
    "gain first": lambda x: (x * G * lax.rsqrt(mean_square(x) + 1e-6)) @ W,
    "1/sqrt": lambda x: (x * (1 / jnp.sqrt(mean_square(x) + 1e-6)) * G) @ W,
    "division": lambda x: (x / jnp.sqrt(mean_square(x) + 1e-6) * G) @ W,
    "eps outside": lambda x: (x / (jnp.sqrt(mean_square(x)) + 1e-6) * G) @ W,
    "scale after": lambda x: ((x * G) @ W) * 1.0 + (rms(x) @ V),
    "bias and gelu": lambda x: jax.nn.gelu(rms(x) @ W + C),
    "gated MLP": lambda x: x + (jax.nn.silu(rms(x) @ W) * (rms(x) @ V)) @ BACK,
    "QKV": lambda x: tuple(rms(x) @ w for w in (W, V, U)),
    "fused QKV": lambda x: jnp.split(rms(x) @ jnp.concatenate([W, V, U], 1), 3, -1),
    "heads": lambda x: jnp.einsum(
        "btd,dhk->bthk", rms(x.reshape(2, len(x) // 2, K)), W.reshape(K, 4, N // 4)
    ),
    "LayerNorm": lambda x: layer(x) @ W + C,
    "LayerNorm by moments": lambda x: moments(x) @ W,
    "jnp.var": lambda x: variance(x) @ W,
    "only a mean": lambda x: ((x - x.mean(-1, keepdims=True)) * G / 7 * x.std(-1)[:, None]) @ W,
    "half a mean": lambda x: ((x - 0.5 * x.mean(-1, keepdims=True)) / x.std(-1)[:, None]) @ W,
    "L2": lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ W,
    "mean of absolutes": lambda x: (x / jnp.abs(x).mean(-1, keepdims=True)) @ W,
    "softmax": lambda x: jax.nn.softmax(x) @ W,
    "row scale": lambda x: (x * jnp.exp(x[:, :1])) @ W,
    "weights on the left": lambda x: W.T @ rms(x).T,
    "post-norm residual": lambda x: layer(x) + jnp.tanh(layer(x) @ W) @ BACK,
    "residual in the epilogue": lambda x: x[:, :N] + rms(x) @ W,
    "two norms": lambda x: rms(layer(x) @ W @ BACK) @ V,
}
WIDER = {
    "cast down": (lambda x: cast_down(x) @ W.astype(x.dtype), jnp.bfloat16),
    "cast down f16": (lambda x: cast_down(x) @ W.astype(x.dtype), jnp.float16),
    "residual stream in f32": (
        lambda x: rms(x).astype(jnp.bfloat16) @ W.astype(jnp.bfloat16),
        jnp.float32,
    ),
    "f32 result": (
        lambda x: jnp.dot(cast_down(x), W.astype(x.dtype), preferred_element_type=jnp.float32),
        jnp.bfloat16,
    ),
}


def routes(f, *args, **options):
    report = sym_optimize(f, **options).explain(*args)
    return [r for r in report.routes if r.name == "norm_linear"]


def close(got, wanted, rtol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(y, np.float64) for y in (a, b))
        assert np.abs(a - b).max(initial=0) <= rtol * np.abs(b).max(initial=0)


def compared(programs, x):
    """Results as optimised and as written, by name; all are compiled at once, which is faster."""
    optimised = {name: sym_optimize(f, kernels="always") for name, f in programs.items()}

    def run(x):
        return {name: (optimised[name](x), f(x)) for name, f in programs.items()}

    return quick_jit(run)(x)


@functools.cache
def found_results(rows):
    return compared(FOUND, X[:rows])


@pytest.mark.parametrize("rows", [M, 2])
@pytest.mark.parametrize("name", FOUND)
def test_norm_and_product_are_one_kernel(name, rows):
    assert any(r.taken for r in routes(FOUND[name], X[:rows], kernels="always"))
    got, wanted = found_results(rows)[name]
    close(got, wanted, 1e-5)


ONE_ROW = ["RMSNorm", "LayerNorm", "jnp.var", "gated MLP", "L2", "softmax", "QKV"]


@pytest.mark.parametrize("x", [X[:1], X[0]], ids=["matrix", "vector"])
def test_norm_of_one_row_is_a_kernel(x):
    programs = {name: FOUND[name] for name in ONE_ROW}
    for name, (got, wanted) in compared(programs, x).items():
        assert any(r.taken for r in routes(FOUND[name], x, kernels="always")), name
        close(got, wanted, 1e-5)


def test_casts_are_looked_through():
    programs = {n: lambda x, f=f, t=t: f(x.astype(t)) for n, (f, t) in WIDER.items()}
    for name, (got, wanted) in compared(programs, X).items():
        f, dtype = WIDER[name]
        assert [r.taken for r in routes(f, X.astype(dtype), kernels="always")] == [True], name
        close(got, wanted, 2e-2)


def group_norm(x):
    y = x.reshape(M, 8, K // 8)
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.reshape(M, K)


def rounded_mean(x):
    mean = (x + 300).mean(-1, keepdims=True).astype(jnp.bfloat16).astype(x.dtype)
    c = (x + 300) - mean
    return (c / jnp.sqrt((c**2).mean(-1, keepdims=True) + 1e-5)) @ W


DECLINED = {
    "nonlinearity": (lambda x: jax.nn.silu(rms(x)) @ W, "nonlinearity"),
    "tanh": (lambda x: jnp.tanh(layer(x)) @ W, "nonlinearity"),
    "groups": (lambda x: group_norm(x) @ W, "contracted axes alone"),
    "batch": (lambda x: ((x - x.mean(0)) / x.std(0)) @ W, "not over the axis"),
    "result": (lambda x: (rms(x), rms(x) @ W), "itself a result"),
    "added": (lambda x: (rms(x) + jnp.sin(x)) @ W, "another value is added"),
    "rounded mean": (rounded_mean, "not the mean"),
    "two scales": (
        lambda x: (x * jnp.exp(x[:, :1]) + x * jnp.exp(x[:, 1:2])) @ W,
        "two row scales",
    ),
}


def test_norm_is_declined_with_the_reason():
    for name, (got, wanted) in compared({n: f for n, (f, _) in DECLINED.items()}, X).items():
        f, reason = DECLINED[name]
        (found,) = routes(f, X, kernels="always")
        assert not found.taken, name
        assert reason in found.reason
        close(got, wanted, 1e-5)


ALONE = {
    "no norm": lambda x: jax.nn.silu(x @ W) @ BACK,
    "column scale": lambda x: (x * G) @ W,
    "norm of the result": lambda x: rms(x @ W, 1.0),
    "scalar": lambda x: (x * 3.0) @ W,
    "traced scalar": lambda x: (x * jnp.exp(C[0] * B[0])) @ W,
    "scale of all rows": lambda x: (x / jnp.abs(x).max()) @ W,
    "integers": lambda x: (
        (x.astype(jnp.int32) * x.astype(jnp.int32).sum(1)[:, None]) @ jnp.ones((K, N), jnp.int32)
    ),
    "itself": lambda x: rms(x) @ rms(x).T,
}


def test_norm_without_a_product_is_no_candidate():
    for name, (got, wanted) in compared(ALONE, X).items():
        assert not any(r.taken for r in routes(ALONE[name], X, kernels="always")), name
        close(got, wanted, 1e-5)


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single(rows):
    x = X[:rows]
    close(sym_optimize(FOUND["LayerNorm"], kernels="always")(x), FOUND["LayerNorm"](x), 1e-5)


def test_nan_and_inf_stay_in_their_rows():
    x = X.at[1].set(jnp.nan).at[2].set(jnp.inf).at[3].set(0)
    f = FOUND["RMSNorm"]
    got = sym_optimize(f, kernels="always")(x)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(f(x)))
    close(got[3:], f(x)[3:], 1e-5)


def test_cancelling_operand_is_not_split():
    def f(x, w):
        y = x + 100 * x[:, :1]
        return (y - y) @ w

    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 9)), jnp.float32)
    g = sym_optimize(f, kernels="always")
    assert not any(r.taken for r in g.explain(x, x).routes)
    np.testing.assert_array_equal(g(x, x), np.zeros((9, 9)))


def test_a_diagonal_scales_rows():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 20)), jnp.float32)
    f = lambda x: (x * jnp.sin(jnp.diag(x) + 1)[:, None]) @ x.T[:, :5]  # noqa: E731
    np.testing.assert_allclose(sym_optimize(f, kernels="always")(x), f(x), rtol=1e-4, atol=1e-4)


def test_symbolic_sizes_stay():
    (m,) = jax.export.symbolic_shape("m")
    exported = jax.export.export(sym_optimize(FOUND["RMSNorm"], kernels="always"))(
        jax.ShapeDtypeStruct((m, K), jnp.float32)
    )
    close(exported.call(X), FOUND["RMSNorm"](X), 1e-5)


def test_derivatives():
    f = lambda x: jnp.sum(jnp.sin(FOUND["LayerNorm"](x)))  # noqa: E731
    g = lambda x: jnp.sum(jnp.sin(sym_optimize(FOUND["LayerNorm"], kernels="always")(x)))  # noqa: E731
    step = sym_optimize(jax.grad(f), kernels="always")
    inside = jax.grad(sym_optimize(f, kernels="always"))
    wanted, *found = quick_jit(lambda x: [h(x) for h in (jax.grad(f), jax.grad(g), inside, step)])(
        X
    )
    for got in found:
        close(got, wanted, 1e-4)


def gated_loss(p, x):
    y = layer(x, p["g"], p["b"])
    q, k, v = (y @ p[n] for n in "qkv")
    h = jax.nn.silu(q) * k + v
    return jnp.mean((rms(h @ BACK, p["g"]) @ p["v"]) ** 2)


def test_a_step_of_training():
    p = {"g": G, "b": B, "q": W, "k": V, "v": U}

    def trained(loss):
        def step(p, x):
            value, gradient = jax.value_and_grad(loss)(p, x)
            return value, jax.tree.map(lambda a, b: a - 0.1 * b, p, gradient)

        return step

    plain, outside = trained(gated_loss), sym_optimize(trained(gated_loss), kernels="always")
    inside = trained(sym_optimize(gated_loss, kernels="always"))
    wanted, *found = quick_jit(lambda p, x: [f(p, x) for f in (plain, outside, inside)])(p, X)
    for got in found:
        close(got, wanted, 1e-4)
    report = outside.explain(p, X)
    reasons = [r.reason for r in report.routes if r.name == "norm_linear" and not r.taken]
    assert any(r.taken for r in report.routes if r.name == "norm_linear")
    reason = "the statistics are not over the axis that the product sums"
    assert reason in reasons  # the gradient of a weight


def test_the_report_counts_kernels():
    (found,) = routes(FOUND["QKV"], X, kernels="always")
    assert found.reason == "1 kernel for 3 products"
    many = lambda x: [rms(x) @ (n * W) for n in range(1, 11)]  # noqa: E731
    (found,) = routes(many, X, kernels="always", rules=())
    assert found.reason == "2 kernels for 10 products"
    late = lambda x: (y := rms(x) @ W, jnp.cumsum(y, 0) + rms(x) @ V)  # noqa: E731
    (found,) = routes(late, X, kernels="always")
    assert found.reason == "2 kernels for 2 products"
    close(sym_optimize(late, kernels="always")(X), late(X), 1e-5)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "heads"])
def test_transformed(name):
    f, x = FOUND[name], jnp.stack([X, 2 * X])
    inside = jax.vmap(sym_optimize(f, kernels="always"))
    outside = sym_optimize(jax.vmap(f), kernels="always")
    wanted, *found = quick_jit(lambda x: [g(x) for g in (jax.vmap(f), inside, outside)])(x)
    for got in found:
        close(got, wanted, 1e-5)


def big(m, k=4096, n=4096, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (k,), (k, n))]


def layer_of(x, g, w):
    return cast_down_with(x, g) @ w


def cast_down_with(x, g):
    f = x.astype(jnp.float32)
    return (f * lax.rsqrt(mean_square(f) + 1e-6)).astype(x.dtype) * g


def with_residual(x, g, w):
    y = cast_down_with(x, g)
    return y + y @ w


def by_var(x, g, w):
    f = x.astype(jnp.float32)
    centred = f - f.mean(-1, keepdims=True)
    return (centred * lax.rsqrt(f.var(-1, keepdims=True) + 1e-6) * g).astype(x.dtype) @ w


def by_std(x, g, w):
    f = x.astype(jnp.float32)
    centred = f - f.mean(-1, keepdims=True)
    return (centred / (f.std(-1, keepdims=True) + 1e-6) * g).astype(x.dtype) @ w


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("f", [by_var, by_std])
def test_the_variance_of_numpy_is_taken_as_any_other(f):
    """`jnp.var` compares its number of elements with zero, which is known."""
    (found,) = routes(f, *big(16), device="h200", kernels="always")
    assert found.taken
    wanted = [routes(f, *big(4, 8, 8, "float32"), kernels=kind) for kind in ("xla", "triton")]
    assert all(r.taken for found in wanted for r in found)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_gpu_takes_it_where_asked_alone(rows):
    """On an H200 XLA's kernels took 0.4 to 0.7 of the time: experiments/on_gpu."""
    (found,) = routes(layer_of, *big(rows), device="h200")
    assert not found.taken and "predicted" in found.reason
    (found,) = routes(layer_of, *big(rows), device="h200", kernels="always")
    assert found.taken


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    ("f", "rows", "device", "reason"),
    [
        (layer_of, 4096, "h200", "slower"),
        (layer_of, 16, "cpu", "CPU"),
        (with_residual, 16, "h200", "another value reads"),
    ],
)
def test_norm_is_refused_with_the_reason(f, rows, device, reason):
    (found,) = routes(f, *big(rows), device=device)
    assert not found.taken
    assert reason in found.reason


def test_triton_by_name_says_why_it_cannot():
    with pytest.raises(KernelError, match="triton"), jax.enable_x64(True):
        x, w = np.ones((4, 8)), np.ones((8, 4))
        sym_optimize(lambda x, w: rms(x, 1.0) @ w, kernels="triton").explain(x, w)


def full(x, g, b, w, c):
    return layer(x, g, b) @ w + c


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_are_folded_before_the_kernel(dtype):
    names, values = ("g", "b", "w", "c"), (G, B, W, C)
    f = lambda x, g, b, w, c: full(x.astype("float32"), g, b, w, c).astype(dtype)  # noqa: E731
    frozen = dict(zip(names, values, strict=True))
    prepared = sym_optimize(f, frozen=names, kernels="always").prepare(**frozen)
    x = X.astype(dtype)
    close(prepared(x), f(x, **frozen), 1e-5 if dtype == "float32" else 1e-2)
    folded, *vectors = sorted(prepared.constants(x), key=lambda c: -c.ndim)
    np.testing.assert_allclose(folded, G[:, None] * W, rtol=1e-6)
    assert {v.shape for v in vectors} <= {(N,), ()}
    assert any(np.allclose(v, B @ W, rtol=1e-4) for v in vectors if v.shape)


def test_kernels_off():
    assert routes(FOUND["RMSNorm"], X, kernels="off") == []
    assert routes(FOUND["RMSNorm"], X, kernels="always", numerics="exact") == []


@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
@pytest.mark.parametrize("f", [layer, variance], ids=["two passes", "jnp.var"])
def test_a_large_mean_loses_no_digits(f, mean):
    x = np.asarray(mean + draw((M, K)), np.float32)
    program = lambda x: f(x) @ W  # noqa: E731
    with jax.enable_x64(True):
        wanted = np.asarray(jax.jit(program)(x.astype(np.float64)))
    routed = functools.partial(sym_optimize(program, kernels="always"))
    errors = [np.linalg.norm(np.asarray(g(x)) - wanted) for g in (routed, jax.jit(program))]
    assert errors[0] <= 4 * errors[1]


def rms_qkv(x, g, q, k, v):
    y = x * lax.rsqrt(mean_square(x) + 1e-6) * g
    return y @ q, y @ k, y @ v


FROZEN = {
    # program of x and frozen arrays, those arrays, the shapes kept
    "RMSNorm and QKV": (rms_qkv, (G, W, V, U), [(K, N)] * 3),
    "LayerNorm and bias": (full, (G, B, W, C), [(N,), (K, N)]),
    "LayerNorm and an adapter": (
        lambda x, g, b, w, u, v: layer(x, g, b) @ (w + 2 * u @ v),
        (G, B, W, BACK.T[:, :4], V[:4]),
        [(N,), (K, N)],
    ),
    "an adapter beside": (
        lambda x, g, w, u, v: rms(x, g) @ w + (rms(x, g) @ u) @ v,
        (G, W, BACK.T[:, :4], V[:4]),
        None,
    ),
    "a plain scale": (lambda x, g, w: (x * jnp.exp(x[:, :1]) * g) @ w, (G, W), None),
    "gated MLP": (
        lambda x, g, a, b, c: x + (jax.nn.silu(rms(x, g) @ a) * (rms(x, g) @ b)) @ c,
        (G, W, V, BACK),
        [(N, K), (K, N), (K, N)],
    ),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_weights_are_folded_without_a_kernel(name):
    f, arrays, shapes = FROZEN[name]
    names = [f"a{n}" for n in range(len(arrays))]
    named = eval(f"lambda x, {', '.join(names)}: f(x, {', '.join(names)})", {"f": f})
    frozen = dict(zip(names, arrays, strict=True))
    prepared = sym_optimize(named, frozen=tuple(names)).prepare(**frozen)
    both = lambda x: [(prepared(x[:m]), f(x[:m], *arrays)) for m in (1, 2, M)]  # noqa: E731
    for got, wanted in quick_jit(both)(X):
        close(got, wanted, 1e-5)
    if shapes is not None:
        kept = [tuple(d for d in c.shape if d != 1) for c in prepared.constants(X[:2])]
        assert sorted(shape for shape in kept if shape) == sorted(shapes)


@pytest.mark.parametrize(
    ("device", "rows", "shapes"),
    [
        ("h200", 2, [(K, 3 * N)]),
        ("h200", 48, [(K, N)] * 3),
        ("cpu", 2, [(K, N)] * 3),
    ],
)
def test_projections_stand_beside_each_other_where_that_pays(device, rows, shapes):
    frozen = {"g": G, "q": W, "k": V, "v": U}
    options = {"frozen": tuple(frozen), "device": device, "kernels": "off"}
    prepared = sym_optimize(rms_qkv, **options).prepare(**frozen)
    x = jnp.tile(X, (8, 1))[:rows]
    close(prepared(x), rms_qkv(x, **frozen), 1e-5)
    assert [c.shape for c in prepared.constants(x)] == shapes


def test_f16_weights_are_not_scaled():
    x, g, w = (a.astype(jnp.float16) for a in (X, 300 * G, 300 * W))
    f = lambda x, g, w: (cast_down_with(x, g) / 1000) @ w  # noqa: E731
    prepared = sym_optimize(f, frozen=("g", "w")).prepare(g=g, w=w)
    np.testing.assert_array_equal(prepared(x), jax.jit(f)(x, g, w))


def test_second_centring_subtracts_the_rounding_of_the_mean():
    """A sum of centred values was taken for 0; far rows of x multiplied its rounding error."""
    x, w = (np.asarray(a + draw(s), np.float32) for a, s in ((1e4, (7, 6)), (1, (6, 6))))
    mode = Mode("in_second", "model", kernels="always")
    assert check_function(lambda x, w: jnp.var(x @ w, 0), [x, w], mode) == "equal"


def test_the_mean_of_half_precision_is_held_in_f32():
    """`x.mean()` rounds to the dtype of x: no cast of the user's, and the result is nearer so."""
    x, g, b, w = (v.astype(jnp.bfloat16) for v in (X, G, B, W))

    def fun(x, g, b, w):
        return layer(x, g, b) @ w

    ours = sym_optimize(fun, kernels="always")
    assert [r.name for r in ours.explain(x, g, b, w).routes if r.taken] == ["norm_linear"]
    exact = quick_jit(fun)(*[v.astype(jnp.float32) for v in (x, g, b, w)])
    errors = [jnp.linalg.norm(f(x, g, b, w) - exact) for f in (ours, quick_jit(fun))]
    assert errors[0] <= errors[1] < 0.1 * jnp.linalg.norm(exact)


def test_centred_values_whose_rounding_is_read_are_stored():
    """The kernel rounds a mean of its own: far rows multiplied the difference of both means."""

    def f(x, w):
        y = x @ w
        centred = y - y.mean(0)
        return centred.T @ x - jnp.outer(centred.mean(0), x.sum(0))

    x, w = (np.asarray(a + draw(s), np.float32) for a, s in ((1e4, (7, 6)), (0, (6, 6))))
    (found,) = routes(f, x, w, kernels="always")
    assert not found.taken and "zero but for rounding" in found.reason
    assert check_function(f, [x, w], Mode("value", "random", kernels="always")) == "equal"
