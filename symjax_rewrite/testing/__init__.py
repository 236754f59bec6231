"""Test support: assertions about optimised programs, the rule checker, a reference evaluator.

May import every other folder. `assert_*` need chex (`pip install 'symjax_rewrite[testing]'`).

    assert_optimized(f, *args, uses="lora")
"""

from symjax_rewrite.testing.assertions import Specimen as Specimen
from symjax_rewrite.testing.assertions import assert_equivalent as assert_equivalent
from symjax_rewrite.testing.assertions import assert_no_cliff as assert_no_cliff
from symjax_rewrite.testing.assertions import assert_no_intermediate as assert_no_intermediate
from symjax_rewrite.testing.assertions import assert_optimized as assert_optimized
from symjax_rewrite.testing.assertions import check_rule as check_rule
from symjax_rewrite.testing.assertions import tolerance as tolerance
