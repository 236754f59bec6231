"""Defects that were found once, each by name; any equal form may be chosen in these tests."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import errors, sym_optimize
from tests.fuzz.check import Failure, Mode, check_function, choosing

CHOICES = [("model", 0), ("always", 0), *(("random", k) for k in range(6)), ("wide", 0)]


def agree(
    f: Callable[..., Any],
    *shapes: Any,
    transform: str = "value",
    choices: Sequence[tuple[str, int]] = CHOICES,
    **mode: Any,
) -> None:
    """The function means the same whatever equal form of it is chosen."""
    rng = np.random.default_rng(0)
    args = [
        np.asarray(rng.standard_normal(getattr(s, "shape", s)), getattr(s, "dtype", np.float32))
        for s in shapes
    ]
    for choice, seed in choices:
        outcome = check_function(f, args, Mode(transform, choice, seed, **mode))
        assert not isinstance(outcome, Failure), f"{choice} {seed}: {outcome}"


def f16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float16)


def c64(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.complex64)


def test_written_node_that_a_rule_makes_too_stays_written():
    """The sum of a Gram matrix and its transpose: its class lost the written node (KeyError)."""

    def f(x):
        g = x.T @ x
        return x @ (g + g.T)

    agree(f, (8, 4))
    agree(lambda x: (x.T @ x + (x.T @ x).T) @ (x.T @ x), (6, 5))


def test_written_node_survives_a_lost_index():
    """A product with constant blocks does not depend on an index it was written with (KeyError)."""

    def f(a, b, x):
        return x @ jnp.concatenate([a, b], 1)

    agree(f, (4, 5), (4, 2), (2, 4), transform="in_second")


def test_slice_of_a_class_whose_axes_were_renumbered():
    """Starts of a slice were read in the axes of another class (negative shift, wrong starts)."""

    def f(x, s):
        p = jax.nn.softmax(s, -1)
        return (p @ x)[0], p

    def g(a, b, x):
        w = jnp.concatenate([a, b], 1)
        return (x @ w)[:, 1:7], w

    agree(f, (3, 5), (3, 3))
    agree(g, (8, 4), (8, 8), (4, 8), transform="in_jvp")

    def h(a, b, x):
        y = jnp.block([[a, jnp.zeros((1, 1))], [jnp.zeros((1, 2)), b]]) @ x
        return (b @ a + y)[jnp.arange(1)[::-1]]

    agree(h, (1, 2), (1, 1), (3,))


def test_block_diagonal_second_derivative():
    """Slices of block matrices went out of bounds under second derivatives."""

    def f(a, b, x):
        zero = jnp.zeros((4, 4), a.dtype)
        return jnp.block([[a, zero], [zero, b]]) @ x

    agree(f, (4, 4), (4, 4), (8,), transform="in_second")


def test_value_spread_over_no_elements():
    """What is equal to an array with an axis of size 0 can't be read from that array."""

    def f(c, w, v):
        def step(i, carry):
            y = jnp.einsum("dbe,b->e", w, v)
            return carry * 0.5 + jnp.tanh(jnp.sum(y + y))

        return jax.lax.fori_loop(0, 3, step, c)

    agree(f, (), (8, 0, 0), (0,), transform="in_jvp")


def test_complex_coefficients_have_no_sign():
    """`distribute` compared complex coefficients with zero (TypeError)."""
    agree(
        lambda x, w, a, b: x @ (w - (a @ b) * (1 + 2j)), c64(3, 4), c64(4, 5), c64(4, 1), c64(1, 5)
    )


def test_complex_softmax_has_no_fold():
    agree(lambda x: jax.nn.softmax(x * 0.5, -1), c64(6, 4), kernels="always")


def test_prefix_of_another_dtype():
    """A triangle of float32 ones times float16 gave a float16 prefix sum."""
    agree(lambda x: jnp.tri(3) @ x, f16(3, 3))
    agree(lambda x: jnp.tri(3) @ x, f16(3, 3), transform="grad")


def test_sum_in_the_dtype_of_the_result():
    """A float16 operand summed alone for a float32 product is summed in float32."""

    def f(x, y):
        return jnp.einsum("ij,k->k", x, y, preferred_element_type=jnp.float32)

    agree(f, f16(300, 8), f16(4))


