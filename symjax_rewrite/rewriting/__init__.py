"""Equality saturation: rules, matching, regions of the program, extraction of the cheapest form.

Before: terms as they were written. After: for each region, equal terms that cost less.

    x @ (W + A @ B)  →  x @ W + (x @ A) @ B
"""
