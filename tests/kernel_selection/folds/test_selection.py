"""Every reduction over a pairwise term becomes a fold, in the forward and the backward pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.kernel_selection.folds import clustering
from symjax_rewrite.kernel_selection.folds.pairwise_terms import Pair
from symjax_rewrite.pallas_kernels.fold import tiling
from symjax_rewrite.pallas_kernels.fold.fold import fold
from symjax_rewrite.pallas_kernels.fold.reference import result_shapes
from symjax_rewrite.pallas_kernels.fold.spec import ColumnSums, FoldSpec, Sums
from symjax_rewrite.pallas_kernels.fold.tile import state_dtypes
from symjax_rewrite.testing.assertions import assert_equivalent, assert_no_intermediate
from tests.kernel_selection.folds.programs import (
    FOLDS,
    LEFT,
    D,
    H,
    M,
    N,
    Program,
    draw,
    gradient,
    induced,
    log_sum_exp,
    neighbours,
)
from tests.programs import emitted


def named(program: Program) -> str:
    return program.fun.__name__


@pytest.mark.parametrize("program", FOLDS, ids=named)
def test_pairs_are_never_made_whole(program, monkeypatch):
    monkeypatch.setattr(tiling, "ONE_BLOCK", 0)  # else few pairs are one block
    routed = sym_optimize(program.fun, kernels="always")
    report = routed.explain(*program.args)
    assert {r.taken for r in report.routes if r.name == "fold"} == {True}, report
    leaves = jax.tree.leaves(program.args)
    assert_no_intermediate(emitted(report), *leaves, elements=program.pairs)
    assert_equivalent(routed, jax.jit(program.fun), *program.args, rtol=2e-5)


@pytest.mark.parametrize(("fun", "reason"), LEFT, ids=lambda x: getattr(x, "__name__", ""))
def test_lookalikes_of_folds_stay(fun, reason):
    args = draw(N, D) * 0.5, draw(M, D, seed=1) * 0.5
    routed = sym_optimize(fun, kernels="always")
    routes = [r for r in routed.explain(*args).routes if r.name == "fold"]
    assert not any(r.taken for r in routes)
    assert bool(routes) == (reason is not None)
    assert all(reason in r.reason for r in routes), routes
    assert_equivalent(routed, jax.jit(fun), *args)


def test_blocks_of_rows_and_columns_with_64_bit_integers():
    def attend(q, k, v):
        return jax.nn.softmax(q @ k.mT, axis=-1) @ v

    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(draw(2, 1100, D, seed=n), jnp.float64) for n in range(3))
        for fun in (attend, jax.grad(lambda *qkv: jnp.sum(attend(*qkv) ** 2), argnums=(0, 1, 2))):
            routed = sym_optimize(fun, kernels="always")
            assert any(r.taken for r in routed.explain(q, k, v).routes)
            assert_equivalent(routed, jax.jit(fun), q, k, v, rtol=1e-10)


def test_lengths_of_64_bits():
    def attend(q, k, v, lengths):
        seen = jnp.arange(90) < lengths[:, None, None]
        return jax.nn.softmax(jnp.where(seen, q @ k.mT, -jnp.inf), axis=-1) @ v

    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(draw(3, 90, D, seed=n), jnp.float32) for n in range(3))
        lengths = jnp.array([2**40, 5, 2**31])
        assert lengths.dtype == jnp.int64
        routed = sym_optimize(attend, kernels="always")
        assert any(r.taken for r in routed.explain(q, k, v, lengths).routes)
        assert_equivalent(routed, jax.jit(attend), q, k, v, lengths, rtol=1e-5)


@pytest.mark.parametrize("fun", [log_sum_exp, neighbours], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_folds_in_other_dtypes(fun, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, y = (jnp.asarray(draw(n, D) * 0.5, dtype) for n in (70, 90))
        ours, theirs = (f(x, y) for f in (sym_optimize(fun, kernels="always"), jax.jit(fun)))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(jax.tree.leaves(x)[0], np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(a, b, rtol={"float64": 1e-12}.get(dtype, 2e-2), atol=2e-2)


@pytest.mark.parametrize(
    "program", [log_sum_exp, lambda x, y: ((x @ y.T).max(-1), jnp.argmax(x @ y.T, -1))]
)
def test_nonfinite_inputs_give_the_same_results(program):
    routed, written = sym_optimize(program, kernels="always"), jax.jit(program)
    for bad in (np.nan, np.inf, -np.inf):
        x, y = draw(40, D), draw(50, D).at[3].set(bad)
        jax.tree.map(np.testing.assert_allclose, routed(x, y), written(x, y))


def test_integers_wrap_and_compare_as_written():
    x, y = (jnp.arange(n * D, dtype=jnp.int32).reshape(n, D) * 7919 for n in (40, 50))

    def fun(x, y):
        s = jnp.maximum(x @ y.T, -5)
        return s.max(-1), s.sum(-1), jnp.argmin(s, -1), jnp.argsort(s, -1)[:, :4]

    routed = sym_optimize(fun, kernels="always")
    assert [r.taken for r in routed.explain(x, y).routes if r.name == "fold"] == [True]
    jax.tree.map(np.testing.assert_array_equal, routed(x, y), fun(x, y))


def test_integers_are_multiplied_and_added_up_as_integers():
    x, y = (jnp.arange(n * D, dtype=jnp.int32).reshape(n, D) % 13 for n in (40, 50))

    def fun(x, y, w):
        return -jnp.sum((x[:, None] - y[None]) ** 2, -1) @ w

    w = jnp.arange(150, dtype=jnp.int32).reshape(50, 3) * 100_003
    routed = sym_optimize(fun, kernels="always")
    assert [r.taken for r in routed.explain(x, y, w).routes if r.name == "fold"] == [True]
    np.testing.assert_array_equal(routed(x, y, w), fun(x, y, w))


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_labels_out_of_range(mode):
    def fun(h, w, label):
        logits = jnp.exp(h @ w)
        chosen = jnp.take_along_axis(logits, label[:, None], 1, mode=mode)[:, 0]
        return jnp.log(logits.sum(-1)), chosen

    routed, written = sym_optimize(fun, kernels="always"), jax.jit(fun)
    for label in (-1, -M - 1, M, 0):
        args = draw(N, D), draw(D, M) * 0.3, jnp.full((N,), label, jnp.int32)
        assert [r.taken for r in routed.explain(*args).routes if r.name == "fold"] == [True]
        for ours, theirs in zip(routed(*args), written(*args), strict=True):
            np.testing.assert_allclose(ours, theirs, 1e-5)


@pytest.mark.parametrize("size", [0, 1, 2])
def test_small_and_empty(size):
    x, y = draw(size, D), draw(3, D)
    routed = sym_optimize(log_sum_exp, kernels="always")
    np.testing.assert_allclose(routed(x, y), log_sum_exp(x, y), 1e-6)


def test_small_sizes_are_left_alone(one_device):
    x = jax.ShapeDtypeStruct((256, D), jnp.float32)
    assert not [r for r in sym_optimize(log_sum_exp).explain(x, x).routes if r.taken]


def test_large_sizes_are_taken(one_device):
    x = jax.ShapeDtypeStruct((1 << 14, D), jnp.float32)
    report = sym_optimize(log_sum_exp, device="cpu").explain(x, x)
    assert [r.taken for r in report.routes if r.name == "fold"] == [True]
    assert report.after.largest_intermediate < 0.05 * report.before.largest_intermediate


@pytest.mark.parametrize("words", [60, 70])
def test_pairs_that_a_fold_never_makes_are_read_by_no_other(words):
    """The second fold's scores are a product of the probabilities that the first never makes."""

    def fun(q, k, v, w):
        p = jax.nn.softmax(q @ k.T)
        return p @ v, jax.nn.logsumexp(p @ w, -1)

    args = draw(90, 8), draw(70, 8), draw(70, 5), draw(70, words)
    routed = sym_optimize(fun, kernels="always")
    report = routed.explain(*args)
    folds = [r for r in report.routes if r.name == "fold"]
    assert sum(r.taken for r in folds) == 1
    refused = [r.reason for r in folds if not r.taken]
    assert refused == ["it reads a pairwise term that another fold does not store"] * (words == 70)
    assert_equivalent(routed, jax.jit(fun), *args, rtol=2e-5)


