"""Every error this library raises on purpose, in one hierarchy (imports nothing).

Each message says what is wrong, where (the user's own line when an equation is to blame),
what was expected against what was given, and what to do.
"""

from __future__ import annotations


class SymjaxError(Exception):
    """Base of all errors of this library.

    Args:
        what: one sentence saying what is wrong.
        where: the user's source line, if one is known.
        expected: what would have been accepted.
        got: what was given.
        remedy: what to do about it.

    Example:
        >>> print(SymjaxError("no such pack", expected="'lora'", got="'lorra'"))
        no such pack
          expected: 'lora'
          got:      'lorra'
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.got, self.remedy = (
            what,
            where,
            expected,
            got,
            remedy,
        )
        lines = [what]
        if where:
            lines.append(f"  at:       {where}")
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if got is not None:
            lines.append(f"  got:      {got}")
        if remedy:
            lines.append(f"  to do:    {remedy}")
        super().__init__("\n".join(lines))


class UsageError(SymjaxError, TypeError):
    """The library was called with something it does not take (not a function, a bad option)."""


class RuleError(SymjaxError, ValueError):
    """A rule or rule pack is unknown, malformed, or its two sides differ."""


class PassError(SymjaxError, RuntimeError):
    """A pass of a rule pack raised, or proposed something that its program does not have."""


class UnsupportedError(SymjaxError):
    """A program was kept as written where the caller set `on_unsupported="error"`."""


class FrozenError(SymjaxError, ValueError):
    """A frozen name is no argument, or `prepare` was given something else than was traced."""


class PlanError(SymjaxError, ValueError):
    """A saved plan is corrupt or belongs to another program."""


class EquivalenceError(SymjaxError, AssertionError):
    """The rewritten program's values differ from the original's by more than rounding explains."""


class CliffError(SymjaxError, AssertionError):
    """A program is far more expensive than an equal one, or holds too large an intermediate."""


class KernelError(SymjaxError):
    """A kernel that was asked for by name cannot run here."""
