"""The hierarchy of all errors that this library raises on purpose.

Each message states the fault, its place (the user's own line when an equation is to blame), the
expected and the given value, and the remedy. Imports nothing of the package.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable


def readable_place(where: str) -> str:
    """Return a source line with the cell of a notebook, `In[2]:12 (f)`, in place of its file.

    A kernel compiles each cell from a temporary file. IPython knows the cell by the file's name.
    """
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    named = getattr(getattr(get_shell(), "compile", None), "format_code_name", lambda name: None)
    path, colon, line = where.rpartition(":")
    cell = named(path)
    return where if cell is None else f"{cell[1]}{colon}{line}"


def choice(given: object, known: Iterable[str]) -> dict[str, str]:
    """Return the fields of an error about a name that is not among the known names.

    Examples:
        >>> choice("frist", ("off", "first"))["remedy"]
        "did you mean 'first'?"
    """
    names = list(known)
    fields = {"expected": f"one of {', '.join(names)}", "got": repr(given)}
    near = difflib.get_close_matches(given, names, n=1) if isinstance(given, str) else []
    return fields | ({"remedy": f"did you mean {near[0]!r}?"} if near else {})


class SymjaxError(Exception):
    """The base of all errors of this library.

    Args:
        what: the fault, in one sentence.
        where: the user's source line, if one is known.
        expected: a value that would have been accepted.
        got: the given value.
        remedy: the action to take.

    Examples:
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
        self.what, self.where, self.remedy = what, where, remedy
        self.expected, self.got = expected, got
        at = readable_place(where) if where else None
        rows = {"at": at, "expected": expected, "got": got, "to do": remedy or None}
        lines = [f"  {name + ':':9} {value}" for name, value in rows.items() if value is not None]
        super().__init__("\n".join([what, *lines]))


class UsageError(SymjaxError, TypeError):
    """An invalid use of the library, such as an argument that is no function, or a bad option."""


class RuleError(SymjaxError, ValueError):
    """A rule or rule pack that is unknown or malformed, or a rule whose two sides differ."""


class PassError(SymjaxError, RuntimeError):
    """A pass of a rule pack that raised, or proposed a value that its program does not have."""


class UnsupportedError(SymjaxError):
    """A program that was kept as written although the caller set `on_unsupported="error"`."""


class FrozenError(SymjaxError, ValueError):
    """A frozen name that is no argument, or values for `prepare` of other avals than traced."""


class PlanError(SymjaxError, ValueError):
    """A saved plan that is corrupt or belongs to another program."""


class ProfileError(SymjaxError, ValueError):
    """A file with a device profile that is missing, corrupt or foreign."""


class CalibrationError(SymjaxError, RuntimeError):
    """A calibration on a machine whose times spread too much to be measured."""


class EquivalenceError(SymjaxError, AssertionError):
    """Values of a rewritten program that differ from the original's by more than rounding."""


class CliffError(SymjaxError, AssertionError):
    """A program that is far more expensive than an equal one, or has too large an intermediate."""


class KernelError(SymjaxError):
    """A kernel that was requested by name and cannot run here."""