def test_the_first_of_a_sorted_row_are_those_of_a_sort():
    """NaN comes last and equal values in order, in every dtype."""

    def fun(x):
        s = jnp.maximum(x[:, None] - x[None], -1)
        return jnp.argsort(s, -1)[:, 1:6], jnp.sort(s, -1)[:, 3]

    x = jnp.round(draw(40) * 4).at[3].set(jnp.nan).at[5:8].set(jnp.inf)  # no rounding
    for dtype in ("float32", "bfloat16", "float16"):
        x = x.astype(dtype)
        routed = sym_optimize(fun, kernels="always")
        assert [r.taken for r in routed.explain(x).routes if r.name == "fold"] == [True]
        for ours, written in zip(routed(x), jax.jit(fun)(x), strict=True):
            assert ours.dtype == written.dtype
            ours, written = np.asarray(ours, np.float64), np.asarray(written, np.float64)
            np.testing.assert_array_equal(ours, written)


@pytest.mark.parametrize(("dtype", "taken"), [("float32", "selection"), ("float64", "fold")])
def test_a_fold_is_compared_with_a_selection_where_there_is_one(dtype, taken, one_device):
    def fun(x):
        squares = jnp.sum(x**2, -1)
        return jnp.sort(squares[:, None] + squares - 2 * x @ x.T, 1)[:, :2].sum(1)

    with jax.enable_x64(True):
        report = sym_optimize(fun).explain(jax.ShapeDtypeStruct((341, 48), dtype))
    assert [r.name for r in report.routes if r.taken] == [taken]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_shift_that_matters_keeps_its_gradient(axis):
    """With something added to the sum, or along another axis, the derivative by the shift stays."""

    def fun(x, y):
        s = jnp.tanh(x @ y.T) * 3
        e = jnp.exp(s - s.max(-1, keepdims=True))
        p = e / (e.sum(axis, keepdims=True) + 0.1 * axis)
        return jnp.sin((p * jnp.linspace(0, 1, 40)[:, None]).sum(0) @ y).sum()

    grad = jax.jit(jax.grad(fun, (0, 1)))
    assert_equivalent(sym_optimize(grad, kernels="always"), grad, draw(40, D), draw(50, D))


