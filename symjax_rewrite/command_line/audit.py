"""`audit`: the six properties of a function, what uses them, and what limits each line."""

from __future__ import annotations

from collections.abc import Sequence

from symjax_rewrite.auditing.audit import PROPERTIES, Audit, use_text
from symjax_rewrite.auditing.audit import audit as audit_program
from symjax_rewrite.auditing.quantities import seconds_text
from symjax_rewrite.command_line.arguments import GivenArguments
from symjax_rewrite.command_line.program import bound, load, program_parser, traced
from symjax_rewrite.command_line.terminal import is_terminal, print_table


def audit(argv: Sequence[str]) -> int:
    """Print the audit of a function; return 0."""
    parser = program_parser("audit", "The six properties of a function.", html=True)
    options = parser.parse_args(argv)
    fun, args = bound(load(options.function), GivenArguments(options.args))
    found = traced(lambda: audit_program(fun, *args, device=options.device), options)
    if options.html:
        found.save(options.html)
    if options.json:
        print(found.to_json())
    elif is_terminal():
        _print_tables(found)
    else:
        print(found)
    return 0


def _print_tables(found: Audit) -> None:
    rows = [
        (f.property, f.what, f.where, use_text(f)) for name in PROPERTIES for f in found.of(name)
    ]
    none = [name for name in PROPERTIES if not found.of(name)]
    print_table(("property", "what has it", "line", "use"), rows, str(found).partition("\n")[0])
    if none:
        print(f"none found: {', '.join(none)}")
    parts = [(p.limit, f"{p.share:.0%}", seconds_text(p.seconds), p.where) for p in found.parts]
    print_table(("limit", "share", "seconds", "line"), parts, f"limits: {found.bottleneck}")