def test_class_that_is_a_product_of_its_own_product():
    """a = 1·b and b = 1·a: opening products did not end (RecursionError)."""
    agree(lambda x: jax.nn.one_hot(jnp.arange(3), 3) @ x, (3, 2), transform="in_grad")

    def f(x, y, w):
        return x @ w + (y - 1.0 * (x @ w))

    agree(f, (32, 2), (32, 4), (2, 4), transform="in_grad")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64, jnp.int32])
def test_nothing_is_kept_because_of_an_error(dtype):
    """The names above fail loudly, not by falling back to what was written."""
    x = jnp.ones((8, 4), dtype)
    sym_optimize(lambda x: x @ (x.T @ x + (x.T @ x).T), on_unsupported="error")(x)


def test_a_sum_of_a_one_hot_is_zero_out_of_range():
    labels = jnp.array([-1, 0, 3, 9])
    y = jnp.arange(1.0, 5.0)

    def f(labels, y):
        return jnp.einsum("bv,b->b", jax.nn.one_hot(labels, 4), y)

    np.testing.assert_array_equal(sym_optimize(f, device="h200")(labels, y), f(labels, y))
    np.testing.assert_array_equal(f(labels, y), [0, 2, 3, 0])


@pytest.mark.internal_error
def test_an_error_while_emitting_keeps_the_original(monkeypatch):
    from symjax_rewrite.codegen import term_lowering

    def broken(*_):
        raise ZeroDivisionError

    f = lambda a, b, x: (a @ b) @ x  # noqa: E731
    args = (jnp.ones((256, 256)), jnp.ones((256, 256)), jnp.ones(256))
    monkeypatch.setitem(term_lowering._LOWER, "contract", broken)
    np.testing.assert_allclose(sym_optimize(f)(*args), f(*args), 1e-6)
    with pytest.raises(errors.UnsupportedError):
        sym_optimize(f, on_unsupported="error")(*args)


def test_a_constant_term_of_a_sum_is_counted():
    """Σ c + y·Σ c = (n + n·y)·c: the count of what was left without factors was lost."""

    def f(x):
        ones = jnp.full((2, 3), 0.5, jnp.float32)
        return jnp.sum(ones) + jnp.tanh(jnp.sum(x)) * jnp.sum(ones)

    agree(f, (2, 3))
    agree(f, f16(2, 3))

    def looped(x, xs, y):
        step = lambda c, t: (c * 0.5 + jnp.tanh(jnp.sum(y)), None)  # noqa: E731
        return jax.lax.scan(step, x, xs)[0]

    agree(looped, (2, 5), (2, 2), (2, 3), transform="in_second")


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_indices_that_wrap_are_no_indices(dtype):
    """With 300 classes a label of 8 bits has up to two hot entries, and triangles come twice."""
    labels = np.array([200, 3, 100, 255]).astype(dtype)
    w = np.arange(600, dtype=np.float32).reshape(300, 2)
    for f in (
        lambda x, w: jax.nn.one_hot(x, 300) @ w,
        lambda x, w: (x[:, None] == jax.lax.iota(dtype, 300)).astype(jnp.float32) @ w,
        lambda x, w: (
            (
                jax.lax.broadcasted_iota(dtype, (300, 300), 0)
                >= jax.lax.broadcasted_iota(dtype, (300, 300), 1)
            ).astype(jnp.float32)
            @ w
        ),
        lambda x, w: (
            (
                jax.lax.broadcasted_iota(dtype, (300, 300), 0) + dtype(100)
                >= jax.lax.broadcasted_iota(dtype, (300, 300), 1) + dtype(100)
            ).astype(jnp.float32)
            @ w
        ),
    ):
        for choice, seed in CHOICES:
            outcome = check_function(f, [labels, w], Mode("value", choice, seed))
            assert not isinstance(outcome, Failure), outcome


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_labels_into_nothing(dtype):
    """A one-hot sum over no classes (jnp.take refuses an empty axis), or over many."""
    for n in (0, 1, 127):
        f = lambda i, w: jnp.einsum("on,nd->od", jax.nn.one_hot(i, w.shape[0]), w)  # noqa: E731
        values = [np.array([-1, 0, 3, 100]).astype(dtype), np.ones((n, 3), np.float32)]
        for choice, seed in CHOICES:
            outcome = check_function(f, values, Mode("value", choice, seed))
            assert not isinstance(outcome, Failure), outcome


