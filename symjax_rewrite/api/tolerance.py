"""The test that two results of a program differ by rounding alone, and its use at run time.

The tolerance follows from the dtypes, the accumulators and the lengths of the sums of the program
(`rounding`), never from the number of entries of a result. The test applies to the whole result and
to every slice across each axis, to the root mean square and to the largest entry: roundings average
out over many entries, while a wrong mask in one row does not.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import jax
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.api.rounding import relative_bound, spread, unit_roundoff
from symjax_rewrite.errors import EquivalenceError
from symjax_rewrite.jax_internals import ClosedJaxpr, Tracer
from symjax_rewrite.options import Numerics, Options

MEAN = 3.0  # λ for a root mean square
LARGEST = 6.0  # λ for the largest entry
ENTRIES = 64  # minimum entries of a slice for the test of its root mean square
INFORMATIVE = 2.0**-6  # relative bound above which `spread` is measured


@dataclass
class Rounding:
    """The rounding errors of one program at its inputs `values`."""

    closed: ClosedJaxpr
    values: Sequence[Any]

    @classmethod
    def of(cls, fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Rounding:
        """Trace a function of arrays; leaves that are no arrays stay constants."""
        flat, values = jax_internals.of_leaves(fun, args, kwargs, (jax.Array, np.ndarray))
        return cls(jax_internals.make_jaxpr(flat, *values)[0], values)

    def part(self) -> float:
        """Return the relative error if nothing cancels; 0 if the bound is too loose."""
        bound = relative_bound(self.closed)
        return bound if bound <= INFORMATIVE else 0.0

    def spread(self, k: int) -> np.ndarray:
        """Return the rounding error of the entries of output `k`."""
        return self._spread[k]

    @functools.cached_property
    def _spread(self) -> list[np.ndarray]:
        moved = jax.jit(lambda *values: spread(self.closed, values))(*self.values)
        return [np.asarray(x, np.float64) for x in moved]


def difference(
    got: Any, expected: Any, numerics: Numerics, rounding: Callable[[], Rounding]
) -> str | None:
    """Return as text the place where two results differ beyond rounding; None if they agree."""
    ours, tree = jax.tree.flatten(got)
    theirs, other = jax.tree_util.tree_flatten_with_path(expected)
    if tree != other:
        return f"pytree {tree} instead of {other}"
    once = functools.cache(rounding)
    for k, (a, (path, b)) in enumerate(zip(ours, theirs, strict=True)):
        found = _leaf(_numbers(a), _numbers(b), numerics, k, once)
        if found:
            return f"output {jax.tree_util.keystr(path) or k}: {found}"
    return None


def _numbers(x: Any) -> np.ndarray:
    """Return a result as a NumPy array; a key of random numbers as its words."""
    is_key = jax.numpy.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _leaf(
    a: np.ndarray, b: np.ndarray, numerics: Numerics, k: int, rounding: Callable[[], Rounding]
) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    floats = unit_roundoff(b.dtype) > 0.0
    if np.array_equal(a, b, equal_nan=floats):
        return None
    if numerics.level == "exact":
        return "values differ"
    if not floats:
        moved = 0 if b.dtype.kind not in "iub" else int((rounding().spread(k) > 0).sum())
        count = int((a != b).sum())
        text = f"{count} entries differ, rounding moves {moved}"
        return None if count <= MEAN * moved else text
    wide = np.complex128 if b.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    finite = np.isfinite(x) & np.isfinite(y)
    same = finite | (x == y) | (np.isnan(y) & ~np.isfinite(x))  # inf − inf may become inf
    if not same.all():
        return f"{int((~same).sum())} entries are not finite on one side only"
    with np.errstate(over="ignore", invalid="ignore"):
        error, size = np.abs(np.where(finite, x - y, 0)), np.abs(np.where(finite, y, 0))
    if numerics.level == "approx" and error.max() <= numerics.rtol * size.max():
        return None
    unit, least = unit_roundoff(b.dtype), _least(b.dtype)
    if _unexplained(error, max(rounding().part(), unit) * size, least) is None:
        return None
    noise = np.hypot(rounding().spread(k), unit * size)
    return _unexplained(error, noise, least)


def _least(dtype: np.dtype) -> float:
    """Return the distance of numbers near 0, where subnormal numbers may be flushed to 0."""
    info = jax.numpy.finfo(dtype)
    flushed = float(info.tiny) < 1e-30  # float16 is computed in float32, which keeps its subnormals
    return float(info.tiny if flushed else info.smallest_subnormal)


def _unexplained(error: np.ndarray, noise: np.ndarray, least: float) -> str | None:
    """Return the first block of entries whose error exceeds its noise, as text.

    Blocks are the whole array and, for each axis, the slices at one index of the axis.
    """
    scale = float(max(error.max(), noise.max())) or 1.0
    if not np.isfinite(scale):
        return "the difference overflows"
    error, noise, least = error / scale, noise / scale, least / scale
    root_mean = lambda x, axis: np.sqrt(np.mean(x * x, axis=axis))  # noqa: E731
    axes: list[int | None] = [None]
    axes += [i for i, n in enumerate(error.shape) if n > 1 and error.size >= ENTRIES * n]
    for axis in axes:
        others = tuple(i for i in range(error.ndim) if i != axis)
        many = error.size >= ENTRIES * (1 if axis is None else error.shape[axis])
        mean = MEAN if many else LARGEST  # few samples of an error may be small by chance
        for name, factor, of in (("mean", mean, root_mean), ("largest", LARGEST, np.max)):
            far, limit = of(error, axis=others), factor * of(noise, axis=others) + 4 * least
            if np.all(far <= limit):
                continue
            at = int(np.argmax(far - limit))
            place = "" if axis is None else f" at index {at} of axis {axis}"
            far, limit = np.ravel(far)[at] * scale, np.ravel(limit)[at] * scale
            return f"a {name} difference of {far:.3g}{place}, rounding explains {limit:.3g}"
    return None


def copied(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return arguments with copies of the arrays, which a call may donate."""
    copy = lambda x: x.copy() if isinstance(x, jax.Array) else x  # noqa: E731
    return jax.tree.map(copy, (args, kwargs))


class Verified:
    """A jitted function whose results are compared with the results of the original.

    `"always"` compares every call, `"first"` and `"warn"` the first call at every shape; after a
    mismatch `"warn"` warns and runs the original from then on. Other attributes are those of the
    jitted function. Calls inside another transformation are not compared. A call that is compared
    donates copies of its arguments; the original donates none.
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
        settings = jax_internals.jit_settings(optimised) or {}
        self._donates = any(settings.get(k) for k in ("donate_argnums", "donate_argnames"))
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
        given, named = copied(args, kwargs) if self._donates else (args, kwargs)
        got = self.optimised(*given, **named)
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
