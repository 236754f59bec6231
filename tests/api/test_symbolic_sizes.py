"""Attention, norms, scans and folds whose sizes are names: found, exported, run at any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import CPU

F32 = jnp.float32
ROWS = {"b": 1, "T": 1, "S": 1, "n": 1, "m": 1}
ODD = {"b": 3, "T": 7, "S": 9, "n": 5, "m": 3}
BLOCKS = {"b": 2, "T": 531, "S": 530, "n": 513, "m": 517}  # more than a block, and no multiple


def specs(shapes, dtype=F32, constraints=()):
    """`"b T 64, 64"` as specs over the named sizes."""
    scope = export.SymbolicScope(constraints)
    return [
        jax.ShapeDtypeStruct(export.symbolic_shape(", ".join(words.split()), scope=scope), dtype)
        for words in shapes.split(",")
    ]


def arrays(avals, sizes, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [tuple(sizes.get(str(d), d) for d in a.shape) for a in avals]
    return [rng.standard_normal(s).astype(a.dtype) for s, a in zip(shapes, avals, strict=True)]


def scores(q, k):
    return jnp.einsum("bhqd,bhkd->bhqk", q, k) / 4


def weighted(s, v):
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(s, -1), v)


def attention(q, k, v):
    return weighted(scores(q, k), v)


def causal(q, k, v):
    s = scores(q, k)
    return weighted(jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf), v)


def last_rows(q, k, v):
    s = scores(q, k)
    rows, columns = s.shape[-2:]
    mask = jnp.tril(jnp.ones((rows, columns), bool), k=columns - rows)
    return weighted(jnp.where(mask, s, -1e30), v)


def padded(q, k, v, keep):
    return weighted(jnp.where(keep[:, None, None, :] > -1, scores(q, k), -1e30), v)


def grouped(q, k, v):
    return causal(q, *(jnp.repeat(x, 2, axis=1) for x in (k, v)))


def windowed(q, k, v):
    s = scores(q, k)
    i, j = (jnp.arange(n) for n in s.shape[-2:])
    return weighted(jnp.where(jnp.abs(i[:, None] - j) <= 3, s, -jnp.inf), v)


def logsumexp(x, w):
    return jax.nn.logsumexp(x @ w.T, axis=-1)


def nearest(x, y):
    d = jnp.sum((x[:, None] - y[None]) ** 2, -1)
    return jnp.argmin(d, 1), jnp.min(d, 1)


def kernel_sum(x, y, v):
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def both_ways(x, y):
    p = jnp.tanh(x @ y.T)
    return p.sum(0), p.sum(1)


QKV = "b 2 T 8, b 2 T 8, b 2 T 8"
FOLDS = {
    "attention": (attention, QKV),
    "causal attention": (causal, QKV),
    "attention to other keys": (attention, "b 2 T 8, b 2 S 8, b 2 S 8"),
    "attention of the last rows": (last_rows, "b 2 T 8, b 2 S 8, b 2 S 8"),
    "padded keys": (padded, f"{QKV}, b T"),
    "grouped heads": (grouped, "b 4 T 8, b 2 T 8, b 2 T 8"),
    "a window": (windowed, QKV),
    "logsumexp": (logsumexp, "n 8, 600 8"),
    "nearest neighbours": (nearest, "n 3, m 3"),
    "sums of a kernel": (kernel_sum, "n 3, m 3, m 4"),
    "sums of rows and of columns": (both_ways, "n 4, m 4"),
}


def rms_norm(x, g, w):
    return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g) @ w


def layer_norm(x, g, b, w):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return ((x - mean) * jax.lax.rsqrt(variance + 1e-6) * g + b) @ w


def recurrence(a, x):
    def step(h, ax):
        h = jnp.tanh(ax[0]) * h + ax[1]
        return h, h

    return jax.lax.scan(step, jnp.zeros(x.shape[1:]), (a, x))[1]


def selective(dt, a, b, c, x):
    def step(h, s):
        dt, b, c, x = s
        h = jnp.exp(-jnp.abs(dt[..., None] * a)) * h + (dt * x)[..., None] * b[:, None, :]
        return h, jnp.sum(h * c[:, None, :], -1)

    start = jnp.zeros((x.shape[1], x.shape[2], a.shape[1]))
    return jax.lax.scan(step, start, (dt, b, c, x))[1]


OTHERS = {
    "RMSNorm": (rms_norm, "b T 8, 8, 8 4"),
    "LayerNorm": (layer_norm, "b T 8, 8, 8, 8 4"),
    "recurrence": (recurrence, "T b 4, T b 4"),
    "recurrence of known length": (recurrence, "9 b 4, 9 b 4"),
    "selective scan": (selective, "T b 8, 8 4, T b 4, T b 4, T b 8"),
}


def close(got, wanted, rtol=1e-4):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * max(1, np.abs(y).max()))


@pytest.mark.parametrize("name", FOLDS | OTHERS)
def test_exported_kernels_run_at_any_size(name):
    fun, shapes = (FOLDS | OTHERS)[name]
    avals = specs(shapes)
    optimised = sym_optimize(fun, kernels="always", on_unsupported="error")
    assert any(route.taken for route in optimised.explain(*avals).routes)
    exported = export.export(optimised)(*avals)
    for sizes in (ROWS, ODD, BLOCKS):
        args = arrays(avals, sizes)
        close(exported.call(*args), jax.jit(fun)(*args))


MANY = FOLDS | {"logsumexp": (logsumexp, "n 64, 50000 64")}
LONG = ("attention", "attention to other keys")  # shorter, XLA's library stores no weights either


@pytest.mark.parametrize("name", MANY)
def test_folds_are_taken_where_they_pay_at_all_sizes(name, one_device):
    if name in LONG and CPU.folds.calls_go_on:
        pytest.skip("XLA's library holds the weights of a few heads at once")
    fun, shapes = MANY[name]
    facts = tuple(f"{size} >= 4096" for size in "ST" if size in shapes) if name in LONG else ()
    report = sym_optimize(fun, on_unsupported="error", assume=facts).explain(*specs(shapes))
    (fold,) = [route for route in report.routes if route.taken]
    assert fold.name == "fold"
    assert "T" in fold.reason or "n" in fold.reason.split()[0]


@pytest.mark.parametrize("name", LONG)
def test_a_fold_that_loses_at_some_size_names_it(name, one_device):
    fun, shapes = FOLDS[name]
    report = sym_optimize(fun).explain(*specs(shapes))
    fold, *_ = report.routes
    assert (fold.name, fold.taken) == ("fold", False) and "T = " in fold.reason


def test_few_pairs_run_as_written_and_many_are_streamed(one_device):
    exported = export.export(sym_optimize(nearest))(*specs("n 3, m 3"))

    def compiled(rows):
        x = jax.ShapeDtypeStruct((rows, 3), F32)
        return jax.jit(exported.call).lower(x, x).compile()

    few, many = compiled(32), compiled(4096)
    assert " while(" not in str(few.as_text())
    assert " while(" in str(many.as_text())
    memory = many.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * 4096**2 / 4


def test_double_precision():
    with jax.enable_x64():
        avals = specs(QKV, jnp.float64)
        exported = export.export(sym_optimize(causal, kernels="always"))(*avals)
        args = arrays(avals, BLOCKS)
        close(exported.call(*args), jax.jit(causal)(*args), 1e-12)


def test_gradients_of_named_sizes():
    def loss(q, k, v):
        return jnp.sum(causal(q, k, v) ** 2)

    avals = specs(QKV)
    step = sym_optimize(jax.grad(loss, (0, 1, 2)), kernels="always", on_unsupported="error")
    assert any(route.taken for route in step.explain(*avals).routes)
    exported = export.export(step)(*avals)
    args = arrays(avals, BLOCKS)
    close(exported.call(*args), jax.jit(jax.grad(loss, (0, 1, 2)))(*args), 1e-3)


@pytest.mark.slow
def test_gradients_of_optimised_functions_of_named_sizes():
    avals = specs(QKV)
    loss = lambda q, k, v: jnp.sum(causal(q, k, v) ** 2)  # noqa: E731
    inside = jax.jit(jax.grad(sym_optimize(loss, kernels="always"), (0, 1, 2)))
    exported = export.export(inside)(*avals)
    for sizes in (ROWS, BLOCKS):
        args = arrays(avals, sizes)
        close(exported.call(*args), jax.jit(jax.grad(loss, (0, 1, 2)))(*args), 1e-3)


def returned(q, k, v):
    s = scores(q, k)
    return weighted(s, v), s


def dropped(q, k, v):
    s = scores(q, k)
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, s.shape)
    return weighted(jnp.where(keep, s, -jnp.inf), v)


@pytest.mark.parametrize("fun", [returned, dropped])
def test_look_alikes_stay(fun):
    avals = specs(QKV)
    optimised = sym_optimize(fun, kernels="always")
    assert not any(route.taken for route in optimised.explain(*avals).routes)


def chain(q, k, v):
    return jnp.einsum("bqk,bkd->bqd", jnp.einsum("bqd,bkd->bqk", q, k), v)


def lora(x, w, a, b):
    return x @ (w + a @ b)


def projected(x, v, w):
    return x @ v + x @ w


UNDECIDED = {
    "LoRA": (lora, "T 512, 512 512, 512 8, 8 512"),
    "linear attention": (chain, "b T 64, b T 64, b T 64"),
    "shared operand": (projected, "n m, m k, m k"),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_the_fact_named_decides(name):
    fun, shapes = UNDECIDED[name]
    report = sym_optimize(fun).explain(*specs(shapes))
    assert not report.rules
    (advice,) = report.details.crossovers
    decided = sym_optimize(fun, assume=advice.facts).explain(*specs(shapes))
    assert decided.rules
    assert not decided.crossovers


def test_constraints_of_names_are_facts():
    shapes = "T 512, 512 512, 512 8, 8 512"
    assert sym_optimize(lora).explain(*specs(shapes, constraints=["T <= 64"])).rules
    assert not sym_optimize(lora).explain(*specs(shapes, constraints=["mod(T,2) == 0"])).rules
