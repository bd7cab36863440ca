"""A dry run of many ranks starts none of them."""

from __future__ import annotations

from training.utils.run import launch


def test_no_ranks_are_started_for_a_plan(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "run_and_wait", lambda *started_with, **_: started.append(started_with) or 0)
    for name in ("RANK", "WORLD_SIZE", "THREESTEP_RANKS", "THREESTEP_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    launch.launch("m", "--num_ranks 64 --dry_run true".split(), 1)
    assert [command[1:] for command, _ in started] == [["-m", "m", "--num_ranks", "64", "--dry_run", "true"]]
