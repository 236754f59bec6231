"""The public interface: `sym_optimize`, its derivatives, frozen arguments, and checks.

May import every other folder but `testing`. Before: a Python function or a `jax.jit` object.
After: a `jax.jit` object that runs the optimised program.

    lora = sym_optimize(lambda x, W, A, B: x @ (W + A @ B))
    lora(x, W, A, B)               # runs x @ W + (x @ A) @ B
    lora.explain(x, W, A, B)       # Report
"""
