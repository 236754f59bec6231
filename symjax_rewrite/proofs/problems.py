"""Pairs of functions to compare, traced at their specs and at concrete sizes.

The functions `f` and `g` of `"f32[n,d]"` are traced once with sizes n and d, and at n = 2, d = 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export, lax

from symjax_rewrite import jax_internals
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.sizes import Assumptions
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.options import Budget
from symjax_rewrite.proofs.verdicts import Different
from symjax_rewrite.spec_texts import parse_argument, spec_text

_BRACKETS = str.maketrans(dict.fromkeys("[]'.", ""))


@dataclass(frozen=True)
class Problem:
    """Two functions of flat arrays, traced.

    kinds: the structure of their results. names: of their arguments. facts: about sizes.
    """

    functions: tuple[Callable[..., Any], Callable[..., Any]]
    leaves: list[Any]
    traced: tuple[ClosedJaxpr, ClosedJaxpr]
    kinds: tuple[Any, Any]
    names: tuple[str, ...]
    facts: Assumptions
    numerics: str
    budget: Budget

    @classmethod
    def of(cls, f: Any, g: Any, args: Any, named: Any, *options: Any) -> Problem:
        """Trace two functions."""
        functions, traced, kinds, leaves = [], [], [], []
        for name, fun in (("f", f), ("g", g)):
            flat, leaves = jax_internals.of_leaves(fun, args, named, jax.ShapeDtypeStruct)
            try:
                closed, kind = jax_internals.make_jaxpr(flat, *leaves)
            except Exception as error:  # tracing runs the user's function
                lines = str(error).strip().splitlines() or ["no message"]
                what = f"{name} cannot be traced: {type(error).__name__}: {lines[0]}"
                given = ", ".join(map(spec_text, leaves)) or "no arguments"
                raise UsageError(what, got=given) from error
            functions.append(flat)
            traced.append(closed)
            kinds.append(kind)
        paths = jax.tree_util.tree_flatten_with_path((args, named))[0]
        arrays = [path for path, leaf in paths if isinstance(leaf, jax.ShapeDtypeStruct)]
        names = tuple(["x" + "".join(map(str, p[1:])).translate(_BRACKETS) for p in arrays])
        return cls(tuple(functions), leaves, tuple(traced), tuple(kinds), names, *options)

    def structure(self) -> Different | None:
        """Return the difference in structure, shapes or dtypes of the results, if any."""
        if self.kinds[0] != self.kinds[1]:
            return Different(f"f returns {self.kinds[0]}, g returns {self.kinds[1]}")
        for k, (x, y) in enumerate(zip(*(c.out_avals for c in self.traced), strict=True)):
            if x.dtype != y.dtype or tuple(x.shape) != tuple(y.shape):
                reason = f"output {k} is {spec_text(x)} in f and {spec_text(y)} in g"
                return Different(reason, output=k)
        return None

    @functools.cached_property
    def both(self) -> ClosedJaxpr:
        """Return the program of both functions; comparisons relate the axes of their results."""
        f, g = map(jax_internals.jaxpr_as_fun, self.traced)

        def run(*args: Any) -> Any:
            left, right = f(*args), g(*args)
            return [*left, *right, *map(lax.eq, left, right)]

        return jax_internals.make_jaxpr(run, *self.leaves)[0]

    @functools.cached_property
    def _known(self) -> dict[tuple[tuple[str, int], ...], list[ClosedJaxpr]]:
        return {(): list(self.traced)}

    def at(self, sizes: dict[str, int]) -> list[ClosedJaxpr]:
        """Return both functions traced at concrete sizes."""
        key = tuple(sizes.items())
        if key not in self._known:
            specs = [concrete(s, sizes) for s in self.leaves]
            self._known[key] = [jax_internals.make_jaxpr(f, *specs)[0] for f in self.functions]
        return self._known[key]


def concrete(spec: Any, sizes: dict[str, int], dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Return a spec at concrete sizes, of its own dtype or another."""
    shape = tuple(jax_internals.dim_at(d, sizes) for d in spec.shape)
    weak = bool(getattr(spec, "weak_type", False))
    return jax.ShapeDtypeStruct(shape, dtype or spec.dtype, weak_type=weak)


def specs_of(tree: Any, scope: export.SymbolicScope) -> Any:
    """Return a tree of arguments with texts as specs; arrays and numbers become specs too."""

    def spec(x: Any) -> Any:
        if isinstance(x, str):
            return parse_argument(x, scope)
        if isinstance(x, int | float | complex) and not isinstance(x, bool):
            return jax.ShapeDtypeStruct((), jax.numpy.asarray(x).dtype, weak_type=True)
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            weak = bool(getattr(x, "weak_type", False))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)
        return x

    return jax.tree.map(spec, tree)


def scope_of(tree: Any) -> export.SymbolicScope:
    """Return the scope of the symbolic sizes of specs, or a new one."""
    dims = (d for leaf in jax.tree.leaves(tree) for d in getattr(leaf, "shape", ()))
    return next((d.scope for d in dims if jax_internals.is_symbolic(d)), export.SymbolicScope())


def is_wide(tree: Any) -> bool:
    """Return True if 64-bit types are enabled, or asked for."""
    dtypes = {str(getattr(x, "dtype", "")) for x in jax.tree.leaves(tree)}
    return bool(dtypes & {"float64", "complex128"}) or bool(jax.config.read("jax_enable_x64"))
