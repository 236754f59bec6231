"""`check-rules`: every rule of a pack, tested on random values."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from symjax_rewrite.command_line.main import FOUND, OK, command_parser, one_line
from symjax_rewrite.command_line.program import load
from symjax_rewrite.command_line.terminal import print_table, progress
from symjax_rewrite.errors import RuleError
from symjax_rewrite.rewriting.route_matching import PatternRoute
from symjax_rewrite.rewriting.rule import Axiom, Lemma, RulePack
from symjax_rewrite.rules import packs


class Verdict(NamedTuple):
    """The outcome for one rule: programs in which it fired, or the counterexample."""

    rule: str
    kind: str
    rests_on: str
    programs: int
    seconds: float
    counterexample: str = ""

    def words(self) -> str:
        """Return the verdict in words."""
        return f"wrong: {self.counterexample}" if self.counterexample else "holds"


def check_rules(argv: Sequence[str]) -> int:
    """Test rules and print a table; return 0, or 1 if a rule does not hold."""
    parser = command_parser("check-rules")
    parser.add_argument("pack", nargs="?", default="default", help="a pack, or module:object")
    parser.add_argument("rules", nargs="*", help="names of rules of the pack; default: all")
    options = parser.parse_args(argv)
    rules = _chosen(options.pack, options.rules)
    verdicts = []
    with progress("checking", len(rules)) as step:
        for rule in rules:
            step(rule.name)
            verdicts.append(_verdict(rule))
    if options.json:
        print(json.dumps([v._asdict() for v in verdicts], indent=1))
    else:
        columns = ("rule", "kind", "property", "programs", "seconds", "verdict")
        rows = [
            (v.rule, v.kind, v.rests_on, str(v.programs), f"{v.seconds:.1f}", v.words())
            for v in verdicts
        ]
        print_table(columns, rows)
    return FOUND if any(v.counterexample for v in verdicts) else OK


def _chosen(name: str, names: Sequence[str]) -> list[Any]:
    """Return the rules and routes of a pack, or those of it that are named."""
    found = load(name) if ":" in name else packs.named(name)
    pack = found if isinstance(found, RulePack) else RulePack(name, (found,))
    rules = [r for r in (*pack.rules, *pack.added) if isinstance(r, (Axiom, Lemma, PatternRoute))]
    known = [r.name for r in rules]
    if unknown := [n for n in names if n not in known]:
        raise RuleError("no such rule in this pack", expected=", ".join(known), got=unknown[0])
    return [r for r in rules if not names or r.name in names]


def _verdict(rule: Axiom | Lemma | PatternRoute) -> Verdict:
    from symjax_rewrite.testing.rule_checker import check_rule

    start, programs, wrong = time.perf_counter(), 0, ""
    try:
        programs = check_rule(rule)
    except RuleError as error:
        wrong = one_line(error)
    kind = "route" if isinstance(rule, PatternRoute) else type(rule).__name__.lower()
    used = ", ".join(rule.uses) if isinstance(rule, PatternRoute) else rule.property
    return Verdict(rule.name, kind, used, programs, time.perf_counter() - start, wrong)
