"""What a program is like: the properties it has, what limits it, and guards against cliffs.

May import everything below `testing`. `audit` and `guard` are public names of the package.
"""
