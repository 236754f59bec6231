"""Forms that count fewer operations and take longer are not chosen."""

import math

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.ir.dataflow import CycleError
from symjax_rewrite.rewriting.choice_cost import ChoiceCost, _Moved


def test_forces_of_all_pairs_stay_a_fused_loop():
    """Σⱼ uᵢⱼ·(xᵢ − xⱼ) became products of a matrix and a vector for every i: twice slower."""

    def potential(x, m):
        gap = x[:, None] - x[None, :]
        distance = jnp.sqrt(jnp.sum(gap**2, -1) + 1e-2)
        return -0.5 * jnp.sum(m[:, None] * m[None, :] / distance)

    forces = sym_optimize(jax.grad(potential), kernels="off")
    report = forces.explain(jnp.ones((256, 3)), jnp.ones(256))
    assert "dot_general" not in str(report.after.jaxpr)


def test_a_move_is_priced_like_the_moved_choice(monkeypatch):
    """The price of every move that the search tries equals that of the whole moved choice."""
    after, moves = ChoiceCost.after, []

    def checked(self, move):
        moved = self.moved(move)
        moves.append((after(self, move), moved.seconds))
        if moved.seconds < math.inf:
            same(moved, ChoiceCost(self.g, self.roots, self.model, self.free, moved.choice))
        return moves[-1][0]

    def same(moved, anew):
        written(moved)
        assert moved.order == anew.order and moved.kernels == pytest.approx(anew.kernels, rel=1e-12)
        assert moved.written == anew.written
        for c in anew.order:
            assert moved.readers_of(c) == anew.readers_of(c)
            assert moved.group_of(c) == anew.group_of(c)

    def written(self):
        try:
            whole = self.model.evaluate(self.g, self.choice, self.roots, self.free).seconds
        except (CycleError, KeyError):
            whole = math.inf
        assert self.seconds == pytest.approx(whole, rel=1e-12)

    made = ChoiceCost.__init__
    monkeypatch.setattr(ChoiceCost, "after", checked)
    monkeypatch.setattr(
        ChoiceCost, "__init__", lambda self, *args: (made(self, *args), written(self))[0]
    )

    def gates(x, w, a, b, s):
        y = x @ (w + a @ b) * s + x @ w
        return jax.nn.softmax(y * 2 + y) @ w, jnp.sum((x - y) ** 2, axis=-1), y[:, :5] * s[:5]

    def total(*arrays):
        return sum(map(jnp.sum, gates(*arrays)))

    shapes = ((32, 64), (64, 64), (64, 4), (4, 64), (64,))
    args = [jnp.ones(s) for s in shapes]
    for fun in (gates, jax.grad(total, argnums=(0, 1, 2))):
        sym_optimize(fun).explain(*args)
    sym_optimize(gates, frozen=("w", "a", "s")).prepare(w=args[1], a=args[2], s=args[4])
    assert len(moves) > 40
    for got, wanted in moves:
        assert got == pytest.approx(wanted, rel=1e-12)


def test_a_move_is_priced_once_for_all_paths_to_an_operand(monkeypatch):
    """A chain of values that are read twice has 2ⁿ paths from its end to its start."""
    looked, is_written = [], _Moved._is_written
    monkeypatch.setattr(
        _Moved, "_is_written", lambda self, c: (looked.append(c), is_written(self, c))[1]
    )

    def chain(x, y, w):
        z = x
        for _ in range(9):
            z = (z * 2 + y) * (z - y * 3)
        return jnp.sum(z, 1) @ (w @ w) @ w, jnp.sum(z * y + z * x, 0)

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((600, 500), (600, 500), (600, 600))]
    sym_optimize(chain, device="cpu").explain(*args)
    assert 0 < len(looked) < 3_000
