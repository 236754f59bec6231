"""Products turn where an operand is read across its rows, keep their values, and else stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import packs, sym_optimize
from symjax_rewrite.cost.device_profiles import CPU, DEVICES
from symjax_rewrite.cost.product_layouts import Matrix, added_seconds
from symjax_rewrite.jax_internals import eval_jaxpr

NAME = "orientation"
LAYOUTS = CPU.layouts
assert LAYOUTS is not None
LONG = max(LAYOUTS.long_sum, 4096)


def array(*shape: int, dtype: Any = np.float32, seed: int = 0) -> jax.Array:
    values = np.random.default_rng((seed, *shape)).normal(size=shape)
    return jnp.asarray(values / np.sqrt(np.prod(shape)), dtype)


def turned(fun: Any, *args: Any, **options: Any) -> int:
    """The number of products that turn; values and dtypes are checked."""
    ours = sym_optimize(fun, device="cpu", **options)

    def check(a: Any, b: Any) -> None:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a), np.asarray(b)
        scale = max(float(np.abs(b).max()), 1e-30)
        np.testing.assert_allclose(a / scale, b / scale, atol=2e-5)

    jax.tree.map(check, ours(*args), jax.jit(fun)(*args))
    return sum(r.count for r in ours.explain(*args).rules if r.name == NAME)


def dims(fun: Any, *args: Any) -> list[Any]:
    """The contracted axes of the products that are emitted."""
    closed = sym_optimize(fun, device="cpu").explain(*args).after.jaxpr
    products = [e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
    return [e.params["dimension_numbers"][0] for e in products]


X, Y, W = array(5000, 64), array(5000), array(64)
FEW, COLUMN = array(5000, 4), array(5000, 1)
WIDE, ROW = array(32, LONG), array(1, LONG)
POINTS, CENTRES = array(300, 8), array(400, 8)
FIRES = {
    "transpose times vector": (lambda x, y: x.T @ y, X, Y),
    "transpose times column": (lambda x, y: x.T @ y, X, COLUMN),
    "residual": (lambda x, w, y: x.T @ (x @ w - y), X, W, Y),
    "vector times transpose": (lambda x, y: y @ x.T, WIDE, ROW[0]),
    "row times transpose": (lambda x, y: y @ x.T, WIDE, ROW),
    "transpose in between": (lambda x, y: (x + 1).T @ y, X, Y),
    "few columns": (lambda x, y: x.T @ y, X, FEW),
    "few columns, no transpose": (
        lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))), X, FEW,
    ),
    "few columns, transposed result": (lambda x, y: (y.T @ x).T, X, FEW),
    "two transposes": (lambda x, y: x.T @ y.T, X, FEW.T + 0),
    "two transposes of the result": (lambda x, y: (x.T @ y).T.T, X, FEW),
    "two summed axes": (
        lambda x, y: jnp.einsum("btd,bth->dh", x, y), array(10, 500, 64), array(10, 500, 4),
    ),
    "two summed axes, a vector": (
        lambda x, y: jnp.einsum("btd,bt->d", x, y), array(10, 500, 64), array(10, 500),
    ),
    "transpose read twice": (lambda x, y, z: (x.T @ y, x.T @ z), X, Y, Y + 1),
    "gradient of a linear map": (
        jax.grad(lambda w, x, y: jnp.sum((x @ w - y) ** 2)), array(64, 4), X, FEW,
    ),
    "transposed function of a product": (lambda a, b: jnp.tanh((-(a @ b.T)).T), POINTS, CENTRES),
    "transposed function of two products": (
        lambda a, b: 2 * (jnp.exp(a @ b.T) / (a**2 @ b.T)).T, POINTS, CENTRES,
    ),
    "transposed function of a batch": (
        jax.vmap(lambda a, b: jnp.tanh((a @ b.T + b[:, 0]).T)), array(3, 300, 8), array(3, 200, 8),
    ),
    "a mask is transposed as well": (
        lambda a, b: (mask := jnp.tri(400, 300, dtype=bool), jnp.where(mask, b @ a.T, 0).T - 1),
        POINTS, CENTRES,
    ),
    "a mask beside its transposition": (
        lambda a, b: (
            i := lax.broadcasted_iota(int, (300, 300), 0), jnp.where(i < i.T, -(a @ b.T), 1).T - 1
        ),
        POINTS, CENTRES[:300],
    ),
    "in a loop": (lambda x, y: lax.fori_loop(0, 3, lambda _, v: x.T @ (x @ v) + y, y), X, W),
}  # fmt: skip
QUERIES, KEYS = array(2, 8, 16, 32), array(2, 2, 1000, 32)
GROUPED = {
    "scores": (lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, jnp.repeat(k, 4, 1)), QUERIES, KEYS),
    "one query": (
        lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, jnp.repeat(k, 4, 1)), QUERIES[:, :, :1], KEYS,
    ),
    "heads after tokens": (
        lambda q, k: jnp.einsum("bthd,bshd->bhts", q, jnp.repeat(k, 4, 2)), array(2, 16, 8, 32),
        array(2, 1000, 2, 32),
    ),
    "values": (lambda p, v: p @ jnp.repeat(v, 4, 1), array(2, 8, 16, 1000), KEYS),
}  # fmt: skip
NOT_GROUPED = {
    "tiled": (lambda q, k: q @ jnp.tile(k, (1, 4, 1, 1)), array(2, 8, 16, 1000), KEYS),
    "repeated along the sum": (
        lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, jnp.repeat(k, 2, 3)), array(2, 2, 16, 64),
        KEYS,
    ),
    "not repeated": (lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, k), QUERIES[:, :2], KEYS),
}  # fmt: skip
STAYS = {
    "rows in order": (lambda x, w: x @ w, X, W),
    "vector first": (lambda x, y: y @ x, X, Y),
    "no transpose before a vector": (
        lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))), X, Y,
    ),
    "gradient with a column": (
        jax.grad(lambda w, x, y: jnp.sum((x @ w - y) ** 2)), W[:, None], X, COLUMN,
    ),
    "small": (lambda x, y: x.T @ y, X[:100], Y[:100]),
    "short sum": (lambda x, y: x.T @ y, array(16, 5000), array(16)),
    "two large operands": (lambda x, y: x.T @ y, array(400, 300), array(400, 310)),
    "the small operand is left": (lambda x, y: y.T @ x, X, FEW),
    "a product of itself": (lambda x: x.T @ x, X),
    "half precision": (lambda x, y: x.T @ y, X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)),
    "complex": (lambda x, y: x.T @ y, X.astype(jnp.complex64), Y.astype(jnp.complex64)),
    "integer": (lambda x, y: x.T @ y, jnp.ones((5000, 64), int), jnp.ones(5000, int)),
    "batch axes": (lambda x, y: jnp.einsum("bkm,bk->bm", x, y), array(4, 2000, 64), array(4, 2000)),
    "another dtype preferred": (
        lambda x, y: jnp.matmul(x.T, y, preferred_element_type=jnp.float32), X.astype(jnp.float16),
        Y.astype(jnp.float16),
    ),
    "a function in both orders": (
        lambda a, b: ((c := jnp.exp(a @ b.T)), jnp.tanh(c.T)), POINTS, CENTRES,
    ),
    "a transposed product": (lambda a, b: jnp.tanh((a @ b.T).T), POINTS, CENTRES),
    "a transposed function that a product reads": (
        lambda a, b: (-(a @ b.T)).T @ a, POINTS, CENTRES,
    ),
    "a function beside its transposition": (
        lambda a, b: jnp.tanh(((c := jnp.exp(a @ b.T)) / (1 + c.T)).T), POINTS, CENTRES[:300],
    ),
    "inner product": (lambda x, y: x @ y, Y, Y),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRES)
def test_products_are_oriented(name: str) -> None:
    assert turned(*FIRES[name]) >= 1


@pytest.mark.parametrize("name", STAYS)
def test_stays(name: str) -> None:
    assert turned(*STAYS[name]) == 0


@pytest.mark.parametrize("name", GROUPED)
def test_copies_of_groups_are_not_made(name: str) -> None:
    assert turned(*GROUPED[name]) == 1
    closed = sym_optimize(GROUPED[name][0], device="cpu").explain(*GROUPED[name][1:]).after.jaxpr
    assert "broadcast_in_dim" not in [e.primitive.name for e in closed.jaxpr.eqns]


@pytest.mark.parametrize("name", NOT_GROUPED)
def test_other_batches_stay(name: str) -> None:
    assert turned(*NOT_GROUPED[name]) == 0


def test_a_transpose_read_by_others_stays_for_them() -> None:
    assert turned(lambda x, y: (x.T @ y, x.T + 1), X, Y) == 1


def test_the_matrix_stands_where_it_is_read_in_order() -> None:
    assert dims(FIRES["transpose times vector"][0], X, Y) == [((0,), (0,))]
    assert dims(lambda x, y: y @ x.T, WIDE, ROW[0]) == [((1,), (0,))]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("other", [Y, FEW])
def test_dtypes_stay(dtype: Any, other: jax.Array) -> None:
    with jax.enable_x64(True):
        x, y = (jnp.asarray(np.asarray(a), dtype) for a in (X, other))
        assert turned(lambda x, y: x.T @ y, x, y) == 1


@pytest.mark.parametrize("other", [Y, FEW])
def test_precision_follows_its_operand(other: jax.Array) -> None:
    both = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)

    def fun(x: Any, y: Any) -> Any:
        return lax.dot(x.T, y, precision=both)

    closed = sym_optimize(fun, device="cpu").explain(X, other).after.jaxpr
    found = [e.params for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [p["precision"] for p in found] == [both[::-1]]
    assert [p["preferred_element_type"] for p in found] == [None]


@pytest.mark.parametrize("device", [d for d in DEVICES if d != "cpu"])
def test_gpus_keep_the_orientation(device: str) -> None:
    rules = sym_optimize(lambda x, y: x.T @ y, device=device).explain(X, Y).rules
    assert NAME not in [r.name for r in rules]


@pytest.mark.parametrize("options", [{"numerics": "exact"}, {"rules": packs.default - NAME}])
def test_orientation_can_be_switched_off(options: dict[str, Any]) -> None:
    assert turned(lambda x, y: x.T @ y, X, Y, **options) == 0


@pytest.mark.parametrize("name", FIRES)
def test_oriented_products_are_a_fixed_point(name: str) -> None:
    fun, *args = FIRES[name]
    closed = sym_optimize(fun, device="cpu").explain(*args).after.jaxpr

    def run(*args: Any) -> Any:
        return eval_jaxpr(closed, *args)

    rules = sym_optimize(run, device="cpu").explain(*args).rules
    assert NAME not in [r.name for r in rules]


def test_derivatives_agree() -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x.T @ y))

    for other in (Y, FEW):
        ours = jax.grad(sym_optimize(loss, device="cpu"), (0, 1))(X, other)
        for a, b in zip(ours, jax.grad(loss, (0, 1))(X, other), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_batch_of_calls_agrees() -> None:
    fun = sym_optimize(lambda x, y: x.T @ y, device="cpu")
    xs, ys = array(3, 5000, 64), array(3, 5000)
    np.testing.assert_allclose(jax.vmap(fun)(xs, ys), jnp.einsum("bkm,bk->bm", xs, ys), atol=1e-5)


def test_the_price_grows_with_the_operand_that_is_read_across() -> None:
    assert LAYOUTS is not None
    narrow, wide = Matrix(4, 5000, True, True), Matrix(64, 5000, True, True)
    assert added_seconds(narrow, wide, LAYOUTS) < added_seconds(wide, narrow, LAYOUTS)
    assert added_seconds(Matrix(64, 5000, False, False), narrow, LAYOUTS) == 0


def test_rows_a_multiple_of_two_kib_are_slower_to_read_across() -> None:
    assert LAYOUTS is not None
    few = Matrix(4, 5000, True, True)
    odd, even = (added_seconds(Matrix(n, 5000, True, True), few, LAYOUTS) for n in (500, 512))
    assert even > 3 * odd
    assert turned(lambda x, y: x.T @ y, array(512, 512), array(512, 2))
    assert not turned(lambda x, y: x.T @ y, array(512, 500), array(512, 499))
