"""The curve of cost."""

from __future__ import annotations

from functools import partial

from training.plan.curve import limit, points
from training.plan.search import search


def test_each_number_of_gpus_has_its_best_and_the_part_that_costs_more(wanted, estimates):
    """By hand: one GPU offloads and takes 8 of 16 sequences at a time, 2 x 10 + 5 seconds; four shard weights and take
    4 at once, 4 x (6 + 1) seconds of GPUs; 16 have a sequence each and room for whole weights, 16 x 3."""
    one, four, sixteen, more = points(wanted(), (1, 4, 16, 32), partial(search, estimates=estimates))
    assert (one.device_seconds, four.device_seconds, sixteen.device_seconds) == (25.0, 28.0, 48.0)
    assert limit(four, four) == "the cheapest"
    assert limit(sixteen, four) == "+71%, most by matmuls"
    assert more.best is None and limit(more, four) == "the batch has 16 sequences"


def test_where_nothing_fits_it_says_what_is_missing(wanted, estimates):
    (point,) = points(wanted(gpu_bytes=10), (4,), partial(search, estimates=estimates))
    assert point.best is None and point.why_none.startswith("nothing fits 4 x h100") and point.device_seconds > 1e9
