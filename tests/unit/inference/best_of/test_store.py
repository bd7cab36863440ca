"""Batches are kept whole, once, and only beside those of the same settings."""

from __future__ import annotations

import pytest

from training.inference.best_of.store import ANSWERS, AnswerStore
from training.utils.base.errors import ThreestepError

BATCHES = [range(2), range(2, 3)]
ONE, TWO = [{"prompt": "a\u2028b"}, {"prompt": "c"}], [{"prompt": "d"}]


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
