"""Importing the package: its public names, and the modules that it does not load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import symjax_rewrite

ROOT = Path(__file__).parents[1]
HEAVY = (
    "chex", "jax.experimental.pallas", "jax.extend", "jax_triton", "matplotlib", "sympy",
    "symjax_rewrite.api.differentiation", "symjax_rewrite.reports.builder",
    "symjax_rewrite.kernel_selection", "symjax_rewrite.loops", "symjax_rewrite.optimizer",
    "symjax_rewrite.pallas_kernels", "symjax_rewrite.proofs", "symjax_rewrite.testing",
)  # fmt: skip
PUBLIC = {
    "Budget", "Options", "Report", "RulePack", "__version__", "audit", "axiom", "bisect",
    "disabled", "errors", "guard", "keep", "lemma", "packs", "prove_equal", "route",
    "sym_optimize", "testing",
}  # fmt: skip


def loaded(statement: str) -> set[str]:
    """The modules that a fresh Python holds after a statement."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "symjax_rewrite"}


def test_import_loads_no_module_of_the_package() -> None:
    assert ours(loaded("import symjax_rewrite")) == {"symjax_rewrite"}


@pytest.mark.parametrize(
    "statement",
    [
        "import symjax_rewrite",
        "from symjax_rewrite import sym_optimize",
        "from symjax_rewrite import RulePack, axiom, lemma, packs, route",
        "from symjax_rewrite import Budget, Options, Report, bisect, disabled, errors, keep",
        "from symjax_rewrite import sym_optimize\nsym_optimize(lambda x: x)",
    ],
)
def test_heavy_modules_load_when_used(statement: str) -> None:
    assert loaded(statement) & set(HEAVY) == set()


def test_modules_of_loops_and_approximations_load_when_used() -> None:
    statement = """
import jax.numpy as jnp
from symjax_rewrite import sym_optimize
sym_optimize(lambda x: jnp.tanh(x @ x)).explain(jnp.ones((8, 8)))
"""
    folder = "symjax_rewrite.kernel_selection"
    modules = {f"{folder}.far_fields.selection", f"{folder}.scans.selection", "jax.extend"}
    assert loaded(statement) & modules == set()


def test_heavy_modules_are_found_where_they_are_loaded() -> None:
    modules = loaded("import symjax_rewrite.optimizer, symjax_rewrite.pallas_kernels.fold.triton")
    assert {"symjax_rewrite.optimizer", "jax.experimental.pallas"} <= modules & set(HEAVY)


def test_optimiser_loads_no_pallas() -> None:
    modules = loaded("import symjax_rewrite.optimizer, symjax_rewrite.testing")
    assert modules & {"jax.experimental.pallas", "chex", "sympy", "matplotlib"} == set()


def test_package_shows_its_public_names() -> None:
    assert set(dir(symjax_rewrite)) == set(symjax_rewrite.__all__) == PUBLIC
    assert all(hasattr(symjax_rewrite, name) for name in PUBLIC)


def test_submodules_are_not_shown() -> None:
    import symjax_rewrite.optimizer  # sets the attribute

    assert "optimizer" not in dir(symjax_rewrite)


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from symjax_rewrite import *", names)
    assert set(names) - {"__builtins__"} == PUBLIC


def test_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="'symjax_rewrite' has no attribute 'optimize'"):
        symjax_rewrite.optimize  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
