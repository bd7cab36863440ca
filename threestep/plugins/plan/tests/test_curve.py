"""The curve of cost."""

from __future__ import annotations

from functools import partial

from threestep.plugins.plan.curve import SLOW_NODES, STOPS, bites, limit, points
from threestep.plugins.plan.failures import Losses
from threestep.plugins.plan.search import search


def nothing(ranks: int, seconds: float) -> Losses:
    """A run without failures."""
    return Losses(1, 1.0, 0.0, 0.0, 0.0)


def test_each_number_of_gpus_has_its_best_and_the_part_that_costs_more(wanted, estimates):
    """By hand: one GPU offloads and takes 8 of 16 sequences at a time, 2 x 10 + 5 seconds; four shard weights and take
    4 at once, 4 x (6 + 1) seconds of GPUs; 16 have a sequence each and room for whole weights, 16 x 3."""
    one, four, sixteen, more = points(wanted(), (1, 4, 16, 32), partial(search, estimates=estimates), nothing)
    assert (one.device_seconds, four.device_seconds, sixteen.device_seconds) == (25.0, 28.0, 48.0)
    assert limit(four, four) == "the cheapest"
    assert limit(sixteen, four) == "+71%, most by matmuls"
    assert more.best is None and limit(more, four) == "the batch has 16 sequences"


def test_where_nothing_fits_it_says_what_is_missing(wanted, estimates):
    (point,) = points(wanted(gpu_bytes=10), (4,), partial(search, estimates=estimates), nothing)
    assert point.best is None and point.why_none.startswith("nothing fits 4 x h100") and point.device_seconds > 1e9


def test_slow_nodes_and_stops_are_parts_that_begin_to_bite(wanted, estimates):
    """By hand: 28 seconds of four GPUs, 48 of sixteen, of which 16 x 3 are matmuls where four took 24; slow nodes add a
    tenth to sixteen, 4.8, which is more than a twentieth of 28, and stops 0.48, which is not."""

    def lost(ranks: int, seconds: float) -> Losses:
        return Losses(1, 1.0, 0.0, 0.1, 0.01) if ranks == 16 else nothing(ranks, seconds)

    four, sixteen = found = points(wanted(), (4, 16), partial(search, estimates=estimates), lost)
    assert sixteen.best is not None and sixteen.best.parts is not None
    assert abs(sixteen.best.parts[SLOW_NODES] - 0.3) < 1e-9 and abs(sixteen.best.parts[STOPS] - 0.03) < 1e-9
    assert bites(found, four) == {"matmuls": 16, SLOW_NODES: 16} and bites(found, sixteen) == {}
