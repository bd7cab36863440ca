"""The tokens among which a head guesses."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts, roll
from threestep.plugins.speculation.frequent import FewLogits, FrequentTokens, vocabulary_of


def test_frequent_tokens():
    """Of 1,001 tokens 995 are 3, 9 and 7, which cover 99 %, as no two do; with those of the prompts, in order."""
    frequent, prompt = FrequentTokens(), torch.tensor([5, 2, 5])
    assert frequent.among(prompt) is None
    drawn = [3] * 600 + [9] * 300 + [7] * 95 + [1] * 5
    plain = roll(tiny_causal_lm("llama"), replace(PLAIN, max_new_tokens=1), prompts((3, 2)))
    lengths_B, ids_BR = torch.tensor([len(drawn), 1]), torch.tensor([drawn, [11] * len(drawn)])
    frequent.note(replace(plain, response_ids_BR=ids_BR, response_lengths_B=lengths_B), 64)
    assert frequent.among(prompt).tolist() == [2, 3, 5, 7, 9]
    assert frequent.among(torch.arange(40)) is None  # too many
    frequent.note(replace(plain, response_ids_BR=ids_BR + 1, response_lengths_B=lengths_B), 64)
    assert frequent.among(prompt).tolist() == [2, 3, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_few_logits(family):
    model = copy.deepcopy(tiny_causal_lm(family))
    states_AH = torch.randn(3, model.get_output_embeddings().weight.shape[1])
    among_S, all_AV = torch.tensor([0, 5, 9]), FewLogits(model)(states_AH)
    assert all_AV.shape[1] == vocabulary_of(model)
    torch.testing.assert_close(FewLogits(model, among_S)(states_AH), all_AV[:, among_S])
    # Of a layer that is more than its weight, all are computed.
    model.set_output_embeddings(type("Odd", (torch.nn.Linear,), {})(states_AH.shape[1], vocabulary_of(model)))
    assert FewLogits(model, among_S).among_S is None
