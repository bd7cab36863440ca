"""Devices as data: rates of matmuls, memory and links, each with its source. Cheap to import: flags list the names.

Rates are per second and one device; TFLOP are of dense matrices. Sources, by letter: [E] stas00/ml-engineering 744d01e
(accelerator and network pages), [4090] hmc-tech.com, [FA2] arXiv 2307.08691, [FA3] arXiv 2407.08608, [M] recalled.
"""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


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


class Tiles(NamedTuple):
    """processors: among which a matmul's tiles are shared; a tile's rows and columns."""

    processors: int
    rows: int
    columns: int


Points = tuple[tuple[float, float], ...]  # a value by size, in ascending order


class HostCosts(NamedTuple):
    """Seconds of an operator in a forward and in a backward, by its bytes: large tensors drive the host's own data out
    of the caches; of what a step and each of its micro-steps do besides their model; of what a step of drawing does
    besides it, and more for each number of the logits that it draws from; of an operator in it (0: as of the smallest
    in a forward); of what a rollout does besides its models; of what a step and each of its micro-steps do for a layer,
    whatever its size, besides the operators that are counted (its weights' part of the optimizer's step, hooks); of a
    further document in a layer's attention, whose views are no operators, forward and backward (0: as an operator)."""

    forward: Points
    backward: Points
    step: float = 0.0
    micro_step: float = 0.0
    token: tuple[float, float] = (0.0, 0.0)
    drawn: float = 0.0
    rollout: float = 0.0
    layer: float = 0.0
    layer_micro_step: float = 0.0
    document: tuple[float, float] = (0.0, 0.0)


class Measured(NamedTuple):
    """Rates of a CPU that is its own host: every launch adds to the work that it launches, and nothing hides behind
    anything; all tables ascend. matmuls: (width, ((rows, FLOP/s), ...)) of the products of layers as wide as tall.
    optimizer: (numbers, numbers a second) of a step's way through gradients and AdamW. head_rate: bytes a second of the
    log-probabilities' operators. thin: (weights, ((rows, FLOP/s), ...)) of products of few rows, in a model of so many
    weights: a processor's cache holds those of a small one. cache_rate: bytes a second of a cache that a step of
    drawing reads. memory: (bytes of an operator, bytes a second) of memory-bound operators, forward and backward.
    thin_products: (rows, seconds) of a product of few rows, besides its weights and its launch."""

    matmuls: tuple[tuple[float, Points], ...]
    costs: HostCosts
    optimizer: Points
    head_rate: float
    thin: tuple[tuple[float, Points], ...]
    cache_rate: float
    memory: tuple[Points, Points]
    thin_products: Points = ((1.0, 0.0),)

    def matmul_rate(self, rows: int, columns: int, inner: int) -> float:
        """FLOP/s of a product. Its longest side counts as the rows, whose order changes little, and the mean of the
        other two, by their logarithms, as the width."""
        first, second, longest = sorted((rows, columns, inner))
        widths = [(width, _between(points, longest)) for width, points in self.matmuls]
        return _between(widths, math.sqrt(first * second))

    def optimizer_rate(self, numbers: float) -> float:
        """Numbers a second of a step that trains so many."""
        return _between(self.optimizer, numbers)

    def launch_seconds(self, size: float, backward: bool = False) -> float:
        """Seconds of the host for an operator of `size` bytes."""
        return _between(self.costs.backward if backward else self.costs.forward, size)

    def memory_rate(self, size: float, backward: bool = False) -> float:
        """Bytes a second of memory-bound operators of `size` bytes."""
        return _between(self.memory[backward], size)

    def thin_rate(self, weights: float, rows: float) -> float:
        """FLOP/s of a layer of few rows, in a model of so many weights."""
        return _between([(size, _between(points, rows)) for size, points in self.thin], weights)

    def thin_product_seconds(self, rows: float) -> float:
        """Seconds of a product of few rows besides those by `thin_rate`."""
        return _between(self.thin_products, rows)


def _between(points: Sequence[tuple[float, float]], size: float) -> float:
    """The value between the measured sizes, by the logarithm of the size; beyond them that of the nearest."""
    sizes = [known for known, _ in points]
    place = bisect.bisect(sizes, size)
    if place in (0, len(sizes)):
        return points[max(0, place - 1)][1]
    (small, slow), (large, fast) = points[place - 1 : place + 1]
    return slow + math.log(size / small) / math.log(large / small) * (fast - slow)


