"""Terms looked up in tables by integers of the pair, and sums by key: biases of positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec, KeyedSums, Operand, Tile
from symjax_rewrite.pallas_kernels.fold.tiling import Blocks
from symjax_rewrite.pallas_kernels.fold.xla import fold_xla
from symjax_rewrite.testing.assertions import assert_equivalent, assert_no_intermediate
from tests.kernel_selection.folds.programs import draw
from tests.programs import emitted

B, H, N, D, K = 2, 3, 40, 8, 16
PAIRS = B * H * N * N
PLACES = np.random.default_rng(0).integers(0, K, (N, N)).astype(np.int32)


def apart():
    """Return the distance of each key behind its query, int32[N, N]."""
    return jnp.arange(N)[None, :] - jnp.arange(N)[:, None]


def bucket():
    """Buckets of distances as T5 has them: exact when near, logarithmic when far."""
    far = jnp.abs(apart())
    scaled = jnp.log(far.astype(jnp.float32) / 4 + 1e-6) / jnp.log(32 / 4) * 4
    rest = jnp.minimum(4 + scaled.astype(jnp.int32), 7)
    return (apart() > 0) * 8 + jnp.where(far < 4, far, rest)


def t5(table):  # [K, H]
    return table[bucket()].transpose(2, 0, 1)


def taken(table):
    return jnp.take(table, bucket(), axis=0).transpose(2, 0, 1)


def one_hot(table):
    return jnp.einsum("qkn,nh->hqk", jax.nn.one_hot(bucket(), K), table)


def one_hot_product(table):
    return (jax.nn.one_hot(bucket(), K) @ table).transpose(2, 0, 1)


def constant_index(table):
    return table[PLACES.reshape(-1)].reshape(N, N, H).transpose(2, 0, 1)


def of_heads(table):
    return table.T[:, PLACES]


def clipped_distance(table):
    return table[jnp.clip(apart(), -8, 7) + 8].transpose(2, 0, 1)


def two_keys(table):
    return table.reshape(4, 4, H)[PLACES // 4, PLACES % 4].transpose(2, 0, 1)


def each_head_its_own(table):
    keys = (bucket()[None] + jnp.arange(H)[:, None, None]) % K
    return jnp.take_along_axis(table.T[:, :, None], keys.reshape(H, -1, 1), 1).reshape(H, N, N)


def from_the_end(table):
    return table[-1 - bucket()].transpose(2, 0, 1)


def small_integers(table):
    return table[PLACES.astype(np.uint8)].transpose(2, 0, 1)


def made_of_another(table):
    return (16 * jax.nn.sigmoid(table @ jnp.eye(H)))[PLACES].transpose(2, 0, 1)


def out_of_range(mode):
    def bias(table):
        return table.at[clipped() + K // 2].get(mode=mode, fill_value=0.5).transpose(2, 0, 1)

    def clipped():
        return jnp.clip(apart(), -K, K)

    bias.__name__ = f"out_of_range_{mode}"
    return bias


TABLES = [
    t5,
    taken,
    one_hot,
    one_hot_product,
    constant_index,
    of_heads,
    clipped_distance,
    two_keys,
    from_the_end,
    small_integers,
    made_of_another,
    out_of_range("clip"),
    out_of_range("fill"),
]


def attention(bias, table, q, k, v):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(D) + bias(table)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v)


def loss_of(bias):
    def loss(table, q, k, v):
        return jnp.sum(jnp.tanh(attention(bias, table, q, k, v)))

    return loss


def operands(batch=B):
    q, k, v = (draw(batch, H, N, D, seed=n) for n in range(3))
    return draw(K, H, seed=3), q, k, v


@pytest.fixture
def small_blocks(monkeypatch):
    """Folds are cut as if they were large, so that nothing of a whole tile's size is made."""
    cut = lambda spec: Blocks(min(16, spec.rows), min(12, spec.cols))  # noqa: E731
    monkeypatch.setattr("symjax_rewrite.pallas_kernels.fold.xla.xla_blocks", cut)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bias", TABLES, ids=lambda f: f.__name__)
