"""The points of the search."""

from __future__ import annotations

from dataclasses import replace

from threestep.plugins.plan.choices import Choice, ladders, settings_of, ways_of_drawing
from threestep.plugins.plan.drawing_flags import DRAWINGS, EngineLoad


def test_micro_batches_divide_a_ranks_share(wanted):
    """24 sequences on 2 ranks: 12 of each, in 1, 2 or 4."""
    here = list(ladders(wanted(ranks=2, sequences=24)))
    assert {tuple(choice.micro_batch for choice in ladder) for ladder in here} == {(1, 2, 4)}
    assert {(ladder[0].zero_stage, ladder[0].offload, ladder[0].recompute) for ladder in here} == {
        (stage, offload, recompute)
        for stage, offload in ((0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True))
        for recompute in (False, True)
    }


def test_one_rank_shards_nothing_that_it_does_not_offload(wanted):
    assert {(ladder[0].zero_stage, ladder[0].offload) for ladder in ladders(wanted(ranks=1))} == {
        (0, False), (1, True), (2, True), (3, True),
    }  # fmt: skip


def test_step_3_draws_as_many_as_it_trains_on(wanted):
    here = replace(wanted(ranks=2), drawn=EngineLoad(100, 1, 16, 1000, heads=14))
    assert [drawing.ranks for drawing in ways_of_drawing(here)] == [1, 2, 1]
    assert [drawing.ranks for drawing in ways_of_drawing(replace(here, ranks=8))] == [1, 2, 1]
    choice = Choice(3, True, True, 4, DRAWINGS[1])
    first, second = settings_of(choice, here)
    assert first["per_device_training_batch_size"] * first["gradient_accumulation_steps"] == 8
    assert (first["per_device_generation_batch_size"], first["generation_batches"]) == (8, 1)
    assert (second["per_device_generation_batch_size"], second["generation_batches"]) == (2, 4)
    assert first["offload_reference_model"] and first["critic_zero_stage"] == 3
