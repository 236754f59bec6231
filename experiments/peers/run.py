"""Peers in one run: plain `jax.jit`, `sym_optimize`, Enzyme-JAX and torch.compile, on the CPU.

The same programs, spelled once, on the same arrays. Every contestant lives in a process of its own;
samples are taken in turn across the processes, so that one contestant runs at a time.

python experiments/peers/run.py                                   # without peers: "not installed"
python experiments/peers/run.py --enzyme-python P --torch-python Q --write
python experiments/peers/run.py --quick                           # small sizes: a smoke test
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import numpy as np
from programs import PROGRAMS

NAMES = {"jit": "`jax.jit`", "ours": "`sym_optimize`", "enzyme": "Enzyme-JAX", "torch": "torch"}
SAMPLE_S = 0.03
TOLERANCE = 1e-4  # of the largest value


class Contestant:
    """A worker process, or the reason why there is none."""

    def __init__(self, kind: str, python: str | None) -> None:
        self.kind, self.failed = kind, ""
        if python is None or not Path(python).exists():
            self.failed = "not installed"
            return
        command = [python, str(HERE / "worker.py"), kind]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        told = self._read()
        self.versions = told.get("versions", {})
        if not self.versions:
            self.failed = "not installed"

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; one that dies answers that it failed."""
        try:
            self._stream("stdin").write(json.dumps(request) + "\n")
            self._stream("stdin").flush()
        except BrokenPipeError:
            return {"failed": "its process ended"}
        return self._read()

    def close(self) -> None:
        if hasattr(self, "process"):
            self._stream("stdin").close()
            self.process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        text = self._stream("stdout").readline()
        return json.loads(text) if text else {"failed": "its process ended"}

    def _stream(self, name: str) -> Any:
        return getattr(self.process, name)


def main() -> None:
    options = parse()
    pythons = {"jit": sys.executable, "ours": sys.executable}
    pythons |= {"enzyme": options.enzyme_python, "torch": options.torch_python}
    contestants = [Contestant(kind, python) for kind, python in pythons.items()]
    shrink, rounds = (16, 2) if options.quick else (1, options.rounds)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, program in enumerate(PROGRAMS[:2] if options.quick else PROGRAMS):
            results[program.name] = contest(contestants, number, shrink, rounds, Path(folder))
            print(program.name, results[program.name], file=sys.stderr, flush=True)
    versions = {c.kind: c.failed or c.versions for c in contestants}
    for contestant in contestants:
        contestant.close()
    parts = tell(results, versions)
    print("\n\n".join(parts))
    if options.write:
        harness.write_json(HERE / "results.json", {"versions": versions, "programs": results})
        harness.write_table(HERE / "README.md", *parts)
        plot(results)


def parse() -> argparse.Namespace:
    options = harness.parser(__doc__, rounds=11)
    options.add_argument("--enzyme-python", help="an interpreter that has enzyme_ad")
    options.add_argument("--torch-python", help="an interpreter that has torch")
    return options.parse_args()


def contest(
    contestants: list[Contestant], number: int, shrink: int, rounds: int, folder: Path
) -> dict[str, Any]:
    """Build one program everywhere, compare results with plain jit's, and sample in turn."""
    told: dict[str, Any] = {}
    running = []
    for each in contestants:
        store = folder / f"{each.kind}.npy"
        answer = {"failed": each.failed}
        if not each.failed:
            answer = each.ask(build=number, shrink=shrink, store=str(store))
        if not answer.get("failed") and difference(folder, each.kind) > TOLERANCE:
            answer["failed"] = "another value"
        told[each.kind] = answer
        running += [] if answer.get("failed") else [each]
    order, seconds = random.Random(number), {each.kind: [] for each in running}
    for _ in range(rounds):
        for each in order.sample(running, len(running)):
            seconds[each.kind].append(each.ask(sample=SAMPLE_S)["seconds"])
    samples = harness.Samples(seconds)
    for kind in seconds:
        told[kind] |= {"seconds": samples.median(kind), "ratio": samples.ratio("jit", kind)}
    return told


def difference(folder: Path, kind: str) -> float:
    """Return the largest difference from plain jit's result, over its largest value."""
    want, got = (np.load(folder / f"{name}.npy") for name in ("jit", kind))
    return float(np.abs(got - want).max() / np.abs(want).max())


def tell(results: dict[str, Any], versions: dict[str, Any]) -> list[str]:
    header = [
        "program",
        "`jax.jit`",
        *(f"{name}, times as fast" for name in list(NAMES.values())[1:]),
    ]
    rows = [
        [
            name,
            harness.duration(told["jit"]["seconds"]),
            *(told[kind].get("failed") or str(told[kind]["ratio"]) for kind in list(NAMES)[1:]),
        ]
        for name, told in results.items()
    ]
    present = "; ".join(
        f"{NAMES[kind]}: " + (v if isinstance(v, str) else ", ".join(map(" ".join, v.items())))
        for kind, v in versions.items()
    )
    return [
        f"Samples in turn across processes, float32, on the CPU, in {harness.CPU_NOTE}. {present}. "
        "GPU: not measured",
        harness.markdown_table(header, rows),
    ]


def plot(results: dict[str, Any]) -> None:
    series = {
        NAMES[kind]: {
            name: told[kind]["ratio"].median
            for name, told in results.items()
            if "ratio" in told[kind]
        }
        for kind in list(NAMES)[1:]
    }
    found = {name: values for name, values in series.items() if values}
    harness.bars(HERE / "results.png", "times as fast as plain jax.jit", found)


if __name__ == "__main__":
    main()
