"""Time and energy of attention from its FLOPs and bytes, with every constant and its source."""

from __future__ import annotations

import dataclasses

from symjax_rewrite.cost.device_profiles import DEVICES


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Constants of the projection.

    flops_per_s, bytes_per_s: rates of large products and copies. flop_joules: of one floating-point
    operation. byte_joules: of one byte from or to main memory. width: bytes of a number.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    flop_joules: float
    byte_joules: float
    width: int
    source: str

    @property
    def access_over_flop(self) -> float:
        """Return the energy of a number from memory over that of an operation on it."""
        return self.width * self.byte_joules / self.flop_joules

    def seconds(self, flops: float, moved: float) -> float:
        """Return the time if arithmetic and transfers overlap entirely."""
        return max(flops / self.flops_per_s, moved / self.bytes_per_s)

    def joules(self, flops: float, moved: float) -> float:
        return flops * self.flop_joules + moved * self.byte_joules


HOROWITZ = "M. Horowitz, Computing's energy problem, ISSCC 2014 (45 nm)"
CPU = Machine(
    "CPU, float32",
    DEVICES["cpu"].flops_per_s["float32"],
    DEVICES["cpu"].bytes_per_s,
    (0.9e-12 + 3.7e-12) / 2,  # an addition and a multiplication, 32 bits
    1.95e-9 / 8,  # 1.3 to 2.6 nJ for 64 bits of DRAM
    4,
    f"rates: the library's profile `cpu`; energies: {HOROWITZ}: addition 0.9 pJ and multiplication "
    "3.7 pJ of 32 bits, 64 bits of DRAM 1.3 to 2.6 nJ (its middle is taken)",
)
H200 = Machine(
    "H200, bfloat16",
    DEVICES["h200"].flops_per_s["bfloat16"],
    DEVICES["h200"].bytes_per_s,
    700 / 989e12,  # board power over peak: an upper bound, everything else included
    8 * 3.92e-12,
    2,
    "rates: the library's profile `h200` (datasheet times the share large products reach); "
    "energies: 700 W over 989 TFLOP/s of the datasheet, which bounds a FLOP from above; 3.92 pJ "
    "per bit of HBM2 (M. O'Connor et al., Fine-Grained DRAM, MICRO 2017)",
)
MACHINES = {"cpu": CPU, "h200": H200}
