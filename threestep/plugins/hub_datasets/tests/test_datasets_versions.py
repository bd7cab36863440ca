"""Rows of the classes, by recorded digests: where one changes, so must the `ROWS_VERSION` of its module."""

from __future__ import annotations

import json

from tests.support.data_flags import data_flags, raw_dataset_of
from tests.unit.utils.data.test_fingerprint_row_versions import PAIRS, digest, texts_of
from threestep.plugins.hub_datasets import datasets, jsonfile
from training.utils.data import registry


def hub_rows(name):
    """Rows with every column that the hub's classes read."""
    passages = [{"text": "Green."}, {"text": "Red."}]
    return [
        {
            **{column: f"{column} {i}." for column in ("history", "label", "query", "human_ref_A", "human_ref_B")},
            **{column: f"{column} {i} [1, 2]." for column in ("answer_0", "answer_1", "INSTRUCTION", "RESPONSE")},
            "question": {"full_text": f"Why {i}?"} if "webgpt" in name else f"Why {i}?",
            "prompt": f"USER: {i}? ASSISTANT:",
            "chosen": f"Assistant: {i} Assistant: so",
            "rejected": None if i % 5 == 4 else f" {i}",
            "score_0": str(i % 3),
            "score_1": "1",
            "labels": i % 2,
            "positive_passages": passages[i % 2 :],
            "negative_passages": passages[: i % 3],
            "queries": {"zh_cn": f"{i}?", "ja": None},
            "answers": {"zh_cn": passages, "ja": []},
            "human_answers": [f"{i}", "no"][: i % 3],
            "sentence": f"It is {i}.",
            "questions": [f"Is it {i}?"],
            "paragraph": f"It may be {i}.",
        }
        for i in range(6)
    ]


def test_rows_of_the_hub(monkeypatch):
    def load(self, name):
        return dict.fromkeys(("train", "test", "dev", "validation"), hub_rows(name))

    monkeypatch.setattr(datasets.HubDataset, "load_raw_datasets", load)
    found = []
    for name in registry.registered_names():
        if registry.find_dataset(name).__module__ == datasets.__name__:
            monkeypatch.setattr(registry.find_dataset(name), "load_raw_datasets", load)
            found.append([name, *texts_of(registry.find_dataset(name)("", 1, 0, name))])
    assert (datasets.ROWS_VERSION[:8], digest(found)) == ("58b9e6dc", "c7ab60d4756a7deb")


def test_rows_of_json_files(tmp_path):
    place = tmp_path / "local" / "jsonfile"
    place.mkdir(parents=True)
    for name in ("train.json", "eval.json"):
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in PAIRS), encoding="utf-8")
    found = texts_of(raw_dataset_of(str(place), data_flags(), 1))
    assert (jsonfile.ROWS_VERSION[:8], digest(found)) == ("ddf09ebb", "a79a049aa78f2f9d")
