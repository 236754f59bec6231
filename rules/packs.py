"""Named packs of rules, which compose with `+` and lose rules with `-`."""

from __future__ import annotations

from symjax_rewrite.errors import RuleError, choice
from symjax_rewrite.rewriting.rule import RulePack
from symjax_rewrite.rules import lemmas
from symjax_rewrite.rules.associativity import contraction_order
from symjax_rewrite.rules.distributivity import distribute, factor, flatten_sum
from symjax_rewrite.rules.folding import fold_into_kernel, fold_scale, fold_shift
from symjax_rewrite.rules.inverses import inverse_of_product, solve_instead, solve_is_inverse
from symjax_rewrite.rules.locality import block_products, gather_parts, partial_access
from symjax_rewrite.rules.low_rank import low_rank_readout, low_rank_solve
from symjax_rewrite.rules.separability import (
    pairwise_differences,
    pairwise_squares,
    separable_extremum,
)
from symjax_rewrite.rules.sparsity import masked_product, one_hot, triangular_prefix

associativity = RulePack("associativity", (contraction_order,))
transpose = RulePack("transpose", (contraction_order,))  # transposes are index names: order only
distributivity = RulePack("distributivity", (flatten_sum, distribute, factor))
locality = RulePack("locality", (partial_access, gather_parts, block_products))
inverses = RulePack(
    "inverses",
    (solve_is_inverse, solve_instead, inverse_of_product, low_rank_solve, low_rank_readout),
)
separability = RulePack(
    "separability", (pairwise_squares, pairwise_differences, separable_extremum)
)
lora = RulePack("lora", (lemmas.lora, lemmas.lora_scaled, lemmas.lora_pair)) + distributivity
moe = RulePack("moe", (lemmas.moe_sandwich,)) + distributivity + associativity
folding = RulePack("folding", (fold_scale, fold_shift, fold_into_kernel, contraction_order))
norms = folding + distributivity
linear_algebra = (
    RulePack("linear_algebra", (lemmas.shared_operand,))
    + associativity
    + distributivity
    + locality
    + separability
    + inverses
)
sparsity = (
    RulePack("sparsity", (masked_product, one_hot, triangular_prefix)) + locality + associativity
)
transformer_gpu = lora + moe + linear_algebra + sparsity + folding
default = RulePack("default", (transformer_gpu).rules)


def by_name() -> dict[str, RulePack]:
    """Return every pack of this module by its name here."""
    return {name: pack for name, pack in globals().items() if isinstance(pack, RulePack)}


def named(name: str) -> RulePack:
    """Return the pack of a name.

    Raises:
        RuleError: no pack has this name.
    """
    known = by_name()
    if name not in known:
        raise RuleError("unknown rule pack", **choice(name, sorted(known)))
    return known[name]
