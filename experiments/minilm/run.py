"""The main job: a sentence encoder with low-rank adapters, before and after `sym_optimize`.

python experiments/minilm/run.py            # what is gained, under a minute on two cores
python experiments/minilm/run.py --write    # everything, and the results beside this script
python experiments/minilm/run.py --quick    # two layers, few rounds: a smoke test
"""

import argparse
import dataclasses
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness
import jax
import model
import numpy as np
import weights

from symjax_rewrite import sym_optimize
from symjax_rewrite.command_line.terminal import progress

SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "Heavy rain and thunder are expected tonight.",
    "He drove to the stadium to watch the match.",
    "The home team scored twice in the second half.",
    "Knead the dough and let it rest for an hour.",
    "Bake the bread until its crust is golden.",
    "A compiler rewrites programs so that they run faster.",
    "The program was slow because it multiplied large matrices.",
    "Associativity lets us choose the order of a matrix chain.",
    "Jupiter is the largest planet of the solar system.",
    "The telescope photographed a distant galaxy.",
)
TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers, few rounds")
    parser.add_argument("--write", action="store_true", help="write README.md and results.json")
    options = parser.parse_args()
    rounds = 3 if options.quick else 11 if options.write else 5
    with progress("MiniLM", 5 if options.write else 4) as begin:
        begin("loading the model")
        encoder, arguments = load(options.quick)
        calls = calls_of(arguments)
        begin("optimising")
        rewritten = sym_optimize(model.encode)
        reports = {title: rewritten.explain(*call) for title, call in calls.items()}
        gaining = [title for title in calls if reports[title].changed] or [*calls][-1:]
        begin("compiling, as written and rewritten")
        timed = [*calls] if options.write else gaining
        pairs = {title: Compiled.of(rewritten, calls[title]) for title in timed}
        begin("running both in turn")
        speed = {title: measured(pairs[title], calls[title], rounds) for title in timed}
        last = gaining[-1]
        vectors = encoded(pairs[last], calls[last], arguments)
        build = build_of(pairs[last], reports[last])
        if options.write:
            begin("timing the optimiser against XLA's compiler")
            specs = harness.specs_of(arguments)
            count = 1 if options.quick else 3
            build = harness.build_time(model.encode, sym_optimize, specs, count)
    tell_gains(reports, speed)
    print(f"\nMiniLM, {len(arguments[1])} layers, adapters of rank 8 on every projection.")
    print(f"Weights: {encoder.origin}. Input: {len(SENTENCES)} sentences of up to {TOKENS} tokens.")
    resources = tell_resources(reports)
    for title, report in reports.items():
        tell_rules(title, report)
    difference = compare_meaning(*vectors)
    tell_build(build)
    if options.write:
        rules = {t: {rule.name: rule.count for rule in r.rules} for t, r in reports.items()}
        save(encoder.origin, difference, rules, resources, build, speed)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One call compiled as written and rewritten, with the seconds that lowering and XLA took."""

    plain: Any
    rewritten: Any
    lower_s: float
    compile_s: float
    compile_after_s: float

    @classmethod
    def of(cls, rewritten: Any, call: tuple) -> "Compiled":
        """Compile a call."""
        start = time.perf_counter()
        lowered = jax.jit(model.encode).lower(*call)
        lower_s = time.perf_counter() - start
        both, seconds = [], []
        for each in (lowered, rewritten.lower(*call)):
            start = time.perf_counter()
            both.append(each.compile())
            seconds.append(time.perf_counter() - start)
        return cls(*both, lower_s, *seconds)


def load(quick: bool) -> tuple[Any, tuple]:
    """Return the encoder, and the arguments of the largest call."""
    encoder = weights.load()
    params, adapters = encoder.params, weights.lora_adapters(encoder.params)
    if quick:
        params = {**params, "layers": params["layers"][:2]}
        adapters = adapters[:2]
    params, adapters = jax.device_put((params, adapters))
    ids, mask = jax.device_put(encoder.tokenise(SENTENCES, TOKENS))
    return encoder, (params, adapters, ids, mask)


def measured(pair: Compiled, call: tuple, rounds: int) -> dict[str, Any]:
    """Time both programs in turn: medians, and the ratio with its quartiles."""
    samples = harness.interleave(
        {"before": lambda: pair.plain(*call), "after": lambda: pair.rewritten(*call)}, rounds
    )
    before, after = (harness.duration(samples.median(name)) for name in ("before", "after"))
    return {"before": before, "after": after, "ratio": samples.ratio("before", "after")}


def encoded(pair: Compiled, call: tuple, arguments: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of all sentences by both programs, as many rows at a time as in a call."""
    params, adapters, ids, mask = arguments
    rows = len(call[2])
    parts = [(ids[k : k + rows], mask[k : k + rows]) for k in range(0, len(ids), rows)]
    before, after = (
        np.concatenate([np.asarray(run(params, adapters, *part)) for part in parts])
        for run in (pair.plain, pair.rewritten)
    )
    return before, after


