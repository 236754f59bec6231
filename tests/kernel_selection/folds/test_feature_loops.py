"""Sums over features of pairwise terms run as loops inside a fold's tile."""

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.kernel_selection.folds.pairwise_terms import PIECE, UNROLL
from symjax_rewrite.pallas_kernels.fold import tiling
from symjax_rewrite.testing.assertions import assert_equivalent, assert_no_intermediate
from tests.kernel_selection.folds.programs import draw
from tests.programs import emitted

ROWS, COLUMNS, FEATURES = 30, 41, 19
LONG = UNROLL + 7


def manhattan(x, y):
    return jnp.sum(jnp.abs(x[..., :, None, :] - y[..., None, :, :]), -1)


def nearest(x, y):
    return jnp.min(manhattan(x, y), -1)


def laplacian_kernel(x, y):
    return jnp.exp(-manhattan(x, y) / 4) @ y


def huber(x, y):
    d = x[:, None] - y
    return jnp.max(jnp.sum(jnp.where(jnp.abs(d) < 1, d * d / 2, jnp.abs(d) - 0.5), -1), -1)


def canberra(x, y):
    far = jnp.abs(x[:, None] - y) / (jnp.abs(x[:, None]) + jnp.abs(y))
    return jnp.sum(jnp.exp(-jnp.sum(far, -1)), 0)


def additive_attention(x, y):
    scores = jnp.tanh(x[:, None] + y) @ jnp.linspace(-1, 1, x.shape[-1])
    seen = jnp.arange(y.shape[0]) <= jnp.arange(x.shape[0])[:, None]
    return jax.nn.softmax(jnp.where(seen, scores, -1e30), -1) @ y


def places_of_features(x, y):
    """A term that depends on the feature's number."""
    weights = jnp.where(jnp.arange(x.shape[-1]) % 3 == 1, 0.5, 2.0)
    return jnp.argmin(jnp.sum(weights * jnp.abs(x[:, None] - y), -1), -1)


def halves_of_features(x, y):
    """A term of slices along the features."""
    half = x.shape[-1] // 2
    d = jnp.abs(x[:, None, :half] - y[:, half : 2 * half])
    return jnp.max(jnp.sum(jnp.maximum(d, 0.25), -1), -1)


def sums_in_sums(x, y):
    """A term that holds a sum over another axis of features."""
    inner = jnp.sum(jnp.tanh(x[:, None, :, None] * y[:, None, :3]), -1)
    return jnp.min(jnp.sum(jnp.abs(inner), -1), -1)


def distances_of_two_kinds(x, y):
    near = jnp.sum(jnp.sqrt(jnp.abs(x[:, None] - y)), -1)
    return jnp.min(near + manhattan(x, y), -1)


def one_point(x, y):
    return jnp.min(jnp.sum(jnp.abs(x[0] - y), -1))


TERMS = [
    nearest, laplacian_kernel, huber, canberra, additive_attention, places_of_features,
    halves_of_features, sums_in_sums, distances_of_two_kinds,
]  # fmt: skip


@pytest.mark.parametrize("features", [PIECE + 1, FEATURES, LONG])
@pytest.mark.parametrize("fun", TERMS, ids=lambda f: f.__name__)
def test_values(fun, features):
    x, y = draw(ROWS, features), draw(COLUMNS, features, seed=1)
    assert_equivalent(sym_optimize(fun, kernels="always"), jax.jit(fun), x, y, rtol=2e-5)


@pytest.mark.parametrize("fun", [nearest, huber, places_of_features, distances_of_two_kinds])
def test_terms_by_feature_are_never_stored(fun):
    x, y = draw(ROWS, LONG), draw(COLUMNS, LONG, seed=1)
    report = sym_optimize(fun, kernels="always").explain(x, y)
    assert any(r.taken for r in report.routes if r.name == "fold"), report
    assert_no_intermediate(emitted(report), x, y, elements=4 * ROWS * COLUMNS)


@pytest.mark.parametrize("fun", [nearest, one_point])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_other_dtypes(fun, dtype):
    x, y = ((4 * draw(n, LONG, seed=n)).astype(dtype) for n in (ROWS, COLUMNS))
    assert_equivalent(sym_optimize(fun, kernels="always"), jax.jit(fun), x, y)


def test_batches():
    x, y = draw(3, ROWS, FEATURES), draw(3, COLUMNS, FEATURES, seed=1)
    assert_equivalent(sym_optimize(nearest, kernels="always"), jax.jit(nearest), x, y)


