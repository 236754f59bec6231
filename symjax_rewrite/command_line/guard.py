"""`guard`: fail if an equal form of a function is much cheaper, or an intermediate too large."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from symjax_rewrite.auditing.guard import guard as guard_program
from symjax_rewrite.command_line.arguments import GivenArguments
from symjax_rewrite.command_line.main import FOUND, OK, UNKNOWN, one_line
from symjax_rewrite.command_line.program import bound, load, program_parser, traced
from symjax_rewrite.errors import CliffError


def guard(argv: Sequence[str]) -> int:
    """Print the regret of a function; return 0, 1 for a cliff, 2 if there is no price."""
    parser = program_parser("guard")
    parser.add_argument("--max-regret", type=float, default=1.5, help="times the cheapest form")
    parser.add_argument("--max-intermediate", help="bytes, or text such as '2 GB'")
    options = parser.parse_args(argv)
    fun, args = bound(load(options.function), GivenArguments(options.args))
    limits = {"max_regret": options.max_regret, "max_intermediate": options.max_intermediate}
    try:
        found = traced(lambda: guard_program(fun, *args, **limits, device=options.device), options)
    except CliffError as error:
        if not options.json:
            raise
        fields = ("what", "where", "expected", "got", "remedy")
        row = {name: getattr(error, name) for name in fields}
        print(json.dumps({"ok": False, "error": one_line(error), **row}, default=str, indent=1))
        return FOUND
    is_known = found.regret is not None
    if options.json:
        print(json.dumps({"ok": is_known, **asdict(found)}, indent=1))
    else:
        print(found)
    return OK if is_known else UNKNOWN
