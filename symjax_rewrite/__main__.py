"""The command line: `python -m symjax_rewrite explain mod:fn --args "f32[8,64]" ...`."""

from __future__ import annotations

import sys

from symjax_rewrite.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
