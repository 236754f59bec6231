"""Whether a backend can run a kernel: yes, or the reason why not (imports nothing)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Yes:
    """The backend runs it."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Reason:
    """The backend does not run it, and why.

    Example:
        >>> bool(Reason("head size above 256")), str(Reason("head size above 256"))
        (False, 'head size above 256')
    """

    text: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.text


Support = Yes | Reason
YES = Yes()


def first_reason(*checks: tuple[bool, str]) -> Support:
    """`YES` unless a check's condition holds: then its text."""
    for fails, text in checks:
        if fails:
            return Reason(text)
    return YES
