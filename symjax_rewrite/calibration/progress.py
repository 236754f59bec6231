"""Progress on stderr after two seconds: a line that changes in a terminal, else one line in all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

QUIET_S = 2.0  # shorter work shows nothing


class Progress:
    """Tells how far some work has come.

    Args:
        title: of the work.
        stream: where to write; default: stderr as it is then.
        clock: seconds since any time.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.title, self.clock = title, clock
        self.stream = sys.stderr if stream is None else stream
        self.started, self.width, self.lines = clock(), 0, 0

    def show(self, done: int, count: int, what: str) -> None:
        """Show that `done` of `count` parts are done, and the next part."""
        took = self.clock() - self.started
        if took < QUIET_S:
            return
        text = f"{self.title}: {done}/{count}, {took:.0f} s, {what}"
        if self.stream.isatty():
            self.stream.write("\r" + text[:100].ljust(self.width))
            self.width = len(text[:100])
        elif not self.lines:
            self.stream.write(f"{self.title} takes more than {QUIET_S:.0f} s\n")
        self.lines += 1
        self.stream.flush()

    def close(self) -> None:
        """Clear the line in a terminal."""
        if self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
        self.width = 0