def repeat(times: int, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def f(x, w):
        y = x
        for _ in range(times):
            y = step(y, w)
        return y @ w, jnp.sum(jnp.exp(y) * y, -1), y[0]

    return f


MANY = {
    "squares": repeat(40, lambda y, w: y * y),
    "squares of matrices": repeat(40, lambda y, w: y @ y),
    "products of sums": repeat(40, lambda y, w: y * (y + 1)),
    "sums of sums": repeat(40, lambda y, w: (y + w) + (y - 2 * w)),
    "positive products": repeat(40, lambda y, w: jnp.exp(y) * (jnp.exp(y) + y * y)),
    "a chain": repeat(500, lambda y, w: y @ w),
    "a long product": repeat(1500, lambda y, w: y * w),
    "a long sum": repeat(1500, lambda y, w: y + w),
    "long maps": repeat(1500, lambda y, w: jnp.exp(y) / w),
    "shared maps": repeat(40, lambda y, w: jnp.sin(y) + jnp.cos(y)),
}


@pytest.mark.parametrize("name", MANY)
def test_time_does_not_grow_with_the_paths_of_a_program(name):
    """What is shared n times deep has 2ⁿ paths; looking at each took for ever, or the stack."""
    spec = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    f = sym_optimize(MANY[name], on_unsupported="error", kernels="always")
    report = f.explain(spec, spec)
    assert report.time_s < 60, report.stop


def test_pieces_are_joined_in_the_order_they_are_made():
    """Gates of an LSTM were each transposed, joined and transposed back: ten times slower."""

    def f(ws, xs):
        def step(h, x):
            gates = h @ jnp.concatenate(ws, 1) + x
            i, o = jnp.split(jax.nn.sigmoid(gates), 2, -1)
            return i * h + o, None

        return jax.lax.scan(step, jnp.zeros((8, 256)), xs)[0]

    args = ([jnp.ones((256, 256))] * 2, jnp.ones((16, 8, 512)))
    report = sym_optimize(f).explain(*args)
    assert [r.name for r in report.rules] == ["block_products"]
    assert "transpose" not in str(report.after.jaxpr)
    np.testing.assert_allclose(sym_optimize(f)(*args), f(*args), 1e-5)


def test_a_norm_of_all_gradients_does_not_join_them_into_one_region():
    """Its sum of squares made one region of a whole training step: seconds of search."""
    from symjax_rewrite.ir.dataflow import needed
    from symjax_rewrite.ir.flat_program import flatten
    from symjax_rewrite.ir.term_graph import build
    from symjax_rewrite.rewriting.region_partition import find_regions

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    def step(ws, x):
        gradients = jax.grad(loss)(ws, x)
        scale = jax.lax.rsqrt(sum(jnp.sum(g**2) for g in gradients))
        return [w - 0.1 * scale * g for w, g in zip(ws, gradients, strict=True)]

    for layers in (3, 12):
        closed = jax.make_jaxpr(step)([jnp.ones((32, 32))] * layers, jnp.ones((128, 32)))
        t = build(flatten(closed))
        regions = find_regions(t, needed(t), lambda c: ())
        assert max(len(r.classes) for r in regions) <= 8 * layers


def test_forces_of_all_pairs_stay_a_fused_loop():
    """Σⱼ uᵢⱼ·(xᵢ − xⱼ) became products of a matrix and a vector for every i: twice slower."""

    def potential(x, m):
        gap = x[:, None] - x[None, :]
        distance = jnp.sqrt(jnp.sum(gap**2, -1) + 1e-2)
        return -0.5 * jnp.sum(m[:, None] * m[None, :] / distance)

    forces = sym_optimize(jax.grad(potential), kernels="off")
    report = forces.explain(jnp.ones((256, 3)), jnp.ones(256))
    assert "dot_general" not in str(report.after.jaxpr)


def test_a_product_over_several_axes_rearranges_its_smaller_operand():
    """A scale moved behind a linear layer made XLA transpose the weights, not the activations."""

    def f(w, x):
        pooled = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return w @ (0.25 * pooled).transpose(0, 3, 1, 2).reshape(4, -1).T

    report = sym_optimize(f).explain(jnp.ones((128, 4096)), jnp.ones((4, 16, 16, 64)))
    products = [e for e in report.after.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) == 1 and len(products[0].params["dimension_numbers"][0][0]) == 3
    sides = zip(products[0].invars, products[0].params["dimension_numbers"][0], strict=True)
    contracted = max(sides, key=lambda side: side[0].aval.size)[1]
    assert list(contracted) == sorted(contracted)


def test_slices_of_slices_of_nothing():
    """A slice of an empty slice started behind the end (TypeError)."""
    agree(lambda x: jnp.cumprod(jnp.tanh(x), -2), (5, 2), transform="in_jvp")
    agree(lambda x, y: (x * y)[1::2][2:2][:, :1] @ y[:1, :3], (4, 3), (4, 3))


def test_near_values_are_subtracted_before_they_are_scaled():
    """(u − v)/3 + x·W is exact where u is near v, and u/3 + x·W − v/3 is not."""
    rng = np.random.default_rng(0)
    x, y, w = (rng.standard_normal((6, 6)).astype(np.float32) for _ in range(3))
    far = [x + np.float32(1e4), y + np.float32(1e4), w]

    def squares(u, v, w):
        return jnp.mean((u[:, None, :] - v[None, :, :]) ** 2, (0, 1))

    def differences(u, v, w):
        return (u - v) * 0.3 + w @ w, ((u - v) + w @ w) + (v - u) / 3, ((u - v) / 3 + w @ w) / 7

    for f in (squares, differences):
        for choice, seed in [*CHOICES, *(("wide", k) for k in range(9))]:
            outcome = check_function(f, far, Mode("value", choice, seed))
            assert not isinstance(outcome, Failure), f"{choice} {seed}: {outcome}"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_maximum_of_a_routed_fold_is_used_in_its_own_dtype(dtype):
    """The row algebra around a fold met the maximum in the accumulator's dtype (TypeError)."""

    def f(x, y):
        s = x @ x.T * 0.3
        return jax.nn.softmax(s) @ y + jnp.max(s, 1, keepdims=True), jax.nn.logsumexp(s, 1)

    given = [jax.ShapeDtypeStruct(s, dtype) for s in ((4, 16), (4, 32))]
    agree(f, *given, kernels="always")


@pytest.mark.parametrize("name", ["xs", "fori"])
def test_a_loop_of_a_named_length_gives_up_what_does_not_change(name):
    """`lax.scan` refuses a length that is a name (InconclusiveDimensionOperation)."""
    n = jax.export.symbolic_shape("n")[0]

    def f(x, t):
        if name == "xs":
            return jax.lax.scan(lambda c, u: (c * 0.5 + t @ (x @ x.T) @ x, u), x[0], x)
        return jax.lax.fori_loop(0, x.shape[0], lambda i, c: c * 0.5 + (t @ (x @ x.T)) @ x, x[0])

    specs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, 4), (n,))]
    g = sym_optimize(f, on_unsupported="error", assume="n >= 1", kernels="always")
    args = [jnp.ones((5, 4)), jnp.arange(5.0)]
    ours, theirs = (jax.export.export(jax.jit(h))(*specs).call(*args) for h in (g, f))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), ours, theirs)


