"""Laws as text that is evaluated: `law("(a·b)·c = a·(b·c)", a="ij", b="jk", c="kr")`.

The text is an equation of JAX arrays: `·` is the matrix product, `*` the elementwise product, `ᵀ`
the transpose and `⁻¹` the inverse. Definitions follow after `, where`, separated by `and`.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.numpy import linalg

from symjax_rewrite.errors import RuleError

_SIGNS = str.maketrans({"·": " @ ", "−": "-", "ᵀ": ".T", "≤": "<=", "≥": ">="})
_LAW = "such as '(a·b)·c = a·(b·c)', with spaces around ="
_INVERSE = re.compile(r"(\w+|\([^()]*\))⁻¹")


@dataclass(frozen=True, slots=True)
class Sides:
    """The two sides of a law as JAX functions of the same arguments.

    shapes: one word per argument, one letter per axis, as of a specimen: `n!9` are indices, `*do`
    is frozen; r and s are small. both: a function of arrays that returns (left, right). kinds: of
    dtypes for which it holds: float, complex, int, or Float of at least 32 bits. text: the
    equation, if both sides are compiled from it.
    """

    shapes: str
    both: Callable[..., tuple[Any, Any]]
    kinds: str = "fci"
    text: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """Return the shapes of the arguments, one word each."""
        return tuple(self.shapes.split(","))


def regular(a: Any) -> Any:
    """Return a matrix plus a dominant diagonal, which has an inverse."""
    return a + (1 + 8 * jnp.max(jnp.abs(a), initial=0)) * jnp.eye(len(a), dtype=a.dtype)


def _python(source: str) -> str:
    return _INVERSE.sub(r"inv(\1)", source).translate(_SIGNS)


def _check_equations(equations: list[str], known: set[str], text: str) -> None:
    """Raise `RuleError` unless every part is an equation of expressions in known names."""
    used: set[str] = set()
    for equation in equations:
        sides = equation.split(" = ")
        try:
            trees = [ast.parse(_python(side).strip(), mode="eval") for side in sides]
        except SyntaxError as error:
            raise RuleError("a law that cannot be read", expected=_LAW, got=repr(text)) from error
        if len(sides) != 2:
            raise RuleError("a law is one equation", expected=_LAW, got=repr(text))
        used |= {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}
    defined = {equation.split(" = ")[0].strip() for equation in equations[1:]}
    if unknown := sorted(used - known - defined - vars(builtins).keys()):
        remedy = f"give its shape: law(..., {unknown[0]}='ij')"
        raise RuleError(f"a law with an unknown name {unknown[0]!r}", got=repr(text), remedy=remedy)


def law(text: str, kinds: str = "fci", regulars: str = "", **names: Any) -> Sides:
    """Return the sides of a law from its text.

    Args:
        text: the equation.
        kinds: as of `Sides`.
        regulars: names of the arguments that are regular matrices.
        names: the shape of each argument, as a word of `Sides.shapes`; or a function by its name.

    Raises:
        RuleError: the text is no equation, or has a name without a shape.

    Example:
        >>> factored = law("a·b + a·c = a·(b + c)", a="ij", b="jk", c="jk")
        >>> left, right = factored.both(jnp.eye(2), jnp.ones((2, 3)), jnp.ones((2, 3)))
        >>> bool((left == right).all())
        True
    """
    shapes = {name: word for name, word in names.items() if isinstance(word, str)}
    known = {"I": lambda a: jnp.eye(len(a), dtype=a.dtype), "Σ": jnp.sum, "where": jnp.where}
    known |= {"solve": linalg.solve, "inv": linalg.inv, "mean": jnp.mean} | names
    equation, _, definitions = text.partition(", where ")
    _check_equations([equation, *filter(None, definitions.split(" and "))], {*known}, text)

    def evaluated(source: str, scope: dict[str, Any]) -> Any:
        return eval(_python(source), scope)

    def both(*arrays: Any) -> tuple[Any, Any]:
        scope = known | dict(zip(shapes, arrays, strict=True))
        scope |= {name: regular(scope[name]) for name in regulars}
        for definition in filter(None, definitions.split(" and ")):
            name, value = definition.split(" = ")
            scope[name] = evaluated(value, scope)
        left, right = equation.split(" = ")
        return evaluated(left, scope), evaluated(right, scope)

    return Sides(",".join(shapes.values()), both, kinds, text)
