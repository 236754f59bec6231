"""Comparing the rewritten program with the original at run time (a face)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import jax
import numpy as np

from symjax_rewrite.errors import EquivalenceError
from symjax_rewrite.jax_internals import Tracer
from symjax_rewrite.options import Numerics, Options

# Relative tolerance by numerics class, in units of the dtype's epsilon times √(elements summed);
# the bound is on the largest entry, as for a matrix product.
EPSILONS = {"exact": 0.0, "reassoc": 64.0, "finite": 64.0, "cancels": 4096.0}


class Verified:
    """A jitted function whose results are compared with the original's.

    The mode is `"first"` (the first call at every shape), `"always"`, or `"warn"`: as `"first"`,
    but after a mismatch it warns and runs the original from then on. Everything else is the jitted
    function's. Inside another transformation nothing can be compared, and nothing is.
    """

    def __init__(
        self,
        optimised: Any,
        original: Callable[..., Any],
        rules: Callable[..., list[str]],
        options: Options,
    ) -> None:
        self.optimised, self._original, self._rules = optimised, original, rules
        self._mode, self._numerics = options.verify, options.numerics
        self._seen: set[Any] = set()
        self._refused = False
        self.__wrapped__ = optimised.__wrapped__
        self.__name__ = getattr(optimised, "__name__", "verified")
        self.__doc__ = optimised.__doc__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimised, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(x, Tracer) for x in leaves):
            return self.optimised(*args, **kwargs)
        if self._refused:
            return self._original(*args, **kwargs)
        key = (tree, tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves))
        if key in self._seen and self._mode != "always":
            return self.optimised(*args, **kwargs)
        expected = self._original(*args, **kwargs)
        got = self.optimised(*args, **kwargs)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(expected)):
            return got  # it closes over values traced outside
        self._seen.add(key)
        difference = compare(got, expected, self._numerics)
        if difference is None:
            return got
        error = self._error(difference, ", ".join(self._rules(*args, **kwargs)) or "none")
        if self._mode != "warn":
            raise error
        self._refused = True
        warnings.warn(f"the original runs instead: {error}", stacklevel=2)
        return expected

    def _error(self, difference: str, names: str) -> EquivalenceError:
        return EquivalenceError(
            f"{self.__name__} differs from the original",
            expected=f"agreement at numerics={self._numerics.level!r}",
            got=difference,
            remedy=f"rules in question: {names}; bisect(f, ...) names the one; keep(x) fences a "
            "value, rules=packs.default - (name,) takes a rule out",
        )


def compare(got: Any, expected: Any, numerics: Numerics) -> str | None:
    """Where two results differ beyond the tolerance, as text; None if they agree."""
    ours, tree = jax.tree.flatten(got)
    theirs, other = jax.tree.flatten(expected)
    if tree != other:
        return f"pytree {tree} instead of {other}"
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        found = _compare_leaf(np.asarray(a), np.asarray(b), numerics)
        if found:
            return f"output {k}: {found}"
    return None


def _compare_leaf(a: np.ndarray, b: np.ndarray, numerics: Numerics) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    if b.dtype.kind in "iub" or numerics.level == "exact":
        return None if np.array_equal(a, b, equal_nan=b.dtype.kind in "fc") else "values differ"
    wide = np.complex128 if b.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    finite = np.isfinite(x) & np.isfinite(y)
    same = finite | (x == y) | (np.isnan(y) & ~np.isfinite(x))  # inf − inf may become inf
    if not same.all():
        return f"{int((~same).sum())} entries are not finite on one side only"
    if not finite.any():
        return None
    scale = float(np.abs(y[finite]).max()) or 1.0
    error = float(np.abs(x - y)[finite].max()) / scale
    bits = float(jax.numpy.finfo(b.dtype).eps)
    limit = numerics.rtol if numerics.level == "approx" else EPSILONS[numerics.level] * bits
    limit *= max(1.0, float(np.sqrt(b.size)) / 64) if numerics.level != "approx" else 1.0
    return None if error <= limit else f"relative error {error:.2e}, allowed {limit:.2e}"
