"""The helper that launches ranks: reports come home, failures are told, nothing is left behind."""

from __future__ import annotations

import os
import time

import pytest

from tests.distributed.launch import run_ranks


def test_two_ranks_meet_and_report():
    results = run_ranks(
        """
        import os, sys, torch, torch.distributed as dist
        from tests.distributed.launch import report
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        report({"rank": dist.get_rank(), "sum": total.item(), "args": sys.argv[1:],
                "threads": os.environ["OMP_NUM_THREADS"]})
        dist.destroy_process_group()
        """,
        world_size=2,
        args=["a b", 3],
    )
    assert results == [{"rank": rank, "sum": 3.0, "args": ["a b", "3"], "threads": "1"} for rank in (0, 1)]


def test_a_failing_rank_ends_the_others_and_shows_its_words():
    started = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 ended with code 1") as failure:
        run_ranks(
            """
            import os, time
            if os.environ["RANK"] == "1":
                raise RuntimeError("the words of rank one")
            time.sleep(60)
            """
        )
    assert "the words of rank one" in str(failure.value)
    assert time.monotonic() - started < 30


def test_time_runs_out_and_no_process_is_left(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(AssertionError, match="not done after 2 seconds"):
        run_ranks(script, args=[tmp_path], timeout_seconds=2)
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)
