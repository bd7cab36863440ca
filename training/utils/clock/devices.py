"""Devices as data: rates of matmuls, memory and links, each with its source. Cheap to import: flags list the names.

Rates are per second and one device; TFLOP are of dense matrices. Sources, by letter: [E] stas00/ml-engineering 744d01e
(accelerator and network pages), [4090] hmc-tech.com, [FA2] arXiv 2307.08691, [FA3] arXiv 2407.08608, [M] recalled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Rates(NamedTuple):
    """peak: TFLOP/s of the specification. reached: the most that was measured of any shape (MAMF); 0: not known, and
    taken to be `USUAL_SHARE` of the peak."""

    peak: float
    reached: float = 0.0


class AttentionShares(NamedTuple):
    """Shares of the matmul peak that attention kernels reach, forward and backward."""

    forward: float
    backward: float


class Links(NamedTuple):
    """Gigabytes a second of one device and direction: among the devices of a node, to other nodes, to the host."""

    within: float
    between: float
    host: float


@dataclass(frozen=True)
class Device:
    """16-bit and 8-bit rates; memory in gigabytes (1e9) and gigabytes a second. processors: among which a matmul's
    tiles are shared. tile: of a matmul, rows x columns. source: letters of this file's docstring."""

    half: Rates
    memory_gb: float
    memory_rate: float
    attention: AttentionShares
    links: Links
    processors: int
    tile: tuple[int, int]
    source: str
    eighth: Rates = Rates(0.0)
    single: float = 0.0

    @property
    def is_cuda(self) -> bool:
        return self.memory_gb > 0


USUAL_SHARE = 0.8  # of a peak that some shape reaches: H100 0.80, B200 0.78, A100 0.87 [E]
# FlashAttention-2: 73 and 63 % of an A100's peak [FA2, section 4.1], 35 % of an H100's [FA3, abstract]. Its backward
# there is taken to fall off as on the A100.
_AMPERE = AttentionShares(0.73, 0.63)
_HOPPER = AttentionShares(0.35, 0.30)
_WIDE, _TALL = (128, 256), (256, 128)
_HGX = Links(450.0, 50.0, 55.0)  # NVLink 4; 400 Gb/s a GPU [E]; PCIe 5 x16: 63 less its overhead [M]
_PCIE4 = Links(25.0, 3.1, 25.0)  # x16: 31.5 less its overhead [M]; one network card of 200 Gb/s for eight [M]

DEVICES: dict[str, Device] = {
    "h100": Device(Rates(989, 794.5), 80, 3350, _HOPPER, _HGX, 132, _WIDE, "E", Rates(1979, 1402.6), 67),
    "h200": Device(Rates(989, 794.5), 141, 4800, _HOPPER, _HGX, 132, _WIDE, "E", Rates(1979, 1453.4), 67),
    "b200": Device(Rates(2250, 1745), 180, 8000, _HOPPER, Links(900, 50, 55), 148, _WIDE, "E", Rates(4500, 3432.5), 80),
    "a100": Device(Rates(312, 271.2), 80, 2000, _AMPERE, Links(300, 25, 25), 108, _TALL, "E", single=19.5),
    "a100-40": Device(Rates(312, 271.2), 40, 1555, _AMPERE, Links(300, 25, 25), 108, _TALL, "E, M", single=19.5),
    "l40s": Device(Rates(362), 48, 860, _AMPERE, _PCIE4, 142, _WIDE, "E", Rates(733), 91),
    "rtx4090": Device(Rates(165.2), 24, 1008, _AMPERE, _PCIE4, 128, _WIDE, "4090", Rates(330.3), 82),
}
DEVICES_OF_A_NODE = 8
