"""What is known of the devices that programs can be compiled for without having one: sizes and peak rates.

Rates are per jax device, as published by the vendor: TPU v4 (without megacore) and TPU7x have two devices a chip. The
memory is what the compiler gives a program.
"""

from typing import NamedTuple


class Chip(NamedTuple):
    """memory: bytes. bandwidth: bytes per second. flops, int8_ops: per second, of products in bfloat16 and in int8.
    flops_per_cycle: of the matrix units in bfloat16."""

    memory: int
    bandwidth: float
    flops: float
    int8_ops: float
    flops_per_cycle: int

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.flops / self.flops_per_cycle


_GIB = 1 << 30
CHIPS = {  # by `device_kind`
    "TPU v4": Chip(int(15.25 * _GIB), 614e9, 137.5e12, 137.5e12, 1 << 17),
    "TPU v5 lite": Chip(int(15.75 * _GIB), 819e9, 197e12, 394e12, 1 << 17),
    "TPU v5": Chip(int(95.73 * _GIB), 2765e9, 459e12, 918e12, 1 << 18),
    "TPU v6 lite": Chip(int(31.24 * _GIB), 1638e9, 918e12, 1836e12, 1 << 19),
    "TPU7x": Chip(int(94.74 * _GIB), 3690e9, 1153.5e12, 1153.5e12, 1 << 19),
}
# Topologies whose names the compiler knows, with the least number of chips of a host; others have more chips.
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