def build_of(pair: Compiled, report: Any) -> harness.BuildTime:
    """Return the times before the first call, of one round."""
    compiles = (pair.compile_s, pair.compile_after_s)
    return harness.BuildTime(report.time_s, report.time_s, pair.lower_s, *compiles)


def tell_gains(reports: dict[str, Any], speed: dict[str, Any]) -> None:
    """Print what was gained: measured, then predicted; the calls that gained first."""
    heading("Gained")
    for title in sorted(reports, key=lambda t: not reports[t].changed):
        report, one = reports[title], speed.get(title)
        if one is not None:
            times = f"{one['before']} → {one['after']} a call"
            print(f"{title:<14}{one['ratio']} times as fast, measured: {times}")
        print(f"{title if one is None else '':<14}{str(report).splitlines()[0]}")


def compare_meaning(before: np.ndarray, after: np.ndarray) -> float:
    """Print the similarities, and how far both programs are apart; returns that."""
    heading("Cosine similarities (rewritten program)")
    similarity = after @ after.T
    print(" " * 46 + "".join(f"{i + 1:>6}" for i in range(len(similarity))))
    for i, row in enumerate(similarity):
        sentence = textwrap.shorten(SENTENCES[i], 41, placeholder="…")
        print(f"{i + 1:>3} {sentence:<42}" + "".join(f"{value:6.2f}" for value in row))
    difference = float(np.abs(before @ before.T - similarity).max())
    print(f"\nLargest difference from the unrewritten program's: {difference:.1e}")
    return difference


def calls_of(arguments: tuple) -> dict[str, tuple]:
    """A batch and a single query: which form is cheaper depends on the number of tokens."""
    params, adapters, ids, mask = arguments
    sizes = {f"{len(ids)} sentences": len(ids), "1 sentence": 1}
    return {name: (params, adapters, ids[:rows], mask[:rows]) for name, rows in sizes.items()}


def tell_rules(title: str, report: Any) -> None:
    heading(f"Rules that fired, {title}")
    for rule in report.rules:
        print(f"{rule.count:>4} × {rule.name:<28} {rule.property}")
        for place in unique(rule.where):
            print(f"         {place}")
    if not report.rules:
        print("   none: left as written")


def unique(where: Any) -> list[str]:
    places = [where] if isinstance(where, str) else list(where)
    return list(dict.fromkeys(str(place) for place in places))


def tell_resources(reports: dict[str, Any]) -> dict[str, list[str]]:
    heading("Resources, from the program alone")
    units = {
        "flops": ("FLOPs", "FLOP"),
        "bytes": ("memory traffic", "B"),
        "largest_intermediate": ("largest intermediate", "B"),
    }
    rows = {}
    print(f"{'':<40}{'before':>14}{'after':>14}")
    for title, report in reports.items():
        for name, (text, unit) in units.items():
            sides = (report.before, report.after)
            cells = [price(getattr(side, name), unit) for side in sides]
            label = f"{title}, {text}"
            print(f"{label:<40}{cells[0]:>14}{cells[1]:>14}")
            rows[label] = cells
    return rows


def price(value: Any, unit: str) -> str:
    return "not priced" if value is None else harness.quantity(float(value), unit)


def tell_build(build: harness.BuildTime) -> None:
    heading("Time before the first call")
    print(f"optimiser                {harness.duration(build.optimise_s):>10}")
    print(f"XLA compile, as written  {harness.duration(build.compile_s):>10}")
    print(f"XLA compile, rewritten   {harness.duration(build.compile_after_s):>10}")
    print(f"optimiser / compile      {build.share:>10.1%}")


def save(
    origin: str,
    difference: float,
    rules: dict[str, dict[str, int]],
    resources: dict[str, list[str]],
    build: harness.BuildTime,
    speed: dict[str, dict],
) -> None:
    rows = [[name, *cells, ""] for name, cells in resources.items()]
    rows += [[f"{title}, time", *one.values()] for title, one in speed.items()]
    compiles = (build.compile_s, build.compile_after_s)
    rows.append(["XLA compile time", *map(harness.duration, compiles), ""])
    rows.append(["optimiser time", "", harness.duration(build.optimise_s), f"{build.share:.1%}"])
    rows.append(["largest difference of a similarity", "", f"{difference:.1e}", ""])
    for title, counts in rules.items():
        fired = ", ".join(f"{count} × {name}" for name, count in counts.items())
        rows.append([f"{title}, rules", "", fired or "none", ""])
    table = harness.markdown_table(["", "before", "after", "ratio"], rows)
    harness.write_table(HERE / "README.md", table, f"Weights: {origin}.")
    record = {"weights": origin, "largest_similarity_difference": difference, "rules": rules}
    record |= {"resources": resources, "build": build, "speed": speed}
    harness.write_json(HERE / "results.json", record)


def heading(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}")


if __name__ == "__main__":
    main()
