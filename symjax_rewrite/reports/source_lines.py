"""The user's source lines, with their share of the predicted time and their changes."""

from __future__ import annotations

import ast
import linecache
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from symjax_rewrite.reports import units
from symjax_rewrite.reports.places import place
from symjax_rewrite.reports.record import Record
from symjax_rewrite.reports.text import considered, gain_there, grouped, named, refusal, title

LONGEST = 60  # lines of a function that are all shown
AROUND = 2  # lines shown before and after a line, of a longer function
MOST_LINES = 400  # of a report


@dataclass(slots=True)
class Note:
    """A note on a line: `taken` or `refused`, and a sentence."""

    kind: str
    text: str


@dataclass(slots=True)
class SourceLine:
    """One line of source: its number, text, share of the predicted time, and notes."""

    number: int
    text: str
    share: float = 0.0
    notes: list[Note] = field(default_factory=list)


@dataclass(slots=True)
class SourceBlock:
    """A function of the user: its file, and its lines; a gap in their numbers is a gap in these."""

    file: str
    lines: list[SourceLine]


def source_blocks(report: Record) -> list[SourceBlock]:
    """Return the functions that the program was traced through, in the order of their use."""
    notes, shares = _notes(report), _shares(report)
    by_file: dict[str, set[int]] = defaultdict(set)
    for where in (*report.details.lines, *(f"{f}:{n} (f)" for f, n in notes)):
        if (at := place(where)) is not None:
            by_file[at[0]].add(at[1])
    blocks, left = [], MOST_LINES
    for file, touched in by_file.items():
        text = linecache.getlines(file)
        for numbers in _shown(text, touched):
            numbers = numbers[:left]
            left -= len(numbers)
            lines = [
                SourceLine(n, text[n - 1].rstrip(), shares.get((file, n), 0.0), notes[file, n])
                for n in numbers
            ]
            blocks += [SourceBlock(file, lines)] if lines else []
    return blocks


def _shares(report: Record) -> dict[tuple[str, int], float]:
    """Return the share of the predicted time by file and line."""
    seconds: dict[tuple[str, int], float] = defaultdict(float)
    for where, s in report.details.seconds_by_line.items():
        if (at := place(where)) is not None:
            seconds[at[:2]] += s
    whole = sum(report.details.seconds_by_line.values())
    return {at: s / whole for at, s in seconds.items()} if whole else {}


def _notes(report: Record) -> dict[tuple[str, int], list[Note]]:
    """Return the candidates taken and refused, by file and line."""
    out: dict[tuple[str, int], list[Note]] = defaultdict(list)
    found = [
        (places, Note("taken", title(c) + gain_there(gain))) for c, places, gain in grouped(report)
    ]
    found += [
        (use.places, Note("refused", f"{named(use)}: {refusal(use)}")) for use in considered(report)
    ]
    for places, note in found:
        for where, count in places.items():
            if (at := place(where)) is not None:
                out[at[:2]].append(Note(note.kind, note.text + units.times(count)))
    return out


def _shown(text: list[str], touched: set[int]) -> Iterator[list[int]]:
    """Yield the numbers of the lines to show, function by function."""
    spans = list(_functions("".join(text)))
    left = {n for n in touched if n <= len(text)}
    while left:
        first = min(left)
        span = next((s for s in spans if s[0] <= first <= s[1]), (first, first))
        inside = {n for n in left if span[0] <= n <= span[1]}
        left -= inside
        if span[1] - span[0] < LONGEST:
            yield list(range(span[0], span[1] + 1))
        else:
            yield _windows(inside, span)


def _windows(inside: Iterable[int], span: tuple[int, int]) -> list[int]:
    near = {m for n in inside for m in range(n - AROUND, n + AROUND + 1)}
    return sorted(m for m in near | {span[0]} if span[0] <= m <= span[1])


def _functions(source: str) -> Iterator[tuple[int, int]]:
    """Yield the first and last line of every outermost function of a file, methods too."""
    try:
        stack: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # a notebook cell may hold magics
        return
    while stack:
        for node in ast.iter_child_nodes(stack.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield first, node.end_lineno or node.lineno
            elif isinstance(node, (ast.ClassDef, ast.If, ast.Try, ast.With)):
                stack.append(node)