def test_no_pairs_of_floats_in_a_training_step(bias):
    step = jax.grad(loss_of(bias), argnums=(0, 1, 2, 3))
    routed = sym_optimize(step, kernels="always")
    report = routed.explain(*operands())
    assert any(r.taken for r in report.routes if r.name == "fold"), report
    assert_no_intermediate(emitted(report), *operands(), elements=H * N * N)
    assert_equivalent(routed, jax.jit(step), *operands(), rtol=3e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bias", [t5, clipped_distance, one_hot], ids=lambda f: f.__name__)
def test_gradient_of_an_optimised_program(bias):
    step = jax.grad(sym_optimize(loss_of(bias), kernels="always"), argnums=(0, 1))
    plain = jax.grad(loss_of(bias), argnums=(0, 1))
    assert_equivalent(step, jax.jit(plain), *operands(), rtol=3e-5)
    assert_no_intermediate(step, *operands(), elements=PAIRS)


@pytest.mark.parametrize("bias", [each_head_its_own], ids=lambda f: f.__name__)
def test_bias_per_head_keeps_its_gradient(bias):
    step = jax.grad(loss_of(bias), argnums=(0, 1))
    assert_equivalent(sym_optimize(step, kernels="always"), jax.jit(step), *operands(), rtol=3e-5)


def test_gradient_for_one_batch_element():
    step = jax.grad(loss_of(t5), argnums=(0, 1))
    assert_equivalent(sym_optimize(step, kernels="always"), jax.jit(step), *operands(1), rtol=3e-5)


@pytest.mark.usefixtures("small_blocks")
def test_keys_of_each_batch_element():
    keys = jnp.asarray(np.random.default_rng(1).integers(0, K, (B, N, N)))

    def loss(table, q, k, v):
        return loss_of(lambda t: t[keys].transpose(0, 3, 1, 2))(table, q, k, v)

    step = jax.grad(loss, argnums=(0, 1))
    routed = sym_optimize(step, kernels="always")
    assert_no_intermediate(routed, *operands(), elements=PAIRS)
    assert_equivalent(routed, jax.jit(step), *operands(), rtol=3e-5)


@pytest.mark.usefixtures("small_blocks")
def test_causal_attention_keeps_its_band():
    def loss(table, q, k, v):
        mask = jnp.tril(jnp.ones((N, N), bool))
        return loss_of(lambda t: jnp.where(mask, clipped_distance(t), -jnp.inf))(table, q, k, v)

    step = jax.grad(loss, argnums=(0, 1, 2, 3))
    routed = sym_optimize(step, kernels="always")
    assert_no_intermediate(routed, *operands(), elements=H * N * N)
    assert_equivalent(routed, jax.jit(step), *operands(), rtol=3e-5)


def test_64_bit_keys_and_values():
    with jax.enable_x64(True):
        args = [jnp.asarray(x, jnp.float64) for x in operands()]
        step = jax.grad(loss_of(clipped_distance), argnums=(0, 1))
        routed = sym_optimize(step, kernels="always")
        assert any(r.taken for r in routed.explain(*args).routes)
        assert_equivalent(routed, jax.jit(step), *args, rtol=1e-10)


def test_half_precision_sums_are_not_worse():
    args = [x.astype(jnp.bfloat16) for x in operands()]
    step = jax.grad(loss_of(clipped_distance))
    exact = jax.grad(loss_of(clipped_distance))(*(x.astype(jnp.float32) for x in args))
    errors = [
        float(jnp.max(jnp.abs(f(*args).astype(jnp.float32) - exact)))
        for f in (sym_optimize(step, kernels="always"), step)
    ]
    assert errors[0] <= 2 * errors[1] + 1e-2


@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_sums_by_key_out_of_range(mode):
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))

    def histogram(x, y):
        keys = (apart() % 24 - 4)[..., None]
        weights = jnp.tanh(x @ y.T)
        return lax.scatter_add(jnp.zeros(K), keys, weights, numbers, mode=mode)

    args = draw(N, D), draw(N, D, seed=1)
    routed = sym_optimize(histogram, kernels="always")
    report = routed.explain(*args)
    assert any(r.taken for r in report.routes)
    assert_no_intermediate(emitted(report), *args, elements=N * N + 1)
    assert_equivalent(routed, jax.jit(histogram), *args, rtol=1e-5)


