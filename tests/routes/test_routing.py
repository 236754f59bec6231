"""Routes are taken as far as they stand together in the program as it will be emitted."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.term_graph import build
from symjax_rewrite.kernel_selection.conflicts import take


@dataclass(eq=False)
class Kernel:
    """Computes some classes from others; all of its own may be read unless some are hidden."""

    own: set[int]
    before: list[int] = field(default_factory=list)
    hidden: frozenset[int] = frozenset()

    def classes(self) -> set[int]:
        return self.own

    def gives(self) -> set[int]:
        return self.own - self.hidden

    def needs(self, cls: int) -> list[int]:
        return self.before


@pytest.fixture
def chain() -> tuple[Any, list[int]]:
    """A program `x -> a -> b -> c -> d`, which gives b and d, and the classes of all five."""

    def fun(x):
        b = jnp.cos(jnp.sin(x))
        return b, jnp.tanh(jnp.exp(b))

    t = build(flatten(jax.make_jaxpr(fun)(jnp.ones(3))))
    values = [t.program.inputs[0], *(e.outvals[0] for e in t.program.equations)]
    return t, [t.view(v).cls for v in values]


def test_routes_in_order_are_taken(chain):
    t, (x, a, b, c, d) = chain
    routed: dict[int, Any] = {}
    assert take(t, routed, [Kernel({a, b}, [x], frozenset({a})), Kernel({c, d}, [b])]) == 0
    assert set(routed) == {a, b, c, d}


def test_a_route_that_waits_for_itself_is_dropped(chain):
    t, (x, a, _, c, _) = chain
    routed: dict[int, Any] = {}
    assert take(t, routed, [Kernel({a, c}, [x])]) == 0  # at once, from the input
    routed.clear()
    assert take(t, routed, [Kernel({a, c}, [chain[1][2]])]) == 1  # from b, which reads a
    assert not routed


def test_routes_that_wait_for_each_other_are_dropped(chain):
    t, (x, a, b, c, d) = chain
    routed: dict[int, Any] = {}
    assert take(t, routed, [Kernel({a, d}, [x, c]), Kernel({b}, [a])]) == 2
    assert take(t, routed, [Kernel({b}, [a])]) == 0


def test_what_is_read_is_not_hidden(chain):
    t, (x, a, b, c, _) = chain
    first = Kernel({b, c}, [a], frozenset({b}))  # b is a result
    routed: dict[int, Any] = {}
    assert take(t, routed, [first]) == 1
    assert take(t, routed, [Kernel({a, b}, [x], frozenset({a}))]) == 0
    assert take(t, routed, [Kernel({c}, [a])]) == 1  # a is within the first
    assert take(t, routed, [Kernel({b}, [x])]) == 1  # computed already
    assert set(routed) == {a, b}