def test_what_platforms_save_for_their_backward_passes_is_not_equal():
    """A gradient through `jnp.diag` read what another platform would have saved (wrong value)."""
    agree(lambda a, b: jnp.diag(a @ b), (3, 1), (1, 3), transform="in_grad")
    agree(lambda a, b: jnp.diag(a @ b), (3, 3), (3, 3), transform="grad")


def test_a_batch_of_loops_ends_one_by_one():
    """The condition of a batched `while` is no scalar (TypeError)."""

    def f(x, w):
        step = lambda c: c * 2 + 1 + 0 * (w @ w @ c)  # noqa: E731
        return jax.lax.while_loop(lambda c: jnp.sum(c**2) < 50, step, x)

    agree(f, (3,), (3, 3), transform="in_vmap")
    agree(f, (3,), (3, 3), transform="vmap")


@pytest.mark.parametrize(("dtype", "scale"), [(jnp.float16, 1e-3), (jnp.float32, 1e-25)])
def test_scales_that_meet_do_not_underflow(dtype, scale):
    """1e-4 · 1e-3 of float16 values left a sum as one coefficient, rounded by a fifth or to 0."""

    def f(x, w, v):
        return ((x * (scale / 10)) @ w @ v) * scale

    x = jnp.full((4, 64), 60, dtype) if dtype == jnp.float16 else jnp.full((4, 64), 1e20, dtype)
    w = jnp.full((64, 64), 30 if dtype == jnp.float16 else 1e20, dtype)
    v = jnp.full((64,), 1, dtype)
    got = np.asarray(sym_optimize(f)(x, w, v), np.float64)
    np.testing.assert_allclose(got, np.asarray(f(x, w, v), np.float64), rtol=2e-2)


