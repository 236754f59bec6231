"""Arguments of functions as text, as `spec_texts` reads them.

Named sizes are the same in all arguments. A number, a string, True or False is a static argument.
`name=…` is an argument by keyword.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jax import export

from symjax_rewrite.errors import UsageError
from symjax_rewrite.spec_texts import parse_argument


class GivenArguments:
    """Arguments by position and by keyword; which of them are static values."""

    def __init__(self, texts: Sequence[str]) -> None:
        scope = export.SymbolicScope()
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        for text in texts:
            name, value = _named(text)
            parsed = parse_argument(value, scope)
            if name:
                self.kwargs[name] = parsed
            elif self.kwargs:
                raise UsageError("an argument by position after one by keyword", got=repr(text))
            else:
                self.args.append(parsed)

    @property
    def static_argnums(self) -> tuple[int, ...]:
        """Return the positions of static values."""
        return tuple(k for k, x in enumerate(self.args) if _is_static(x))

    @property
    def static_argnames(self) -> tuple[str, ...]:
        """Return the names of static values."""
        return tuple(name for name, x in self.kwargs.items() if _is_static(x))


def _named(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", text, flags=re.DOTALL)
    return (match[1], match[2]) if match else ("", text)


def _is_static(x: Any) -> bool:
    return isinstance(x, (bool, int, float, complex, str))
