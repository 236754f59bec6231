"""Programs that take nearly all their time in launches of kernels, by their equations alone.

XLA fuses the operations of a large program on small arrays as it chooses, and no rewriting saves a
launch for sure. Where the program would be hardly faster without any arithmetic and traffic, no
term is worth reading. On GPUs kernels save launches, so that no program is light there.
"""

from __future__ import annotations

import functools

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
    for e in program.equations:
        if e.name in LIBRARY:
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
    read, stored = set[int](), {*numbers(program.outputs)}
    for e in program.equations:
        stored.update(read.intersection(e.reads))
        read.update(e.reads)
    made = [e for e in program.equations if e.name not in VIEWS]
    return device.launch_s * sum([not stored.isdisjoint(e.outvals) for e in made])


def _other_seconds(program: Program, device: Device) -> float:
    """Return the seconds of elementwise arithmetic and of all traffic, without those of bodies."""
    sizes = [aval_size(aval) for aval in program.avals]
    steps_of = functools.cache(device.functions.of)
    equations = [e for e in program.equations if e.name not in VIEWS]
    held = [aval_bytes(aval) for aval in program.avals]
    moved = sum([held[v] for e in equations for v in (*e.reads, *e.outvals)])
    steps = sum([sizes[v] * (1.0 + steps_of(e.name)) for e in equations for v in e.outvals])
    return moved / device.bytes_per_s + steps / device.elementwise_per_s