def test_float16_products_keep_their_order():
    """A gradient's (g·x)·xᵀ was made as g·(x·xᵀ), which is infinite in float16."""

    def f(x, w, v):
        return (x * v * 1e-4) @ w @ w.T * 1e-3

    rng = np.random.default_rng(0)
    args = [(300 * rng.standard_normal(s)).astype(np.float16) for s in ((48, 4), (4, 96), (4,))]
    for choice, seed in CHOICES:
        outcome = check_function(f, args, Mode("grad", choice, seed))
        assert not isinstance(outcome, Failure), f"{choice} {seed}: {outcome}"
    specs = f16(8, 2048), f16(2048, 2048), f16(2048, 16), f16(16, 2048)
    lora = lambda x, w, a, b: x @ (w + a @ b)  # noqa: E731
    report = sym_optimize(lora).explain(*specs)
    assert not report.rules
    assert any("may be infinite in float16" in r.reason for r in report.routes)
    assert [r.name for r in sym_optimize(lora, numerics="finite").explain(*specs).rules] == ["lora"]


def test_what_a_fold_keeps_to_itself_is_read_by_no_other_route():
    """A norm and product read part of a sum that a fold's epilogue had taken in (ValueError)."""

    def f(a, b, mask, c):
        p = jax.nn.softmax(a @ b.T / 2, where=mask > 0) @ a
        return jnp.exp(c - jnp.max(c, 0)) @ p

    shapes = [(6, 6)] * 4
    agree(f, *shapes, transform="in_second", kernels="always", choices=CHOICES[:3])


def test_not_a_number_may_become_infinite():
    """Σ a/x at x = 0 is inf − inf; as (Σ a)/x it is infinite, which `verify` lets pass too."""
    f = lambda a, x: (a / x).sum(-1)  # noqa: E731
    agree(f, (4, 64), (4, 1))
    a = np.resize(np.array([1, -2], np.float32), (4, 64))
    x = np.array([[0], [1], [2], [0]], np.float32)
    for choice, seed in CHOICES:
        with choosing(Mode("value", choice, seed)):
            got = sym_optimize(f, verify="always")(a, x)
        assert not np.isfinite(got[0])


def test_what_is_spelled_twice_is_read_as_it_is():
    """A product with equal columns was read as its first column, spread: other bits, more work."""

    def f(x):
        half = jnp.full((32, 32), 0.5)
        return jnp.sin(x @ half) + x @ half

    for numerics, products in (("exact", 2), ("reassoc", 0)):
        made = jax.make_jaxpr(sym_optimize(f, numerics=numerics))(jnp.ones((32, 32)))
        assert str(made).count("dot_general[") == products
        assert "slice" not in str(made)
    agree(f, (32, 32), numerics="exact")


def test_pairs_that_a_fold_reads_whole_are_made():
    """A fold did not give what only pairs read, and another fold read these pairs (ValueError)."""

    def f(q, k, v):
        s = q @ k.T
        p = jax.nn.softmax(s) @ (v @ v.T)
        return -jnp.sum((p[:, None] - s[None]) ** 2, -1)

    shapes = (8, 8), (8, 8), (8, 9)
    agree(f, *shapes, transform="in_second", kernels="always", choices=CHOICES[:1])


