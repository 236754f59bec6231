"""Whole programs emitted with forms chosen at random, not by cost: any choice is right."""

import random
from dataclasses import replace

import jax
import numpy as np
import pytest

from symjax_rewrite import jax_internals, packs
from symjax_rewrite.cost.term_cost import reachable
from symjax_rewrite.ir.dataflow import CycleError
from symjax_rewrite.ir.term import LEAF
from symjax_rewrite.optimizer import Optimiser
from symjax_rewrite.options import Options
from symjax_rewrite.rewriting import region_solver
from symjax_rewrite.rewriting.extraction import extract, is_emittable, original_choice
from symjax_rewrite.testing.numpy_evaluator import evaluate
from symjax_rewrite.testing.rule_examples import SPECIMENS, arguments, size_tables
from tests.profiles import changed

SEEDS = 3


def choose_at_random(rng):
    def chosen(g, roots, model, free, *rest):
        choice = {**extract(g, roots, model, free, *rest).choice}
        for cls in g.live():
            nodes = g.classes[cls].nodes
            forms = [n for n, why in nodes.items() if is_emittable(g, n, why.rule == "original")]
            if any(n.op == LEAF for n in forms):
                continue
            trial = {**choice, cls: rng.choice(forms)} if forms else choice
            try:
                reachable(trial, roots, lambda c: False)
            except (CycleError, KeyError):
                continue
            choice = trial
        best = extract(g, roots, model, free, *rest)
        return replace(best, choice={**original_choice(g), **choice}, taken=True)

    return chosen


@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda p: p.name)
def test_every_equal_form_has_the_same_values(specimen, monkeypatch):
    device = changed(margins={"share_of_program": -np.inf})  # whatever it gains
    for dtype in ("float64", "int32"):
        if not specimen.takes(dtype):
            continue
        with jax.enable_x64(dtype == "float64"):
            sizes = size_tables(specimen, 2)[0]
            avals = specimen.avals(sizes, dtype)
            closed, _ = jax_internals.make_jaxpr(specimen.fun, *avals)
            args = next(arguments(specimen, sizes, dtype, [(1.0, 0.0)]))
            wanted = evaluate(closed, args)
            for seed in range(SEEDS):
                monkeypatch.setattr(region_solver, "extract", choose_at_random(random.Random(seed)))
                result = Optimiser(Options(rules=packs.default), packs.default, device).run(closed)
                made = jax_internals.make_avals_jaxpr(result.emit(), closed.in_avals)
                _same(evaluate(made, args), wanted)


def _same(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if y.dtype.kind in "iub":
            np.testing.assert_array_equal(x, y)
        elif y.size:
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y))  # filled out of range
            x, y = np.nan_to_num(x), np.nan_to_num(y)
            assert np.abs(x - y).max() <= 1e-9 * np.abs(y).max() + 1e-12
