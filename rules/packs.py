"""Named packs of rules; compose them with `+`."""

from __future__ import annotations

from symjax_rewrite.rule import RulePack
from symjax_rewrite.rules.associativity import contraction_order
from symjax_rewrite.rules.distributivity import distribute, factor, flatten_sum
from symjax_rewrite.rules.locality import block_products, partial_access
from symjax_rewrite.rules.separability import pairwise_squares

associativity = RulePack("associativity", (contraction_order,))
default = RulePack(
    "default",
    (
        contraction_order,
        flatten_sum,
        distribute,
        factor,
        partial_access,
        block_products,
        pairwise_squares,
    ),
)
