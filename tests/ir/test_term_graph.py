"""Index terms have the values of the equations that they are read from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.term_graph import build
from tests.equal_forms import CHOICES, agree
from tests.fuzz.check import Failure, Mode, check_function, choosing


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
    """A value equal to an array with an axis of size 0 cannot be read from that array."""

    def f(c, w, v):
        def step(i, carry):
            y = jnp.einsum("dbe,b->e", w, v)
            return carry * 0.5 + jnp.tanh(jnp.sum(y + y))

        return jax.lax.fori_loop(0, 3, step, c)

    agree(f, (), (8, 0, 0), (0,), transform="in_jvp")


def test_slices_of_slices_of_nothing():
    """A slice of an empty slice started behind the end (TypeError)."""
    agree(lambda x: jnp.cumprod(jnp.tanh(x), -2), (5, 2), transform="in_jvp")
    agree(lambda x, y: (x * y)[1::2][2:2][:, :1] @ y[:1, :3], (4, 3), (4, 3))


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


def test_residuals_of_platform_branches_are_not_merged():
    """A gradient through `jnp.diag` read the residual of another platform (wrong value)."""
    agree(lambda a, b: jnp.diag(a @ b), (3, 1), (1, 3), transform="in_grad")
    agree(lambda a, b: jnp.diag(a @ b), (3, 3), (3, 3), transform="grad")


def test_operations_on_constants_are_folded():
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


def test_a_choice_by_platform_is_read_without_the_implementation_that_a_loop_dropped():
    def twice(x):
        return lax.platform_dependent(x, cpu=lambda x: x + x, default=lambda x: 2.0 * x)

    program = flatten(jax.make_jaxpr(twice)(jnp.ones(3)))
    (choice,) = [e for e in program.equations if e.name == "cond"]
    whole = build(program.copy())
    program.equations = [e for e in program.equations if not set(e.outvals) & {*choice.same_as}]
    cut = build(program)
    nodes = [node_of(t.graph, t.view(choice.outvals[0]).cls).op for t in (whole, cut)]
    assert nodes == ["add", "native"]
