"""The table of commands, their parsers, and errors as one line with an exit code."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from symjax_rewrite.errors import CliffError, EquivalenceError, SymjaxError, UsageError, choice

OK, FOUND, UNKNOWN = 0, 1, 2
EXIT_CODES = "exit codes: 0 ok; 1 a cliff, a difference or a wrong rule; 2 wrong use or unknown"

# Commands with a description. Each has a file of its name, with a function of its name that takes
# the arguments and returns the exit code.
COMMANDS = {
    "demo": "two programs before and after, on this machine",
    "explain": "the rewrites of a function, with reasons",
    "audit": "the six properties of a function, and what limits it",
    "guard": "fail if an equal form is much cheaper",
    "prove": "a proof that two functions are equal, or a counterexample",
    "calibrate": "measure this machine's device profile",
    "check-rules": "test every rule of a pack on random values",
}


def usage() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    first = ("usage: symjax-rewrite COMMAND [arguments] [--traceback] | --version", "")
    last = ("", "symjax-rewrite COMMAND --help shows the arguments of a command.", EXIT_CODES)
    return "\n".join([*first, *rows, *last])


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of commands are."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of a wrong argument."""
        raise UsageError(message, remedy=f"{self.prog} --help shows the arguments")


def command_parser(name: str, *, json: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a command, with the options of all commands."""
    about = COMMANDS[name]
    parser = CommandParser(
        prog=f"symjax-rewrite {name}",
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=f"--traceback shows where an unexpected error was raised; {EXIT_CODES}",
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    traceback = "--traceback" in given
    given = [word for word in given if word != "--traceback"]
    if not given or given[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if given else sys.stderr)
        return OK if given else UNKNOWN
    if given[0] == "--version":
        print(importlib.metadata.version("symjax_rewrite"))
        return OK
    if given[0] not in COMMANDS:
        return _printed(UsageError("no such command", **choice(given[0], COMMANDS)))
    try:
        code = _command(given[0].replace("-", "_"))(given[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except SystemExit as error:  # of argparse, which has printed the help, or of the user's module
        return error.code if isinstance(error.code, int) else UNKNOWN
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return UNKNOWN
    except Exception as error:
        if traceback:
            raise
        return _printed(error)


def _command(name: str) -> Callable[[Sequence[str]], int]:
    return getattr(importlib.import_module(f"{__package__}.{name}"), name)


def _printed(error: Exception) -> int:
    """Print an error as one line; return the exit code."""
    expected = isinstance(error, (SymjaxError, OSError))
    kind = "" if expected else f"{type(error).__name__}: "
    hint = "" if expected else " (--traceback shows where)"
    print(f"error: {kind}{one_line(error)}{hint}", file=sys.stderr)
    return FOUND if isinstance(error, (CliffError, EquivalenceError)) else UNKNOWN


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line.

    Example:
        >>> from symjax_rewrite.errors import UsageError
        >>> one_line(UsageError("no such pack", expected="lora", got="lorra"))
        'no such pack; expected: lora; got: lorra'
    """
    rows = [" ".join(row.split()) for row in str(error).splitlines()]
    return "; ".join(filter(None, rows)) or "no message"
