"""Values that XLA's fusions compute slowly are stored and stay equal; others are not stored."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import packs, sym_optimize
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.rewriting import fused_chains
from tests.programs import put

NAME = "fusion_limits"
OLD = pytest.mark.skipif(
    CPU.fusions is None or not CPU.fusions.sorts_parts, reason="this XLA keeps top-ks whole"
)


def array(*shape: int) -> jax.Array:
    return put(np.random.default_rng(shape).normal(size=shape))


def stored(fun: Callable, *args: Any, **options: Any) -> int:
    """The number of values stored by the pass; values and dtypes are checked."""
    ours = sym_optimize(fun, device="cpu", kernels="off", **options)
    a, b = ours(*args), jax.jit(fun)(*args)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    return sum(r.count for r in ours.explain(*args).rules if r.name == NAME)


def distances(x, y):
    return jnp.sum((x[:, None] - y) ** 2, -1)


def forces(x):
    r = x[None] - x[:, None]
    return jnp.sum(jnp.sin(r) / (jnp.sum(r**2, -1, keepdims=True) + 0.1), 1)


def kernel_times(x, y, w):
    return jnp.exp(-distances(x, y) / 100) @ w


POINTS, W = array(300, 2), array(64, 32)
TAKEN = {
    "forces in the plane": (forces, POINTS),
    "masked forces": (
        lambda x: jnp.sum(jnp.where(jnp.eye(300)[..., None] > 0, 0, jnp.sin(x - x[:, None])), 1),
        POINTS,
    ),
    "sums of rows": (lambda x: jnp.sum(x, -1), array(60_000, 12)),
    "weights that lack an outer axis": (
        lambda a, x: jnp.sum(a[:, None] * x, 0), array(60, 100), array(60, 40, 100),
    ),
    "a weight for each matrix": (
        lambda a, x: jnp.sum(a[:, None, None] * jnp.tanh(x), 0), array(60), array(60, 40, 100),
    ),
    "distances in a product": (kernel_times, array(2000, 64), array(70, 64), array(70, 3)),
    "rows and a vector": (lambda x, w: jnp.tanh(x[:, None] - x) @ w, array(450, 64), array(64)),
    "a vector and rows": (
        lambda x, w: jnp.einsum("k,ijk->ij", w, jnp.abs(x[:, None] - x)),
        array(450, 64), array(64),
    ),
    "points that a product computes, in a sum that goes on": (
        lambda x, w, y: jnp.exp(-distances(x @ w, y) / 100),
        array(1500, 4), array(4, 64), array(90, 64),
    ),
    "a softmax of distances over many features": (
        lambda x, y, w: jax.nn.softmax(-distances(x, y) / 100) @ w,
        array(379, 256), array(120, 256), array(120, 3),
    ),
    "a function of distances in tiles larger than the allocator keeps": (
        lambda x, y: jnp.exp(-distances(x, y)), array(700, 600), array(90, 600)
    ),
    "largest differences in a product": (
        lambda x, y, w: jnp.max(jnp.abs(x[:, None] - y), -1) @ w,
        array(2000, 64), array(70, 64), array(70, 3),
    ),
}  # fmt: skip


SMALL, LARGE, POINT = array(700, 64), array(1100, 64), array(120, 32)


@pytest.mark.parametrize(
    ("x", "is_inner", "until_11", "from_11"),
    [
        (SMALL, True, 1, 0), (SMALL, False, 0, 1), (LARGE, True, 0, 0), (LARGE, False, 1, 1),
    ],
)  # fmt: skip
def test_products_in_fusions_that_write_what_reads_them_are_stored(
    x: jax.Array, is_inner: bool, until_11: int, from_11: int
) -> None:
    def farthest(x, y):
        z = x @ W
        return jnp.max(jnp.abs(y[:, None] - z if is_inner else z[:, None] - y), -1)

    assert CPU.fusions is not None
    expected = until_11 if CPU.fusions.repeats_pieces else from_11
    assert stored(farthest, x, POINT) == expected
    followed = stored(lambda x, y: jnp.sqrt(farthest(x, y)), x, POINT)
    assert followed == (expected and not is_inner)
    weights = array(len(x) if is_inner else len(POINT), 8)
    read = stored(lambda x, y, w: farthest(x, y) @ w, x, POINT, weights)
    assert read == (0 if CPU.fusions.repeats_pieces else expected)


def test_all_products_of_a_fusion_that_writes_what_reads_one_are_stored() -> None:
    ours = sym_optimize(lambda x, y: distances(x @ W, y @ W), device="cpu", kernels="off")
    assert str(jax.make_jaxpr(ours)(LARGE, array(60, 64))).count(" reduce_precision[") == 2


@OLD
def test_products_that_a_call_computes_again_are_stored_where_it_goes_on() -> None:
    def kernel(x, w, y):
        z = x @ w
        return jnp.exp(-distances(y, z) / 100)

    few, many = (array(160, 211), array(211, 48)), (array(160, 8), array(8, 48))
    assert stored(kernel, *few, array(150, 48))
    assert not stored(kernel, *many, array(150, 48))
    assert not stored(lambda x, w, y: jnp.exp(-distances(x @ w, y)), *few, array(150, 48))


def test_a_product_against_itself_is_stored() -> None:
    assert stored(lambda x: distances(x @ W, x @ W), array(300, 64))


@pytest.mark.parametrize("name", TAKEN)
def test_values_in_slow_fusions_are_stored(name: str) -> None:
    fun, *args = TAKEN[name]
    assert stored(fun, *args)
    assert not stored(fun, *args, rules=packs.default - NAME)


def repeated(x, *more):
    return jnp.broadcast_to(jnp.exp(jnp.max(x, 1))[:, None], (len(x), *more))


@OLD
@pytest.mark.parametrize(
    ("fun", "count"),
    [
        (lambda x: repeated(x, 8), 1),
        (lambda x: repeated(x, 8).reshape(-1), 1),
        (lambda x: jnp.concatenate([repeated(x, 8), x], 1), 1),
        (lambda x: jnp.broadcast_to(jnp.max(x, 1)[:, None], (9, len(x), 5)), 1),
        (lambda x: jnp.repeat(lax.optimization_barrier(jnp.max(x, 1)), 8), 1),
        (lambda x: repeated(x, 8) + x[0, :8], 0),
        (lambda x: jnp.broadcast_to(jnp.max(x, 1), (8, len(x))), 0),
        (lambda x: jnp.broadcast_to(jnp.max(x[:20], 1)[:, None], (20, 8000)), 0),
        (lambda x: (lambda m: jnp.stack([m[:, None] + jnp.zeros(8)] * 2) + m[0])(jnp.max(x, 1)), 0),
    ],
)
def test_a_result_that_its_call_repeats_one_by_one_is_stored(fun: Callable, count: int) -> None:
    assert stored(fun, array(20_000, 20)) == count


@OLD
def test_the_kernel_of_a_square_product_is_stored() -> None:
    def product(x, y, b):
        return jnp.exp(-distances(x, y)) @ b

    x, y, b = array(300, 12), array(256, 12), array(256, 300)
    assert stored(product, x, y, b)
    assert not stored(product, x, y, array(256, 296))
    assert not stored(lambda x, y, b: b @ jnp.exp(-distances(x, y)), x, y, b)
    assert not stored(lambda x, b: (x / jnp.sum(x, 1, keepdims=True)) @ b, array(300, 256), b)


@OLD
def test_distances_in_a_batch_of_products_are_stored_where_their_rows_are_fresh_memory() -> None:
    batch = lambda n: (array(5, n, 32), array(5, 512, 32), array(5, 512, 8))  # noqa: E731
    assert stored(jax.vmap(kernel_times), *batch(512))
    assert not stored(jax.vmap(kernel_times), *batch(64))
    short = array(6, 900, 4), array(6, 900, 4), array(6, 900, 8)
    assert not stored(jax.vmap(kernel_times), *short)


@OLD
def test_a_square_kernel_right_of_a_product_is_stored_where_the_product_is_fused() -> None:
    def product(b, x):
        return b @ jnp.exp(-distances(x, x + 1))

    b, x = array(200, 300), array(300, 12)
    assert stored(lambda b, x: jnp.tanh(product(b, x)), b, x)
    assert not stored(product, b, x)


@OLD
def test_a_square_product_of_a_product_is_stored_where_it_is_fused() -> None:
    def product(b, x):
        return b @ jnp.tanh(x @ (x + 1).T)

    b, x = array(700, 700) / 30, array(700, 32) / 30
    assert stored(lambda b, x: jnp.sum(jnp.abs(product(b, x))), b, x)
    assert not stored(product, b, x)
    assert not stored(lambda b, x: jnp.sum(jnp.abs(product(b[:300], x))), b, x)
    report = sym_optimize(lambda b, x: (product(b, x), jnp.sum(product(b, x)))).explain(b, x)
    assert NAME not in [r.name for r in report.rules]  # a result is stored as it is
    assert not stored(lambda b, x: jnp.sum(jnp.abs(product(b, x))), b[:300, :300], x[:300])


LEFT = {
    "weights of all axes": (
        lambda a, x: jnp.sum(a * x, 0), array(60, 40, 100), array(60, 40, 100),
    ),
    "weights of matrices of one column": (
        lambda a, x: jnp.sum(a[:, None] * x, 0), array(6000, 1) / 100, array(6000, 40, 1),
    ),
    "a sum over no axis": (
        lambda a, x: jnp.sum(a[:, None] * x, ()), array(60, 100), array(60, 40, 100),
    ),
    "weights that lack the last axis": (
        lambda a, x: jnp.sum(a[:, :, None] * x, 0), array(60, 40), array(60, 40, 100),
    ),
    "weights beside a sum of rows": (
        lambda a, x: jnp.sum(a[:, None] * x, 2), array(60, 100), array(60, 40, 100),
    ),
    "an extremum of weighted matrices": (
        lambda a, x: jnp.max(a[:, None] * x, 0), array(60, 100), array(60, 40, 100),
    ),
    "long rows": (lambda x: jnp.sum(jnp.tanh(x[:, None] - x) + 1, 1), array(100, 64)),
    "distances along the rows": (lambda x: distances(x, x), POINTS),
    "one operation": (lambda x: jnp.sum(x[:, None] - x, 1), POINTS),
    "operands in memory": (lambda x, y: jnp.sum(jnp.tanh(x * y) + 1, 1), *[array(9, 4000, 2)] * 2),
    "distances of parameters": (lambda x, y: jnp.exp(-distances(x, y)), *[array(128, 32)] * 2),
    "a masked kernel, which the library does not select": (
        lambda x, y, w: jnp.where(jnp.eye(2000, 70) > 0, 0, distances(x, y)) @ w,
        array(2000, 64), array(70, 64), array(70, 3),
    ),
    "an operation on a column in memory": (
        lambda x, w: (lambda y: y + jnp.sum(-y, (0, 1)))(x @ w),
        array(21, 4000, 1), array(21, 1, 1),
    ),
    "a product in pieces that stay in the caches, in a sum that goes on": (
        lambda x, w, y: -distances(x @ w, y), array(3450, 8), array(8, 64), array(14, 64),
    ),
    "products in a batch": (
        lambda x, w: (lambda z: jnp.sum(jnp.abs(z[:, :, None] - z[:, None]), -1))(x @ w),
        array(8, 200, 16), array(16, 32),
    ),
    "a product that differences of two sums read": (
        lambda x, w, y: (lambda r: jnp.sum(r, 0) + jnp.sum(r, 1)[:24])(abs((x @ w)[:, None] - y)),
        array(2000, 64), array(64, 32), array(24, 32),
    ),
    "few rows": (lambda x: jnp.sum(x, -1), array(50, 3)),
    "sums along the last axes": (
        lambda x: jnp.sum(jnp.tanh(x[:, None] - x) ** 2, (-2, -1)), array(100, 4, 3)
    ),
    "a stored value that two sums read": (
        lambda x: (lambda r: jnp.sum(r, 1) + jnp.sum(-r, 0))(jnp.tanh(x[:, None] - x) + 1),
        array(304, 2),
    ),
    "no axes": (
        lambda x: lax.reduce_sum_p.bind(jnp.tanh(x - x[:, None]) + 1, axes=(), out_sharding=None),
        POINTS,
    ),
    "a number": (lambda x: lax.reduce_sum_p.bind(x[0, 0], axes=(), out_sharding=None), POINTS),
    "few pairs": (lambda x: jnp.sum(jnp.tanh(x - x[:, None]) + 1, 1), array(64, 2)),
    "sums of long rows": (lambda x: jnp.sum(x, -1), array(2000, 100)),
    "sums of computed rows": (lambda x: jnp.sum(jnp.exp(x), -1), array(60_000, 3)),
    "short rows in a product": (kernel_times, array(4000, 32), array(70, 32), array(70, 3)),
    "a softmax of distances over few features in a product": (
        lambda x, y, w: jax.nn.softmax(-distances(x, y) / 100) @ w,
        array(2000, 24), array(70, 24), array(70, 3),
    ),
    "a function of distances in small tiles": (
        lambda x, y: jnp.exp(-distances(x, y)), array(50, 500), array(900, 500)
    ),
    "a function of distances, each whole": (
        lambda x, y: jnp.exp(-distances(x, y)), array(170, 900), array(180, 900)
    ),
    "few distances in a product": (kernel_times, array(200, 64), array(70, 64), array(70, 3)),
    "distances that two products read": (
        lambda x, y, w: (lambda k: k @ w + k @ w[::-1])(jnp.exp(-distances(x, y) / 100)),
        array(2000, 64), array(70, 64), array(70, 3),
    ),
    "rows that two read": (
        lambda x, w: (lambda t: t @ w + jnp.max(t, -1))(jnp.tanh(x[:, None] - x)),
        array(450, 64), array(64),
    ),
    "few rows and a vector": (lambda x, w: jnp.abs(x[:, None] - x) @ w, array(100, 64), array(64)),
    "short rows and a vector": (lambda x, w: jnp.abs(x[:, None] - x) @ w, array(800, 9), array(9)),
    "rows in memory and a vector": (lambda t, w: jnp.tanh(t) @ w, array(450, 450, 64), array(64)),
    "rows and a matrix": (lambda x, w: jnp.abs(x[:, None] - x) @ w, array(450, 64), array(64, 2)),
    "distances in memory": (lambda d, w: jnp.max(d, -1) @ w, array(2000, 70, 64), array(70, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_fast_fusions_stay(name: str) -> None:
    fun, *args = LEFT[name]
    assert not stored(fun, *args)


def test_exact_numerics_keep_the_order_of_sums() -> None:
    assert not stored(lambda x: jnp.sum(x, -1), array(60_000, 3), numerics="exact")
    assert stored(forces, POINTS, numerics="exact")  # storing changes no value


@OLD
def test_weighted_sums_of_computed_rows_are_no_products_and_keep_special_values() -> None:
    def scores(x, w):
        return jnp.sum(jnp.abs(x[:, None] - x) * w, -1)

    x = array(60, 64)
    assert stored(scores, x, array(64))
    assert stored(scores, x.at[0, 0].set(jnp.nan).at[1, 1].set(3e38), array(64))
    assert not stored(scores, x, array(64), numerics="exact")


@OLD
def test_weighted_sums_over_several_axes_keep_them() -> None:
    def totals(x, w):
        return jnp.sum(jnp.abs(x[:, None] - x) * w, (1, 2))

    assert stored(totals, array(60, 64), array(64), rules=packs.default - "contraction_order")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
def test_sums_of_few_numbers_stay(shape: tuple[int, ...]) -> None:
    assert not stored(lambda x: lax.reduce_sum(jnp.tanh(x) * x, range(x.ndim)), jnp.ones(shape))


def test_special_values_are_kept() -> None:
    x = POINTS.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf)
    assert stored(forces, x)


def test_other_dtypes_stay() -> None:
    assert not stored(lambda x: jnp.sum((x[None] - x[:, None]) ** 2 + 1, 1), POINTS.astype(int))


def test_what_computes_a_stream_of_residuals_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reduction reads the stream through all layers below it."""
    read: list[object] = []
    of = fused_chains.extremum_of
    monkeypatch.setattr(fused_chains, "extremum_of", lambda e, m: (read.append(e), of(e, m))[1])

    def stream(x: jax.Array, ws: jax.Array) -> jax.Array:
        for w in ws:
            x = x + jnp.tanh((x - x.mean(-1, keepdims=True)) * w)
        return x

    closed = jax.make_jaxpr(stream)(array(300, 64), array(20, 64))
    program = flatten(closed)
    assert CPU.fusions is not None
    r = fused_chains.Fused(program, CPU, CPU.fusions)
    sums = [e for e in program.equations if e.name == "reduce_sum"]
    chains = [r.chain(e.reads[0]) for e in sums]
    assert len(chains) == 20 and len(read) < 2 * len(program.equations)
    assert [len(c.spread) for c in chains] == [2 * n for n in range(20)]  # a mean and a weight


