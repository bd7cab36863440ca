"""Names, weights and addresses in entries of --reward."""

from __future__ import annotations

from training.utils.rewards.names.entries import is_http, is_judge, reward_name, split_weight


def test_a_weight_is_the_last_number_unless_that_is_a_port():
    found = {
        entry: (reward_name(entry), split_weight(entry.strip())[1])
        for entry in (
            "gsm8k", "model:0.5", " dir/my.py:score:0", "judge:dir/kind.yaml:0", "http:http://h:80", "https://h/x:-2",
        )
    }  # fmt: skip
    assert found == {
        "gsm8k": ("gsm8k", 1.0), "model:0.5": ("model", 0.5), " dir/my.py:score:0": ("score", 0.0),
        "judge:dir/kind.yaml:0": ("kind", 0.0), "http:http://h:80": ("h_80", 1.0), "https://h/x:-2": ("h", -2.0),
    }  # fmt: skip


def test_which_entries_are_addresses_of_services():
    assert is_judge("judge:a.yaml") and not is_judge("judge.py:a")
    assert is_http("http:server.yaml") and not is_http("httpd.py:score")
