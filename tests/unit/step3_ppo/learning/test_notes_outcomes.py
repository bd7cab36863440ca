"""A prompt is learned from if a step was taken with a response that counts; otherwise it has a reason."""

from __future__ import annotations

from types import SimpleNamespace

from training.step3_ppo.learning.notes import NO_RESPONSE_COUNTS, NO_STEP_TAKEN, prompt_outcomes


def test_each_prompt_has_one_outcome():
    counts = [True, False, False, False, True, True]  # two samples of three prompts
    sequences = [SimpleNamespace(counts=own) for own in counts]
    rows = [7, 7, 8, 8, 9, 9]
    assert prompt_outcomes(rows, sequences, {0, 1, 2, 3}, 2) == [(7, None), (8, NO_RESPONSE_COUNTS), (9, NO_STEP_TAKEN)]
    assert prompt_outcomes(rows, sequences, {5}, 2) == [(7, NO_STEP_TAKEN), (8, NO_RESPONSE_COUNTS), (9, None)]
    assert [row for row, _ in prompt_outcomes(rows, sequences, set(), 1)] == rows
