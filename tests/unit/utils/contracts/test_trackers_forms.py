"""Samples as services take them."""

from __future__ import annotations

from training.utils.contracts.trackers import sample_table


def test_the_table_of_samples():
    """Columns that some sample has, then each reward's; JSON stands for what is neither number nor text."""
    samples = [
        {
            "prompt": "p",
            "response": "r",
            "reward": 1.0,
            "sample": 0,
            "ground_truth": ["a"],
            "reward/rule": 1.0,
            "step": 3,
        },
        {"prompt": "p", "response": "s", "reward": 0.5, "sample": 1, "ground_truth": None, "reward/rule/key": 2.0},
        {"prompt": "q", "response": "t", "reward": 0.0, "sample": 0, "check": 1.0},
    ]
    columns, rows = sample_table(samples, 2)
    assert columns == ["prompt", "sample", "response", "ground_truth", "reward", "reward/rule", "reward/rule/key"]
    assert rows == [["p", 0, "r", '["a"]', 1.0, 1.0, None], ["p", 1, "s", None, 0.5, None, 2.0]]
    assert "check" in sample_table(samples, 3)[0] and sample_table([], 8) == ([], [])
