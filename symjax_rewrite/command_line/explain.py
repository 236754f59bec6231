"""`explain`: the rewrites of a function at some arguments, with reasons."""

from __future__ import annotations

from collections.abc import Sequence

from symjax_rewrite.api.sym_optimize import sym_optimize
from symjax_rewrite.command_line.arguments import GivenArguments
from symjax_rewrite.command_line.program import bound, load, program_parser, traced


def explain(argv: Sequence[str]) -> int:
    """Print the report of a function; return 0."""
    parser = program_parser("explain", html=True)
    parser.add_argument("--assume", nargs="*", default=[], help="facts about sizes: 'b <= 64'")
    parser.add_argument("--numerics", default="reassoc", help="exact, reassoc, finite, cancels")
    parser.add_argument("--rules", help="the name of a rule pack")
    parser.add_argument("--kernels", default="auto", help="auto, always, off, or a backend")
    options = parser.parse_args(argv)
    fun, given = load(options.function), GivenArguments(options.args)
    settings = {k: getattr(options, k) for k in ("numerics", "rules", "kernels", "device")}
    settings["assume"] = tuple(options.assume)
    usual = {k: parser.get_default(k) for k in settings} | {"assume": ()}
    if not (hasattr(fun, "explain") and settings == usual):  # one of ours keeps its own options
        fun, args = bound(fun, given)
        optimised, kwargs = sym_optimize(fun, **settings), {}
    else:
        optimised, args, kwargs = fun, given.args, given.kwargs
    report = traced(lambda: optimised.explain(*args, **kwargs), options)
    if options.html:
        report.save(options.html)
    print(report.to_json() if options.json else report)
    return 0
