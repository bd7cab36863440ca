"""Tokenizers that are loaded, and every mistake that is told in a sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from tests.support.tiny_models import tiny_causal_lm
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.loading.tokenizers import (
    add_tokens,
    load_padding_tokenizer,
    load_tokenizer,
    same_tokenizer,
    tokenizer_digest,
    with_pad_apart,
)

TAGS = ["<Parallel>", "<Path>", "</Path>", "</Parallel>"]


def edit_json(path: str | Path, **changes) -> None:
    values = {**json.loads(Path(path).read_text()), **changes}
    Path(path).write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def test_a_tokenizer_is_loaded_from_the_models_own_folder(save_folder, tiny_tokenizer):
    loaded = load_tokenizer(save_folder())
    assert loaded.get_vocab() == tiny_tokenizer.get_vocab()
    assert loaded.padding_side == "right"


def test_no_pad_token_names_the_flag(save_folder):
    folder = save_folder()
    edit_json(f"{folder}/tokenizer_config.json", pad_token=None)
    with pytest.raises(ThreestepError, match=r"has no pad token; name one .*--pad_token '<\|endoftext\|>'"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, "<|endoftext|>").pad_token == "<|endoftext|>"
    assert load_tokenizer(folder, end_may_pad=True).pad_token == "<|endoftext|>"
    assert load_tokenizer(save_folder(), end_may_pad=True).pad_token == "<|pad|>"
    with pytest.raises(ThreestepError, match="--pad_token expects a token of the tokenizer in .*, got 'no such'"):
        load_tokenizer(folder, "no such")


def test_a_pad_token_is_added_where_a_model_is_trained(save_folder):
    """DeepSpeed-Chat's [PAD], which Llama 2 lacks."""
    folder = save_folder()
    given, new = load_padding_tokenizer(folder, None, False)
    assert (given.pad_token, new) == ("<|pad|>", 0)
    edit_json(f"{folder}/tokenizer_config.json", pad_token=None)
    padded, new = load_padding_tokenizer(folder, None, False)
    assert (padded.pad_token, padded.pad_token_id, new) == ("[PAD]", len(given), 1)
    assert padded("Two.").input_ids == given("Two.").input_ids
    named, new = load_padding_tokenizer(folder, "<|endoftext|>", False)
    assert (named.pad_token, new) == ("<|endoftext|>", 0)


