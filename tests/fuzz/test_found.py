"""Programs that random search found, by their seeds: each went wrong once."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.fuzz.cases import case
from tests.fuzz.check import Failure, Mode, check_function
from tests.fuzz.symbolic import check_named

SEEDS = {  # of random programs, and what went wrong
    3004999: "users of merged classes were noted again and again: no end",
    3005101: "a log-softmax was deferred past a product as a norm, and lost all digits",
    3007730: "two folds waited for each other once a third was refused",
    3012155: "a result without a sum was read as one with the sum of the state",
    3012708: "a size `n - 3` was negative at the sample for n: no cheapest form, no end",
    3012726: "at the exact level a product was computed as a term, other than written",
    4003208: "a row sum took a product that others read rounded to bfloat16 as it was before",
    4005634: "what cancelled between two terms of one rounded product was rounded in each",
    4008027: "residuals of a complex program were rounded by what takes no complex numbers",
    5002699: "in a loop's body a branch for another platform read what no branch here had saved",
    5006529: "what is made of the state before a step was made of the first one",
    5012422: "an axis without entries was unstacked",
    5018845: "scores were read with their mean taken off by one fold, and without by another",
    6014771: "a slice of a diagonal beside the main one was read from the main one",
    6019426: "a result of a scan was summed over an axis that nothing in it has",
    8001498: "cotangents were added in the order of a jit, as under `jax.jit`, not of the program",
    12000924: "rows were added up at keys, and taken for pairs with one row",
    12002346: "beside a tie a cast to bfloat16 fell the other way, as it may",
    18002731: "a row of named length was sorted by `top_k` as a reduction to that many entries",
    130006642: "a slice of a slice of a constant had no axes to compose",
    132000372: "the largest entry of a product was read as that of a sum over its slots",
    40001764: "a quadratic form minus itself was factored by either of its equal factors: not 0",
    50007863: "a norm that overflows in float16 as written was finite, as where XLA keeps it wide",
    62001206: "a gradient that underflow makes large cancels: rounding was sought in float64",
    74004467: "near values were scaled before a mean of other values was subtracted",
    75015709: "the size of a product's right operand was taken for a number where it was a name",
    76003941: "sums of opened terms lost more digits than the program as written, as they may",
    76004229: "a branch that calls a method of the sum of no parts, a number, was no program",
    76010689: "the time to copy an empty array was divided by its size",
    80020255: "a constant was read from a table that only dead equations read",
    91827369: "a sum was opened inside itself, without end",
    98021298: "the term of a sum in a loop was an operand, and read with all its features",
    98023300: "of a view with a named size it was asked whether it repeats what it reads",
}


FORCED = {  # the same, where every legal candidate is taken
    98010290: "what is written out of range was judged as clipped, where XLA drops it",
    98011140: "an array without elements was said to be made in a body, and made nowhere",
    99600134: "results of no bytes were kept or computed again by a ratio of nothing",
}


@pytest.mark.parametrize("seed", SEEDS)
def test_programs_that_random_search_found(seed):
    outcome = check_named(*case(seed))
    assert not isinstance(outcome, Failure), outcome


@pytest.mark.parametrize("seed", FORCED)
def test_programs_that_random_search_found_without_thresholds(seed):
    program, mode = case(seed)
    outcome = check_named(program, replace(mode, choice="forced"))
    assert not isinstance(outcome, Failure), FORCED[seed]


@pytest.mark.filterwarnings("ignore")
def test_a_solve_beside_an_inverse_of_its_matrix_stays_a_solve():
    """The second derivative was a product with the inverse that the first one computes."""

    def readout(u, y):
        z = jnp.linalg.inv(1e-2 * jnp.eye(40) + u @ u.T) @ y
        return jnp.outer(z, z) @ u

    rng = np.random.default_rng(1)
    u, y = rng.standard_normal((40, 2)), np.round(2 * rng.standard_normal(40))
    values = [u.astype(np.float32), y.astype(np.float32)]
    assert check_function(readout, values, Mode("in_second", "always")) == "equal"
