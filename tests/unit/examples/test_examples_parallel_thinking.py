"""The embedded task by parallel thinking: blocks that the layout takes, and a reward that reads behind them."""

from __future__ import annotations

import pytest

from examples.parallel_thinking import EmbeddedInParallel, answer
from threestep.plugins.embedded.task import generate


def test_attempts_stand_in_a_block_and_the_answer_behind_it():
    rows = generate(1, 50, 5)["train"]
    dataset = EmbeddedInParallel.__new__(EmbeddedInParallel)
    first = set()
    for row in rows:
        text = dataset.get_chosen(row)
        block, _, behind = text.partition("</Parallel>")
        paths = block.removeprefix(" <Parallel><Path>").removesuffix("</Path>").split("</Path><Path>")
        assert sorted(paths) == sorted([row.chosen, row.rejected]) and behind == row.chosen
        assert dataset.get_rejected(row) == f"{block}</Parallel>{row.rejected}"
        first.add(paths[0] == row.chosen)
    assert first == {True, False}  # or the answer would be known from the place


def test_the_reward_reads_what_stands_behind_the_last_block():
    prompt = "Human: Put owl last: fox elk Assistant:"
    right, wrong = "<Path> fox elk owl</Path>", "<Path> owl</Path>"
    responses = [
        f" <Parallel>{wrong}{wrong}</Parallel> fox elk owl", f" <Parallel>{right}{right}</Parallel> fox owl",
        " fox elk owl", f" <Parallel>{right}{wrong}",
    ]  # fmt: skip
    scores, values = answer([prompt] * 4, responses, ground_truth=[None] * 4)
    assert scores[:3] == pytest.approx([1.0, 2 / 3, 1.0]) and scores[3] < 0.5
    assert values == {"with_block": [1.0, 1.0, 0.0, 0.0]}
