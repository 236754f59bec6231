"""Loops: their normal form, hoisting, fusion, rematerialisation, and recurrences in them.

Before: scan and while equations. After: loops that compute less in each step.

    scan(h ← tanh((A @ B) @ h + W @ x_t))
    → AB = A @ B; Wx = x @ W.T; scan(h ← tanh(AB @ h + Wx_t))

    read      equations as loops (`loop_reading`, `loop`, `normalization`), how carries depend on
              each other (`carry_dependence`), which carries follow a monoid (`monoids`,
              `monoid_carries`, tested by `exact_steps` in a `prime_field`)
    detect    unrolled loops (`unrolled_detection`, `rerolling`, `stepwise_equations`), and trees of
              `associative_scan` (`associative_scan_detection`, `associative_scan_gradients`)
    change    one loop: `hoisting`, `joined_invariants`, `product_splitting`, `fusion`,
              `storage_order`, `stream_folds`, as parts and candidates (`motion`, `changes`),
              by the kernels of a step (`step_kernels`)
    gradient  forward and backward loops: `program_partition`, `rematerialization`,
              `sunk_operands`, `linear_zeros`
    passes    `loop_optimizer`, `batched_loops`, `bodies`, `paired_steps`, `differentiated_loops`,
              `affine_trees` (by `associative_scan_loops`)
"""
