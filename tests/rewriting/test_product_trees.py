"""Orders of products: where factors of no index are multiplied."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.cost.term_cost import shape_of


def _arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s) / 16, jnp.float32) for s in shapes]


def _scaled_elements(f, *args) -> int:
    """Return the number of elements that the program multiplies elementwise."""
    equations = jax_internals.all_equations(jax.make_jaxpr(f)(*args))
    sizes = lambda e: math.prod(shape_of(e.outvars[0]))  # noqa: E731
    return sum(sizes(e) for e in equations if e.primitive.name == "mul")


def test_the_cotangent_of_a_loss_multiplies_a_thin_value_once():
    """The outer products that are gradients of a chain's matrices are not multiplied."""

    def loss(a, b, c, x):
        return jnp.sum(jnp.sin(((a @ b) @ c) @ x))

    n = 256
    args = _arrays((n, n), (n, n), (n, n), (n, 2))
    gradient = jax.grad(sym_optimize(loss), (0, 1, 2, 3))
    assert _scaled_elements(gradient, *args) == 2 * n
    plain = jax.grad(loss, (0, 1, 2, 3))(*args)
    chex.assert_trees_all_close(gradient(*args), plain, rtol=1e-3, atol=1e-5)


def test_a_factor_of_no_index_multiplies_the_smallest_value():
    n = 256
    s, a, b, x = _arrays((), (n, n), (n, n), (n,))
    inside, outside = (lambda s, a, b, x: (s * (a @ b)) @ x), (lambda s, a, x: s * (x @ a @ x))
    assert _scaled_elements(sym_optimize(inside), s, a, b, x) == n
    assert _scaled_elements(sym_optimize(outside), s, a, x) == 1
    got = sym_optimize(inside)(s, a, b, x)
    chex.assert_trees_all_close(got, inside(s, a, b, x), rtol=1e-3, atol=1e-6)


def test_a_factor_of_no_index_leaves_factors_narrow():
    """Matrix units multiply bfloat16; a factor times a float32 number would be float32."""
    s, *rest = _arrays((), (256, 8), (8, 64), (64, 512))
    product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    f = lambda s, a, b, c: product(s * product(a, b), c)  # noqa: E731
    equations = jax_internals.all_equations(
        jax.make_jaxpr(sym_optimize(f))(s, *[x.astype(jnp.bfloat16) for x in rest])
    )
    first = next(e for e in equations if e.primitive.name == "dot_general")
    assert [str(v.aval) for v in first.invars] == ["bfloat16[8,64]", "bfloat16[64,512]"]
