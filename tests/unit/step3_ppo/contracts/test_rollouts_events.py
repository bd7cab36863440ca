"""A line of rollouts.jsonl for each step."""

from __future__ import annotations

import json

from training.step3_ppo.contracts import rollouts
from training.step3_ppo.contracts.rollouts import RolloutEvents, RolloutsOfStep, Times
from training.utils.contracts.rollout_engine import ServerShare
from training.utils.run.run_folder import RunLog


def test_lines_name_weights_times_rows_and_reasons(tmp_path):
    events = RolloutEvents(RunLog(tmp_path / "log"), "hf", prompts=4, per_step=2)
    events.trained(RolloutsOfStep(1, 0, (), (), 0.5, Times(1.0, 2.0, 3.0)), [(3, None), (1, "cut")])
    events.trained(RolloutsOfStep(2, 0, (), ()), [(0, None), (2, None)])
    events.unused([(3, 1)], "the run ended")
    first, second, third = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    shared = {"engine": "hf", "prompts": 4}
    assert first.pop("trained") <= second.pop("trained")
    assert first == {
        **shared, "step": 1, "version": 0, "first": 0, "asked": [1.0], "began": [2.0], "ended": [3.0], "waited": 0.5,
        "rows": [3, 1], "left_out": {"cut": [1]},
    }  # fmt: skip
    assert second == {
        **shared, "step": 2, "version": 0, "first": 2, "waited": 0.0, "rows": [0, 2], "left_out": {}
    }  # fmt: skip
    assert third == {**shared, "step": 3, "version": 1, "first": 4, "unused": "the run ended"}
    RolloutEvents(None, "hf", 4, 2).unused([(3, 1)], "the run ended")  # other ranks write nothing


def test_lines_name_the_servers_of_all_ranks(tmp_path, monkeypatch):
    other = {"http://b:1": ServerShare(2, 3.0, 2.5), "http://a:1": ServerShare(0, 9.0, 9.0)}
    monkeypatch.setattr(rollouts, "gathered", lambda own: [own, other if isinstance(own, dict) else own])
    events = RolloutEvents(RunLog(tmp_path / "log"), "vllm_server", prompts=4, per_step=2)
    events.trained(RolloutsOfStep(1, 0, (), (), shares={"http://b:1": ServerShare(1, 0.5, 0.5)}), [(3, None)])
    events.trained(RolloutsOfStep(2, 0, (), ()), [(1, None)])
    first, second = [json.loads(line)["servers"] for line in (tmp_path / "log").read_text().splitlines()]
    assert first == {
        "http://a:1": {"responses": 0, "seconds": 9.0, "slowest": 9.0},
        "http://b:1": {"responses": 3, "seconds": 3.5, "slowest": 2.5},
    }
    assert second["http://b:1"]["responses"] == 2, "another rank may have drawn alone"
