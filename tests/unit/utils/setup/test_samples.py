"""The rows of an evaluation's samples, and what is written of them."""

from __future__ import annotations

import json

from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_folder import RunFolder
from training.utils.setup.samples import EvaluationSamples, sample_uid


def test_rows_are_drawn_by_the_seed_alone():
    samples = EvaluationSamples(count=5)
    drawn = samples.rows(100, seed=7)
    assert drawn == samples.rows(100, seed=7) == sorted(set(drawn)) and len(drawn) == 5
    assert drawn != samples.rows(100, seed=8) and max(drawn) > 5  # not the first of the data
    assert samples.rows(3, seed=7) == [0, 1, 2]
    assert samples.rows(0, seed=7) == EvaluationSamples().rows(100, seed=7) == []


def test_a_text_leaves_out_the_token_that_ends_it():
    samples = EvaluationSamples(decode=lambda ids: "".join(map(str, ids)), end_token_ids=frozenset({9}))
    assert [samples.text(ids) for ids in ([1, 9, 2], [1, 2, 9], [9], [])] == ["192", "12", "", ""]


def test_the_main_rank_writes_lines_with_their_step_and_trackers_hear_of_them(tmp_path):
    heard: list = []

    class Tracker:
        def samples(self, step, samples):
            heard.append((step, list(samples)))

        def close(self, ended_well):
            pass

    for is_main in (True, False):
        with MetricsWriter(tmp_path, is_main, trackers=[Tracker()] if is_main else []) as metrics:
            EvaluationSamples(1, RunFolder(tmp_path, is_main)).write(metrics, 3, [{"prompt": "a"}, {"prompt": "ü"}])
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [{"step": 3, "prompt": "a"}, {"step": 3, "prompt": "ü"}]
    assert heard == [(3, lines)]


def test_a_uid_is_of_all_its_texts():
    assert sample_uid("a", "b") == sample_uid("a", "b") != sample_uid("ab") and len(sample_uid("a")) == 16
