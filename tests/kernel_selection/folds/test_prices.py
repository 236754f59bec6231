"""Decisions by the price of a fold on the CPU, against the program that XLA's compiler makes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES, device_profile
from symjax_rewrite.ir.dataflow import needed
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.term_graph import build
from symjax_rewrite.kernel_selection.folds import named_sizes
from symjax_rewrite.kernel_selection.folds.clustering import Scope, clusters

pytestmark = pytest.mark.usefixtures("one_device")


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def takes_fold(fun, *shapes):
    report = sym_optimize(fun, device="cpu").explain(*(spec(*s) for s in shapes))
    return any(r.taken for r in report.routes if r.name == "fold")


def residual(y, u, v):
    return jnp.sum((y - u @ v.T) ** 2)


def residual_by_rows(y, u, v):
    return jnp.sum((y - u @ v.T) ** 2, axis=1)


def absolute_residual(y, u, v):
    return jnp.sum(jnp.abs(y - u @ v.T))


def adapter(x, w, a, b, g):
    whole = w + a @ b
    return x @ (g * whole / jnp.linalg.norm(whole, axis=0))


def gradient_of_kernel(x, y, w):
    def energy(x):
        return jnp.sum(w * jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1)))

    return jax.grad(energy)(x)


@pytest.mark.parametrize(("points", "features"), [(1000, 3), (600, 24)])
def test_double_precision_is_priced_as_the_library_computes_it(points, features):
    """XLA's library has sums in float64 too; the parts of a gradient share a fold's distance."""
    if features > 3 and DEVICES["cpu"].folds.calls_go_on:
        pytest.skip("this XLA computes the gradient in one call")
    sizes = (points, features), (points, features), (points, points)
    with jax.enable_x64(True):
        specs = [jax.ShapeDtypeStruct(s, jnp.float64) for s in sizes]
        report = sym_optimize(gradient_of_kernel, device="cpu").explain(*specs)
    assert any(r.taken for r in report.routes if r.name == "fold")


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_call_that_reduces_again_stores_nothing_before(monkeypatch, goes_on):
    """XLA 0.12 computes the distance and the sum over points in one call, tile by tile."""
    device, found = DEVICES["cpu"], []
    folds = replace(device.folds, calls_go_on=goes_on)
    monkeypatch.setitem(DEVICES, "cpu", replace(device, folds=folds))
    compared = named_sizes.compared
    monkeypatch.setattr(named_sizes, "compared", lambda *a: found.append(compared(*a)) or found[-1])
    specs = [jax.ShapeDtypeStruct(s, "float32") for s in ((1000, 40), (1000, 40), (1000, 1000))]
    sym_optimize(gradient_of_kernel, device="cpu").explain(*specs)
    before_s, _, fresh_bytes = found[0]
    assert (fresh_bytes == 0) == goes_on
    assert (before_s < 0.02) == goes_on


@pytest.mark.parametrize("fun", [residual, residual_by_rows, absolute_residual])
def test_reduction_fused_by_xla_is_no_fold(fun):
    assert not takes_fold(fun, (4096, 4096), (4096, 32), (4096, 32))


def test_batches_and_squares_are_fused_as_the_version_of_xla_does():
    def powers(x, y):
        return jnp.sum((x @ jnp.swapaxes(y, -1, -2)) ** 4)

    assert not takes_fold(powers, (4096, 16), (4000, 16))
    stored = not device_profile("cpu").folds.streams_batches
    assert takes_fold(powers, (4096, 16), (4096, 16)) == stored
    assert takes_fold(powers, (8, 1024, 16), (8, 1024, 16)) == stored
    assert not takes_fold(powers, (4096, 5), (4096, 5))


def test_softmax_sums_of_two_readers_stay_a_fold():
    def cross_entropy(h, w):
        return jax.nn.logsumexp(h @ w, axis=-1)

    assert takes_fold(cross_entropy, (1024, 64), (64, 50_000))


@pytest.mark.parametrize("shifted", [False, True])
def test_scores_without_a_product_are_stored_as_the_version_of_xla_does(shifted):
    """XLA 0.10 computes means by functions of scalars in one call; a fold took 1.3 to 1.9 times."""

    def smoothing(x, y, v):
        scores = -jnp.abs(x @ y.T)
        p = jax.nn.softmax(scores, axis=1) if shifted else (scores + 1) ** 3
        return (p @ v) / (1 if shifted else jnp.sum(p, axis=1, keepdims=True))

    folds = device_profile("cpu").folds
    least = folds.library_shifted if shifted else folds.library_features
    assert takes_fold(smoothing, (8192, 1), (2232, 1), (2232, 8)) == (least > 8)
    assert takes_fold(smoothing, (8192, 2), (2232, 2), (2232, 8))  # a product's result is stored
    assert takes_fold(smoothing, (8192, 1), (2232, 1), (2232, 1))


def test_sums_of_short_rows_begin_anew_in_blocks_too():
    """A fold of twelve classes took twice the time of a softmax as XLA runs it."""

    def cross_entropy(h, w, labels):
        likely = jax.nn.log_softmax(h @ w, axis=-1)
        return -jnp.mean(jnp.take_along_axis(likely, labels.astype(int)[:, None], axis=1))

    assert not takes_fold(cross_entropy, (50_000, 11), (11, 12), (50_000,))


def test_exponentials_of_short_rows_are_no_vectors_in_blocks():
    """A fold of 22 gates took two to three times the time of a softmax as XLA runs it."""

    def gates(x, a, b, v):
        return jnp.prod(jax.nn.softmax((x @ a) * (x @ b), axis=-1) @ v, axis=-1)

    assert not takes_fold(gates, (36_350, 8), (8, 22), (8, 22), (22, 2))


@pytest.mark.parametrize(("length", "taken"), [(1024, True), (1021, False)])
def test_a_smaller_last_block_of_columns_is_computed_for_all_rows(length, taken):
    """Loops leave out whole blocks alone: causal attention of 1,021 keys took 1.2 times as long."""

    def causal(q, k, v):
        scores = jnp.where(jnp.tri(length, dtype=bool), q @ k.T, -1e30)
        return jax.nn.softmax(scores) @ v

    assert takes_fold(causal, *[(length, 75)] * 3) == taken


def test_an_operand_read_across_its_storage_costs_its_transposition():
    assert not takes_fold(adapter, (8, 2048), (2048, 2048), (2048, 8), (8, 2048), (2048,))


def test_a_kernel_matrix_that_a_product_reads_whole_is_stored_once():
    """Kᵀ K reads K as an operand too: a fold would compute K beside the stored one."""

    def ridge(x, z, w):
        k = jnp.exp(-0.5 * jnp.sum((x[:, None] - z[None]) ** 2, -1))
        return k @ w, k.T @ k

    assert not takes_fold(ridge, (3000, 4), (100, 4), (100,))
    assert takes_fold(lambda x, z, w: ridge(x, z, w)[0], (3000, 4), (1000, 4), (1000,))


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_a_whole_sum_follow_the_storage_of_its_operand(turned):
    def whole(y, u, v):
        return jnp.sum(jnp.abs(y - (v @ u.T if turned else u @ v.T)))

    shapes = [spec(512, 512), spec(512, 16), spec(512, 16)]
    t = build(flatten(jax.make_jaxpr(whole)(*shapes)))
    (cluster,) = clusters(t, needed(t), Scope(0, False, True))
    (member,) = cluster.members
    for ref in member.tile.whole:
        assert ref.axes.index(member.pair.row) < ref.axes.index(member.pair.column)


def forces(points, power):
    gaps = points[None] - points[:, None]
    squares = jnp.sum(gaps**2, -1, keepdims=True) + 0.01
    return jnp.sum(power(squares) * gaps, 1)


@pytest.mark.parametrize(
    "power", [lambda s: s**-1.5, lambda s: s**-4 - s**-7, lambda s: jnp.exp(-s)]
)
def test_a_function_of_a_distance_is_priced_once_for_all_components(power):
    """XLA computes it once, so three components do not make the fold three times as dear."""
    assert takes_fold(lambda x: forces(x, power), (2048, 3))


def test_forces_between_points_that_a_product_computes():
    assert takes_fold(lambda x, w: forces(x @ w, lambda s: s**-4), (2048, 5), (5, 3))
    assert not takes_fold(lambda x, w: forces(x @ w, lambda s: s**-4), (32, 5), (5, 3))


def test_a_tile_is_priced_once_where_no_loop_over_its_batch_selects_it():
    """XLA moves it out of the loop: each of 60 rows of the batch takes a third of the time."""

    def heavy(x, y):
        return jnp.tanh(x - y) * jnp.exp(-jnp.abs(x * y))

    def ratio(size, tile):
        def extrema(x, y, u, v):
            return jnp.min(tile(x[:, None], y[None]) + u[:, :, None] * v[:, None, :], -1)

        shapes = [(size,), (size,), (60, size), (60, size)]
        report = sym_optimize(extrema, device="cpu").explain(*(spec(*s) for s in shapes))
        return next(r.ratio for r in report.routes if r.name == "fold") or 0.0

    assert ratio(110, heavy) > 0.9 * ratio(110, jnp.multiply)
    assert ratio(110, heavy) > 2 * ratio(200, heavy)  # two blocks of rows, each selected by a loop


def talking_heads(q, k, v, mix, again):
    scores = jnp.einsum("bhij,hg->bgij", jnp.einsum("bhid,bhjd->bhij", q, k), mix)
    weights = jnp.einsum("bgij,gh->bhij", jax.nn.softmax(scores, -1), again)
    return jnp.einsum("bhij,bhjd->bhid", weights, v)


@pytest.mark.parametrize("batch", [2, 8])
def test_blocks_of_single_elements_cost_their_pieces(batch):
    """A fold over heads reads and writes the scores of all heads, which stand far apart."""
    qkv = [(batch, 8, 256 if batch == 8 else 512, 64)] * 3
    assert not takes_fold(talking_heads, *qkv, (8, 8), (8, 8))


def test_a_distance_of_few_features_is_computed_for_each_sum_of_a_tile():
    """The gradient of soft k-means sums along and down its tiles.

    A fold with the distance written out took twice the time, one with a loop 0.5 to 0.7.
    """

    def soft_means(x, c):
        squares = jnp.sum((x[:, None] - c) ** 2, -1)
        return jnp.mean(jnp.sum(jax.nn.softmax(-squares, 1) * squares, 1))

    assert not takes_fold(jax.grad(soft_means, (0, 1)), (4000, 8), (200, 8))
    assert takes_fold(jax.grad(soft_means, (0, 1)), (4000, 16), (200, 16))
    assert takes_fold(jax.grad(soft_means, (0, 1)), (50_000, 3), (10, 3))


def test_operands_and_results_in_another_order_are_copied():
    """The fold that mixes heads reads and writes scores of another order: 1.5 times as long."""

    def heads_last(q, k, v, mix, again):
        weights = jax.nn.softmax(jnp.einsum("bhid,bhjd->ijbh", q, k) @ mix, 1)
        return jnp.einsum("ijbh,bhjd->bhid", weights @ again, v)

    for batch, length in ((2, 128), (1, 256)):
        assert not takes_fold(heads_last, *[(batch, 4, length, 64)] * 3, (4, 4), (4, 4))


def test_a_tile_that_is_compared_with_its_extremum_is_stored():
    def chamfer(x, y):
        squares = jnp.sum((x[:, None] - y[None]) ** 2, -1)
        return jnp.mean(jnp.min(squares, 1)) + jnp.mean(jnp.min(squares, 0))

    assert takes_fold(chamfer, (2048, 3), (2048, 3))
    assert not takes_fold(jax.grad(chamfer, (0, 1)), (4096, 3), (2048, 3))


def test_a_sum_that_folds_compute_in_parts_is_one_sum_as_written():
    """Its parts need blocks of whole columns too, which are slower."""

    def chamfer(x, y):
        squares = jnp.sum(x**2, 1)[:, None] + jnp.sum(y**2, 1) - 2 * x @ y.T
        return jnp.mean(jnp.min(squares, 1)) + jnp.mean(jnp.min(squares, 0))

    assert takes_fold(chamfer, (4096, 3), (4096, 3))
    assert not takes_fold(jax.grad(chamfer, (0, 1)), (2048, 3), (2048, 3))


def test_sums_across_short_rows_copy_their_factors():
    def steps(x, g):
        gaps = x[:, None] - x
        k = jnp.exp(-jnp.sum(gaps**2, -1))
        return k @ g + jnp.sum(k[:, :, None] * gaps, 1)

    assert takes_fold(steps, (800, 16), (800, 16))


def test_arithmetic_that_two_sums_read_is_stored():
    def loss(x, v):
        return jnp.sum((jnp.exp(-jnp.sum((x[:, None] - x) ** 2, -1)) @ v) ** 2)

    assert takes_fold(jax.grad(loss), (1500, 8), (1500, 4))


def test_operands_that_the_library_cannot_compute_are_stored():
    """Selections and clamps are stored, with new pages if they are large."""

    def masked(x, y, bias):
        return jnp.sum(jnp.where(bias > 0, jnp.exp(x @ y.T), 0.0), 1)

    def projected(p, places):
        weights = jnp.clip(1 - jnp.abs(places[:, :, None] - jnp.arange(51.0)), 0, 1)
        return jnp.sum(p[:, :, None] * weights, 1)

    assert takes_fold(masked, (4096, 16), (4096, 16), (4096, 4096))
    assert takes_fold(projected, (8192, 51), (8192, 51))


def test_terms_of_a_size_that_the_allocator_may_keep_are_no_new_pages():
    def kernel(x, z, a):
        squares = jnp.sum(x**2, 1)[:, None] + jnp.sum(z**2, 1) - 2 * x @ z.T
        return jnp.exp(-0.5 * squares) @ a

    assert not takes_fold(kernel, (4000, 16), (2000, 16), (2000,))
    assert takes_fold(kernel, (5000, 16), (4000, 16), (4000,))


def test_selections_are_written_over_their_operands():
    """Scores without the diagonal are one array, their exponentials another."""

    def entropy(z):
        scores = jnp.where(jnp.eye(2048, dtype=bool), -1e9, 2 * z @ z.T)
        return jnp.mean(jax.nn.logsumexp(scores, 1))

    assert not takes_fold(jax.grad(entropy), (2048, 128))


def differential(q1, k1, q2, k2, v):
    def weights(q, k):
        return jax.nn.softmax(jnp.einsum("hid,hjd->hij", q, k), -1)

    return (weights(q1, k1) - 0.5 * weights(q2, k2)) @ v


def entropies(x, y):
    p = jax.nn.softmax(x @ y.T, -1)
    return -jnp.sum(p * jnp.log(p + 1e-9), -1)


def test_terms_of_many_rows_that_end_in_one_result_are_one_call_of_the_library():
    assert not takes_fold(differential, *[(8, 768, 64)] * 5)
    assert not takes_fold(entropies, (8192, 64), (1024, 64))


@pytest.mark.parametrize(("heads", "rows", "features"), [(8, 1024, 64), (6, 1365, 16)])
def test_a_call_in_a_batch_stores_what_the_version_of_the_library_does(heads, rows, features):
    """A fold took 1.1 to 1.3 times as long where the library stores no head, or one at a time."""

    def attention(q, k, v):
        scores = jnp.einsum("hid,hjd->hij", q, k) / 8
        return jax.nn.softmax(scores, -1) @ v

    folds = device_profile("cpu").folds
    few = features <= folds.head_features and rows <= folds.head_columns
    stored = not (few or folds.library_heads)
    assert takes_fold(attention, *[(heads, rows, features)] * 3) == stored
    # One head is more than is kept; two are stored at once, and a fold took 1.1 times as long.
    assert takes_fold(attention, *[(heads, 3000, features)] * 3) != folds.library_heads
    assert takes_fold(attention, *[(1, 4096, features)] * 3)


def test_values_that_heads_share_are_multiplied_by_stored_weights_of_all_heads():
    """A fold took 0.3 to 0.7 of the time, and twice the time where each head has its values."""

    def attention(q, k, v):
        scores = jnp.einsum("hid,hjd->hij", q, k)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return weights @ v / weights.sum(-1, keepdims=True)

    scores = [(12, 1000, 8)] * 2
    assert takes_fold(attention, *scores, (1000, 8))
    heads = DEVICES["cpu"].folds.library_heads
    assert takes_fold(attention, *scores, (12, 1000, 8)) != heads  # divided behind its product


def test_parts_of_a_gradient_share_the_price_of_a_distance_and_its_extremum(monkeypatch):
    def nearest(x):
        least = lambda x: jnp.min(jnp.mean((x[:, None] - x) ** 2, -1) + jnp.eye(len(x)), 1)  # noqa: E731
        return jax.grad(lambda x: jnp.sum(least(x)))(x)

    found, compared = [], named_sizes.compared
    monkeypatch.setattr(named_sizes, "compared", lambda *a: found.append(compared(*a)) or found[-1])
    for features in (16, 64):
        sym_optimize(nearest, device="cpu").explain(spec(392, features))
    assert found[-1][1] < 5 * found[0][1]


def test_scores_that_are_read_in_two_orders_of_axes_are_stored_in_both():
    """A log-sum-exp of scores transposed behind their maximum took 1.7 times as long."""

    def matched(x, y):
        scores = 10 * jnp.einsum("md,bnd->mbn", x, y)
        most = jnp.max(scores, -1)
        turned = jnp.swapaxes(scores, 0, 1) - most.T[..., None]
        return jnp.log(jnp.sum(jnp.exp(turned), -1)) + most.T

    def in_order(x, y):
        return jax.nn.logsumexp(10 * jnp.einsum("md,bnd->mbn", x, y), -1)

    sizes = (487, 6), (4, 487, 6)
    assert takes_fold(matched, *sizes)
    assert not takes_fold(in_order, *sizes)


def test_a_distance_that_its_call_repeats_for_selections_is_priced():
    """Until XLA 0.11 a gradient took four times as long, most of it to repeat the distances."""

    def laplacian(x):
        energy = lambda x: jnp.sum(jnp.mean(jnp.abs(x[:, None] - x), -1) ** 2)  # noqa: E731
        return jax.grad(energy)(x)

    fusions = DEVICES["cpu"].fusions
    assert fusions is not None
    assert takes_fold(laplacian, (159, 16)) == (fusions.repeated_s > 0)


@pytest.mark.parametrize(("share", "features"), [(1.0, 32), (1.9, 32), (1.0, 64), (1.9, 64)])
def test_large_products_of_heads_are_as_fast_as_the_version_of_the_library(share, features):
    """From XLA 0.11 on, short windows took 1.3 to 1.6 times as long in a fold or in blocks."""

    def windowed(q, k, v):
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(q.shape[1])
        scores = jnp.where((i >= j) & (i - j < 32), jnp.einsum("hid,hjd->hij", q, k), -jnp.inf)
        return jax.nn.softmax(scores, -1) @ v

    device = device_profile("cpu")
    device = replace(device, folds=replace(device.folds, batch_share=share))
    report = sym_optimize(windowed, device=device).explain(*[spec(16, 256, features)] * 3)
    assert any(r.taken for r in report.routes) == (share == 1)
    if features == 32:  # a gradient at 512 rows took twice as long as its fold
        gradient = jax.grad(lambda *a: jnp.sin(windowed(*a)).sum(), (0, 1, 2))
        report = sym_optimize(gradient, device=device).explain(*[spec(8, 512, features)] * 3)
        assert any(r.taken for r in report.routes if r.name == "fold")


def test_many_heads_of_one_query_have_a_price():
    """A tile of one row has no index of rows."""

    def decoded(q, k, v):
        scores = jnp.einsum("hd,hjd->hj", q, k)
        return jnp.einsum("hj,hjd->hd", jax.nn.softmax(scores, -1), v)

    specs = spec(8192, 64), spec(8192, 1000, 64), spec(8192, 1000, 64)
    f = sym_optimize(decoded, device="cpu", kernels="always", on_unsupported="error")
    assert any(r.ratio for r in f.explain(*specs).routes if r.name == "fold")


def by_blocks(q, k, v, mask):
    scores = jnp.einsum("hid,hjd->hij", q, k) / 8
    whole = jnp.repeat(jnp.repeat(mask, 64, 0), 64, 1)
    return jax.nn.softmax(jnp.where(whole > 0, scores, -1e9), -1) @ v


def test_truth_values_are_stored_as_numbers_to_be_counted():
    def near(x, y):
        return jnp.sum(x @ y.T < 0.5, axis=1)

    assert takes_fold(near, (10_763, 8), (512, 8))
    assert not takes_fold(near, (10_763, 8), (32, 8))


def test_terms_that_need_fresh_memory_beside_others_pay_for_it():
    """Two arrays of 17 MB are fresh in every call; two of 12 MB are kept."""

    def contrasted(x, y):
        s = x @ y.T / 0.1
        return jnp.mean(jax.nn.logsumexp(s, axis=1) - jnp.diag(s))

    assert takes_fold(contrasted, (2048, 16), (2048, 16))
    assert not takes_fold(contrasted, (1700, 16), (1700, 16))


def test_values_written_over_an_operand_need_no_fresh_memory():
    """The softmax is divided in place, and the results of a fold by blocks are as large."""
    report = sym_optimize(by_blocks, device="cpu").explain(*[spec(8, 1024, 64)] * 3, spec(16, 16))
    assert not report.rules
    assert not any(r.taken for r in report.routes)


def test_gradients_of_sums_of_kernels_are_folds_beside_rules_that_save_less():
    def mmd(x, y):
        kernel = lambda a, b: jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1))  # noqa: E731
        return kernel(x, x).mean() - 2 * kernel(x, y).mean()

    assert takes_fold(jax.grad(mmd), (2000, 8), (2000, 8))


def test_sines_are_computed_again_for_every_feature_of_a_block():
    """The fold takes 1.5 times as long, where 0.65 was predicted of functions computed once."""

    def smoothed(x, y, v):
        d = jnp.sum(jnp.abs(jnp.tanh(x)[:, None] - y), -1)
        k = jnp.exp(-2 * jnp.sin(d / 2) ** 2)
        return jnp.sum((k @ v) / jnp.sum(k, axis=1, keepdims=True))

    assert not takes_fold(jax.grad(smoothed, (0, 1, 2)), (1525, 2), (2128, 2), (2128, 2))


@pytest.mark.parametrize("device", ["cpu", "cpu-1"])
def test_gradients_of_a_log_sum_of_kernels_are_folds_on_one_core_too(device: str) -> None:
    """The parts of the gradient share the distance: 0.3 to 0.5 of the time as written."""

    def loss(x, y):
        return -jnp.mean(jax.nn.logsumexp(-jnp.sum((x[:, None] - y) ** 2, -1), axis=1))

    x = spec(1024, 16)
    report = sym_optimize(jax.grad(loss, (0, 1)), device=device).explain(x, x)
    assert any(r.name == "fold" and r.taken for r in report.routes), report


def test_pairs_that_xla_transposes_pay_for_it():
    """A batch of keys alone: their product begins with the queries, and softmax with the batch."""

    def attention(q, k, v, bias):
        equation = "bnd,bmd->bnm" if q.ndim == 3 else "nd,bmd->bnm"
        scores = jnp.einsum(equation, q, k) + bias
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        return (weights @ v) / jnp.sum(weights, axis=-1, keepdims=True)

    shapes = (33, 435, 16), (435, 16), (435, 435)
    assert takes_fold(attention, (435, 16), *shapes)
    assert not takes_fold(attention, (33, 435, 16), *shapes)


@pytest.mark.parametrize(("across", "taken"), [(False, False), (True, True)])
def test_a_fold_saves_reads_across_the_rows_of_its_pairs(across, taken):
    """Predicted and measured 0.27 of the time of the product pᵀ y."""

    def weighted(x, y):
        p = jax.nn.sigmoid(x @ y.T)
        return (p.T if across else p) @ y

    assert takes_fold(weighted, (512, 4), (512, 4)) is taken


def layers(x, w, u, v):
    return (jax.nn.silu(x @ w) * (x @ u)) @ v


def normalised(y):
    return y / (1 + jnp.max(jnp.abs(y), axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("after", "rows", "taken"),
    [
        (lambda y: y, 100_000, True),
        (lambda y: normalised(y.T), 100_000, True),
        (lambda y: (y, normalised(y)), 100_000, True),
        (normalised, 100_000, False),
        (lambda y: jnp.sum(y, axis=1), 100_000, False),
        (lambda y: jnp.mean((jnp.tanh(y) - 1) ** 2), 100_000, False),
    ],
    ids=["results", "columns", "results beside rows", "rows", "sums", "a loss"],
)
def test_layers_that_a_call_reduces_are_no_folds(after, rows, taken):
    """XLA's library computes both layers and reduces them in one call, which stores nothing.

    By themselves they take 89 ms of 466,033 rows, and 23 ms with their rows normalised.
    """

    def program(x, w, u, v):
        return after(layers(x, w, u, v))

    assert takes_fold(program, (rows, 9), (9, 48), (9, 48), (48, 9)) == taken


def test_an_order_of_products_that_ends_a_call_is_refused():
    """A product with a vector is no part of the call: 1.7 times slower for 466,033 rows."""

    def program(x, w, u, v, e):
        y = normalised(layers(x, w, u, v))
        return jnp.sum(jnp.abs(y - (y @ e) @ e.T), axis=1)

    shapes = (466_033, 9), (9, 48), (9, 48), (48, 9), (9, 1)
    report = sym_optimize(program, device="cpu").explain(*[spec(*s) for s in shapes])
    assert not report.rules, report


def test_folds_by_fresh_memory_alone_must_pay_at_rest():
    """Gradients of messages along edges took 1.3 to 1.7 times as long, with their array cut."""

    def loss(w, x, v, u, s, r):
        made = jax.nn.relu(jnp.concatenate([x[s], x[r], x[s][:, :8]], -1) @ w) @ v
        sums = jax.ops.segment_sum(made, r, len(x))
        return jnp.sum((x + jax.nn.relu(jnp.concatenate([x, sums], -1) @ u)) ** 2)

    edges = [jax.ShapeDtypeStruct((100_000,), jnp.int32)] * 2
    specs = [spec(136, 64), spec(10_000, 64), spec(64, 64), spec(128, 64), *edges]
    assert not sym_optimize(jax.grad(loss), device="cpu").explain(*specs).rules
