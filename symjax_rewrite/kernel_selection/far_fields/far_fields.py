"""The pass of far fields, which loads its search only where an approximation is permitted."""

from __future__ import annotations

from collections.abc import Iterable

from symjax_rewrite.candidates import Context, Found
from symjax_rewrite.ir.flat_program import Program


class FarFields:
    """Pass that approximates sums over pairs of points by grids of cells."""

    name = "far_field"

    def candidates(self, program: Program, context: Context) -> Iterable[Found]:
        options = context.options
        if options.numerics.level != "approx" or options.kernels not in ("auto", "always"):
            return ()
        from symjax_rewrite.kernel_selection.far_fields.selection import far_fields

        return far_fields(program, context)
