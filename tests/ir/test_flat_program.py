"""Flat programs: copies are independent, and a body is flattened once in a run."""

from collections import Counter

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite import packs
from symjax_rewrite.cost.profile_file import selected_device
from symjax_rewrite.ir import flat_program
from symjax_rewrite.ir.dataflow import makers_of
from symjax_rewrite.ir.flat_program import flatten, flattening_once
from symjax_rewrite.optimizer import Optimiser
from symjax_rewrite.options import Options


def test_programs_of_one_jaxpr_change_apart():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
    with flattening_once():
        one, other = flatten(closed), flatten(closed)
        one.equations.clear()
        one.new_value(closed.in_avals[0])
        assert len(other.equations) == len(flatten(closed).equations) == 2
        assert len(other.avals) == len(flatten(closed).avals) == 3


def test_makers_are_found_once_and_again_after_a_change():
    program = flatten(jax.make_jaxpr(lambda x: jnp.sin(x) * x)(1.0))
    found = program.once(makers_of)
    assert program.once(makers_of) is found
    program.equations.append(program.equations[-1])
    again = program.once(makers_of)
    assert again is not found
    program.equations = [*program.equations[:-2], program.equations[-1]]
    assert program.once(makers_of) is not again
    assert program.copy().once(makers_of) == program.once(makers_of)


def test_a_body_is_flattened_once_in_a_run(monkeypatch):
    inline, counts = flat_program.inline, Counter()

    def counted(program, closed, *args):
        counts[id(closed.jaxpr)] += 1
        return inline(program, closed, *args)

    def looped(x):
        return lax.scan(lambda h, row: (jnp.tanh(h * row), h), x[0], x)

    closed = jax.make_jaxpr(looped)(jnp.ones((8, 4)))
    monkeypatch.setattr(flat_program, "inline", counted)
    Optimiser(Options(), packs.default, selected_device(None)).run(closed)
    assert set(counts.values()) == {1}
