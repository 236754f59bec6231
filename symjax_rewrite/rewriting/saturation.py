"""Saturation of a region: axioms are applied until no node is new or the budget is exhausted."""

from __future__ import annotations

from symjax_rewrite.ir.egraph import ORIGINAL, Justification
from symjax_rewrite.ir.term import ADD, CONTRACT, Node
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.options import Budget
from symjax_rewrite.rewriting.lemma_matching import Pattern, apply_lemma, shape
from symjax_rewrite.rewriting.rule import Axiom, RuleContext

SATURATED = "saturated"
NODE_LIMIT = "node limit"
ROUND_LIMIT = "round limit"
Done = dict[tuple[int, Node], dict[str, int]]  # by rule, node counts of the operands
FINAL = "contraction_order"  # trees from dynamic programming are not opened again


def saturate(
    ctx: RuleContext, axioms: tuple[Axiom, ...], patterns: tuple[Pattern, ...], budget: Budget
) -> str:
    """Run lemmas and axioms; return the stop reason.

    Lemmas run first, so that a node derived by both has the name of the lemma. Matching is
    semi-naive: an axiom reads a node once. An axiom that asks for it reads a node again when a
    class that the node reads has gained nodes.
    """
    by_op: dict[str, list[Axiom]] = {}
    for rule in axioms:
        for op in rule.on:
            by_op.setdefault(op, []).append(rule)
    done: Done = {}
    for cls in ctx.g.live():
        _apply_lemmas(ctx, cls, patterns)
    ctx.g.rebuild()
    if ctx.g.count > budget.nodes:
        return NODE_LIMIT
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


def _apply_lemmas(ctx: RuleContext, cls: int, patterns: tuple[Pattern, ...]) -> None:
    found: tuple | None = None
    for node in list(ctx.g.classes[cls].nodes):
        if node.op not in (CONTRACT, ADD) or _is_absorbed(ctx, cls, node):
            continue
        if found is None:
            found = shape(ctx.g, cls)
        for p in patterns:
            if p.shape == found and ctx.permits(p.lemma.numerics, ctx.g.classes[cls].dtype):
                for ref in list(apply_lemma(ctx, p, cls)):  # a list: unions change classes
                    ctx.g.add_to(cls, ref, Justification(p.lemma.name, cls))


def _apply_all(
    ctx: RuleContext, cls: int, by_op: dict[str, list[Axiom]], done: Done, budget: Budget
) -> bool:
    g = ctx.g
    for node, reason in list(g.classes[cls].nodes.items()):
        rules = by_op.get(node.op)
        if not rules or (node.op == ADD and len(node.args) > 1 and ctx.is_whole(cls)):
            continue
        opened = reason.rule == FINAL or _is_absorbed(ctx, cls, node)
        seen = done.setdefault((cls, node), {})
        stamp = sum([len(g.classes[g.find(a).cls].nodes) for a in node.args])
        for rule in rules:
            if (opened and not rule.everywhere) or reason.rule in rule.not_after:
                continue
            if rule.needs and g.kinds.isdisjoint(rule.needs):
                continue
            before = seen.get(rule.name)
            if before is not None and (before == stamp or not rule.again):
                continue
            seen[rule.name] = stamp
            if not ctx.permits(rule.numerics, g.classes[cls].dtype):
                ctx.refuse(rule.name, Obstacle.NUMERICS(f"needs numerics={rule.numerics!r}"), cls)
                continue
            for ref in rule.forms(ctx, cls, node):
                g.add_to(cls, ref, rule.reason(cls))
                if g.count > budget.nodes:
                    return False
            if g.parent[cls] is not None:
                return True
    return True


def _is_absorbed(ctx: RuleContext, cls: int, node: Node) -> bool:
    """Return True if the only user of a product is a product, or of a sum a sum, and opens it.

    One that reads it twice, as A Aᵀ does, can also read one form of it twice.
    """
    if node.op not in (CONTRACT, ADD) or ctx.uses(cls) != 1:
        return False
    for user, n in ctx.g.uses[cls]:
        owner = ctx.g.classes[user]
        if n not in owner.nodes or owner.dtype != ctx.g.classes[cls].dtype:
            continue
        if [a.cls for a in n.args].count(cls) > 1:
            return False
        if node.op == ADD and len(node.args) > 1:
            if n.op == ADD:
                return True
        elif owner.nodes[n] == ORIGINAL and n.op in (CONTRACT, ADD) and _opens(n):
            return True
    return False


def _opens(user: Node) -> bool:
    return user.op == CONTRACT or len(user.args) == 1
