"""The block of temporaries: its size as XLA allocates it, and its fresh memory in choices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.cost.temporaries import (
    FreshMemory,
    Temporaries,
    may_hold_fresh,
    temporaries_of,
)
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.reports.program_cost import ProgramTerms


def kernel(x: Any) -> Any:
    """Return a Gaussian kernel. x: float[n, d]."""
    return jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1) / 2)


def independence(x: Any, y: Any) -> Any:
    """Return the Hilbert-Schmidt independence criterion. x, y: float[n, d]."""
    H = jnp.eye(len(x)) - 1 / len(x)
    return jnp.trace(kernel(x) @ H @ kernel(y) @ H)


def smoothed(x: Any, y: Any) -> Any:
    return jnp.sum(y * (kernel(x) @ y))


def copied(x: Any, y: Any) -> Any:
    """Read differences along both of their axes, in products with a batch each."""
    d, w = x[:, None] - x[None], kernel(y)
    return jnp.einsum("ij,ijk->ik", w, d) * jnp.einsum("ij,ijk->jk", w, d)


def weighted(x: Any, y: Any) -> Any:
    """The same with weights by row: XLA computes their copy from what they are made of."""
    d, w = x[:, None] - y[None], jnp.exp(x @ y.T) * (1 + jnp.sum(x, 1)[:, None])
    return jnp.einsum("ij,ijk->ik", w, d), jnp.einsum("ij,ijk->jk", w, d)


def counted(x: Any, y: Any) -> Any:
    """XLA stores truth values as numbers and counts them in pieces."""
    return jnp.sum(x @ y.T < 0.5, 1)


def contrasted(x: Any, y: Any) -> Any:
    """XLA gathers the diagonal of the scores in memory."""
    s = x @ y.T / 0.1
    return jnp.mean(jax.nn.logsumexp(s, 1) - jnp.diag(s))


def highway(x: Any, y: Any) -> Any:
    """Half of the temporaries are in the memory of the result."""
    h = x * 2
    return 0.5 * (h + h @ y[:24])


@pytest.mark.parametrize(
    ("fun", "differentiated", "off"),
    [
        (smoothed, True, 0.2), (copied, False, 0.2), (weighted, False, 0.01),
        (counted, False, 0.2), (contrasted, False, 0.2), (highway, False, 0.2),
    ],
)  # fmt: skip
def test_the_block_is_as_large_as_xla_makes_it(fun: Any, differentiated: bool, off: float) -> None:
    if differentiated:
        fun = jax.grad(fun, (0, 1))
    specs = [jax.ShapeDtypeStruct((300, 24), "float32")] * 2
    terms = ProgramTerms.of(flatten(jax.make_jaxpr(fun)(*specs)))
    found = temporaries_of(terms.t, terms.need, terms.model(CPU, {})).bytes()
    made: Any = jax.jit(fun).lower(*specs).compile().memory_analysis()
    assert found == pytest.approx(made.temp_size_in_bytes, rel=off)


@pytest.mark.parametrize(
    ("head", "fresh"),
    [
        (lambda x, w: jnp.tanh(x) @ w.T, False),  # as of a language model
        (lambda x, w: jnp.sum(jnp.tanh(jnp.tanh(x) @ w.T), 1), True),
    ],
)
def test_results_and_transposed_weights_are_not_in_the_block(head: Any, fresh: bool) -> None:
    specs = [jax.ShapeDtypeStruct((n, 200), "float32") for n in (200, 50_000)]
    assert may_hold_fresh(flatten(jax.make_jaxpr(head)(*specs)), CPU) == fresh


@pytest.mark.parametrize(("points", "features", "taken"), [(300, 24, False), (200, 24, True)])
def test_a_form_whose_copies_need_fresh_memory_is_refused(
    points: int, features: int, taken: bool
) -> None:
    """Two stored differences and a copy of each, 8.6 MB, are fresh in every call together."""
    spec = jax.ShapeDtypeStruct((points, features), "float32")
    report = sym_optimize(jax.grad(independence, (0, 1))).explain(spec, spec)
    assert ("contraction_order" in [r.name for r in report.rules]) == taken, report


def test_memory_of_pairs_that_a_fold_does_not_store_is_no_price(one_device: None) -> None:
    """The form needs fresh memory for differences; folds of it store none."""
    spec = jax.ShapeDtypeStruct((600, 8), "float32")
    report = sym_optimize(jax.grad(independence, (0, 1))).explain(spec, spec)
    assert "contraction_order" in [r.name for r in report.rules], report
    assert "fold" in [r.name for r in report.routes if r.taken], report


def test_a_smaller_block_costs_nothing_where_prices_by_value_fall_more() -> None:
    before, after = FreshMemory(0.04, 0.0), FreshMemory(0.02, 0.003)
    assert after.beyond(before) == 0
    assert FreshMemory(0.05, 0.02).beyond(before) == pytest.approx(0.01)


def test_a_kernel_holds_all_that_it_reads_and_writes() -> None:
    """Without a term of 30 bytes, its operand of 10 and a new result of 5 are held together."""
    block = Temporaries([(1, (10.0, 0, 1)), (2, (30.0, 1, 3)), (3, (8.0, 3, 4))], [])
    assert block.bytes() == 40
    assert block.replaced({2}, {1: 10.0, 7: 5.0}).bytes() == 23
    assert block.replaced({2}, {}).bytes() == 10
    assert block.replaced({9}, {1: 10.0, 7: 5.0}) == block


def test_folds_as_large_as_their_terms_save_no_fresh_memory(one_device: None) -> None:
    """Gradients of filters of pairs: a fold with the results of its pairs took 1.3 to 1.4 times."""

    def filtered(x: Any, h: Any, first: Any, second: Any) -> Any:
        r = jnp.sqrt(jnp.sum((x[:, None] - x) ** 2, -1) + 1e-6)
        near = jnp.exp(-10 * (r[..., None] - jnp.linspace(0, 5, len(first))) ** 2)
        return jnp.sum(jnp.sum(h * (jax.nn.softplus(near @ first) @ second), 1) ** 2)

    shapes = (200, 3), (200, 64), (50, 64), (64, 64)
    specs = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    report = sym_optimize(jax.grad(filtered)).explain(*specs)
    assert not any(r.taken for r in report.routes), report


def test_a_fold_that_pays_by_fresh_memory_pays_at_rest_too(one_device: None) -> None:
    """A contrastive loss and its gradient: 1.3 times as long at rest, 0.9 under load."""

    def contrasted(x: Any, labels: Any) -> Any:
        x = x / jnp.linalg.norm(x, axis=1, keepdims=True)
        s, others = x @ x.T / 0.1, ~jnp.eye(len(x), dtype=bool)
        p = s - jax.nn.logsumexp(jnp.where(others, s, -jnp.inf), 1, keepdims=True)
        alike = (labels[:, None] == labels) & others
        return -jnp.mean(jnp.sum(jnp.where(alike, p, 0), 1) / jnp.maximum(alike.sum(1), 1))

    given = [jax.ShapeDtypeStruct((2000, 128), "float32"), jax.ShapeDtypeStruct((2000,), "int32")]
    report = sym_optimize(jax.value_and_grad(contrasted)).explain(*given)
    assert not any(r.taken for r in report.routes), report
