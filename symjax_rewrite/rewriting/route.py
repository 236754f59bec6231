"""Routes: a pattern on the left, a kernel of the user's on the right.

A route is a pass (`candidates.Pass`), so it is added to a `RulePack` like a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from symjax_rewrite.errors import RuleError
from symjax_rewrite.rewriting.route_matching import PatternRoute
from symjax_rewrite.rewriting.rule import check_level, check_properties, words_of


def route(
    name: str,
    shapes: str,
    *,
    pattern: Callable[..., Any],
    kernel: Callable[..., Any],
    when: Callable[..., bool | str] | None = None,
    seconds: Callable[..., float] | float | None = None,
    dtypes: str | Sequence[str] = (),
    numerics: str = "reassoc",
    uses: str | Sequence[str] = (),
    source: str = "",
) -> PatternRoute:
    """Send every value that a program computes like `pattern` to a kernel of your own.

    The pattern is matched like the left side of a lemma: modulo transposes, einsum or matmul, the
    order of factors and terms, and more axes. A letter stands for any number of axes, which are
    merged for the kernel. The kernel stays one opaque call; derivatives are those of the program as
    written. `testing.check_rule` compares pattern and kernel numerically.

    Args:
        name: its name in packs, reports, `bisect` and plans.
        shapes: one word per argument, one letter per axis: `"nd,do"`; an empty word is a scalar.
        pattern: a function of these arrays that returns one array.
        kernel: a function of the same arrays that returns the same shape and dtype.
        when: a function of the arguments' `jax.ShapeDtypeStruct`s that returns True, or False or
            the reason to leave the program as written; default: always True.
        seconds: predicted seconds of the kernel, or a function of the specs that returns them: it
            is taken where the written operations are predicted to be slower by the margin of a
            rewrite. Without a prediction it is taken wherever `when` holds.
        dtypes: of the arguments (one for all, or one each); default: any, one for all.
        numerics: the level that the kernel needs: `"exact"` if it gives the same bits.
        uses: properties that the kernel rests on, such as `"associativity"`, for `audit`.
        source: where the kernel comes from.

    Returns:
        An element for a `RulePack`.

    Raises:
        RuleError: the shapes, a property, the numerics level or a function is malformed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from symjax_rewrite import packs, sym_optimize
        >>> f = lambda x, W: jax.nn.silu(x @ W)
        >>> mine = route("mine", "nd,do", pattern=f, kernel=lambda x, W: jax.nn.silu(x @ W))
        >>> report = sym_optimize(f, rules=[packs.default, mine]).explain(*jnp.ones((2, 8, 8)))
        >>> [r.name for r in report.routes if r.taken]
        ['mine']
    """
    words, kinds = _checked(shapes, pattern, kernel, dtypes, numerics)
    rests_on = (uses,) if isinstance(uses, str) else tuple(uses)
    if rests_on:
        check_properties(rests_on)
    return PatternRoute(
        name, words, pattern, kernel, when, seconds, kinds, numerics, rests_on, source
    )


def _checked(
    shapes: str, pattern: Any, kernel: Any, dtypes: str | Sequence[str], numerics: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of the shapes and the dtypes of all arguments."""
    words = words_of(shapes)
    check_level(numerics)
    for role, fun in (("pattern", pattern), ("kernel", kernel)):
        if not callable(fun):
            raise RuleError(f"a route's {role} must be a function of arrays", got=repr(fun))
    kinds = (dtypes,) * len(words) if isinstance(dtypes, str) else tuple(map(str, dtypes))
    if kinds and len(kinds) != len(words):
        raise RuleError("a route needs one dtype, or one for each argument", got=repr(dtypes))
    return words, kinds
