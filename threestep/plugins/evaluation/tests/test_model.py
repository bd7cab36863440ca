"""A model is asked as step 3 asks it: the data room's prompts, its end tokens, its draws; a missing one is named."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.data_flags import data_flags
from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import GREEDY
from threestep.plugins.evaluation import chat, evaluate
from threestep.plugins.evaluation.model import (
    check_room,
    dtype_of,
    engine_maker,
    load_chat_model,
    prompt_of,
    stream_answer,
)
from threestep.plugins.evaluation.tests.conftest import CPU
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.table import RolloutEngineFlags
from training.utils.loading.configurations import positions_of

EVALUATED = "reward --reward gsm8k --data_path embedded --rollout_engine vllm"
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Sort these words: pear fig."},
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|pad|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_prompt_without_a_chat_template(asked):
    row = prompt_of(asked, TALK)
    assert row.prompt_text == "Human: Hi Assistant: Yes? Human: Sort these words: pear fig. Assistant:"
    assert asked.tokenizer.decode(row.flipped_prompt_ids[::-1]) == row.prompt_text
    assert asked.end_token_id == asked.tokenizer.eos_token_id


def test_a_prompt_by_the_chat_template_and_its_end_of_turn(save_model, tmp_path):
    path = save_model("model")
    assert dtype_of(path, None) == torch.float32 and dtype_of(path, "bf16") == torch.bfloat16
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    data = data_flags(prompt_style="chat_template", chat_template=str(tmp_path / "template.jinja"))
    asked = load_chat_model(path, None, data, CPU)
    text = asked.tokenizer.decode(prompt_of(asked, TALK).flipped_prompt_ids[::-1])
    assert text == "<|user|>Hi<|pad|><|assistant|>Yes?<|pad|><|user|>Sort these words: pear fig.<|pad|><|assistant|>"
    # <|pad|> stands for an end-of-turn token here; the model's own end token ends an answer too.
    assert asked.end_token_id == asked.tokenizer.convert_tokens_to_ids("<|pad|>")
    assert asked.more_end_tokens == {asked.tokenizer.eos_token_id}


def test_an_answer_grows_and_equal_seeds_give_equal_answers(asked):
    flags = SamplingArguments(max_new_tokens=10)
    parts = list(stream_answer(asked, TALK, flags, seed=3))
    assert [len(part.token_ids) for part in parts] == list(range(1, len(parts) + 1))
    assert all(later.text.startswith(part.text) for part, later in zip(parts, parts[1:], strict=False))
    assert "\ufffd" not in parts[0].text
    assert parts[-1].ended or len(parts) == 10
    assert list(stream_answer(asked, TALK, flags, seed=3)) == parts
    assert list(stream_answer(asked, TALK, flags, seed=4)) != parts


def test_the_end_token_ends_it_and_is_no_text(asked):
    flags = SamplingArguments(max_new_tokens=10)
    ids = [part.token_ids for part in stream_answer(asked, TALK, flags, seed=3)][-1]
    ends = dataclasses.replace(asked, end_token_ids=(ids[4],))
    last = list(stream_answer(ends, TALK, flags, seed=3))[-1]
    cut = ids[: ids.index(ids[4]) + 1]
    assert (last.token_ids, last.ended) == (cut, True)
    assert last.text == asked.tokenizer.decode(cut[:-1])


def test_positions_bound_an_answer_and_a_conversation(asked):
    """128 positions: a prompt that fills all but 3 gets 3 tokens, one that fills them all a sentence."""
    words = "fig " * 200
    used = [len(prompt_of(asked, [{"role": "user", "content": words[: 4 * n]}]).flipped_prompt_ids) for n in (10, 11)]
    count = 10 + (125 - used[0]) // (used[1] - used[0])
    messages = [{"role": "user", "content": words[: 4 * count]}]
    length = len(prompt_of(asked, messages).flipped_prompt_ids)
    last = list(stream_answer(asked, messages, SamplingArguments(max_new_tokens=200, temperature=0), seed=0))[-1]
    assert last.ended or len(last.token_ids) == 128 - length
    with pytest.raises(
        ThreestepError, match=r"tokens, which leaves no room for an answer in the 128 positions of .*; type"
    ):
        next(stream_answer(asked, [{"role": "user", "content": words}], SamplingArguments(), seed=0))
    with pytest.raises(ThreestepError, match="--max_seq_len allow 129 tokens, more than the 128 positions of"):
        check_room(asked, 129, "--max_seq_len")
    check_room(asked, 128, "--max_seq_len")
    assert asked.positions == positions_of(asked.model.config)
    asked.engine.longest_tokens = 9  # an engine's own bound
    assert asked.positions == 9


def test_the_default_engine_answers_one_or_many():
    model = tiny_causal_lm("llama").eval()
    engine = engine_maker(SamplingArguments(), RolloutEngineFlags(), 64)(model)
    assert engine.longest_tokens is None and positions_of(model.config) == model.config.max_position_embeddings
    prompt_ids_P = torch.tensor([5, 6, 7])
    request = RolloutRequest(prompt_ids_P.unsqueeze(0), torch.ones(1, 3, dtype=torch.bool), GREEDY, [1])
    many = engine.roll_out(model, request)
    alone = list(engine.stream(model, RolloutRequest.of_prompt(prompt_ids_P, GREEDY, 1), ()))
    assert alone == many.response_of(0).tolist() and len(alone) > 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda folder: engine_maker(SamplingArguments(rollout_engine="vllm"), RolloutEngineFlags(), 64),
        lambda folder: chat.main([folder, "--rollout_engine", "vllm"]),
        lambda folder: evaluate.main([*EVALUATED.split(), "--model_name_or_path", folder]),
    ],
    ids=["engine", "chat", "evaluate"],
)
def test_without_vllm_no_model_is_loaded(ask, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # a model without weights
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ThreestepError, match="^--rollout_engine vllm needs vLLM, which is not installed here; with a"):
        ask(str(tmp_path))


def test_a_family_that_cannot_be_asked_as_others_is_asked_more_slowly(capsys):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", n_embd=32, n_layer=1, n_head=2)).eval()
    engine = engine_maker(SamplingArguments(), RolloutEngineFlags(), 64)(model)
    told = capsys.readouterr()
    assert "OpenAIGPTLMHeadModel rolls out prompts of one length at a time without a cache" in told.err and not told.out
    sampling = Sampling(4, 1.0, 0, 1.0, end_token_id=-1, pad_token_id=0)
    assert len(list(engine.stream(model, RolloutRequest.of_prompt(torch.tensor([3, 4, 5]), sampling, 0), ()))) == 4


def test_an_engine_for_training_only():
    with pytest.raises(ThreestepError, match="^--rollout_engine hybrid is for training only; use another engine"):
        engine_maker(SamplingArguments(rollout_engine="hybrid"), RolloutEngineFlags(), 64)


REWARD = "reward --data_path embedded --model_name_or_path gpt2 --reward_model runs/nosuch"
WIN_RATE = "win_rate --reward embedded --data_path embedded --model_name_or_path gpt2 --baseline runs/nosuch"


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("chat", "gpt2 runs/nosuch"),
        ("chat", "gpt2 --reward_model runs/nosuch"),
        ("evaluate", WIN_RATE),
        ("evaluate", REWARD),
    ],
)
def test_it_is_named(program, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)  # and so for the configuration:
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    monkeypatch.setattr("sys.stdin", io.StringIO("question"))
    with pytest.raises(ThreestepError, match="^the model folder 'runs/nosuch' does not exist, though 'runs' does"):
        importlib.import_module(f"threestep.plugins.evaluation.{program}").main(flags.split())
