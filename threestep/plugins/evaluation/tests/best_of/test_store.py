"""Batches are kept whole, once, and only beside those of the same settings."""

from __future__ import annotations

import json
import math

import pytest

from threestep.plugins.evaluation.best_of.store import ANSWERS, AnswerStore
from training.utils.base.errors import ThreestepError

BATCHES = [range(2), range(2, 3)]


def drawn(place, prompt, **more):
    scores = {"responses": ["x", "y"], "ended": [True, False], "reward": [0.5, 1.0], "check": [1.0, 0.0]}
    return {"prompt_index": place, "prompt": prompt, "ground_truth": None, "data_source": "s", **scores, **more}


ONE, TWO = [drawn(0, "a\u2028b"), drawn(1, [{"role": "user", "content": "c"}])], [drawn(2, "d")]


def test_what_is_missing_and_what_is_there(tmp_path):
    store = AnswerStore(tmp_path)
    store.begin({"--seed": 1}, overwrite=False)
    assert store.missing(BATCHES) == [0, 1]
    store.add(1, TWO)
    (tmp_path / "batches" / ".000000.jsonl.77").write_text('{"prompt": "a half')  # of a killed process
    again = AnswerStore(tmp_path)
    again.begin({"--seed": 1}, overwrite=False)
    assert again.missing(BATCHES) == [0]
    again.add(0, ONE)
    assert again.close(BATCHES) == ONE + TWO
    assert sorted(path.name for path in tmp_path.iterdir()) == [ANSWERS, "settings.json"]
    # Killed behind the last batch, it is closed again.
    again.begin({"--seed": 1}, overwrite=False)
    assert again.missing(BATCHES) == [] and again.close(BATCHES) == ONE + TWO


def test_other_settings_are_refused_or_drawn_again(tmp_path):
    store = AnswerStore(tmp_path)
    store.begin({"--seed": 1, "--reward": "length"}, overwrite=False)
    store.add(0, ONE)
    expected = "holds responses that were drawn with other settings: --seed was 1 and is 2; restore them, give another"
    with pytest.raises(ThreestepError, match=expected):
        store.begin({"--seed": 2, "--reward": "length"}, overwrite=False)
    assert store.missing(BATCHES) == [1]
    store.begin({"--seed": 2, "--reward": "length"}, overwrite=True)
    assert store.missing(BATCHES) == [0, 1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff", "in UTF-8"),
        (b"[" * 100_000, "line 1: .*JSON"),
        (b"{}\n", "prompt_index is missing"),
        (b"", "expects the prompts 2 to 2, a line each"),
        (json.dumps(ONE[0]).encode(), "expects the prompts 2 to 2"),
        (json.dumps(drawn(2, "d", reward=[1.0, None])).encode(), "reward.1 expects"),
        (json.dumps(drawn(2, "d", reward=[1.0, math.inf])).encode(), "finite scores"),
        (json.dumps(drawn(2, "d", responses=["x"])).encode(), "as many finite scores as responses"),
        (json.dumps(drawn(2, "d", responses=[], ended=[], reward=[], check=[])).encode(), "as many for each prompt"),
    ],
)
def test_a_damaged_file_of_responses_is_named_with_its_remedy(tmp_path, content, expected):
    store = AnswerStore(tmp_path)
    store.begin({}, overwrite=False)
    store.add(0, ONE)
    store.add(1, TWO)
    (tmp_path / "batches" / "000001.jsonl").write_bytes(content)
    with pytest.raises(ThreestepError, match=rf"000001.jsonl.*{expected}.*; remove this file, and its responses are"):
        store.close(BATCHES)
    (tmp_path / "batches" / "000001.jsonl").unlink()
    assert store.missing(BATCHES) == [1]
    store.add(1, TWO)
    assert store.close(BATCHES) == ONE + TWO
    (tmp_path / ANSWERS).write_text(json.dumps(ONE[0]) + "\n")
    with pytest.raises(ThreestepError, match=rf"{ANSWERS} expects the prompts 0 to 2, a line each; remove this file"):
        store.close(BATCHES)


@pytest.mark.parametrize("content", ["", "[1]", '{"--seed": 1', None])
def test_responses_without_their_settings_are_not_taken_for_those_of_any(tmp_path, content):
    store, path = AnswerStore(tmp_path), tmp_path / "settings.json"
    store.begin({"--seed": 1}, overwrite=False)
    store.add(0, ONE)
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ThreestepError, match="settings.json.*; give another --output_dir, or --overwrite to draw"):
        store.begin({"--seed": 2}, overwrite=False)
    store.begin({"--seed": 2}, overwrite=True)
    assert store.missing(BATCHES) == [0, 1]
