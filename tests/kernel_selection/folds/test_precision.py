"""Folds are at least as near to the exact value as the program they replace, in every dtype.

The reference is the same program in f64 on the same rounded inputs. Errors are root mean squares
beside that of the value.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize

F32 = jnp.float32
WIDTH = 16  # its root is exact in every dtype


def attention(q, k, v, bias, *, causal=False, wide=False):
    """Scores and softmax in the dtype of the inputs, or in f32 (`wide`)."""
    scores = jnp.einsum("qd,kd->qk", q, k, preferred_element_type=F32 if wide else None) / 4
    scores = scores + bias.astype(scores.dtype)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1).astype(v.dtype) @ v


def wide_attention(*args, causal=False):
    return attention(*args, causal=causal, wide=args[0].dtype != jnp.float64)


def squares_of_alike_keys(q, k, v, bias):
    """Squares of attention to keys and values that have much in common."""
    return attention(q, k + 4, v + 2, bias) ** 2


def cross_entropy(q, k, v, bias):
    """Return the cross-entropy of the first columns as labels; the vocabulary is k."""
    logits = q @ k.T + bias
    labels = jnp.arange(len(q)) % len(k)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def kernel_sum(q, k, v, bias):
    squares = (q * q).sum(-1)[:, None] + (k * k).sum(-1) - 2 * (q @ k.T)
    return jnp.exp(-squares / 32 + bias) @ v


def spread(q, k, v, bias):
    """The first two moments of scores."""
    scores = jnp.tanh(q @ k.T / 4 + bias)
    mean = scores.mean(-1, keepdims=True)
    return ((scores - mean) ** 2).mean(-1)


def deviations(q, k, v, bias):
    """Sums over columns of terms less row values."""
    scores = jnp.tanh(q @ k.T / 4 + bias)
    return jnp.abs(scores - scores.mean(-1, keepdims=True)) @ v


def inputs(length, dtype):
    rng = np.random.default_rng(length)
    shapes = [(length, WIDTH)] * 3 + [(length,), (length, WIDTH)]
    return [jnp.asarray(rng.standard_normal(s), F32).astype(dtype) for s in shapes]


def gradients(fun, argnums):
    """The value of a function and its gradients against given cotangents."""

    def both(*args):
        *args, cotangent = args
        if fun.__name__ in ("cross_entropy", "spread"):
            cotangent = cotangent[:, 0]
        out, pull = jax.vjp(fun, *args)
        return out, [pull(cotangent.astype(out.dtype))[n] for n in argnums]

    return both


def errors(got, exact):
    size = lambda x: float(np.sqrt(np.mean(x**2)))  # noqa: E731
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
    return [size(np.asarray(x, np.float64) - np.asarray(y)) / size(np.asarray(y)) for x, y in pairs]


@cache
def written(name, length, dtype, options):
    """The errors of a program as it is written, and its exact value."""
    fun = with_options(globals()[name], dict(options))
    args = inputs(length, dtype)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in args]
        exact = jax.tree.map(np.asarray, jax.jit(gradients(fun, ARGNUMS[name]))(*wide))
    return errors(jax.jit(gradients(fun, ARGNUMS[name]))(*args), exact), exact


def with_options(fun, options):
    def made(*args):
        return fun(*args, **options)

    made.__name__ = fun.__name__
    return made


ARGNUMS = {
    "attention": (0, 1, 2, 3),
    "wide_attention": (0, 1, 2, 3),
    "squares_of_alike_keys": (0, 1),
    "cross_entropy": (0, 1, 3),
    "kernel_sum": (0, 1, 2, 3),
    "spread": (0, 1, 3),
    "deviations": (2,),
}


def assert_as_near(name, length, dtype, inside, **options):
    fun = with_options(globals()[name], options)
    theirs, exact = written(name, length, dtype, tuple(options.items()))
    if inside:
        wrapped = sym_optimize(fun, kernels="always")
        wrapped.__name__ = fun.__name__
        run = jax.jit(gradients(wrapped, ARGNUMS[name]))
    else:
        run = sym_optimize(gradients(fun, ARGNUMS[name]), kernels="always")
        assert any(r.taken for r in run.explain(*inputs(length, dtype)).routes)
    ours = errors(run(*inputs(length, dtype)), exact)
    least = 2 * float(jnp.finfo(F32).eps)  # sums in another order
    assert all(a <= 1.1 * b + least for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention(dtype, causal, inside):
    assert_as_near("attention", 1300, dtype, inside, causal=causal)


def test_vanishing_sums_along_rows_do_not_add_the_mean_of_the_keys():
    assert_as_near("squares_of_alike_keys", 300, "bfloat16", inside=False)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_with_a_softmax_in_f32(dtype, causal):
    assert_as_near("wide_attention", 1300, dtype, inside=False, causal=causal)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_short_attention(dtype):
    assert_as_near("attention", 70, dtype, inside=False, causal=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["cross_entropy", "kernel_sum", "spread", "deviations"])
def test_folds_other_than_attention_are_as_near(name, dtype):
    assert_as_near(name, 300, dtype, inside=False)


@pytest.mark.parametrize("widened", [True, False], ids=["in f32", "as it is"])
def test_a_maximum_that_leaves_belongs_to_its_sum(widened):
    """A merged softmax needs both of the same shift, whatever that is rounded to."""

    def parts(q, k):
        scores = q @ k.T + 50
        shift = scores.max(-1)
        total = jnp.exp((scores - shift[:, None]).astype(F32)).sum(-1)
        return (shift.astype(F32) if widened else shift), total

    def merged(shift, total):
        return np.asarray(shift, np.float64) + np.log(np.asarray(total, np.float64))

    q, k, *_ = inputs(300, "bfloat16")
    exact = merged(*parts(*(np.asarray(x, np.float64) for x in (q, k))))
    ours, theirs = (merged(*f(q, k)) for f in (sym_optimize(parts, kernels="always"), parts))
    error, usual = (np.sqrt(np.mean((x - exact) ** 2)) for x in (ours, theirs))
    assert error <= 1.1 * usual, (error, usual)


def test_a_refused_term_does_not_change_the_rounding_of_a_fold():
    """The fold rounds as written, since its maximum leaves; so it does beside other terms."""

    def parts(q, k):
        scores = q @ k.T * 8
        shift = scores.max(-1)
        return shift, jnp.exp((scores - shift[:, None]).astype(F32)).sum(-1)

    def beside(q, k):
        kept = jnp.tanh(q @ q.T)
        return kept, jnp.exp(-kept).sum(-1), *parts(q, k)

    q, k, *_ = inputs(300, "bfloat16")
    alone, ours = (sym_optimize(f, kernels="always")(q, k) for f in (parts, beside))
    np.testing.assert_array_equal(ours[-1], alone[-1])


@pytest.mark.parametrize("fill", [-np.inf, -1e30, "least"])
def test_rows_without_keys_are_as_written(fill):
    def masked(q, k, v, seen):
        scores = q @ k.T / 4
        least = jnp.finfo(scores.dtype).min if fill == "least" else fill
        return jax.nn.softmax(jnp.where(seen, scores, least), axis=-1) @ v

    for dtype in ("bfloat16", "float16") if fill != -1e30 else ("bfloat16",):
        q, k, v, *_ = inputs(80, dtype)
        seen = jnp.arange(80)[None, :] < jnp.arange(80)[:, None]  # the first row sees none
        routed = sym_optimize(masked, kernels="always")
        ours, theirs = (np.float32(f(q, k, v, seen)) for f in (routed, jax.jit(masked)))
        np.testing.assert_allclose(ours, theirs, atol=3e-2, rtol=3e-2)
