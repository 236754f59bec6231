"""Transposed values of long chains are found in time that grows as the chain."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite.ir import transposed_values
from symjax_rewrite.ir.dataflow import makers_of, users_of
from symjax_rewrite.ir.flat_program import flatten


def test_a_value_that_others_read_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors that are read again after the transposition hold it up at every step."""
    looked: list[int] = []
    operands = transposed_values._operands

    def counted(equations: Any) -> list[int]:
        equations = list(equations)
        looked.append(len(equations))
        return operands(equations)

    def chain(a: jax.Array, b: jax.Array) -> Any:
        z, y, factors = a, a @ b, []
        for _ in range(40):
            factors.append(z := jnp.sin(z) * b)
        for z in factors:
            y = jnp.tanh(y) * z
        return y.T, factors

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program = flatten(jax.make_jaxpr(chain)(x, x))
    (turn,) = [e for e in program.equations if e.name == "transpose"]
    monkeypatch.setattr(transposed_values, "_operands", counted)
    found = transposed_values.transposed_value(
        turn, makers_of(program.equations), users_of(program.equations), set(program.outputs)
    )
    assert found is not None
    assert (len(found.equations), len(found.stored)) == (80, 40)
    assert sum(looked) < 5 * len(program.equations)
