"""Where a finished model stops: what was trained, its own, the tokenizer's eos; never inside an answer."""

from __future__ import annotations

import re

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tests.support.chat_templates import chat_tokenizer
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.loading.tokenizers import add_tokens
from training.utils.models.stop_tokens import (
    joined_stop_tokens,
    set_stop_tokens,
    stop_tokens,
    stop_tokens_in,
    unused_stop_tokens,
)


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


def test_an_ordinary_piece_of_text_is_not_taken_over_and_named(tokenizer):
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer))
    letter, beyond = tokenizer("a")["input_ids"][0], len(tokenizer) + 3
    model.generation_config.eos_token_id = [letter, beyond, tokenizer.eos_token_id]
    said = unused_stop_tokens(stop_tokens(model), tokenizer)
    named = rf"names as its end tokens {letter} \('a'\), {beyond} \(no token of the tokenizer\), which"
    assert re.search(named, said) and "responses do not end there" in said
    set_stop_tokens(model, tokenizer, [tokenizer.eos_token_id])
    assert stop_tokens(model) == [tokenizer.eos_token_id]
    assert unused_stop_tokens(stop_tokens(model), tokenizer) is None


def test_an_added_token_that_is_not_special_ends_too():
    """As the `<|im_end|>` and `</tool_call>` of several public tokenizers."""
    tokenizer, model = chat_tokenizer(), tiny_causal_lm("llama", vocab_size=200)
    add_tokens(tokenizer, ["</answer>"])
    (own,) = tokenizer("</answer>", add_special_tokens=False)["input_ids"]
    model.generation_config.eos_token_id = [own]
    assert unused_stop_tokens([own], tokenizer) is None
    set_stop_tokens(model, tokenizer, [tokenizer.eos_token_id])
    assert stop_tokens(model) == [tokenizer.eos_token_id, own]


def test_a_control_token_of_the_plain_vocabulary_ends_too(tmp_path):
    """As `<reserved_106>` of Baichuan: a piece of the model's vocabulary, not added to it."""
    words = {"a": 0, "b": 1, "<reserved_106>": 2, "<eos>": 3, "<": 4}
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token="<eos>")
    assert joined_stop_tokens([2, 1, 4], plain, [3]) == [3, 2]
    assert "1 ('b'), 4 ('<')" in unused_stop_tokens([2, 1, 4, 3], plain)


@pytest.mark.parametrize("given", [float("nan"), "2", [2, [3]], -1, True, {"a": 1}, 1.0])
def test_what_is_no_token(given):
    with pytest.raises(
        ThreestepError,
        match=r"'START': eos_token_id in generation_config.json .* expects the number of a token, or .*, got",
    ):
        stop_tokens_in(GenerationConfig(eos_token_id=given), "START")
