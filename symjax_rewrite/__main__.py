"""The command line: `python -m symjax_rewrite explain mod:fn --args "f32[8,64]" ...`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from jax import export

from symjax_rewrite import packs, sym_optimize
from symjax_rewrite.errors import SymjaxError, UsageError
from symjax_rewrite.proofs.specs import parse_spec


def load(name: str) -> Any:
    """Return the object that `"module:function"` names.

    Raises:
        UsageError: there is no such function, or its module cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise UsageError("not the name of a function", expected="module:function", got=repr(name))
    try:
        found = importlib.import_module(module)
    except Exception as error:  # import runs the user's code, which may raise anything
        raise UsageError(f"cannot import {module}: {_one_line(error)}") from error
    if not hasattr(found, attribute):
        raise UsageError("no such function", expected="module:function", got=name)
    return getattr(found, attribute)


def _one_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code: 0 on success, 2 on a usage error.

    `prove` returns 0 for a proof, 1 for a difference, and 2 for neither.
    """
    parser = argparse.ArgumentParser(prog="python -m symjax_rewrite", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="what is done to a function, and why")
    explain.add_argument("function", help="module:function")
    explain.add_argument("--args", nargs="+", default=[], help="such as f32[b,4096]")
    explain.add_argument("--assume", nargs="*", default=[], help="facts about sizes: 'b <= 64'")
    explain.add_argument("--numerics", default="reassoc")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument("--html", metavar="FILE", help="write HTML")
    check = commands.add_parser("check-rules", help="test every rule of a pack on random values")
    check.add_argument("pack", nargs="?", default="default")
    add_prove(commands)
    options = parser.parse_args(argv)
    try:
        if options.command == "prove":
            return prove(options)
        return _explain(options) if options.command == "explain" else _check(options.pack)
    except (SymjaxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _explain(options: argparse.Namespace) -> int:
    sys.path.insert(0, "")
    scope, fun = export.SymbolicScope(), load(options.function)
    fun = sym_optimize(fun, assume=tuple(options.assume), numerics=options.numerics)
    report = _report(fun, [parse_spec(a, scope) for a in options.args], options)
    if options.html:
        report.save(options.html)
    print(report.to_json() if options.json else report)
    return 0


def add_prove(commands: Any) -> None:
    """Add the arguments of `prove` to the commands of a parser."""
    parser = commands.add_parser("prove", help="do two functions compute the same value?")
    parser.add_argument("functions", nargs=2, metavar="module:function")
    parser.add_argument("--args", nargs="+", default=[], help="such as f32[b,4096]")
    parser.add_argument("--assume", nargs="*", default=[], help="facts about sizes: 'b <= 64'")
    parser.add_argument("--numerics", default="reassoc", help="reassoc or finite")
    parser.add_argument("--json", action="store_true", help="print JSON")


def prove(options: argparse.Namespace) -> int:
    """Print a proof, a counterexample or how far a proof came; return 0, 1 or 2."""
    from symjax_rewrite.proofs import Different, prove_equal

    sys.path.insert(0, "")
    f, g = map(load, options.functions)
    facts = tuple(options.assume)
    verdict = prove_equal(f, g, *options.args, assume=facts, numerics=options.numerics)
    print(verdict.to_json() if options.json else verdict)
    return 0 if verdict else 1 if isinstance(verdict, Different) else 2


def _report(fun: Any, specs: list[Any], options: argparse.Namespace) -> Any:
    try:
        return fun.explain(*specs)
    except SymjaxError:
        raise
    except Exception as error:  # tracing runs the user's function, which may raise anything
        at = " ".join(options.args) or "no arguments"
        what = f"{options.function} cannot be traced at {at}: {_one_line(error)}"
        raise UsageError(what) from error


def _check(name: str) -> int:
    from symjax_rewrite.testing.assertions import check_rule

    for rule in packs.named(name).rules:
        check_rule(rule)
        print(f"{rule.name}: holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
