"""Addresses of judges and servers in entries of --reward: their names, weights and what is one."""

from __future__ import annotations

import pytest

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.table import kind_of, reward_name, split_weight
from training.utils.rewards.weighted import check_comparisons, comparing, named_rewards, reads_ids, reads_messages


def test_a_weight_is_the_last_number_unless_that_is_a_port():
    found = {
        entry: (reward_name(entry), split_weight(entry.strip())[1])
        for entry in ("judge:dir/kind.yaml:0", "http:http://h:80", "https://h/x:-2")
    }
    assert found == {
        "judge:dir/kind.yaml:0": ("kind", 0.0), "http:http://h:80": ("h_80", 1.0), "https://h/x:-2": ("h", -2.0),
    }  # fmt: skip


def test_which_entries_are_addresses_of_services():
    assert kind_of("judge:a.yaml") and not kind_of("judge.py:a")
    assert kind_of("http:server.yaml") and not kind_of("httpd.py:score")


def test_addresses_of_servers_and_judges_and_their_weights(tmp_path, monkeypatch):
    """A port is no weight."""
    monkeypatch.delenv("THREESTEP_API_KEY", raising=False)
    (tmp_path / "kind.yaml").write_text("model: m\nbase_url: http://h/v1\nrubric: Kind.\n")
    for given, name, weight in (
        ("http:http://127.0.0.1:8001", "127.0.0.1_8001", 1.0),
        ("http:http://127.0.0.1:8001:2", "127.0.0.1_8001", 2.0),
        ("http://h:80/v1/scores", "h_80", 1.0),
        ("http:https://h/v1/scores:0.5", "h", 0.5),
        ("http:http://[::1]:8001", "___1__8001", 1.0),
        (f"judge:{tmp_path / 'kind.yaml'}", "kind", 1.0),
        (f"judge:{tmp_path / 'kind.yaml'}:-3", "kind", -3.0),
    ):
        mistakes = Mistakes()
        [reward] = named_rewards(ScoringArguments(reward=given), mistakes)
        mistakes.raise_if_any()
        assert (reward.name, reward.weight) == (name, weight) and reward_name(given) == name
        assert reads_messages([reward]) and reads_ids([reward]) == given.startswith("http")


def test_a_judge_that_compares_wants_several_responses(tmp_path):
    (tmp_path / "duel.yaml").write_text("model: m\nbase_url: http://h/v1\nrubric: Kind.\nform: pairwise\n")
    mistakes = Mistakes()
    flags = ScoringArguments(reward=f"judge:{tmp_path / 'duel.yaml'},length", reward_length_characters=3)
    found = named_rewards(flags, mistakes)
    check_comparisons(found, {"--val_samples 1": 1, "--num_samples_per_prompt 2": 2}, mistakes)
    assert len(comparing(found)) == 1
    with pytest.raises(ThreestepError, match="--reward duel compares the responses .*, and --val_samples 1 gives one"):
        mistakes.raise_if_any()
