"""Tables and progress: by rich where stderr is a terminal, else as plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from symjax_rewrite.text_tables import aligned

PAUSE_S = 10.0


def is_terminal() -> bool:
    """Return True if a person looks on: stderr is a terminal."""
    return sys.stderr.isatty()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table to stdout; in a pipe as aligned columns, which tools can read."""
    if is_terminal():
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, title=title or None)
        for row in rows:
            table.add_row(*row)
        Console(file=sys.stdout, markup=False).print(table)
        return
    print("\n".join([*filter(None, [title]), *aligned([columns, *rows])]))


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr while something runs; yields a function that names the next step.

    In a pipe a line names the step at hand, at most one in `PAUSE_S` seconds.
    """
    if not is_terminal():
        yield _plain_steps(title, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(title, total=total)
        started = False

        def step(name: str) -> None:
            nonlocal started
            bar.update(task, advance=1 if started else 0, description=f"{title}: {name}")
            started = True

        yield step


def _plain_steps(title: str, total: int) -> Callable[[str], None]:
    """Return a function that prints the next step, if the last line is long ago."""
    done, printed = 0, time.monotonic()

    def step(name: str) -> None:
        nonlocal done, printed
        done += 1
        if time.monotonic() - printed > PAUSE_S:
            printed = time.monotonic()
            print(f"{title}: {name} ({done} of {total})", file=sys.stderr, flush=True)

    return step
