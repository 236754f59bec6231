"""Audits of programs: their properties and limits; guards against cliffs.

May import everything below `testing`. `audit` and `guard` are public names of the package.
"""
