"""Programs one of whose sizes is a name, exported as they are and optimised."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from symjax_rewrite import sym_optimize
from symjax_rewrite.api.sym_optimize import unsupported
from tests.fuzz.check import (
    Failure,
    InvalidProgramError,
    Mode,
    check,
    choosing,
    judge_compiled,
    root_cause,
)
from tests.fuzz.programs import Program


def check_named(program: Program, mode: Mode) -> Failure | str:
    """As `check`, where the mode asks for a size that is a name: its commonest above one.

    Raises:
        InvalidProgramError: the original does not run, or not with a size that is a name.
    """
    if not mode.symbolic:
        return check(program, mode)
    f, specs, values = program.function(), program.specs(), program.arguments(1)
    if any(s.weak_type for s in specs):
        raise InvalidProgramError("a Python number has no size")
    named = _named(specs)
    try:
        original = export.export(jax.jit(f))(*named)
        closed = jax.make_jaxpr(f)(*specs)
    except Exception as error:
        raise InvalidProgramError(f"{type(error).__name__}: {error}") from error
    unable = "error" if unsupported(closed) is None else "keep"
    try:
        with choosing(mode):
            optimised: Any = sym_optimize(f, numerics=mode.numerics, on_unsupported=unable)
            ours = export.export(optimised)(*named)
    except Exception as error:
        return Failure(f"exception {type(error).__name__}", root_cause(error))
    if (ours.out_tree, ours.out_avals) != (original.out_tree, original.out_avals):
        return Failure("avals", f"{original.out_avals} became {ours.out_avals}")
    args = [jnp.asarray(v) for v in values]
    theirs, mine = (jax.tree.leaves(e.call(*args)) for e in (original, ours))
    return judge_compiled(closed, values, mine, theirs)


def _named(specs: list[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    sizes = collections.Counter(d for s in specs for d in s.shape if d > 1)
    if not sizes:
        raise InvalidProgramError("no size to name")
    size = max(sizes, key=lambda d: (sizes[d], d))
    (n,) = export.symbolic_shape("n")
    return [
        jax.ShapeDtypeStruct(tuple(n if d == size else d for d in s.shape), s.dtype) for s in specs
    ]