def test_sums_of_integers_by_key_wrap():
    def counts(x, y):
        weights = jnp.maximum(x[:, None] * y[None, :], jnp.int8(3))
        return jnp.zeros(K, jnp.int8).at[PLACES].add(weights)

    args = (jnp.arange(N, dtype=jnp.int8), jnp.arange(N, dtype=jnp.int8)[::-1])
    assert_equivalent(sym_optimize(counts, kernels="always"), counts, *args, rtol=0)


def test_a_table_that_is_added_to_is_kept():
    def update(table, x, y):
        return table.at[PLACES].add(jnp.exp(x @ y.T))

    args = draw(K), draw(N, D) * 0.3, draw(N, D, seed=1) * 0.3
    assert_equivalent(sym_optimize(update, kernels="always"), jax.jit(update), *args, rtol=1e-5)


def test_scatter_set_and_scatter_max_are_not_sums():
    def last(x, y):
        return jnp.zeros(N * N).at[jnp.arange(N * N).reshape(N, N)].set(jnp.exp(x @ y.T))

    def largest(x, y):
        return jnp.zeros(K).at[PLACES].max(jnp.exp(x @ y.T))

    args = draw(N, D) * 0.3, draw(N, D, seed=1) * 0.3
    for fun in (last, largest):
        assert_equivalent(sym_optimize(fun, kernels="always"), jax.jit(fun), *args, rtol=1e-5)


def test_keys_made_of_rounded_values_are_those_of_the_program():
    def histogram(x, y, w):
        near = jnp.sum((x[:, None] - y[None, :]) ** 2, axis=-1)
        keys = jnp.clip((near * 4).astype(jnp.int32), 0, K - 1)
        return jnp.zeros(K).at[keys].add(jnp.exp(x @ y.T) * w[None, :])

    args = draw(N, 4) * 0.3, draw(N, 4, seed=1) * 0.3, draw(N)
    assert_equivalent(
        sym_optimize(histogram, kernels="always"), jax.jit(histogram), *args, rtol=1e-5
    )


def test_a_sum_that_is_used_elsewhere_too_is_made():
    def fun(table, q, k, v):
        grad = jax.grad(lambda b: loss_of(lambda t: b)(table, q, k, v))(t5(table))
        return jnp.zeros(K).at[bucket()].add(grad.sum(0)), grad

    assert_equivalent(sym_optimize(fun, kernels="always"), jax.jit(fun), *operands(), rtol=3e-5)


def test_blocks_that_overlap_count_each_row_once():
    rows, cols = 21, 13
    key = Tile(lambda dots, values, i, j: (values[0] * values[1], (i + j) % 5), (0, 1), "keyed")
    spec = FoldSpec(
        sizes=(("b", 2), ("h", 3), ("m", rows), ("n", cols)),
        batch=("b", "h"),
        row="m",
        col="n",
        operands=(Operand(("b", "h", "m")), Operand(("h", "n"))),
        contractions=(),
        tile=key,
        outputs=(KeyedSums((1,), (5,), kept=("h",)),),
    )
    x, y = draw(2, 3, rows), draw(3, cols)
    places = (np.arange(rows)[:, None] + np.arange(cols)) % 5
    pairs = np.einsum("bhm,hn->hmn", x, y)
    wanted = np.stack([np.where(places == n, pairs, 0).sum((1, 2)) for n in range(5)], -1)
    cuts = [(8, 4, ()), (8, 4, ("h",)), (21, 13, ("b", "h")), (4, 13, ("b",))]
    for blocks in (Blocks(*cut) for cut in cuts):
        ((found,),) = fold_xla(spec, x, y, blocks=blocks)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5)


def test_rows_of_two_tables_that_are_multiplied_are_no_fold(one_device):
    """Ratings of users for items: of each row of pairs only a chosen column is read."""

    def ratings(x, w, items, user, item):
        return jnp.sum(jnp.sin(x @ w)[user] * items[item], -1)

    draws = np.random.default_rng(0)
    user, item = (draws.integers(0, n, 256, np.int32) for n in (4096, 729))
    args = draw(4096, 25), draw(25, 25) / 5, draw(729, 25), user, item
    optimised = sym_optimize(ratings, on_unsupported="error")
    assert not any(r.taken and r.name == "fold" for r in optimised.explain(*args).routes)
    assert_equivalent(optimised, jax.jit(ratings), *args, rtol=3e-5)
