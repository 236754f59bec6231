"""Shared parts of commands on a function: arguments, loading, errors of the user's code."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from symjax_rewrite import jax_internals
from symjax_rewrite.command_line.arguments import GivenArguments
from symjax_rewrite.command_line.main import command_parser
from symjax_rewrite.errors import SymjaxError, UsageError, choice

Found = TypeVar("Found")
# Folders of code that is not the user's.
INSTALLED = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
LIBRARIES = (*INSTALLED, str(Path(__file__).parents[1]))


def program_parser(name: str, *, html: bool = False) -> argparse.ArgumentParser:
    """Return a parser of a function's name, its arguments, the device and the output."""
    parser = command_parser(name)
    parser.add_argument("function", help="module:function")
    add_arguments(parser)
    parser.add_argument("--device", help="a device profile, such as cpu or h200")
    if html:
        parser.add_argument("--html", metavar="FILE", type=_page, help="write a page")
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the user's function."""
    parser.add_argument(
        "--args",
        nargs="+",
        default=[],
        metavar="ARG",
        help="f32[b,4096] · {'w': f32[8,8]} · a static value such as 3 · name=…",
    )


def _page(text: str) -> str:
    if Path(text).suffix != ".html":
        raise argparse.ArgumentTypeError(f"the name of a page ends in .html, got {text!r}")
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder for {text!r}")
    return text


def load(name: str) -> Any:
    """Return the object that `"module:function"` names; modules of the working folder are found.

    Raises:
        UsageError: there is no such function, or its module cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith(".") or module.endswith(".py"):
        expected = f"module:function, such as {Path(module).stem or 'model'}:{attribute or 'f'}"
        raise UsageError("not the name of a function", expected=expected, got=repr(name))
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # import runs the user's code, which may raise anything
        raise UsageError(
            f"cannot import {module}: {_kind(error)}",
            where=_users_line(error),
            remedy=_to_import(module, error),
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = _nearest(part, found)
            remedy = choice(part, near).get("remedy")
            raise UsageError(
                "no such function", expected=", ".join(near), got=repr(name), remedy=remedy
            )
        found = getattr(found, part)
    return found


def _nearest(name: str, holder: Any) -> list[str]:
    """Return the public functions of a module or class whose names are most like a given one."""
    public = [n for n, x in vars(holder).items() if callable(x) and not n.startswith("_")]
    return difflib.get_close_matches(name, public, n=5, cutoff=0.0)


def bound(fun: Any, given: GivenArguments) -> tuple[Any, list[Any]]:
    """Return a function of positional arguments, and these; static values are static for its jit.

    Raises:
        UsageError: no function; or a result of `sym_optimize` is given arguments by keyword.
    """
    if not callable(fun):
        expected = "module:function, a callable of arrays"
        raise UsageError("this names no function", expected=expected, got=type(fun).__name__)
    if given.kwargs and hasattr(fun, "remake"):
        raise UsageError("an optimised function takes its arguments by position here")
    if given.kwargs:
        fun = _by_position(fun, len(given.args), tuple(given.kwargs))
    args = [*given.args, *given.kwargs.values()]
    names = enumerate(given.kwargs, len(given.args))
    numbers = {*given.static_argnums, *(k for k, n in names if n in given.static_argnames)}
    settings = jax_internals.jit_settings(fun) or {}
    if not numbers or settings.keys() & {"static_argnums", "static_argnames"}:
        return fun, args
    settings = {**settings, "static_argnums": tuple(sorted(numbers))}
    return jax.jit(jax_internals.inside_jit(fun), **settings), args


def _by_position(fun: Callable[..., Any], count: int, names: tuple[str, ...]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        return fun(*args[:count], **dict(zip(names, args[count:], strict=True)))

    called.__name__ = getattr(fun, "__name__", "function")
    return called


def traced(run: Callable[[], Found], options: argparse.Namespace) -> Found:
    """Return the result of a function that traces the user's; its errors become usage errors."""
    try:
        return run()
    except SymjaxError:
        raise
    except Exception as error:  # tracing runs the user's function, which may raise anything
        at = f"at {' '.join(options.args)}" if options.args else "without --args"
        what = f"{options.function} cannot be traced {at}: {_kind(error)}"
        where = _users_line(error)
        is_call = isinstance(error, TypeError) and not where  # of the function itself
        remedy = "give --args one text for each argument" if is_call else None
        raise UsageError(what, where=where, remedy=remedy) from error


def _to_import(module: str, error: Exception) -> str:
    """Return the remedy for a module that cannot be imported."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module}.".startswith(f"{missing}."):
        return f"run this in the folder that holds {missing}, or put that folder on PYTHONPATH"
    return f"install {missing} into {sys.prefix}" if missing else ""


def _users_line(error: BaseException) -> str:
    """Return the last line of the user's code that an error came through; empty if none."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if not f.filename.startswith((*LIBRARIES, "<"))]
    return f"{mine[-1].filename}:{mine[-1].lineno} ({mine[-1].name})" if mine else ""


def _kind(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
