"""`prove`: a proof that two functions are equal, or a counterexample."""

from __future__ import annotations

from collections.abc import Sequence

from symjax_rewrite.command_line.arguments import GivenArguments
from symjax_rewrite.command_line.main import FOUND, OK, UNKNOWN, command_parser
from symjax_rewrite.command_line.program import add_arguments, load, traced
from symjax_rewrite.proofs import Different, prove_equal


def prove(argv: Sequence[str]) -> int:
    """Print a verdict; return 0 for a proof, 1 for a difference, 2 for neither."""
    parser = command_parser("prove")
    parser.add_argument("functions", nargs=2, metavar="module:function")
    add_arguments(parser)
    parser.add_argument("--assume", nargs="*", default=[], help="facts about sizes: 'b <= 64'")
    parser.add_argument("--numerics", default="reassoc", help="reassoc or finite")
    options = parser.parse_args(argv)
    options.function = " and ".join(options.functions)
    f, g = map(load, options.functions)
    given = GivenArguments(options.args)
    settings = {"assume": tuple(options.assume), "numerics": options.numerics}
    verdict = traced(lambda: prove_equal(f, g, *given.args, **settings), options)
    print(verdict.to_json() if options.json else verdict)
    return OK if verdict else FOUND if isinstance(verdict, Different) else UNKNOWN
