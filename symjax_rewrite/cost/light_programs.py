"""Programs that take nearly all their time in launches of kernels, by their equations alone.

XLA fuses the operations of a large program on small arrays as it chooses, and no rewriting saves a
launch for sure. Where the program would be hardly faster without any arithmetic and traffic, no
term is worth reading. On GPUs kernels save launches, so that no program is light there.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, aval_size, work_seconds
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.primitives import VIEWS

LITTLE_WORK = "arithmetic and traffic take little of the predicted time"
LIBRARY = frozenset({"dot_general", "conv_general_dilated", "sort", "top_k"})  # more than traffic


def is_light(program: Program, device: Device) -> bool:
    """Return True for a large program whose launches alone take nearly as long as the program."""
    is_small = len(program.equations) < device.search.large_program
    if is_small or device.loops.steps_are_launches:
        return False

    def is_less(work_s: float, launches_s: float) -> bool:
        return not margins.pays(launches_s + work_s, launches_s, "rewrite", device)

    library_s, most_s = 0.0, device.launch_s * len(program.equations)
    for e in [e for e in program.equations if e.name in LIBRARY]:
        library_s += work_seconds(e.eqn, device)
        if not is_less(library_s, most_s):  # a few products are enough in most programs
            return False
    launches_s = launch_seconds(program, device)
    if not is_less(library_s, launches_s):
        return False
    return is_less(_other_seconds(program, device) + library_s, launches_s)


def launch_seconds(program: Program, device: Device) -> float:
    """Return the seconds of the launches that a program needs at least, without those in bodies.

    A result, and a value that several equations read, is written to memory by a kernel.
    """
    read = [e.reads if len(e.reads) < 2 else {*e.reads} for e in program.equations]
    readers = Counter(chain.from_iterable(read))
    stored = {v for v, n in readers.items() if n > 1}.union(numbers(program.outputs))
    made = [e.outvals for e in program.equations if e.name not in VIEWS]
    return device.launch_s * sum([not stored.isdisjoint(values) for values in made])


def _other_seconds(program: Program, device: Device) -> float:
    """Return the seconds of elementwise arithmetic and of all traffic, without those of bodies."""
    avals = {id(aval): aval for aval in program.avals}  # JAX shares equal ones
    size_of = {key: aval_size(aval) for key, aval in avals.items()}
    bytes_of = {key: aval_bytes(aval) for key, aval in avals.items()}
    sizes = [size_of[id(aval)] for aval in program.avals]
    held = [bytes_of[id(aval)] for aval in program.avals]
    equations = [e for e in program.equations if e.name not in VIEWS]
    each = {name: 1.0 + device.functions.of(name) for name in {e.name for e in equations}}
    made = [e.outvals for e in equations]
    moved = sum(map(held.__getitem__, chain(*[e.reads for e in equations], *made)))
    steps = sum([sizes[v] * each[e.name] for e in equations for v in e.outvals])
    return moved / device.bytes_per_s + steps / device.elementwise_per_s
