"""Rules as equations, for people."""

from __future__ import annotations

import ast
import inspect
import textwrap

from symjax_rewrite.rewriting.rule import Axiom, Lemma


def law_text(rule: Axiom | Lemma) -> str:
    """Return a rule as an equation: the law of an axiom, or the two sides of a lemma as written."""
    if isinstance(rule, Axiom):
        return rule.law.partition(";")[0]
    try:
        (fun,) = ast.parse(textwrap.dedent(inspect.getsource(rule.sides))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return ""  # made where there is no source: in an interpreter, or as a lambda
    last = fun.body[-1] if isinstance(fun, ast.FunctionDef) else None
    both = last.value if isinstance(last, ast.Return) else None
    if not isinstance(both, ast.Tuple) or len(both.elts) != 2:
        return ""
    return " = ".join(map(ast.unparse, both.elts))
