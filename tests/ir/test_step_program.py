"""Step programs: equal steps are one, roots keep their operands, keys tell programs apart."""

import numpy as np
import pytest

from symjax_rewrite.codegen.step_evaluation import handlers
from symjax_rewrite.ir.step_program import StepProgram, key_of, place_in, pruned, run
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP


def _difference() -> tuple[StepProgram, int]:
    """Return a program of `x - y`, with a constant that nothing reads, and its root."""
    p = StepProgram()
    p.add("const", 7.0, (), "float32")
    x, y = (p.add("value", k, (), "float32") for k in range(2))
    return p, p.add("apply", (ADD, (1, -1)), (x, y), "float32")


def test_equal_steps_are_one_step():
    p, root = _difference()
    assert p.add(*p.steps[root]) == root
    assert len(p.steps) == 4


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, True), (1, 1.0)])
def test_constants_that_compare_equal_are_two_steps(a, b):
    p = StepProgram()
    assert p.add("const", a, (), "float32") != p.add("const", b, (), "float32")


def test_cast_to_the_same_dtype_is_no_step():
    p, root = _difference()
    assert p.cast(root, "float32") == root
    assert p.steps[p.cast(root, "float16")] == ("cast", None, (root,), "float16")


def test_unread_steps_are_pruned_and_the_rest_renumbered():
    p, root = _difference()
    steps, (new,) = pruned(p.steps, [root])
    assert [s.kind for s in steps] == ["value", "value", "apply"]
    assert (new, steps[new].args) == (2, (0, 1))


def test_keys_tell_programs_apart():
    (p, _), (q, _) = _difference(), _difference()
    assert key_of(p.steps) == key_of(q.steps) == tuple(p.known)
    q.add("const", -0.0, (), "float32")
    assert key_of(p.steps) != key_of(q.steps)


def test_values_of_steps():
    p, root = _difference()
    square = p.add("apply", (CONTRACT, None), (root, root), "float32")
    p.add("apply", (MAP, ("reciprocal", ())), (square,), "float32")
    values = np.asarray([[5.0], [3.0]], np.float32)
    made = run(p.steps, handlers({}, value=lambda number, args, dtype: values[number]))
    assert [float(np.squeeze(x)) for x in made] == [7.0, 5.0, 3.0, 2.0, 4.0, 0.25]


def test_a_step_without_a_handler_is_an_error():
    with pytest.raises(KeyError, match="value"):
        run(_difference()[0].steps, handlers({}))


def test_items_are_numbered_in_the_order_of_first_use():
    items: list[str] = []
    assert [place_in(items, x) for x in "abab"] == [0, 1, 0, 1]
