"""Scores are plain transformers' scores, whatever the answer's tokenizer."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.data_flags import data_flags
from tests.support.tiny_tokenizers import train_tokenizer
from threestep.plugins.evaluation.scorer import load_answer_scorer
from threestep.plugins.evaluation.tests.conftest import CPU
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.engine.ranks.startup import Ranks

ALONE = Ranks(0, 0, 1, CPU)
MESSAGES = [{"role": "user", "content": "Sort these words: pear fig."}]
TEXT = "Human: Sort these words: pear fig. Assistant: fig pear"


def test_ids_and_texts_score_as_in_plain_transformers(save_model, tiny_tokenizer):
    path = save_model("reward", scalar=True)
    scorer = load_answer_scorer(path, None, DataArguments(), ALONE)
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    ids = [*tiny_tokenizer(TEXT)["input_ids"], tiny_tokenizer.eos_token_id]
    with torch.no_grad():
        expected = float(plain(torch.tensor([ids])).logits[0, 0])
    prompt, response = scorer.ids_of_text(MESSAGES, "fig pear")
    assert prompt + response == ids
    assert scorer.ids_of_text("Human: Sort these words: pear fig. Assistant:", " fig pear") == (prompt, response)
    assert scorer.score_ids([prompt, prompt], [response, response[:1]])[0] == pytest.approx(expected, abs=1e-5)


def test_an_answer_that_was_cut_keeps_its_last_token_where_pad_is_the_end(save_model, tiny_tokenizer_pad_is_eos):
    tokenizer = tiny_tokenizer_pad_is_eos
    path = save_model("reward", scalar=True, tokenizer=tokenizer)
    scorer = load_answer_scorer(path, None, DataArguments(), ALONE)
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    prompt, ended = scorer.ids_of_text(MESSAGES, "fig pear")
    assert ended[-1] == tokenizer.pad_token_id
    for cut in (ended, ended[:-1], ended[:-2]):
        with torch.no_grad():
            expected = float(plain(torch.tensor([[*prompt, *cut]])).logits[0, 0])
        assert scorer.score_ids([prompt], [cut]) == [pytest.approx(expected, abs=1e-5)]


def test_a_reward_model_with_a_chat_template_reads_messages_alone(save_model, tmp_path):
    tokenizer = train_tokenizer(["<|user|>Hi"])
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|pad|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.chat_template = template
    path = save_model("reward", scalar=True, tokenizer=tokenizer)
    scorer = load_answer_scorer(path, None, data_flags(prompt_style="chat_template"), ALONE)
    prompt, response = scorer.ids_of_text([{"role": "user", "content": "Hi"}], "fig")
    assert tokenizer.decode(prompt) == "<|user|>Hi<|pad|><|assistant|>"
    assert tokenizer.decode(response) == "fig<|pad|>"
    with pytest.raises(ThreestepError, match="reads conversations by its chat template, in another tokenizer"):
        scorer.ids_of_text("Human: Hi Assistant:", "fig")
    one_way = "{% for m in messages %}{{ loop.length }}<|{{ m.role }}|>{{ m.content }}<|pad|>{% endfor %}"
    tokenizer.chat_template = one_way + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    path = save_model("reward2", scalar=True, tokenizer=tokenizer)
    scorer = load_answer_scorer(path, None, data_flags(prompt_style="chat_template"), ALONE)
    with pytest.raises(ThreestepError, match="renders an answer without its prompt"):
        scorer.ids_of_text([{"role": "user", "content": "Hi"}], "fig")


def test_a_reward_model_whose_rows_are_as_stored_reads_text_as_it_is(save_model):
    scorer = load_answer_scorer(save_model("reward", scalar=True), None, data_flags(prompt_style="as_stored"), ALONE)
    talk = [{"role": "user", "content": "1 ="}, {"role": "assistant", "content": " 1"}]
    prompt, response = scorer.ids_of_text([*talk, {"role": "user", "content": "2 ="}], " 2")
    assert scorer.tokenizer.decode(prompt) == "2 ="
    assert scorer.tokenizer.decode(response).removesuffix(scorer.tokenizer.eos_token) == " 2"
