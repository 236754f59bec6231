"""Forms that count fewer operations and take longer are not chosen."""

import jax
import jax.numpy as jnp

from symjax_rewrite import sym_optimize


def test_forces_of_all_pairs_stay_a_fused_loop():
    """Σⱼ uᵢⱼ·(xᵢ − xⱼ) became products of a matrix and a vector for every i: twice slower."""

    def potential(x, m):
        gap = x[:, None] - x[None, :]
        distance = jnp.sqrt(jnp.sum(gap**2, -1) + 1e-2)
        return -0.5 * jnp.sum(m[:, None] * m[None, :] / distance)

    forces = sym_optimize(jax.grad(potential), kernels="off")
    report = forces.explain(jnp.ones((256, 3)), jnp.ones(256))
    assert "dot_general" not in str(report.after.jaxpr)
