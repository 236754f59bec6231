"""The data of a route: a pattern, a kernel of the user's, and the conditions of its use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class KernelPattern:
    """A pattern that a function of the user's computes; `route.route` explains the fields."""

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
