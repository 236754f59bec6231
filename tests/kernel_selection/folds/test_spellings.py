"""Every spelling of attention is a fold: nothing over queries and keys is made, nothing changes."""

import jax
import numpy as np
import pytest

from symjax_rewrite import jax_internals, sym_optimize
from tests.kernel_selection.folds import variants  # noqa: F401  it adds to the table
from tests.kernel_selection.folds.arrangements import FOLDS, INSIDE
from tests.kernel_selection.folds.spellings import FUNCTIONS, B, T, arrays, tolerance

ALL = {**FUNCTIONS, **INSIDE}


def bodies(eqn):
    """The jaxprs an equation carries; a fold's own are not opened."""
    if eqn.primitive.name == "cond" and "branches_platforms" in str(eqn.params.keys()):
        return
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


ONE_BLOCK = {"t5"}  # has no kernel for GPUs to hide its one block of this size (test_tables.py)


def pairwise(jaxpr):
    """Equations that make an array over queries and keys."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "platform_index" or is_fold(eqn):
            continue
        for v in eqn.outvars:
            shape = tuple(getattr(v.aval, "shape", ()))
            computed = eqn.primitive.name in ("dot_general", "exp", "exp2", "div", "mul", "sub")
            if computed and shape.count(T) >= 2 and np.prod(shape) >= B * T * T:
                yield f"{eqn.primitive.name}: {v.aval}"
        for inner in bodies(eqn):
            yield from pairwise(inner)


def is_fold(eqn):
    return eqn.primitive.name == "cond" and any(
        jax_internals.has_primitive(branch, "pallas_call") for branch in eqn.params["branches"]
    )


def check_values(routed, fun, args, name):
    pairs = zip(jax.tree.leaves(routed(*args)), jax.tree.leaves(jax.jit(fun)(*args)), strict=True)
    for ours, written in pairs:
        assert (ours.dtype, ours.shape) == (written.dtype, written.shape)
        a, b = (np.asarray(x, np.float32) for x in (ours, written))
        np.testing.assert_allclose(a, b, tolerance(name), tolerance(name))


@pytest.mark.parametrize("name", ALL)
def test_spelling_is_a_fold(name):
    fun, args = ALL[name], arrays()
    routed = sym_optimize(fun, kernels="always", on_unsupported="error")
    report = routed.explain(*args)
    taken = [r.taken for r in report.routes if r.name == "fold"]
    assert taken.count(True) == FOLDS.get(name, 1), report
    if name not in ONE_BLOCK:
        assert not list(pairwise(report.after.jaxpr.jaxpr))
    check_values(routed, fun, args, name)
