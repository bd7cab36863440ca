"""Prompt ids are a prefix of every sentence, one end token ends every response, cuts are explicit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.data.rows.tokenize import (
    Dropped,
    TextTokenizer,
    TooLong,
    cut_prompt,
    end_of_conversation_id,
    fit_conversation,
    fit_sentences,
    named_tokenizer,
    require_pad_token,
    token_id,
)

PROMPT, RESPONSE = "Human: What is 2 + 3? Assistant:", " 2 + 3 is 5."


def with_bos_and_eos() -> PreTrainedTokenizerFast:
    """Puts <s> before and </s> behind every text, as some Llama and Gemma tokenizers are set up to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([PROMPT + RESPONSE], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def with_a_space_of_its_own() -> PreTrainedTokenizerFast:
    """Puts a space before any text, as Llama 2's does: a response alone gets one too many."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"])
    tokenizer.train_from_iterator([PROMPT + RESPONSE, "Human: a Assistant: a b"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def encode(texts: TextTokenizer, prompt: str, response: str) -> tuple[list[int], list[int]]:
    ((prompt_ids, response_ids),) = (row.parts for row in texts.encode_sentences([prompt], [[response]]))
    return prompt_ids, response_ids


def test_special_tokens_go_before_a_prompt_once_and_never_behind_it():
    tokenizer = with_bos_and_eos()
    texts = TextTokenizer(tokenizer, None)
    prompt_ids, response_ids = encode(texts, PROMPT, RESPONSE)
    assert texts.prefix_ids == [0]
    assert prompt_ids[0] == 0 and 0 not in prompt_ids[1:] and 1 not in prompt_ids
    assert 0 not in response_ids and response_ids.count(1) == 1 and response_ids[-1] == 1
    assert tokenizer.decode((prompt_ids + response_ids)[1:-1]) == PROMPT + RESPONSE


def test_a_token_across_the_edge_is_the_responses():
    # With no split at spaces, BPE merges "x:" + "y" into one token, and the row has the whole text's ids.
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<unk>", "</s>"])
    tokenizer.train_from_iterator(["x:y x:y x:y Human: a Assistant: a b"], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    texts = TextTokenizer(wrapped, None)
    alone = texts.encode_prompts(["x:"])[0]
    whole = wrapped("x:y", add_special_tokens=False)["input_ids"]
    assert whole[: len(alone)] != alone  # they do merge
    (row,) = texts.encode_sentences(["x:"], [["y"]])
    assert row.parts[0] + row.parts[1] == [*whole, wrapped.eos_token_id]
    assert row.crosses and len(row.parts[0]) < len(alone)
    # Of a pair, the response that no token crosses into begins with the prompt's last tokens.
    (pair,) = texts.encode_sentences(["x:"], [["y", " a"]])
    assert pair.crosses and pair.parts[0] == row.parts[0] and pair.parts[1] == row.parts[1]
    other = wrapped("x: a", add_special_tokens=False)["input_ids"]
    assert pair.parts[0] + pair.parts[2] == [*other, wrapped.eos_token_id]


@pytest.mark.parametrize("make", [with_bos_and_eos, with_a_space_of_its_own])
def test_a_tokenizer_without_offsets_gives_the_same(make, monkeypatch):
    rows = [(PROMPT, RESPONSE, PROMPT), ("a", "b", " c"), (PROMPT, " " + RESPONSE + " ", "Human: a")]
    turns = [(False, True, False)] * 3
    expected = TextTokenizer(make(), None).encode_parts(rows, turns)
    monkeypatch.setattr("training.utils.data.rows.tokenize._backend_that_agrees", lambda _: None)  # as one in Python
    assert TextTokenizer(make(), None).encode_parts(rows, turns) == expected


@settings(max_examples=100, deadline=None)
@given(st.text(min_size=1, max_size=30), st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=3))
@pytest.mark.parametrize("name", ["tiny", "space of its own"])
def test_ids_are_the_whole_texts(tiny_tokenizer, name, prompt, responses):
    """Llama 2's tokenizer puts a space before any text: a response alone would get one too many."""
    tokenizer = tiny_tokenizer if name == "tiny" else with_a_space_of_its_own()
    texts = TextTokenizer(tokenizer, None)
    ((prompt_ids, *response_ids),) = (row.parts for row in texts.encode_sentences([prompt], [responses]))
    for response, ids in zip(responses, response_ids, strict=True):
        whole = by_transformers(tokenizer, prompt + response)
        assert prompt_ids + ids == [*whole, texts.end_id] or prompt_ids + ids == whole
    alone = texts.encode_prompts([prompt])[0]
    assert prompt_ids == alone[: len(prompt_ids)] or prompt.isspace() or prompt[-1].isspace()


def test_the_end_token(tiny_tokenizer):
    """Appended once; one token that the tokenizer knows."""
    _, response_ids = encode(TextTokenizer(tiny_tokenizer, None), PROMPT, RESPONSE + "<|endoftext|>")
    assert response_ids.count(tiny_tokenizer.eos_token_id) == 1
    assert TextTokenizer(tiny_tokenizer, None).end_id == tiny_tokenizer.eos_token_id
    assert end_of_conversation_id(tiny_tokenizer, "<|pad|>") == tiny_tokenizer.pad_token_id
    # DeepSpeed-Chat appends the literal "<|endoftext|>", ten ordinary tokens on tokenizers that do not know it.
    with pytest.raises(ThreestepError, match=r"got '<\|im_end\|>', which is \d+ tokens"):
        end_of_conversation_id(tiny_tokenizer, "<|im_end|>")
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    assert end_of_conversation_id(tokenizer, "</s>") == 1
    with pytest.raises(ThreestepError, match="got '<end>', which is unknown to it"):
        end_of_conversation_id(tokenizer, "<end>")


def test_an_unknown_token_that_ends_a_response():
    """unk, bos, eos and pad are one token in GPT-2, OPT, Pythia and StarCoder."""
    tokenizer = train_tokenizer(SENTENCES, pad_is_eos=True)
    tokenizer.unk_token = tokenizer.bos_token = tokenizer.eos_token
    assert tokenizer.unk_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    assert end_of_conversation_id(tokenizer, tokenizer.eos_token) == tokenizer.eos_token_id
    assert TextTokenizer(tokenizer, tokenizer.eos_token).end_id == tokenizer.eos_token_id
    assert token_id(tokenizer, tokenizer.eos_token) == tokenizer.eos_token_id
    assert token_id(tokenizer, "<|im_end|>") is None
    for other in ("<|im_end|>", f"{tokenizer.eos_token} and more"):
        with pytest.raises(ThreestepError, match=rf"got '{re.escape(other)}', which is \d+ tokens"):
            end_of_conversation_id(tokenizer, other)


def test_a_tokenizer_without_eos(tiny_tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    for name, whose in (
        ("", "the tokenizer"),
        ("models/reward", "the tokenizer of 'models/reward'"),
    ):  # a run reads several
        bare.name_or_path = name
        with pytest.raises(ThreestepError, match=f"{whose} has no eos token.*--end_of_conversation_token"):
            TextTokenizer(bare, None)
        with pytest.raises(ThreestepError, match=f"expects one token of {whose}, got '<a>', which"):
            end_of_conversation_id(bare, "<a>")
        with pytest.raises(ThreestepError, match=f"{whose} has no pad token, which phase 3 needs"):
            require_pad_token(bare.pad_token_id, "phase 3", named_tokenizer(bare))
    require_pad_token(tiny_tokenizer.pad_token_id, "phase 3")


def test_padding_asked_for_by_an_earlier_call_does_not_leak(tiny_tokenizer):
    tiny_tokenizer(["a", "a longer text"], padding="max_length", max_length=20, truncation=True)
    (ids,) = TextTokenizer(tiny_tokenizer, None).encode_prompts(["a"])
    assert tiny_tokenizer.pad_token_id not in ids and len(ids) < 20


# Cuts. Prompt 1 2 3 4, responses 5 6 9 and 7 8 8 8 9, where 9 ends a conversation.
P, A, B = [1, 2, 3, 4], [5, 6, 9], [7, 8, 8, 8, 9]


CUT_TO_NOTHING, NO_ROOM = "response_cut_to_nothing", "no_room_for_the_prompt"


def outcome(cut):
    """What a cut gives, or why there is nothing."""
    try:
        return cut()
    except Dropped as reason:
        return str(reason)
    except TooLong as problem:
        return problem.length_tokens


@pytest.mark.parametrize(
    ("how", "most", "found"),
    [
        *((how, 9, (P, [A, B], False)) for how in ("right", "left", "middle", "drop", "error")),
        ("right", 7, (P, [A, [7, 8, 9]], True)),  # responses still end
        ("right", 6, (P, [[5, 9], [7, 9]], True)),
        ("right", 5, CUT_TO_NOTHING),
        ("left", 8, ([2, 3, 4], [A, B], True)),  # responses stay whole
        ("left", 6, ([4], [A, B], True)),
        ("left", 5, NO_ROOM),
        ("middle", 8, ([1, 3, 4], [A, B], True)),
        ("middle", 6, ([4], [A, B], True)),
        ("middle", 5, NO_ROOM),
        ("drop", 8, "too_long"),
        ("error", 8, 9),
    ],
)
def test_cuts_of_sentences(how, most, found):
    def cut():
        places, *rest = fit_sentences(len(P), (A, B), most, how, end_id=9)
        return ([P[place] for place in places], *rest)

    assert outcome(cut) == found


def test_cut_prompt():
    def cut(most, how):
        return [P[place] for place in cut_prompt(len(P), most, how)]

    assert cut(3, "left") == [2, 3, 4]
    assert cut(3, "right") == [1, 2, 3]
    assert cut(3, "middle") == [1, 3, 4]
    assert cut(4, "middle") == P


# Cuts of a conversation of ten tokens; the turns that carry loss are 2, 3, 4 and 7, 8; the last begins at 7.
LOSS = [False, False, True, True, True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("how", "most", "found"),
    [
        *((how, 10, list(range(10))) for how in ("right", "left", "middle", "drop", "error")),
        ("right", 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("right", 3, [0, 1, 2]),
        ("right", 2, CUT_TO_NOTHING),
        ("left", 6, [4, 5, 6, 7, 8, 9]),
        ("left", 3, NO_ROOM),
        ("middle", 6, [0, 5, 6, 7, 8, 9]),
        ("middle", 3, NO_ROOM),
        ("drop", 9, "too_long"),
        ("error", 9, 10),
    ],
)
def test_cuts_of_a_conversation(how, most, found):
    assert outcome(lambda: list(fit_conversation(LOSS, 7, most, how))) == found


# --- the short way to the Rust tokenizer


def by_transformers(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("split_special_tokens", [False, True])
@pytest.mark.parametrize("make", [with_bos_and_eos, with_a_space_of_its_own])
def test_the_short_way_gives_what_transformers_gives(make, split_special_tokens):
    tokenizer = make()
    tokenizer.split_special_tokens = split_special_tokens
    texts = TextTokenizer(tokenizer, None)
    assert texts._backend is not None
    given = [PROMPT, RESPONSE, "", "</s>", "a </s> b\n\n", "\u00e9\u4e2d\U0001f600", " " * 50]
    expected = by_transformers(tokenizer, given)
    # what an earlier call asked for stays in the Rust tokenizer, and must not count
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(given, truncation=True, max_length=2, padding="max_length")
    assert texts._encode(given) == expected


class Shouting(PreTrainedTokenizerFast):
    """Does something of its own with a text."""

    def _encode_plus(self, text, *args, **kwargs):
        texts = [text.upper()] if isinstance(text, str) else [each.upper() for each in text]
        return super()._encode_plus(texts[0] if isinstance(text, str) else texts, *args, **kwargs)


class WithoutBackend:
    """As a tokenizer that is written in Python."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id

    def __call__(self, *given, **named):
        return self._tokenizer(*given, **named)

    def convert_ids_to_tokens(self, token):
        return self._tokenizer.convert_ids_to_tokens(token)


def test_a_tokenizer_with_ways_of_its_own_is_asked_itself():
    plain = with_bos_and_eos()
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    for tokenizer in (shouting, WithoutBackend(plain)):
        texts = TextTokenizer(tokenizer, None)
        assert texts._backend is None
        assert texts._encode([PROMPT, RESPONSE]) == by_transformers(tokenizer, [PROMPT, RESPONSE])
    assert by_transformers(shouting, [PROMPT]) != by_transformers(plain, [PROMPT])
