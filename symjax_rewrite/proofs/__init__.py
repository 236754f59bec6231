"""Proofs that two JAX functions have equal values: `prove_equal`, `Proof`, `Different`, `Unknown`.

Two functions are traced as one program and read as index terms. Every output becomes a polynomial
over atoms that read indices (`forms`, `arithmetic`, `functions`, `reductions`), by the `laws` of
arithmetic on real numbers. Slices and reversals are other indices (`entries`). Convolutions and
windows are sums and maxima (`windows`), products are recurrences (`affine_forms`), tests are
decided by cases (`sign_cases`). Loops that count become closed forms by induction (`opened_loops`,
`recurrences`). Angles (`trigonometry`), powers of an index (`power_sums`) and orders of values
(`orders`, `sorting`) have laws. Equal polynomials are a proof; its steps are the laws that were
applied, each compared at random values (`checks`, `evaluation`). Functions are sampled first
(`samples`): a difference is a counterexample. May import every other folder.

    proof = prove_equal(jax.nn.softmax, naive_softmax, "f32[n,d]")
    print(proof)
    assert proof and proof.replay()
"""

from symjax_rewrite.proofs.proving import prove_equal as prove_equal
from symjax_rewrite.proofs.verdicts import Different as Different
from symjax_rewrite.proofs.verdicts import Proof as Proof
from symjax_rewrite.proofs.verdicts import Unknown as Unknown