def test_sums_that_a_fold_makes_are_not_written_out():
    """The gradient of two attentions in a row took 27,000 equations when they were."""
    qkv = tuple(draw(1, 40, H, D, seed=n) for n in range(3))
    report = sym_optimize(gradient(induced, 3), kernels="always").explain(*qkv)
    assert [r.taken for r in report.routes if r.name == "fold"] == [True, True]
    assert str(report.after.jaxpr).count(" = ") < 2000


def test_layers_of_folds_are_emitted_in_linear_time():
    """A search of dependences along every path would take 2^24 of them here."""

    def fun(x, memory):
        for _ in range(24):
            x = x + jax.nn.softmax(x @ memory.T) @ memory
        return x

    args = draw(30, 8), draw(40, 8)
    report = sym_optimize(fun, kernels="always").explain(*args)
    assert [r.count for r in report.routes if r.name == "fold" and r.taken]


def test_diagonal_is_read_beside_infinite_entries():
    """A unit matrix chooses: 0 · inf would be nan."""

    def trace(a, b):
        return jnp.einsum("bii->b", a @ b)

    a, b = np.ones((2, 2, 4, 4), np.float32)
    a[0, 0, 0] = np.inf
    f = sym_optimize(trace, kernels="always")
    assert [r.taken for r in f.explain(a, b).routes] == [True]
    np.testing.assert_array_equal(f(a, b), [np.inf, 16])


def test_gathered_score_of_a_single_row_is_unchanged():
    def surprise(h, w, label):
        scores = jnp.tanh(h @ w)
        return jax.nn.logsumexp(scores) - jnp.take(scores, label, mode="clip")

    args = draw(D), draw(D, N), jnp.int32(3)
    f = sym_optimize(surprise, kernels="always", on_unsupported="error")
    assert_equivalent(f, jax.jit(surprise), *args)
    assert_equivalent(jax.jit(jax.grad(f)), jax.jit(jax.grad(surprise)), *args)


