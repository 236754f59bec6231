"""Arguments of functions as text: shapes, trees of them, and static values.

`f32[b,4096]` is an array; letters are named sizes, the same in all arguments. Tuples, lists and
dictionaries are written as in Python: `{'w': f32[64,64], 'b': f32[64]}`. A number, a string, True
or False is a static argument, None is None. `name=…` is an argument by keyword.
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
