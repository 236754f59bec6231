"""The automatic test of a route: its kernel must compute its pattern where its condition holds.

Both run through JAX, since a kernel may be a Pallas call. The tolerance is that of `verify=`:
the rounding of the dtypes and of the lengths of the sums of the pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite.api.tolerance import Rounding, difference
from symjax_rewrite.errors import RuleError
from symjax_rewrite.options import Numerics
from symjax_rewrite.rewriting.lemma_matching import specs_of
from symjax_rewrite.rewriting.route_matching import PatternRoute, compile_route
from symjax_rewrite.spec_texts import spec_text

DTYPES = ("float32", "bfloat16", "float16")
# Sizes of the letters in turn: distinct small ones, multiples of a tile, one size for all.
SIZES = ((3, 5, 2, 7, 4, 6), (64, 128, 32, 16), (128,), (1,))
SCALES = ((1.0, 0.0), (1e-3, 0.0), (8.0, 2.0))  # factor and offset of the samples


def check_route(route: PatternRoute, examples: Sequence[Sequence[Any]] = ()) -> int:
    """Compare a route's kernel with its pattern; return the number of tables of sizes compared.

    Args:
        route: a result of `route`.
        examples: arguments, as `jax.ShapeDtypeStruct`s, to try besides those of `SIZES`.

    Raises:
        RuleError: the kernel raises, or gives another shape, dtype or value; or the condition holds
            at no arguments that are tried.
    """
    compared = 0
    for specs in (*examples, *_specs(route)):
        if not route.refusal(specs):
            _compare(route, specs)
            compared += 1
    if not compared:
        remedy = "give check_rule examples=[(spec, ...)] at which the condition holds"
        raise RuleError(f"route {route.name!r} holds at no sizes that are tried", remedy=remedy)
    return compared


def _specs(route: PatternRoute) -> Iterator[list[jax.ShapeDtypeStruct]]:
    letters = sorted({c for word in route.shapes for c in word})
    kinds = [route.dtypes] if route.dtypes else [(d,) * len(route.shapes) for d in DTYPES]
    for dtypes in kinds:
        for sizes in SIZES:
            table = {q: sizes[k % len(sizes)] for k, q in enumerate(letters)}
            if compile_route(route, dtypes, tuple(sorted(table.items()))) is not None:
                yield specs_of(route.shapes, dtypes, table)


def _compare(route: PatternRoute, specs: Sequence[Any]) -> None:
    at = ", ".join(map(spec_text, specs))
    for seed, (factor, offset) in enumerate(SCALES):
        args = [_sample(seed + 10 * k, s, factor, offset) for k, s in enumerate(specs)]
        wanted = jax.jit(route.pattern)(*args)
        try:
            got = jax.jit(route.kernel)(*args)
        except Exception as error:  # code of users, which may raise anything
            text = (str(error).splitlines() or [""])[0]
            what = f"the kernel of route {route.name!r} raises at {at}"
            raise RuleError(what, got=f"{type(error).__name__}: {text}") from error
        kinds = [(x.shape, x.dtype) for x in (wanted, *jax.tree.leaves(got))]
        if kinds[1:] != kinds[:1]:
            expected = f"one array {wanted.dtype}{list(wanted.shape)}"
            shown = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds[1:])
            what = f"the kernel of route {route.name!r} returns another kind of array at {at}"
            raise RuleError(what, expected=expected, got=shown or "no array")
        rounding = lambda args=args: Rounding.of(route.pattern, tuple(args), {})  # noqa: E731
        found = difference(got, wanted, Numerics(), rounding)
        if found is not None:
            raise RuleError(
                f"the kernel of route {route.name!r} differs from its pattern at {at}, for normal "
                f"samples times {factor:g} plus {offset:g}",
                expected="equal values up to rounding",
                got=found,
                remedy="correct the kernel, or narrow the condition: when=...",
            )


def _sample(seed: int, spec: Any, factor: float, offset: float) -> jax.Array:
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(spec.dtype, jnp.inexact):
        return jnp.asarray(factor * rng.standard_normal(spec.shape) + offset, spec.dtype)
    high = 2 if spec.dtype == jnp.bool_ else 3
    return jnp.asarray(rng.integers(0, high, spec.shape), spec.dtype)
