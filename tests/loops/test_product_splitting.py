"""Products that the steps of a loop read in parts: the gates of an LSTM, and look-alikes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import CPU
from tests.loops.test_hoisting import check_equal, inside
from tests.profiles import use_on_cpu
from tests.programs import assert_close

STEPS, ROWS, WIDTH, RULE = 9, 3, 8, "loop_parts"
FACTS = CPU.loops


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_on_cpu(monkeypatch, loops={"least_cut_weights": 0})


def draw(*shape: int, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), dtype) / 2


def arguments(width: int = WIDTH, rows: int = ROWS, dtype: Any = "float32") -> list[jax.Array]:
    weights = draw(2, 4 * width, width, dtype=dtype) / width**0.5
    return [draw(STEPS, rows, width, dtype=dtype), *weights, draw(4 * width, dtype=dtype)]


def cell(gates: Any, c: Any) -> tuple[Any, Any]:
    i, f, g, o = gates
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def over_steps(step: Callable, x: Any, **options: Any) -> Any:
    start = jnp.zeros_like(x[0])
    return lax.scan(step, (start, start), x, **options)


def by_rows(x, W, U, b, **options):
    def step(s, x):
        return cell(jnp.split(x @ W.T + b + s[0] @ U.T, 4, -1), s[1])

    return over_steps(step, x, **options)


def by_columns(x, W, U, b):
    W, U = W.T, U.T

    def step(s, x):
        return cell(jnp.split(x @ W + s[0] @ U + b, 4, -1), s[1])

    return over_steps(step, x)


def of_vectors(x, W, U, b):
    def step(s, x):
        return cell(jnp.split(W @ x + b + U @ s[0], 4), s[1])

    return over_steps(step, x[:, 0])


def vmapped(x, W, U, b):
    return jax.vmap(lambda x: of_vectors(x[:, None], W, U, b), 1)(x)


def by_slices(x, W, U, b):
    n = x.shape[-1]

    def step(s, x):
        z = b + s[0] @ U.T + x @ W.T
        return cell([z[:, k * n : (k + 1) * n] for k in range(4)], s[1])

    return over_steps(step, x)


def reshaped(x, W, U, b):
    def step(s, x):
        z = (x @ W.T + s[0] @ U.T + b).reshape(*x.shape[:-1], 4, -1)
        return cell([z[:, k] for k in range(4)], s[1])

    return over_steps(step, x)


def given(x, W, U, b):
    entries = jnp.einsum("tbk,nk->tbn", x, W) + b

    def step(s, z):
        return cell(jnp.split(z + s[0] @ U.T, 4, -1), s[1])

    start = jnp.zeros_like(x[0])
    return lax.scan(step, (start, start), entries)


def joined(x, W, U, b):
    K = jnp.concatenate([W, U], 1).T

    def step(s, x):
        return cell(jnp.split(jnp.concatenate([x, s[0]], -1) @ K + b, 4, -1), s[1])

    return over_steps(step, x)


def two_layers(x, W, U, b):
    K = jnp.concatenate([W, U], 1).T

    def layer(x, s):
        return cell(jnp.split(jnp.concatenate([x, s[0]], -1) @ K + b, 4, -1), s[1])

    def step(s, x):
        first, h = layer(x, s[0])
        known, _ = layer(jnp.sin(x), s[1])
        return (first, known), h

    start = (jnp.zeros_like(x[0]), jnp.zeros_like(x[0]))
    return lax.scan(step, (start, start), x)


def transposed(x, W, U, b):
    def step(s, x):
        z = W @ x.T + U @ s[0].T + b[:, None]
        return cell([z.T for z in jnp.split(z, 4)], s[1])

    return over_steps(step, x)


def shifted(x, W, U, b):
    """Gates of unequal width and a sum that is scaled and cast before it is cut."""
    n = x.shape[-1]

    def step(h, x):
        z = (2.0 * (x @ W.T + h @ U.T)).astype(jnp.float32) - b
        a, rest = jnp.split(z, [n], axis=-1)
        h = jnp.tanh(a) + rest.reshape(-1, 3, n).sum(1) / 8
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x)


def backwards(x, W, U, b):
    return by_rows(x, W, U, b, reverse=True)


SPELLINGS = [by_rows, by_columns, of_vectors, vmapped, by_slices, reshaped, given, joined,
             two_layers, transposed, shifted, backwards]  # fmt: skip


@pytest.mark.parametrize("fun", SPELLINGS, ids=lambda f: f.__name__)
def test_gates_are_products_of_their_own(fun: Callable) -> None:
    report = check_equal(fun, *arguments())
    assert RULE in {r.name for r in report.rules}
    assert not inside(report.after.jaxpr, "slice") + inside(report.after.jaxpr, "split")
    assert inside(report.after.jaxpr, "dot_general") == {shifted: 2, two_layers: 8}.get(fun, 4)


@pytest.mark.parametrize("fun", [by_rows, joined], ids=lambda f: f.__name__)
def test_derivatives(fun: Callable) -> None:
    def loss(*a):
        return (fun(*a)[1] ** 2).sum()

    report = check_equal(jax.grad(loss, argnums=(0, 1, 2, 3)), *arguments(), rtol=1e-4)
    assert RULE in {r.name for r in report.rules}
    want = jax.grad(loss, argnums=(0, 1, 2, 3))(*arguments())
    got = jax.grad(sym_optimize(loss), argnums=(0, 1, 2, 3))(*arguments())
    assert_close(want, got, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_dtypes(dtype: str) -> None:
    args, tol = arguments(dtype=dtype), 5e-2 if dtype.endswith("float16") else 1e-4
    assert_close(jax.jit(by_rows)(*args), sym_optimize(by_rows)(*args), tol)


def sum_is_a_result(x, W, U, b):
    def step(s, x):
        z = x @ W.T + b + s[0] @ U.T
        return cell(jnp.split(z, 4, -1), s[1])[0], z

    return over_steps(step, x)


def sum_is_read_whole(x, W, U, b):
    def step(s, x):
        z = x @ W.T + b + s[0] @ U.T
        return cell(jnp.split(z, 4, -1), s[1] + z.max())

    return over_steps(step, x)


def parts_overlap(x, W, U, b):
    n = x.shape[-1]

    def step(s, x):
        z = x @ W.T + b + s[0] @ U.T
        return cell([z[:, k * (n - 1) : k * (n - 1) + n] for k in range(4)], s[1])

    return over_steps(step, x)


def weights_change(x, W, U, b):
    def step(s, x):
        h, c, U = s
        (h, c), y = cell(jnp.split(x @ W.T + b + h @ U.T, 4, -1), c)
        return (h, c, U * 0.9), y

    start = jnp.zeros_like(x[0])
    return lax.scan(step, (start, start, U), x)


def cut_along_rows(x, W, U, b):
    def step(h, x):
        z = x @ W.T + b + jnp.tile(h, (1, 4)) @ jnp.tile(U, (1, 4)).T
        h = jnp.concatenate([jnp.tanh(z[:1]), jnp.sin(z[1:])])[:, : x.shape[-1]]
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x)


def cut_where_summed(x, W, U, b):
    """Parts of the state, not of the product."""

    def step(s, x):
        a, c = jnp.split(s[0], 2, -1)
        n = a.shape[-1]
        z = x @ W.T + b + a @ U[:, :n].T + c @ U[:, n:].T
        return cell([z[:, : 2 * n], z.sum(-1, keepdims=True), z.max(), z.min()], s[1])

    return over_steps(step, x)


def gated_apart(x, W, U, b):
    """A GRU: products are cut as they are."""

    def step(h, x):
        given, kept = jnp.split(x @ W.T + b, 4, -1), jnp.split(h @ U.T, 4, -1)
        r, z = (jax.nn.sigmoid(given[k] + kept[k]) for k in range(2))
        h = (1 - z) * jnp.tanh(given[2] + r * kept[2]) + z * h
        return h, h

    return lax.scan(step, jnp.zeros_like(x[0]), x)


LOOKALIKES = [sum_is_a_result, sum_is_read_whole, parts_overlap, weights_change, cut_along_rows,
              cut_where_summed, gated_apart]  # fmt: skip


@pytest.mark.parametrize("fun", LOOKALIKES, ids=lambda f: f.__name__)
def test_lookalikes_are_not_split(fun: Callable) -> None:
    report = check_equal(fun, *arguments())
    assert RULE not in {r.name for r in report.rules}


@pytest.mark.parametrize(
    ("width", "rows", "cut"), [(256, 8, True), (64, 8, False), (256, 64, False)]
)
def test_only_large_weights_and_few_rows(
    width: int, rows: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_on_cpu(monkeypatch, loops={"least_cut_weights": FACTS.least_cut_weights})
    report = sym_optimize(by_rows).explain(*arguments(width, rows))
    assert (RULE in {r.name for r in report.rules}) == cut


def test_short_loops_stay() -> None:
    x, *rest = arguments()
    report = check_equal(by_rows, x[: FACTS.least_cut_steps - 1], *rest)
    assert RULE not in {r.name for r in report.rules}


def test_small_floats_are_not_taken_apart() -> None:
    """A sum of two rounded products is not the product of a joined operand, rounded once."""
    report = sym_optimize(joined).explain(*arguments(dtype="bfloat16"))
    assert RULE not in {r.name for r in report.rules}


def test_only_products_that_leave_the_loop_are_split_on_a_gpu() -> None:
    report = sym_optimize(joined, device="h200", kernels="off").explain(*arguments(512))
    assert inside(report.after.jaxpr, "dot_general") == 1
    assert inside(report.after.jaxpr, "concatenate") == 0
    report = sym_optimize(by_rows, device="h200", kernels="off").explain(*arguments(512))
    assert RULE not in {r.name for r in report.rules}


def test_exact_programs_stay() -> None:
    report = check_equal(by_rows, *arguments(), numerics="exact")
    assert RULE not in {r.name for r in report.rules}


def test_symbolic_sizes_mean_the_same() -> None:
    rows = jax.export.symbolic_shape("r")[0]
    x, *rest = arguments()
    spec = jax.ShapeDtypeStruct((STEPS, rows, WIDTH), x.dtype)
    exported = jax.export.export(jax.jit(sym_optimize(by_rows)))(spec, *rest)
    assert_close(jax.jit(by_rows)(x, *rest), exported.call(x, *rest))
