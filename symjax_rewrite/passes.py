"""The passes, in the order in which they run.

A pass reads the program as earlier passes left it. A pass that occurs again in the list runs again
only if the program has changed since. To add a pass, write a class like `candidates.Pass` and list
it here, or put it into a `RulePack` to try it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from symjax_rewrite.candidates import Pass
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.kernel_selection.banded_products import BandedProducts
from symjax_rewrite.kernel_selection.far_fields.far_fields import FarFields
from symjax_rewrite.kernel_selection.folds.selection import Folds
from symjax_rewrite.kernel_selection.folds.sparse_reductions import SparseReductions
from symjax_rewrite.kernel_selection.norms.frozen_weights import FrozenWeights
from symjax_rewrite.kernel_selection.norms.selection import Norms
from symjax_rewrite.kernel_selection.partial_sort import PartialSorts
from symjax_rewrite.loops.affine_trees import AffineTrees
from symjax_rewrite.loops.batched_loops import BatchedLoops
from symjax_rewrite.loops.bodies import Bodies
from symjax_rewrite.loops.differentiated_loops import DifferentiatedLoops
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.loop_optimizer import ImprovedLoops
from symjax_rewrite.loops.paired_steps import PairedSteps
from symjax_rewrite.options import Options
from symjax_rewrite.rewriting.algebra import Algebra
from symjax_rewrite.rewriting.column_reductions import ColumnReductions
from symjax_rewrite.rewriting.column_scans import ColumnScans
from symjax_rewrite.rewriting.extremum_places import ExtremumPlaces
from symjax_rewrite.rewriting.fusion_limits import FusionLimits
from symjax_rewrite.rewriting.product_orientation import OrientedProducts
from symjax_rewrite.rewriting.rational_powers import RationalPowers
from symjax_rewrite.rewriting.repeated_products import CommonProducts, RepeatedProducts
from symjax_rewrite.rewriting.short_rows import ShortRows

if TYPE_CHECKING:
    from symjax_rewrite.kernel_selection.scans.selection import Kernel


def loop_kernel(loop: Loop, options: Options, device: Device, gradient: bool = False) -> Kernel:
    """Return the kernel of a loop; the search for it is loaded for the first loop."""
    from symjax_rewrite.kernel_selection.scans import selection

    return selection.loop_kernel(loop, options, device, gradient)


_gradient_kernel = partial(loop_kernel, gradient=True)

FOLDS = Folds()

PASSES: tuple[Pass, ...] = (
    DifferentiatedLoops(_gradient_kernel),  # a loop and its gradient → those of another form
    PairedSteps(loop_kernel),  # a loop and its backward loop → steps optimised together
    AffineTrees(loop_kernel),  # a tree of affine steps and its derivatives → loops or kernels
    BatchedLoops(),  # a loop whose steps do not depend on each other → all steps at once
    ImprovedLoops(loop_kernel),  # a loop → hoisted equations, a smaller loop, or a scan
    SparseReductions(),  # Σ over sparse terms → Σ over their nonzero places
    FarFields(),  # sums over pairs of points → cells, where an approximation is permitted
    RationalPowers(),  # a power of quarters → square roots
    FOLDS,  # reductions over pairs → a fold that stores no pairs
    Norms(),  # a norm and a linear layer → one kernel
    PartialSorts(),  # the ends of sorted rows → selection
    FrozenWeights(),  # a norm's scale and shift → into frozen weights
    Algebra(),  # a region of terms → the cheapest equal terms
    FOLDS,  # again, for reductions over pairs that the rules leave
    Norms(),  # again, for norms that the rules leave
    BandedProducts(),  # a product with a banded matrix → blocks
    RepeatedProducts(),  # a product for every copy of an operand → one product
    Bodies(),  # bodies of loops and branches → optimised programs
    BatchedLoops(),  # again, for loops with a rewritten body
    ImprovedLoops(loop_kernel),  # the same
    CommonProducts(),  # a product written twice → one product
    OrientedProducts(),  # a product → the order of operands that reads memory in order
    ExtremumPlaces(),  # an argmax → a maximum, and the least place where it stands
    ColumnScans(),  # a cumulative sum or extremum down the columns → row by row
    ColumnReductions(),  # a sum or extremum down the columns → row by row
    ShortRows(),  # a reduction of short rows → of long ones, or operations on their columns
    FusionLimits(),  # a value in a slow fusion of XLA → a stored value
)

# Passes of loops and of the bodies in them; the others work on index terms and large arrays.
OF_LOOPS = frozenset(
    {"differentiated_loops", "paired_steps", "affine_trees", "batched_loops", "loops", "bodies"}
)
# Passes that multiply what a loop does not change, computed once before it.
OF_INVARIANTS = frozenset({"algebra"})
