"""Programs whose e-classes went wrong: any equal form of them has the same value."""

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import RulePack, axiom, packs, sym_optimize
from symjax_rewrite.rewriting.right_side import RightSide
from tests.equal_forms import agree, c64, f16
from tests.programs import A, B, W, X, lora


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


def test_class_that_is_a_product_of_its_own_product():
    """a = 1·b and b = 1·a: opening products did not end (RecursionError)."""
    agree(lambda x: jax.nn.one_hot(jnp.arange(3), 3) @ x, (3, 2), transform="in_grad")

    def f(x, y, w):
        return x @ w + (y - 1.0 * (x @ w))

    agree(f, (32, 2), (32, 4), (2, 4), transform="in_grad")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64, jnp.int32])
def test_nothing_is_kept_because_of_an_error(dtype):
    """The names above fail loudly, not by falling back to the program as written."""
    x = jnp.ones((8, 4), dtype)
    sym_optimize(lambda x: x @ (x.T @ x + (x.T @ x).T), on_unsupported="error")(x)


def test_a_constant_term_of_a_sum_is_counted():
    """Σ c + y·Σ c = (n + n·y)·c: the count of a term without factors was lost."""

    def f(x):
        ones = jnp.full((2, 3), 0.5, jnp.float32)
        return jnp.sum(ones) + jnp.tanh(jnp.sum(x)) * jnp.sum(ones)

    agree(f, (2, 3))
    agree(f, f16(2, 3))

    def looped(x, xs, y):
        step = lambda c, t: (c * 0.5 + jnp.tanh(jnp.sum(y)), None)  # noqa: E731
        return jax.lax.scan(step, x, xs)[0]

    agree(looped, (2, 5), (2, 2), (2, 3), transform="in_second")


def test_repeated_product_is_read_whole():
    """A product with equal columns was read as its first column, spread: other bits, more work."""

    def f(x):
        half = jnp.full((256, 256), 0.5)
        return jnp.sin(x @ half) + x @ half

    for numerics, products in (("exact", 2), ("reassoc", 0)):
        made = jax.make_jaxpr(sym_optimize(f, numerics=numerics))(jnp.ones((2048, 256)))
        assert str(made).count("dot_general[") == products
        assert "slice" not in str(made)
    agree(f, (32, 256), numerics="exact")


def test_classes_that_were_merged_have_no_users():
    """A node moved along with its class kept an operand merged before, which nothing chose."""
    agree(
        lambda x, y, z: jnp.matmul(x, y, precision="highest") @ z,
        *((4, 6), f16(6, 4), (4, 4)),
        transform="in_vmap",
        choices=[("random", 2010800)],
        kernels="always",
    )


def test_complex_coefficients_have_no_sign():
    """`distribute` compared complex coefficients with zero (TypeError)."""
    agree(
        lambda x, w, a, b: x @ (w - (a @ b) * (1 + 2j)), c64(3, 4), c64(4, 5), c64(4, 1), c64(1, 5)
    )


def test_form_that_a_rule_gives_up_is_a_refusal():
    @axiom("a·b = a·b", property="associativity", on=("contract",))
    def given_up(context, cls, node):
        yield context.g.ref(cls)
        raise RightSide.of(context, given_up, cls).refused("its product has no order")

    pack = packs.default + RulePack("mine", (given_up,))
    report = sym_optimize(lora, rules=pack).explain(X, W, A, B)
    assert [r.name for r in report.rules] == ["lora"]
    assert "its product has no order" in [r.reason for r in report.routes]