@dataclass(frozen=True)
class Device:
    """16-bit and 8-bit rates; memory in gigabytes (1e9) and gigabytes a second. source: letters of this file's
    docstring. measured: of a device that was measured on the spot."""

    half: Rates
    memory_gb: float
    memory_rate: float
    attention: AttentionShares
    links: Links
    tiles: Tiles
    source: str
    eighth: Rates = Rates(0.0)
    single: float = 0.0
    measured: Measured | None = None

    @property
    def is_cuda(self) -> bool:
        return self.memory_gb > 0

    def as_json(self) -> str:
        """A file that `read_device` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"


USUAL_SHARE = 0.8  # of a peak that some shape reaches: H100 0.80, B200 0.78, A100 0.87 [E]
# FlashAttention-2: 73 and 63 % of an A100's peak [FA2, section 4.1], 35 % of an H100's [FA3, abstract]. Its backward
# there is taken to fall off as on the A100.
_AMPERE = AttentionShares(0.73, 0.63)
_HOPPER = AttentionShares(0.35, 0.30)


def _tiles(processors: int, tall: bool = False) -> Tiles:
    return Tiles(processors, 256, 128) if tall else Tiles(processors, 128, 256)


_HGX = Links(450.0, 50.0, 55.0)  # NVLink 4; 400 Gb/s a GPU [E]; PCIe 5 x16: 63 less its overhead [M]
_PCIE4 = Links(25.0, 3.1, 25.0)  # x16: 31.5 less its overhead [M]; one network card of 200 Gb/s for eight [M]

DEVICES: dict[str, Device] = {
    "h100": Device(Rates(989, 794.5), 80, 3350, _HOPPER, _HGX, _tiles(132), "E", Rates(1979, 1402.6), 67),
    "h200": Device(Rates(989, 794.5), 141, 4800, _HOPPER, _HGX, _tiles(132), "E", Rates(1979, 1453.4), 67),
    "b200": Device(
        Rates(2250, 1745), 180, 8000, _HOPPER, Links(900, 50, 55), _tiles(148), "E", Rates(4500, 3432.5), 80
    ),
    "a100": Device(Rates(312, 271.2), 80, 2000, _AMPERE, Links(300, 25, 25), _tiles(108, True), "E", single=19.5),
    "a100-40": Device(Rates(312, 271.2), 40, 1555, _AMPERE, Links(300, 25, 25), _tiles(108, True), "E, M", single=19.5),
    "l40s": Device(Rates(362), 48, 860, _AMPERE, _PCIE4, _tiles(142), "E", Rates(733), 91),
    "rtx4090": Device(Rates(165.2), 24, 1008, _AMPERE, _PCIE4, _tiles(128), "4090", Rates(330.3), 82),
}
DEVICES_OF_A_NODE = 8
FILE_SUFFIX = ".json"  # of a file that holds a device


def read_device(text: str) -> Device:
    """The device of a file. KeyError, TypeError or ValueError if it holds none."""
    found: dict[str, Any] = json.loads(text)
    records = {"half": Rates, "eighth": Rates, "attention": AttentionShares, "links": Links, "tiles": Tiles}
    for name, kind in records.items():
        found[name] = kind(*found[name])
    if found["measured"] is not None:
        matmuls, costs, optimizer, head_rate, thin, cache_rate, memory, products = found["measured"]
        matmuls, thin = (tuple((size, _points(rates)) for size, rates in table) for table in (matmuls, thin))
        ahead, behind = map(_points, memory)
        rates = (matmuls, _costs(costs), _points(optimizer), head_rate, thin, cache_rate, (ahead, behind))
        found["measured"] = Measured(*rates, _points(products))
    return Device(**found)


def _costs(read: Sequence[Any]) -> HostCosts:
    found = HostCosts(*read)
    (forward, backward), (token, logit) = found.document, found.token
    points = _points(read[0]), _points(read[1])
    return found._replace(forward=points[0], backward=points[1], document=(forward, backward), token=(token, logit))


def _points(table: Sequence[Sequence[float]]) -> Points:
    return tuple((size, rate) for size, rate in table)
