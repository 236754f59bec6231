"""Instructions of compiled GPU kernels, by the assembler and disassembler that Triton brings."""

import importlib
import re
import subprocess
import tempfile
from pathlib import Path

LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+\S")
JUMP = re.compile(r"BRA 0x([0-9a-f]+)")


def loop_lengths(ptx: str) -> list[int]:
    """Return the instructions of every loop of a kernel for an H200, the longest last."""
    tools = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        newest = re.sub(r"\.version 8\.[89]", ".version 8.7", ptx)
        source.write_text(newest)
        subprocess.run([tools / "ptxas", "-arch", "sm_90a", source, "-o", cubin], check=True)
        command = [tools / "cuobjdump", "-sass", cubin]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    jumps = ((LINE.search(line), JUMP.search(line)) for line in sass.splitlines())
    pairs = [(int(here[1], 16), int(to[1], 16)) for here, to in jumps if here and to]
    return sorted((here - to) // 16 for here, to in pairs if to < here)
