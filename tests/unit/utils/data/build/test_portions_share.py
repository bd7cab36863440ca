"""The line that says how many rows --data_split leaves to a step."""

from __future__ import annotations

import pytest

from training.utils.base.typed import WHOLE_RUN_VARIABLE
from training.utils.data.build.build import build_phase
from training.utils.data.build.portions import divide_rows, open_sources, share_sentence
from training.utils.data.sources.file_dataset import FileDataset


@pytest.fixture(autouse=True)
def a_step_alone(monkeypatch):
    """Whatever a run of all steps in this process left behind."""
    monkeypatch.delenv(WHOLE_RUN_VARIABLE, raising=False)


def said(phase, data):
    sources = open_sources(phase, data, 1)
    return share_sentence(phase, data.split, divide_rows(phase, data.split, sources, 1).described)


def rows(count):
    return [{"prompt": f"Human: {i}? Assistant:", "chosen": " yes", "rejected": " no"} for i in range(count)]


def test_a_fifth_of_the_rows_is_a_warning_of_the_first_line(flags, tiny_tokenizer, monkeypatch):
    """600 rows, 60 held out, a fifth of 540."""
    lines: list[str] = []
    data = flags(rows(600))
    build_phase(1, data, tiny_tokenizer, 1, log=lines.append)
    assert lines[0] == (
        "warning: 108 of 600 rows are step 1's share (--data_split 2,4,4); --data_split 1,0,0 takes all"
    )
    lines.clear()
    # also from the cache, for which the rows are not read again
    monkeypatch.setattr(FileDataset, "get_train_data", lambda self: pytest.fail("the rows were read"))
    build_phase(1, data, tiny_tokenizer, 1, log=lines.append)
    assert lines[0].startswith("warning: 108 of 600 rows are step 1's share ") and "from the cache" in lines[1]


@pytest.mark.parametrize(
    ("phase", "given", "sentence"),
    [
        (2, {}, "warning: 15 of 40 rows are step 2's share (--data_split 2,4,4); --data_split 0,1,0 takes all"),
        (3, {"data_split": "1,1,2"}, "data: 18 of 40 rows are step 3's share (--data_split 1,1,2); --data_split 0,0,1"),
        (3, {"data_split": "0,0,5"}, None),
        (1, {"data_split": "0,1,1"}, None),  # an error of its own says so
        (1, {"eval_fraction": 0.0}, "warning: 8 of 40 rows are step 1's share "),
    ],
)
def test_other_splits(flags, phase, given, sentence):
    found = said(phase, flags(rows(40), **given))
    assert (found is None) == (sentence is None)
    assert found is None or found.startswith(sentence)


def test_beside_the_other_steps_it_is_no_warning(flags, monkeypatch):
    monkeypatch.setenv("THREESTEP_WHOLE_RUN", "1")
    assert said(1, flags(rows(40))).startswith("data: 7 of 40 rows are step 1's share (--data_split 2,4,4)")


def test_datasets_of_step_1_alone_and_classes_that_deal_their_rows_are_left_out(own, flags):
    whole = flags(rows(40))
    also = flags(rows(40), sft_only_data_path=whole.source.data_path)
    assert said(1, also) == said(1, whole)
    assert said(1, own(get_phases=lambda self, sample: (1,))) is None
