"""Routes: a pattern on the left, a kernel of the user's on the right.

A route is a pass (`candidates.Pass`), so it is added to a `RulePack` like a rule. `route_matching`
finds the pattern. May import errors and options only, so that a declaration costs no import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from symjax_rewrite.errors import RuleError
from symjax_rewrite.options import NUMERICS

if TYPE_CHECKING:
    from symjax_rewrite.candidates import Context, Found
    from symjax_rewrite.ir.flat_program import Program


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A pattern that a function of the user's computes; see `route` for the fields."""

    name: str
    shapes: tuple[str, ...]
    pattern: Callable[..., Any]
    kernel: Callable[..., Any]
    when: Callable[..., bool | str] | None = None
    seconds: Callable[..., float] | float | None = None
    dtypes: tuple[str, ...] = ()
    numerics: str = "reassoc"
    uses: tuple[str, ...] = ()
    source: str = ""

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the places of a program where the kernel computes what is written."""
        from symjax_rewrite.rewriting.route_matching import find_places

        return find_places(self, program, context)

    def refusal(self, specs: Sequence[Any]) -> str:
        """Return the reason why the kernel must not run at some arguments; empty if it may.

        Args:
            specs: shape and dtype of every argument, as `jax.ShapeDtypeStruct`s.
        """
        answer = True if self.when is None else self.when(*specs)
        if isinstance(answer, str):
            return answer
        return "" if answer else "its condition `when` does not hold"

    def predicted_s(self, specs: Sequence[Any]) -> float | None:
        """Return the seconds that the user predicts for the kernel; None without a prediction."""
        return float(self.seconds(*specs)) if callable(self.seconds) else self.seconds


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
) -> Route:
    """Send every value that a program computes like `pattern` to a kernel of your own.

    The pattern is traced and matched like the left side of a lemma: modulo transposes, einsum or
    matmul, more axes, the order of factors and terms. A letter stands for any number of axes, which
    are merged for the kernel. The kernel stays one opaque call; derivatives are those of the
    program as written. `testing.check_rule` compares pattern and kernel numerically.

    Args:
        name: its name in packs, reports, `bisect` and plans.
        shapes: one word per argument, one letter per axis: `"nd,do"`; an empty word is a scalar.
        pattern: a function of these arrays that returns one array.
        kernel: a function of the same arrays; its result has the shape and dtype of the pattern's.
        when: a function of the arguments' `jax.ShapeDtypeStruct`s that returns True, or False or
            the reason to leave the program as written; default: always True.
        seconds: predicted seconds of the kernel, or a function of the specs that returns them. With
            a prediction the kernel is taken where the cost model predicts the written operations to
            be slower by the margin of a rewrite. Without it the kernel is taken wherever `when`
            holds.
        dtypes: dtypes of the arguments (one for all, or one each); default: every dtype of the
            program, one for all arguments.
        numerics: the level that the kernel needs: `"exact"` if it gives the same bits.
        uses: properties that the kernel rests on, such as `"associativity"`, for `audit`.
        source: where the kernel comes from.

    Returns:
        An element for a `RulePack`.

    Raises:
        RuleError: the shapes, the numerics level or a function is malformed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from symjax_rewrite import RulePack, packs, sym_optimize
        >>> silu = route("my_silu", "nd,do",
        ...     pattern=lambda x, W: jax.nn.silu(x @ W),
        ...     kernel=lambda x, W: (y := x @ W) * jax.nn.sigmoid(y),
        ...     when=lambda x, W: x.dtype == jnp.float32)
        >>> f = sym_optimize(lambda x, W: jax.nn.silu(x @ W), rules=[packs.default, silu])
        >>> [r.name for r in f.explain(jnp.ones((4, 8)), jnp.ones((8, 8))).routes if r.taken]
        ['my_silu']
    """
    words = tuple(w.strip() for w in shapes.split(","))
    if not all(w.isalpha() or w == "" for w in words):
        raise RuleError("malformed shapes of a route", expected="'nd,do'", got=repr(shapes))
    for role, fun in (("pattern", pattern), ("kernel", kernel)):
        if not callable(fun):
            raise RuleError(f"a route's {role} must be a function of arrays", got=repr(fun))
    if numerics not in NUMERICS:
        expected = ", ".join(NUMERICS)
        raise RuleError("unknown numerics level of a route", expected=expected, got=repr(numerics))
    kinds = (dtypes,) * len(words) if isinstance(dtypes, str) else tuple(map(str, dtypes))
    if kinds and len(kinds) != len(words):
        raise RuleError("a route needs one dtype, or one for each argument", got=repr(dtypes))
    rests_on = (uses,) if isinstance(uses, str) else tuple(uses)
    return Route(name, words, pattern, kernel, when, seconds, kinds, numerics, rests_on, source)
