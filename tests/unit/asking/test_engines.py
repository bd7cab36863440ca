"""Which engine answers, and how it is told that vLLM is missing; tests/vllm has the answers of vLLM itself."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from tests.tiny_models import tiny_causal_lm
from tests.unit.step3_ppo.rollout.test_hf import GREEDY
from training import chat, evaluate
from training.asking.engines import by_transformers, chosen, positions_of
from training.step3_ppo.vllm_arguments import VllmArguments
from training.utils.run.errors import ThreestepError

WITHOUT = "^--rollout_engine vllm expects vLLM, and it is not installed here; on a machine with a GPU type"


def test_transformers_answers_one_or_many():
    model = tiny_causal_lm("llama").eval()
    drawing = chosen("hf", VllmArguments(), 64)(model)
    assert drawing.longest_tokens is None and positions_of(model) == model.config.max_position_embeddings
    prompt_ids_P = torch.tensor([5, 6, 7])
    many = drawing.roll_out(prompt_ids_P.unsqueeze(0), torch.ones(1, 3, dtype=torch.bool), GREEDY, [1])
    alone = list(by_transformers(model).stream(prompt_ids_P, GREEDY, 1, ()))
    assert alone == many.response_of(0).tolist() and len(alone) > 1


def test_an_engines_own_bound_counts(asked):
    assert asked.positions == positions_of(asked.model)
    bounded = dataclasses.replace(asked, drawing=dataclasses.replace(asked.drawing, longest_tokens=9))
    assert bounded.positions == 9


@pytest.mark.parametrize(
    "ask",
    [
        lambda: chosen("vllm", VllmArguments(), 64),
        lambda: chat.main(["/nowhere", "--rollout_engine", "vllm"]),
        lambda: evaluate.main(
            "reward --model_name_or_path /nowhere --reward gsm8k --data_path embedded --rollout_engine vllm".split()
        ),
    ],
    ids=["engine", "chat", "evaluate"],
)
def test_without_vllm_no_model_is_loaded(ask, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ThreestepError, match=WITHOUT):
        ask()


def test_perplexity_draws_nothing():
    with pytest.raises(ThreestepError, match="^--rollout_engine is what draws answers, and perplexity draws none"):
        evaluate.main("perplexity --model_name_or_path x --data_path embedded --rollout_engine vllm".split())