def test_pairs_are_not_made_twice():
    """Weights and their sum are computed from scores that are rounded in the same way."""

    def f(x, y):
        v = jax.nn.softmax(x @ x.T / jnp.sqrt(3.0)) @ x
        return -jnp.sum((v[:, None] - y[None]) ** 2, -1)

    x = 100 + np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    g = sym_optimize(f, kernels="always")
    (use,) = [r for r in g.explain(x, x - 100).routes if r.name == "fold"]
    assert use.taken  # the distances read the rows of the attention, which are few
    np.testing.assert_allclose(g(x, x - 100), jax.jit(f)(x, x - 100), rtol=1e-5)


def by_distance(x, q, k):
    gaps = (x @ q)[:, None] - (x @ k)[None]
    return jax.nn.softmax(-jnp.sum(jnp.abs(gaps), -1)) @ x


def by_temperature(x, temperatures):
    return jax.nn.softmax(temperatures[:, None, None] * (x @ x.T)) @ x


@pytest.mark.parametrize(
    ("f", "sides", "pairs"),
    [
        pytest.param(by_distance, [(8, 4), (8, 4)], 96 * 96, id="x @ q is read"),
        pytest.param(by_temperature, [(3,)], 3 * 96 * 96, id="x @ x.T is not made"),
    ],
)
def test_products_that_are_no_larger_than_their_operands_are_read(f, sides, pairs):
    draw = np.random.default_rng(0).standard_normal
    args = [draw(shape).astype(np.float32) for shape in ((96, 8), *sides)]
    g = sym_optimize(f, kernels="always")
    (use,) = [r for r in g.explain(*args).routes if r.name == "fold"]
    assert use.taken and use.reason.startswith(f"{pairs} pairs")
    np.testing.assert_allclose(g(*args), jax.jit(f)(*args), rtol=1e-5, atol=1e-5)


def test_one_fold_sums_over_columns_and_over_rows(monkeypatch):
    def energy(x, y):
        return jnp.sum(jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) ** 1.5)

    def attend(q, k, v):
        return jnp.sum((jax.nn.softmax(q @ k.T, axis=-1) @ v) ** 2)

    def counted(spec, *operands, **options):
        specs.append(spec)
        return fold(spec, *operands, **options)

    monkeypatch.setattr("symjax_rewrite.kernel_selection.folds.builder.fold", counted)
    points, values = draw(N, D) * 0.3, draw(M, D, seed=1) * 0.3
    for fun, args, folds in ((energy, (points, values), 1), (attend, (points, values, values), 2)):
        specs: list[FoldSpec] = []
        gradient = jax.grad(fun, tuple(range(len(args))))
        ours = sym_optimize(gradient, kernels="xla")
        assert_equivalent(ours, jax.jit(gradient), *args, rtol=2e-5)
        assert len(set(specs)) == folds
        assert {type(o) for o in specs[-1].outputs} == {Sums, ColumnSums}
        specs.clear()
        routes = sym_optimize(gradient, kernels="always", device="h200").explain(*args).routes
        assert any(r.taken for r in routes)
        assert not any(isinstance(o, ColumnSums) for s in specs for o in s.outputs)


def test_folds_state_the_dtypes_of_their_tiles_and_results(monkeypatch):
    """A price that traces the fold for these dtypes takes longer than the search for the fold."""

    def statistics(q, k, v):
        s = q @ k.T / 2
        weights = jax.nn.softmax(s.astype(jnp.float32), axis=-1).astype(v.dtype)
        return weights @ v, jnp.argmax(s, -1), (s > 0).any(-1)

    def counted(spec, *operands, **options):
        specs.append(spec)
        return fold(spec, *operands, **options)

    specs: list[FoldSpec] = []
    monkeypatch.setattr("symjax_rewrite.kernel_selection.folds.builder.fold", counted)
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((N, D), (M, D), (M, D))]
    assert sym_optimize(statistics, kernels="always").explain(*args).after.jaxpr
    assert specs
    for spec in specs:
        for each in (spec, replace(spec, epilogue=None)):
            traced = jax.tree.leaves(result_shapes(each))
            stated = each.epilogue.dtypes if each.epilogue else state_dtypes(each)
            assert [jnp.dtype(d) for d in stated] == [x.dtype for x in traced]


