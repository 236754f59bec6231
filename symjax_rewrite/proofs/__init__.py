"""Proofs that two JAX functions have equal values: `prove_equal`, `Proof`, `Different`, `Unknown`.

Two functions are traced as one program and read as index terms. Every output becomes a polynomial
over atoms that read indices, by the laws of arithmetic on real numbers.

    algebra   polynomials (`forms`, `arithmetic`) and their laws (`laws`): of functions
              (`functions`, `trigonometry`), sums and maxima (`reductions`, `power_sums`), orders
              (`orders`), tests, decided by cases (`sign_cases`)
    reading   programs as polynomials: index terms (`lifting`), slices (`entries`), convolutions
              (`windows`), sorts (`sorting`), loops in closed form (`opened_loops`, `recurrences`)
    here      two functions (`problems`) are sampled first (`samples`): a difference is a
              counterexample. Equal polynomials are a proof (`proving`, `verdicts`). Its steps are
              the laws that were applied, written in `notation`, each compared at random values
              (`checks`, `evaluation`)

May import every other folder.

    proof = prove_equal(jax.nn.softmax, naive_softmax, "f32[n,d]")
    print(proof)
    assert proof and proof.replay()
"""

from symjax_rewrite.proofs.proving import prove_equal as prove_equal
from symjax_rewrite.proofs.verdicts import Different as Different
from symjax_rewrite.proofs.verdicts import Proof as Proof
from symjax_rewrite.proofs.verdicts import Unknown as Unknown
