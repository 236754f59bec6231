"""The report that `explain` returns: its record as text, JSON and HTML."""

from __future__ import annotations

from pathlib import Path

from symjax_rewrite.reports.record import Record


class Report(Record):
    """The result of `explain`: prints as text, and shows itself in a notebook.

    Its fields are those of `Record`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from symjax_rewrite import sym_optimize
        >>> a, v = jnp.ones((512, 512)), jnp.ones(512)
        >>> report = sym_optimize(lambda a, v: (a @ a) @ v, device="cpu").explain(a, v)
        >>> report.before.flops > 100 * report.after.flops, report.rules[0].name
        (True, 'contraction_order')
    """

    __slots__ = ()

    def __str__(self) -> str:
        from symjax_rewrite.reports.text import as_text

        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from symjax_rewrite.reports.page import as_fragment

        return as_fragment(self)

    def to_html(self) -> str:
        """Return a page of its own: no scripts, nothing loaded, light and dark."""
        from symjax_rewrite.reports.page import as_page

        return as_page(self)

    def to_json(self) -> str:
        """Return the report as JSON (`reports.plain`), with its schema's version."""
        from symjax_rewrite.reports.plain import as_json

        return as_json(self)

    def save(self, path: str | Path) -> None:
        """Write a page if the path ends in .html, text if in .txt, else `to_json()`."""
        path = Path(path)
        text = {".html": self.to_html, ".txt": self.__str__}.get(path.suffix, self.to_json)()
        path.write_text(text, encoding="utf-8")
