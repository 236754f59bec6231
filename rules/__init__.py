"""The rules: axioms, lemmas and packs, one file per mathematical property.

This top-level folder is the package `symjax_rewrite.rules` and must not be imported by another
name. Imported as `rules`, every module in it would exist twice, and no rule would be equal to its
copy.
"""

if __name__ != "symjax_rewrite.rules":
    raise ImportError(
        f"this folder is the package 'symjax_rewrite.rules', imported here as {__name__!r}. "
        "Install it (pip install -e .) and write: from symjax_rewrite import rules"
    )