@pytest.mark.parametrize(
    ("more", "token"),
    [
        ({"unk_token": "!"}, "!"),  # users of Llama 2 pad with <unk>
        # unk, bos and eos are one token in GPT-2, OPT, Pythia and StarCoder
        ({"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, "<|endoftext|>"),
        ({"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, "<|pad|>"),
    ],
)
def test_the_unknown_token_may_pad(save_folder, more, token):
    folder = save_folder()
    edit_json(f"{folder}/tokenizer_config.json", pad_token=None, **more)
    assert load_tokenizer(folder, token).pad_token == token
    with pytest.raises(ThreestepError, match="--pad_token expects a token of the tokenizer in .*, got 'no such'"):
        load_tokenizer(folder, "no such")


def test_no_end_token(save_folder):
    folder = save_folder()
    edit_json(f"{folder}/tokenizer_config.json", eos_token=None)
    with pytest.raises(ThreestepError, match="has no end-of-sequence token; set eos_token"):
        load_tokenizer(folder)


def test_a_pad_token_that_ends_no_response_stays(tiny_tokenizer, tiny_tokenizer_pad_is_eos):
    assert with_pad_apart(tiny_tokenizer, None).pad_token == "<|pad|>"
    size = len(tiny_tokenizer)
    assert len(with_pad_apart(tiny_tokenizer, None)) == size
    other_end = train_tokenizer(SENTENCES, pad_is_eos=True)
    assert with_pad_apart(other_end, "!").pad_token == "<|endoftext|>"  # responses end with another token
    ends_with_pad = train_tokenizer(SENTENCES)
    ends_with_pad.pad_token = "!"
    assert with_pad_apart(ends_with_pad, "!").pad_token == "<|pad|>"


def test_tokenizers_that_may_meet():
    one = train_tokenizer(SENTENCES)
    same_with_pad_is_eos = train_tokenizer(SENTENCES)
    same_with_pad_is_eos.pad_token = same_with_pad_is_eos.eos_token
    grown = with_pad_apart(train_tokenizer(SENTENCES, pad_is_eos=True), None)
    assert same_tokenizer(one, train_tokenizer(SENTENCES))
    assert same_tokenizer(one, same_with_pad_is_eos) and same_tokenizer(same_with_pad_is_eos, one)
    assert same_tokenizer(grown, train_tokenizer(SENTENCES, pad_is_eos=True))
    assert same_tokenizer(train_tokenizer(SENTENCES, pad_is_eos=True), grown)


def test_tokenizers_that_differ():
    one = train_tokenizer(SENTENCES)
    assert not same_tokenizer(one, train_tokenizer(SENTENCES[:2]))
    assert not same_tokenizer(one, train_tokenizer(SENTENCES, vocab_size=len(one) - 5))
    as_many = [train_tokenizer(sentences, vocab_size=290) for sentences in (SENTENCES[:2], SENTENCES[2:])]
    assert len(as_many[0]) == len(as_many[1]) and not same_tokenizer(*as_many)
    other_end = train_tokenizer(SENTENCES)
    other_end.eos_token = "!"
    assert not same_tokenizer(one, other_end)


def test_added_tokens_are_one_token_each_and_stay_in_the_text():
    tokenizer = train_tokenizer(SENTENCES)
    size = len(tokenizer)
    assert add_tokens(tokenizer, TAGS) == 4 and len(tokenizer) == size + 4
    ids = tokenizer("Think.<Parallel><Path> 5</Path></Parallel>", add_special_tokens=False)["input_ids"]
    assert [token for token in ids if token >= size] == tokenizer.convert_tokens_to_ids(TAGS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Think.<Parallel><Path> 5</Path></Parallel>"
    assert add_tokens(tokenizer, TAGS) == 0 and len(tokenizer) == size + 4


def test_a_word_of_the_vocabulary_becomes_one_token_everywhere():
    """In the vocabulary, and yet cut by the pre-tokenizer where it stands in a text."""
    tokenizer = train_tokenizer(SENTENCES)
    word = next(token for token in tokenizer.get_vocab() if token.isalpha() and len(token) > 3)
    assert add_tokens(tokenizer, [word]) == 0
    assert tokenizer.convert_tokens_to_ids(word) in tokenizer(f"a{word}b", add_special_tokens=False)["input_ids"]


def test_a_tokenizer_that_is_read_and_cannot_be_used(tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path)
    tiny_causal_lm("llama").config.save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": {}}')
    with pytest.raises(ThreestepError, match="no tokenizer could be loaded from"):
        load_tokenizer(str(tmp_path))


def test_a_digest_is_shared_by_tokenizers_that_read_alike(tiny_tokenizer):
    padded = copy.deepcopy(tiny_tokenizer)
    padded.add_special_tokens({"pad_token": "<|another pad|>"})
    by_end = copy.deepcopy(tiny_tokenizer)
    by_end.pad_token = by_end.eos_token
    longer = copy.deepcopy(tiny_tokenizer)
    longer.add_tokens(["quince"])
    other_end = copy.deepcopy(tiny_tokenizer)
    other_end.eos_token = other_end.convert_ids_to_tokens(5)
    bare = copy.deepcopy(by_end)
    bare.add_special_tokens({"pad_token": "<|another pad|>"})
    other_words = copy.deepcopy(tiny_tokenizer)
    other_words.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    own = tokenizer_digest(tiny_tokenizer)
    assert tokenizer_digest(copy.deepcopy(tiny_tokenizer)) == own and tokenizer_digest(bare) == tokenizer_digest(by_end)
    assert len({own, *map(tokenizer_digest, (longer, other_end, other_words))}) == 4
    assert not same_tokenizer(tiny_tokenizer, other_words)