def test_rows_and_columns_in_blocks():
    x, y = draw(700, FEATURES), draw(1500, FEATURES, seed=1)
    assert_equivalent(sym_optimize(nearest, kernels="always"), jax.jit(nearest), x, y, rtol=2e-5)


def test_gradients():
    def loss(x, y):
        return jnp.sum(jnp.tanh(laplacian_kernel(x, y)) ** 2)

    x, y = draw(ROWS, FEATURES), draw(COLUMNS, FEATURES, seed=1)
    grad = jax.grad(loss, (0, 1))
    for optimised in (sym_optimize(grad, kernels="always"), jax.grad(sym_optimize(loss), (0, 1))):
        assert_equivalent(optimised, jax.jit(grad), x, y, rtol=5e-5)


@pytest.mark.parametrize("parts", [1, 5, FEATURES])
def test_parts_of_a_gradient_share_a_loop(monkeypatch, parts):
    """A block holds so many features of the gradient, whose distance it computes once."""
    monkeypatch.setattr(tiling, "LOOP_PAIRS", parts * ROWS * COLUMNS)
    jax.clear_caches()

    def loss(x, y):
        return jnp.sum(jnp.exp(-manhattan(x, y) / 4) ** 2)

    x, y = draw(ROWS, FEATURES), draw(COLUMNS, FEATURES, seed=1)
    optimised = sym_optimize(jax.grad(loss, (0, 1)), kernels="always")
    report = optimised.explain(x, y)
    assert any(r.taken for r in report.routes if r.name == "fold"), report
    assert_no_intermediate(emitted(report), x, y, elements=parts * ROWS * COLUMNS + 1)
    assert_equivalent(optimised, jax.jit(jax.grad(loss, (0, 1))), x, y, rtol=5e-5)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("features", [PIECE + 4, 40, LONG])
def test_gradients_of_many_features_are_taken_by_price(features):
    """Each part summed the features again: 1.1 to 2.5 times as long as written, now 0.1 to 0.5."""
    specs = [jax.ShapeDtypeStruct((1000, features), "float32")] * 2
    gradient = jax.grad(lambda x, y: jnp.sum(jnp.exp(-manhattan(x, y))))
    report = sym_optimize(gradient, device="cpu").explain(*specs)
    assert any(r.taken for r in report.routes if r.name == "fold"), report


def test_the_program_does_not_grow_with_the_features():
    def equations(features):
        specs = [jax.ShapeDtypeStruct((n, features), "float32") for n in (ROWS, COLUMNS)]
        report = sym_optimize(huber, kernels="always").explain(*specs)
        return str(emitted(report)).count("\n")

    assert equations(10 * PIECE) == equations(100 * PIECE)


def test_pairs_stored_by_feature_are_read_as_written():
    def fun(stored, y):
        return jnp.min(jnp.sum(jnp.abs(stored - y), -1), -1)

    stored, y = draw(ROWS, COLUMNS, LONG), draw(COLUMNS, LONG, seed=1)
    report = sym_optimize(fun, kernels="always").explain(stored, y)
    assert not any(r.taken for r in report.routes if r.name == "fold")


def test_gpu_kernels_hold_the_terms_in_registers():
    x, y = draw(ROWS, FEATURES), draw(COLUMNS, FEATURES, seed=1)
    report = sym_optimize(nearest, kernels="triton").explain(x, y)
    assert any(r.taken for r in report.routes if r.name == "fold")
    x, y = draw(ROWS, LONG), draw(COLUMNS, LONG, seed=1)
    report = sym_optimize(nearest, kernels="triton").explain(x, y)
    assert not any(r.taken for r in report.routes if r.name == "fold")


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("features", [64, 256, 1024])
def test_long_sums_are_taken_by_price(features):
    specs = [jax.ShapeDtypeStruct((1000, features), "float32")] * 2
    report = sym_optimize(nearest, device="cpu").explain(*specs)
    assert any(r.taken for r in report.routes if r.name == "fold"), report


def test_nan_and_infinity():
    x, y = draw(ROWS, LONG), draw(COLUMNS, LONG, seed=1)
    x, y = x.at[3, 5].set(jnp.nan), y.at[7, LONG - 1].set(jnp.inf)
    assert_equivalent(sym_optimize(nearest, kernels="always"), jax.jit(nearest), x, y)