@pytest.mark.parametrize(("queries", "keys", "taken"), [(8192, 512, False), (8192, 8192, True)])
def test_scores_in_reused_memory_need_no_fold(one_device, queries, keys, taken):
    def smooth(x, y, v):
        weights = jnp.exp(-0.5 * ((x**2).sum(-1)[:, None] - 2 * x @ y.T + (y**2).sum(-1)))
        return weights @ v / weights.sum(-1, keepdims=True)

    shapes = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (queries, keys, keys)]
    report = sym_optimize(smooth, device="cpu").explain(*shapes)
    assert any(r.taken for r in report.routes if r.name == "fold") == taken, report


def test_sums_over_the_features_of_a_pair_are_slow_as_written(one_device):
    def differences(x, y):
        return jnp.sum(jnp.abs(x[:, None] - y[None, :]), axis=-1).min(-1)

    def product(x, y):
        return jnp.maximum(x @ y.T, 0).sum(-1)

    x = jax.ShapeDtypeStruct((2048, 8), jnp.float32)
    for fun, taken in ((differences, True), (product, False)):
        report = sym_optimize(fun, device="cpu").explain(x, x)
        assert any(r.taken for r in report.routes if r.name == "fold") == taken, report


@pytest.mark.parametrize(
    ("queries", "documents", "taken"),
    [((4, 32), (100, 180), False), ((2, 8192), (2, 8192), True)],
    ids=["many small pairs", "few large ones"],
)
def test_small_products_have_a_price_of_their_own(one_device, queries, documents, taken):
    def late_interaction(q, d):
        return jnp.einsum("qid,kjd->qkij", q, d).max(-1).sum(-1)

    shapes = [jax.ShapeDtypeStruct((*s, 128), jnp.float32) for s in (queries, documents)]
    report = sym_optimize(late_interaction, device="cpu").explain(*shapes)
    assert any(r.taken for r in report.routes if r.name == "fold") == taken, report


def test_row_algebra_reads_an_operand_of_a_fold_that_runs_apart():
    """The gradient's folds wait for each other: their runs are equations of their own."""

    def sharpness(x, y):
        s = x @ y.T
        return jnp.sum(jax.nn.softmax(s) * s)

    optimised = sym_optimize(sharpness, kernels="always", on_unsupported="error")
    args = draw(8, D), draw(9, D, seed=1)
    ours, theirs = (jax.jit(jax.grad(f, (0, 1))) for f in (optimised, sharpness))
    assert_equivalent(ours, theirs, *args, rtol=2e-5)


def test_a_stream_of_residuals_is_read_once(monkeypatch):
    """A reduction on it walked down to the first layer: time grew as the square of the layers."""
    opened = []
    open_ = Pair.open
    monkeypatch.setattr(Pair, "open", lambda pair, ref: opened.append(ref) or open_(pair, ref))

    def network(x, weights):
        for up, down in weights:
            normal = (x - jnp.mean(x, -1, keepdims=True)) / jnp.std(x, -1, keepdims=True)
            x = x + jnp.tanh(normal @ up) @ down
        return x

    def count(layers):
        opened.clear()
        up, down = (jax.ShapeDtypeStruct(s, "f4") for s in ((512, 2048), (2048, 512)))
        sym_optimize(network).explain(
            jax.ShapeDtypeStruct((1024, 512), "f4"), [(up, down)] * layers
        )
        return len(opened)

    few, more, most = map(count, (4, 6, 8))
    assert most - more == more - few > 0


def test_a_tile_that_is_too_large_is_explored_once(monkeypatch):
    """The gradients of a network read streams of residuals, each a part of the next."""
    explored = []
    explore = clustering.explore
    monkeypatch.setattr(
        clustering, "explore", lambda *args: explored.append(explore(*args)) or explored[-1]
    )

    def f(x, y):
        pairs = x[:, None] - y[None]
        for _ in range(300):
            pairs = jnp.sin(pairs)
        return jnp.sum(pairs, 1), jnp.sum(jnp.cos(pairs), 1)

    sym_optimize(f).explain(*[jax.ShapeDtypeStruct((2000,), "f4")] * 2)
    assert explored == [None]