def threshold(x):
    return x >= lax.top_k(x, 4)[0][:, -1:]


@OLD
def test_a_top_k_of_which_a_part_is_read_stays_a_top_k() -> None:
    assert stored(threshold, array(200, 256))
    ours = sym_optimize(threshold, device="cpu")
    text = ours.lower(array(200, 256)).compile().as_text()
    assert "TopK" in text and " sort(" not in text


@OLD
def test_a_top_k_that_is_read_whole_is_left() -> None:
    assert not stored(lambda x: lax.top_k(x, 4)[0], array(200, 256))
    assert not stored(lambda x: jnp.exp(lax.top_k(x, 4)[0]), array(200, 256))


@OLD
def test_a_top_k_that_xla_keeps_for_its_readers_is_left() -> None:
    readers = (
        lambda v, i: v[:, :2],  # a smaller top-k
        lambda v, i: jnp.exp(v)[:, -1:],
        lambda v, i: jnp.zeros((200, 256)).at[jnp.arange(200)[:, None], i].set(v),
        lambda v, i: v.sum(-1),
        lambda v, i: v.T,
    )
    for read in readers:
        f = lambda x, read=read: read(*lax.top_k(x, 4))  # noqa: E731
        assert not stored(f, array(200, 256))
        text = jax.jit(f).lower(array(200, 256)).compile().as_text() or ""
        assert "TopK" in text and " sort(" not in text


@pytest.mark.skipif(
    CPU.fusions is None or CPU.fusions.tasks == float("inf"), reason="this XLA's calls write sums"
)
def test_sums_over_inner_axes_store_no_operand_in_tasks():
    """Gradients of energy distances stored 144 MB of differences first, and took longer."""

    def forces(x, s):
        return jnp.sum((x[:, None] - x) * s[..., None], 1)

    specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1500, 16), (1500, 1500))]
    found = sym_optimize(forces, device="cpu", kernels="off").explain(*specs)
    assert NAME not in [r.name for r in found.rules]
