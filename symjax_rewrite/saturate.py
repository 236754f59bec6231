"""Apply axioms to a region until nothing new appears or the budget of work is spent (a pass)."""

from __future__ import annotations

from symjax_rewrite.config import Budget
from symjax_rewrite.egraph import ORIGINAL
from symjax_rewrite.ir import ADD, CONTRACT, Node
from symjax_rewrite.rule import Axiom, Context

SATURATED = "saturated"
NODE_LIMIT = "node limit"
ROUND_LIMIT = "round limit"
FINAL = "contraction_order"  # trees that dynamic programming chose are not opened again


def saturate(ctx: Context, axioms: tuple[Axiom, ...], budget: Budget) -> str:
    """Run the axioms; returns why it stopped.

    Matching is semi-naive: an axiom sees a node again only when a class it reads has gained nodes.
    """
    by_op: dict[str, list[Axiom]] = {}
    for rule in axioms:
        for op in rule.on:
            by_op.setdefault(op, []).append(rule)
    done: set[tuple] = set()
    for _ in range(budget.rounds):
        before = ctx.g.count
        unions = len(ctx.g.unions)
        for cls in ctx.g.live():
            if ctx.g.parent[cls] is None and not _apply_all(ctx, cls, by_op, done, budget):
                ctx.g.rebuild()
                return NODE_LIMIT
        ctx.g.rebuild()
        if ctx.g.count == before and len(ctx.g.unions) == unions:
            return SATURATED
    return ROUND_LIMIT


def _apply_all(
    ctx: Context, cls: int, by_op: dict[str, list[Axiom]], done: set[tuple], budget: Budget
) -> bool:
    g = ctx.g
    for node, reason in list(g.classes[cls].nodes.items()):
        if reason.rule == FINAL:
            continue
        rules = by_op.get(node.op)
        if not rules or _is_absorbed(ctx, cls, node):
            continue
        stamp = sum(len(g.classes[g.find(a).cls].nodes) for a in node.args)
        for rule in rules:
            key = (rule.name, cls, node, stamp)
            if key in done:
                continue
            done.add(key)
            if not ctx.permits(rule.numerics, g.classes[cls].dtype):
                ctx.refuse(rule.name, f"needs numerics={rule.numerics!r}", cls)
                continue
            for ref in rule.apply(ctx, cls, node):
                g.add_to(cls, ref, rule.reason(cls))
                if g.count > budget.nodes:
                    return False
            if g.parent[cls] is not None:
                return True
    return True


def _is_absorbed(ctx: Context, cls: int, node: Node) -> bool:
    """A product that is used once, by another product: its user opens it."""
    if node.op != CONTRACT or ctx.uses(cls) != 1:
        return False
    users = {c for c, n in ctx.g.uses[cls] if ctx.g.classes[c].nodes.get(n) == ORIGINAL}
    if len(users) != 1:
        return False
    user = users.pop()
    if ctx.g.classes[user].dtype != ctx.g.classes[cls].dtype:
        return False
    return any(
        reason == ORIGINAL and (n.op == CONTRACT or (n.op == ADD and len(n.args) == 1))
        for n, reason in ctx.g.classes[user].nodes.items()
    )
