"""One rank's failure as the others see it. The processes that it ends: tests/distributed/test_leaving.py."""

from __future__ import annotations

import torch.distributed as dist

from training.utils.engine.ranks.rank_watch import RankWatch


def test_a_failure_is_seen_by_all_and_only_in_its_own_program():
    store = dist.HashStore()
    first = [RankWatch(rank, store) for rank in (0, 1)]
    assert first[0].failed_rank() is None
    first[1].report_failure()
    assert first[0].failed_rank() == "rank 1"
    assert RankWatch(0, store).failed_rank() is None  # the next program of the same processes


def test_one_rank_tells_nobody():
    watch = RankWatch(0, None)
    watch.start()
    watch.report_failure()
    watch.stop()
