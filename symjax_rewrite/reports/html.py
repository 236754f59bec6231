"""HTML as nested elements: text is escaped where it is put in, and nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from symjax_rewrite.reports.page_style import PAGE_STYLE, SCOPE, STYLE

CLOSED = frozenset({"meta", "line", "circle"})  # elements that hold nothing


class Html(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


def tag(name: str, /, *content: str, kind: str = "", **attributes: str | float) -> Html:
    """Return an element.

    Args:
        name: of the element.
        content: texts and elements in it.
        kind: its class; empty for none.
        attributes: further attributes; `_` in a name stands for `-`.

    Example:
        >>> tag("p", "a < b ", tag("b", "x"), kind="dim")
        '<p class="dim">a &lt; b <b>x</b></p>'
    """
    named = {"class": kind, **attributes} if kind else attributes
    given = "".join(f' {k.replace("_", "-")}="{escape(str(x))}"' for k, x in named.items())
    if name in CLOSED:
        return Html(f"<{name}{given}/>")
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def joined(content: Iterable[str], between: str = "") -> Html:
    """Return texts and elements as one."""
    return Html(between.join(x if isinstance(x, Html) else escape(x) for x in content))


def row(cells: Iterable[str], cell: str = "td", kinds: Sequence[str] = ()) -> Html:
    """Return a row of a table; `kinds`: the classes of its cells."""
    texts = list(cells)
    kinds = [*kinds, *[""] * (len(texts) - len(kinds))]
    return tag("tr", *(tag(cell, x, kind=k) for x, k in zip(texts, kinds, strict=True)))


def table(heads: Iterable[str], rows: Iterable[Html], kind: str = "") -> Html:
    """Return a table under a row of headings."""
    return tag("table", row(heads, "th"), *rows, kind=kind)


def bar(share: float) -> Html:
    """Return a bar of a share of the width."""
    return tag("i", style=f"width:{100 * share:.1f}%")


def fragment(parts: Iterable[Html]) -> str:
    """Return an element with a style of its own, as a notebook shows it."""
    style = tag("style", Html(STYLE))
    return str(tag("div", joined([style, *parts], "\n"), kind=SCOPE))


def page(title: str, body: str) -> str:
    """Return a page of its own, with a `fragment` in it."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html(PAGE_STYLE)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', Html(body)), lang='en')}\n"
