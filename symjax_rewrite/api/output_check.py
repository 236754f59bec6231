"""Comparison of the rewritten program with the original at run time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import jax
import numpy as np

from symjax_rewrite.api.tolerance import Rounding, difference
from symjax_rewrite.errors import EquivalenceError
from symjax_rewrite.jax_internals import Tracer
from symjax_rewrite.options import Options


class Verified:
    """A jitted function whose results are compared with the results of the original.

    `"always"` compares every call, `"first"` and `"warn"` the first call at every shape; after a
    mismatch `"warn"` warns and runs the original from then on. Other attributes are those of the
    jitted function. Calls inside another transformation are not compared.
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
            return got  # the function captures tracers
        self._seen.add(key)
        rounding = lambda: Rounding.of(self.__wrapped__, args, kwargs)  # noqa: E731
        found = difference(got, expected, self._numerics, rounding)
        if found is None:
            return got
        names = ", ".join(self._rules(*args, **kwargs)) or "none"
        error = EquivalenceError(
            f"{self.__name__} differs from the original",
            expected=f"agreement at numerics={self._numerics.level!r}",
            got=found,
            remedy=f"rules in question: {names}; bisect(f, ...) names the one; keep(x) fences a "
            "value, rules=packs.default - (name,) takes a rule out",
        )
        if self._mode != "warn":
            raise error
        self._refused = True
        warnings.warn(f"the original runs instead: {error}", stacklevel=2)
        return expected
