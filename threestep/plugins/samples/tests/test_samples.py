"""The rows of an evaluation's samples, and their texts."""

from __future__ import annotations

from threestep.plugins.samples.samples import SampleTexts, sample_uid, sampled_rows


def test_rows_are_drawn_by_the_seed_alone():
    drawn = sampled_rows(5, 100, seed=7)
    assert drawn == sampled_rows(5, 100, seed=7) == sorted(set(drawn)) and len(drawn) == 5
    assert drawn != sampled_rows(5, 100, seed=8) and max(drawn) > 5  # not the first of the data
    assert sampled_rows(5, 3, seed=7) == [0, 1, 2]
    assert sampled_rows(5, 0, seed=7) == sampled_rows(0, 100, seed=7) == []


def test_a_text_leaves_out_the_token_that_ends_it():
    samples = SampleTexts(decode=lambda ids: "".join(map(str, ids)), end_token_ids=frozenset({9}))
    assert [samples.text(ids) for ids in ([1, 9, 2], [1, 2, 9], [9], [])] == ["192", "12", "", ""]


def test_a_uid_is_of_all_its_texts():
    assert sample_uid("a", "b") == sample_uid("a", "b") != sample_uid("ab") and len(sample_uid("a")) == 16
