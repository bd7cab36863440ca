"""Tokenizers are compared, and rollouts counted, before a model loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import tiny_config
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.step3_ppo.parts.inputs import load_inputs, load_tokenizers, share_style
from training.step3_ppo.roles.roles import Tokenizers
from training.utils.base.errors import ThreestepError
from training.utils.data.chat.style import SavedStyle, save_style, saved_style
from training.utils.data.rows.arguments import ChatArguments
from training.utils.generation.partners import Partners


def components(rules=()):
    return SimpleNamespace(partners=Partners(), rewards=(), rules=dict(rules))


def test_tokenizers_that_differ_between_actor_and_reward_model(tmp_path):
    for name, sentences in (("actor", SENTENCES), ("same", SENTENCES), ("other", SENTENCES[:2])):
        train_tokenizer(sentences).save_pretrained(tmp_path / name)
        tiny_config("llama").save_pretrained(tmp_path / name)

    def load(critic: str, with_critic: bool = True):
        critic_path = str(tmp_path / critic) if critic else ""
        flags = ppo_flags(actor_model_name_or_path=str(tmp_path / "actor"), critic_model_name_or_path=critic_path)
        return load_tokenizers(flags, with_critic)

    tokenizers = load("same")
    assert tokenizers.actor.get_vocab() == tokenizers.critic.get_vocab()
    assert load("", with_critic=False).critic is None
    with pytest.raises(ThreestepError, match=r"the tokenizers of --actor_model_name_or_path .* differ: the reward"):
        load("other")


def test_flags_that_leave_nothing_to_train_or_to_evaluate(monkeypatch):
    class Rows(list):
        manifest = {"fingerprint": "rows"}  # noqa: RUF012

    nothing = SimpleNamespace(columns={})
    report = SimpleNamespace(train=nothing, eval=nothing)
    phase = SimpleNamespace(train=Rows(range(80)), eval=range(4), report=report, seen=None)
    monkeypatch.setattr("training.step3_ppo.parts.inputs.build_phase", lambda *given, **by_name: phase)
    ranks = SimpleNamespace(world_size=1, is_main=True)
    monkeypatch.setattr("training.step3_ppo.parts.inputs.saved_stop_tokens", lambda *given: [2])
    monkeypatch.setattr("training.step3_ppo.parts.inputs.reader_of_start", lambda *given: {})
    tokenizer = SimpleNamespace(eos_token_id=2, added_tokens_decoder={2: "</s>"})

    def load(critic_warmup: int):
        ppo = {"per_device_training_batch_size": 8, "num_train_epochs": 1.0, "ppo_epochs": 3}  # five rollouts of 16
        return load_inputs(ppo_flags(critic_warmup=critic_warmup, **ppo), components(), tokenizer, ranks)

    with pytest.raises(ThreestepError, match="--val_only evaluates held-out prompts, and there are none; raise"):
        phase.eval = []
        load_inputs(ppo_flags(val_only=True), components(), tokenizer, ranks)
    inputs = load(2)
    assert inputs.rollouts == 5
    with pytest.raises(ThreestepError, match="--critic_warmup 5 leaves none of the run's 5 rollouts"):
        load(5)
    rules = {"mine": lambda prompts, responses, level: []}
    with pytest.raises(ThreestepError, match="^reward function 'mine' expects the column level, and the columns that"):
        load_inputs(ppo_flags(), components(rules), tokenizer, ranks)


def test_responses_end_at_each_end_token_of_the_model(tmp_path, monkeypatch):
    """The trained one first; of the model's own those that are no ordinary text; the tokenizer's eos."""
    rows = type("Rows", (list,), {"manifest": {"fingerprint": "rows"}})(range(80))
    report = SimpleNamespace(train=SimpleNamespace(columns={}), eval=SimpleNamespace(columns={}))
    phase = SimpleNamespace(train=rows, eval=rows, report=report, seen=None)
    monkeypatch.setattr("training.step3_ppo.parts.inputs.build_phase", lambda *given, **by_name: phase)
    tokenizer = chat_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    letter = tokenizer("a")["input_ids"][0]
    tiny_config("llama").save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[ids("<|im_end|>"), ids("<|eot_id|>"), letter]).save_pretrained(tmp_path)
    said: list[str] = []
    monkeypatch.setattr("training.step3_ppo.parts.inputs.log", lambda line, *_: said.append(line))

    def load(*given):
        flags = ppo_flags(actor_model_name_or_path=str(tmp_path), end_of_conversation_token="<|im_end|>")
        return load_inputs(flags, components(), tokenizer, SimpleNamespace(world_size=1, is_main=True))

    assert load().end_token_ids == tuple(ids(["<|im_end|>", "<|eot_id|>", "<|endoftext|>"]))
    assert said[0].startswith(
        "warning: the model's configuration names as its end tokens 76 ('a'), which the tokenizer"
    )
    assert said[1:] == ["responses end at each of the model's end tokens: <|im_end|>, <|eot_id|>, <|endoftext|>"]
    (tmp_path / "generation_config.json").unlink()  # the configuration's then
    assert tokenizer.added_tokens_decoder[2].special
    assert load().end_token_ids == (ids("<|im_end|>"), 2, ids("<|endoftext|>"))


@pytest.mark.parametrize("style, warns", [(None, False), ("chat_template", False), ("human_assistant", True)])
def test_a_reward_model_trained_in_another_style_is_named(capsys, style, warns):
    tokenizers = Tokenizers(*(chat_tokenizer(chat_template("chatml")) for _ in range(2)))
    save_style(tokenizers.actor, SavedStyle("chat_template"))
    if style is not None:
        save_style(tokenizers.critic, SavedStyle(style))
    ranks = SimpleNamespace(is_main=True)
    assert share_style(tokenizers, ChatArguments(), ranks) == "chat_template"
    others = capsys.readouterr().out.splitlines()
    assert len(others) == warns and all(
        "was trained on prompts in another style (human_assistant)" in o for o in others
    )
    assert saved_style(tokenizers.critic) == SavedStyle("chat_template")  # what it learns in this run