def test_numbers_are_computed_when_they_are_read():
    """`g² + 0²`, as optax spells a norm, was a sum, to be rewritten for a gain that XLA has too."""

    def norm(g):
        return jnp.sqrt(jnp.sum(jnp.real(g) ** 2 + jnp.imag(g) ** 2))

    def numbers(x):
        two = jnp.full(x.shape, 200, x.dtype)
        return x * ((two * 3 - two) * 2 - 1) ** 2, x - (two - 201)

    report = sym_optimize(norm).explain(jnp.ones((256, 512)))
    assert not report.rules
    assert report.before.seconds == report.after.seconds
    odd = np.array([-0.0, 0.0, 1, np.nan, np.inf], np.float32)
    zeros = lambda x: (x - 0.0, x + 0.0, 0.0 + x, x + -0.0, 0.0 - x, x * x + 0.0)  # noqa: E731
    with choosing(Mode("value", "always", 0)):
        ours = sym_optimize(zeros, numerics="exact")(odd)
    for a, b in zip(ours, jax.jit(zeros)(odd), strict=True):
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))
    agree(norm, (5, 7), choices=CHOICES[:3])
    for dtype in (jnp.uint8, jnp.int32, jnp.float16, jnp.bfloat16, jnp.complex64):
        x = np.arange(12).reshape(4, 3).astype(dtype)
        for a, b in zip(sym_optimize(numbers)(x), jax.jit(numbers)(x), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_product_of_integers_for_a_sum_of_floats():
    """x·A of integers, for x·(W + A·B) with a B of floats, was asked to be bfloat16 (TypeError)."""
    i32 = jax.ShapeDtypeStruct((3, 3), jnp.int32), jax.ShapeDtypeStruct((3, 1), jnp.int32)
    b16 = jax.ShapeDtypeStruct((1, 3), jnp.bfloat16)
    agree(lambda x, w, a, b: x @ (w + a @ b), i32[0], i32[0], i32[1], b16)


def test_a_sum_over_a_product_in_a_tile():
    """Inside a tile, the operands of a summed product were read without its sum (IndexError)."""

    def f(x, y, w):
        v = jnp.sum(jax.lax.dot(x, y), 1)
        return jnp.sum(v @ w.T - w.T @ v[:, None])

    agree(f, (96, 96), (96, 96), (96, 96), choices=CHOICES[:3])

    def g(q, x, y, w):
        return jax.nn.softmax(jnp.sum(x @ y, 1) * q) @ w

    agree(g, (96,), (96, 96), (96, 96), (96, 4), kernels="always", choices=CHOICES[:2])
    h = lambda q, k, w: jax.nn.softmax(jnp.sum(q[:, None] @ k, (1, 2))) @ w  # noqa: E731
    agree(h, (32, 20), (32, 20, 24), (32, 4), kernels="always", choices=CHOICES[:2])


def test_products_of_exponentials_stay_products():
    """softmax(e^a)·e^a was summed as e^(e^a + a - max), where a is lost beside e^a."""

    def f(a, b):
        s = jnp.exp(8 * a @ b.T)
        return jnp.sum(jax.nn.softmax(s) * s, 1)

    for kernels in ("always", "auto"):
        agree(f, (8, 8), (8, 8), kernels=kernels, choices=CHOICES[:2])


def test_a_loop_that_divides_by_zero_stays():
    """c/0 three times was (1/0)³·c + 0, which is NaN where c/0/0/0 is infinite."""

    def f(x):
        return jax.lax.fori_loop(0, 3, lambda i, c: c / 0.0, x)

    x = jnp.array([-1.0, 0.0, 2.0])
    np.testing.assert_array_equal(sym_optimize(f, kernels="always")(x), jax.jit(f)(x))


SCALED = {
    "divided": lambda c, d: c / d,
    "multiplied": lambda c, d: -(c * (1 / d)),
    "chosen": lambda c, d: jnp.where(d > 1, c * 2, c / d),
    "and added": lambda c, d: c / d + 1.0,
}


@pytest.mark.parametrize("name", SCALED)
def test_loops_that_divide_by_what_turns_out_zero(name):
    """The carry plus nothing, divided by zero, was infinite plus 0/0."""

    def f(x, d):
        return jax.lax.fori_loop(0, 3, lambda i, c: SCALED[name](c, d), x)

    x, d = jnp.array([-1.0, 1.0, 2.0]), jnp.array([0.0, -0.0, 4.0])
    g = sym_optimize(f, kernels="always")
    assert [r.taken for r in g.explain(x, d).routes if r.name == "scan"] == [True]
    np.testing.assert_allclose(g(x, d), jax.jit(f)(x, d), rtol=1e-6)
    as_written = sym_optimize(f, kernels="always", numerics="exact").explain(x, d)
    assert str(as_written.after.jaxpr) == str(as_written.before.jaxpr)


def test_nothing_is_taken_out_of_sums_over_nothing():
    """A sum over no rows was divided, by an empty sum: 0/0 instead of 0."""

    def f(x, y):
        return (jnp.exp(x) / jnp.sum(jnp.exp(x))) @ y

    agree(f, (0, 4), (4, 0), transform="in_grad")


def test_classes_that_were_merged_have_no_users():
    """A node moved along with its class kept an operand merged before, which nothing chose."""
    agree(
        lambda x, y, z: jnp.matmul(x, y, precision="highest") @ z,
        *((4, 6), f16(6, 4), (4, 4)),
        transform="in_vmap",
        choices=[("random", 2010800)],
        kernels="always",
    )
