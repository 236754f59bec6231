"""A softmax is divided after its product where the rows are longer than the result's are wide."""

import jax
import numpy as np
import pytest

from symjax_rewrite import sym_optimize


def weighted(scores: jax.Array, values: jax.Array) -> jax.Array:
    return jax.nn.softmax(scores, axis=-1) @ values


@pytest.mark.parametrize(
    ("rows", "columns", "width", "is_deferred"),
    [(512, 4096, 16, True), (128, 16384, 8, True), (512, 256, 256, False)],
)
def test_division_follows_the_product_of_long_rows(
    rows: int, columns: int, width: int, is_deferred: bool
) -> None:
    specs = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, columns), (columns, width))]
    report = sym_optimize(weighted, device="cpu").explain(*specs)
    (product,) = [e for e in report.after.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert (product is not report.after.jaxpr.eqns[-1]) == is_deferred


def test_values_of_the_deferred_division() -> None:
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((64, 4096), "f4"), rng.standard_normal((4096, 16), "f4")
    scores[0] *= 1e4  # the shift by the maximum stays
    made = sym_optimize(weighted, device="cpu")(scores, values)
    np.testing.assert_allclose(made, jax.jit(weighted)(scores, values), rtol=1e-4, atol=1e-5)
