"""Models of flax, equinox and haiku mean the same under `sym_optimize`, derivatives included."""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize

FOLDER = Path(__file__).parents[1] / "experiments" / "real_models"
NEEDS = {
    "from_flax": ("flax",),
    "from_equinox": ("equinox",),
    "from_haiku": ("haiku",),
    "from_training": ("flax", "equinox", "optax"),
}
# One of each kind, those that compile fast; the experiment has all.
KEPT = {
    "linen MLP",
    "linen attention",
    "linen LSTM",
    "linen GRU",
    "nnx CNN",
    "nnx LoRA",
    "equinox MLP",
    "equinox GRU",
    "equinox block, rotary",
    "haiku LSTM, dynamic_unroll",
    "training an equinox MLP, 3 steps",
}
WITH_GRADIENTS = {"linen LSTM", "nnx LoRA", "equinox MLP"}


def load(name: str) -> ModuleType:
    """A module of the experiment; they find each other by name."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def models() -> list:
    """Name and maker of every model; a skip in place of what lacks a package."""
    out = []
    for module, packages in NEEDS.items():
        lacking = [name for name in packages if importlib.util.find_spec(name) is None]
        if lacking:
            reason = f"needs {', '.join(lacking)}: pip install 'symjax_rewrite[dev]'"
            out.append(pytest.param(None, id=module, marks=pytest.mark.skip(reason=reason)))
        else:
            made = load(module).MODELS
            out += [pytest.param(m, id=name) for name, m in made.items() if name in KEPT]
    return out


compare = load("compare")


@pytest.fixture
def kept(caplog: pytest.LogCaptureFixture):
    """Fails a test in which the optimiser fell back to the original because of an error."""
    with caplog.at_level(logging.WARNING, "symjax_rewrite"):
        yield
    assert [r.getMessage() for r in caplog.records if r.name == "symjax_rewrite"] == []


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("make", models())
def test_same_results(make: Callable) -> None:
    fun, args = make()
    wanted = jax.jit(fun)(*args)
    assert compare.difference(sym_optimize(lambda *x: fun(*x))(*args), wanted) <= 1


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("make", [p for p in models() if p.id in WITH_GRADIENTS])
def test_same_gradients(make: Callable) -> None:
    fun, args = make()

    def loss(apply: Callable, *x: Any) -> jax.Array:
        leaves = jax.tree.leaves(apply(*x))
        return sum((jnp.sum(y.astype(jnp.float32) ** 2) for y in leaves), jnp.float32(0))

    def gradient(apply: Callable) -> Any:
        return jax.jit(jax.grad(lambda *x: loss(apply, *x)))(*args)

    assert compare.difference(gradient(sym_optimize(lambda *x: fun(*x))), gradient(fun)) <= 1


def test_difference_is_seen() -> None:
    x = jnp.arange(4.0)
    assert compare.difference(x, x) == 0
    assert compare.difference(x + 1e-3, x) > 1
    for other in (x.astype(jnp.float16), x[:3], (x,), x.at[0].set(jnp.nan)):
        with pytest.raises(AssertionError):
            compare.difference(other, x)
    with pytest.raises(AssertionError):
        compare.difference(jnp.asarray(1.0), jnp.sum(jnp.ones(1)))
