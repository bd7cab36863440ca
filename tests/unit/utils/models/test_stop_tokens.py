"""Where a finished model stops: what was trained, its own, the tokenizer's eos; never inside an answer."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from tests.support.chat_templates import chat_tokenizer
from tests.support.tiny_models import tiny_causal_lm
from training.utils.models.stop_tokens import set_stop_tokens, stop_tokens, stop_tokens_in
from training.utils.run.errors import ThreestepError


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()  # its eos is <|endoftext|>


@pytest.mark.parametrize(
    "own, trained, inside, expected",
    [
        (None, ["<|im_end|>"], [], ["<|im_end|>", "<|endoftext|>"]),
        (None, ["<|endoftext|>"], [], ["<|endoftext|>"]),
        ("<|eot_id|>", ["<|im_end|>", "</s>"], [], ["<|im_end|>", "</s>", "<|eot_id|>", "<|endoftext|>"]),
        ("<|eot_id|>", ["<|im_end|>", "</s>"], ["</s>", "<|eot_id|>"], ["<|im_end|>", "<|endoftext|>"]),
        (None, ["<|im_end|>"], ["<|im_end|>", "<|endoftext|>"], ["<|im_end|>"]),
    ],
)
def test_a_model_stops_where_its_training_did(tokenizer, tmp_path, own, trained, inside, expected):
    ids = tokenizer.convert_tokens_to_ids
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = own and ids(own)
    set_stop_tokens(model, tokenizer, ids(trained), set(ids(inside)))
    model.generation_config.save_pretrained(tmp_path)
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert stop_tokens(model) == ids(expected)
    assert not model.generation_config._from_model_config


def test_an_id_that_is_no_special_token_is_not_taken_over(tokenizer):
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer))
    letter = tokenizer("a")["input_ids"][0]
    model.generation_config.eos_token_id = [letter]
    set_stop_tokens(model, tokenizer, [tokenizer.eos_token_id])
    assert stop_tokens(model) == [tokenizer.eos_token_id]


@pytest.mark.parametrize("given", [float("nan"), "2", [2, [3]], -1, True, {"a": 1}, 1.0])
def test_what_is_no_token(given):
    with pytest.raises(
        ThreestepError,
        match=r"'START': eos_token_id in generation_config.json .* expects the number of a token, or .*, got",
    ):
        stop_tokens_in(GenerationConfig(eos_token_id=given), "START")
