"""Names, weights and addresses in entries of --reward."""

from __future__ import annotations

from training.utils.rewards.table import reward_name, split_weight


def test_a_weight_is_the_last_number():
    found = {
        entry: (reward_name(entry), split_weight(entry.strip())[1])
        for entry in (
            "gsm8k", "model:0.5", " dir/my.py:score:0",
        )
    }  # fmt: skip
    assert found == {
        "gsm8k": ("gsm8k", 1.0), "model:0.5": ("model", 0.5), " dir/my.py:score:0": ("score", 0.0),
    }  # fmt: skip
