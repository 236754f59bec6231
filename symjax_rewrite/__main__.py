"""The command line: `python -m symjax_rewrite explain mod:fn --args "f32[8,64]" ...`."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from typing import Any

import jax
from jax import export

from symjax_rewrite import packs, sym_optimize
from symjax_rewrite.calibration.command import add_arguments, calibrate
from symjax_rewrite.errors import SymjaxError, UsageError

DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "c64": "complex64",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "bool": "bool",
}  # fmt: skip


def parse_spec(text: str, scope: export.SymbolicScope) -> jax.ShapeDtypeStruct:
    """Return `"f32[b,4096]"` as a ShapeDtypeStruct; letters are symbolic sizes.

    Raises:
        UsageError: the text is no spec.
    """
    match = re.fullmatch(r"\s*(\w+)\[([^\]]*)\]\s*", text)
    if not match or match[1] not in DTYPES:
        raise UsageError("not an argument spec", expected="such as f32[b,4096]", got=repr(text))
    sizes = [s.strip() for s in match[2].split(",") if s.strip()]
    if all(s.isdigit() for s in sizes):
        return jax.ShapeDtypeStruct(tuple(map(int, sizes)), DTYPES[match[1]])
    try:
        shape = export.symbolic_shape(",".join(sizes), scope=scope)
    except ValueError as error:
        raise UsageError("not a shape", expected="such as [b,2*n,64]", got=repr(text)) from error
    return jax.ShapeDtypeStruct(shape, DTYPES[match[1]])


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
    """Run one command; return the exit code: 0 on success, 2 on a usage error."""
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
    add_arguments(commands.add_parser("calibrate", help="measure this machine's device profile"))
    options = parser.parse_args(argv)
    try:
        if options.command == "calibrate":
            return calibrate(options)
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
