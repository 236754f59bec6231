"""`audit`: the six properties of a function, their uses, and the bottleneck of each line."""

from __future__ import annotations

from collections.abc import Sequence

from symjax_rewrite.auditing.audit import audit as audit_program
from symjax_rewrite.command_line.arguments import GivenArguments
from symjax_rewrite.command_line.program import bound, load, program_parser, traced


def audit(argv: Sequence[str]) -> int:
    """Print the audit of a function; return 0."""
    options = program_parser("audit", html=True).parse_args(argv)
    fun, args = bound(load(options.function), GivenArguments(options.args))
    found = traced(lambda: audit_program(fun, *args, device=options.device), options)
    if options.html:
        found.save(options.html)
    print(found.to_json() if options.json else found)
    return 0
