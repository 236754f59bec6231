"""Code generation: chosen terms are converted back to JAX operations.

Before: terms. After: equations, each with the name scope and the source line of the equation that
it replaces.

    Contract((x, (i, k)), (W, (k, j)))  →  dot_general(x, W)
"""
