"""Token sequences that are never completed, in responses and across the end of a prompt."""

from __future__ import annotations

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.drawn import BadWords, tokens_of_words

# Left-padded with 7, which is also a token that words hold.
PROMPTS = torch.tensor([[7, 7, 1], [4, 7, 5]])
MASK = torch.tensor([[False, False, True], [True, True, True]])


def banned(words, responses: list[list[int]], rows=(0, 1)) -> list[list[int]]:
    response_ids = torch.tensor(responses, dtype=torch.int64).view(2, -1)
    known = BadWords(words, PROMPTS, MASK)
    recent = known.recent(response_ids, torch.tensor(rows))
    found = known.banned(recent, vocabulary=10)
    if response_ids.shape[1]:  # token by token as at once
        before = known.recent(response_ids[:, :-1], torch.tensor(rows))
        assert torch.equal(known.after(before, response_ids[list(rows), -1]), recent)
    return [row.nonzero().flatten().tolist() for row in found]


def test_one_token_always():
    assert banned([(3,), (8,)], [[], []]) == [[3, 8], [3, 8]]
    assert banned([(3,)], [[5, 5, 5], [3, 1, 2]]) == [[3], [3]]


def test_several_tokens_where_all_before_the_last_were_said():
    word = (5, 6, 2)
    assert banned([word], [[5, 6], [6, 5]]) == [[2], []]
    assert banned([word], [[1, 5, 6], [5, 6, 1]]) == [[2], []]
    assert banned([word, (6, 2), (6, 9), (4,)], [[5, 6], [1, 6]]) == [[2, 4, 9], [2, 4, 9]]


def test_a_sequence_may_begin_in_the_prompt():
    assert banned([(5, 2)], [[], []]) == [[], [2]]
    assert banned([(7, 5, 6, 2)], [[6], [6]]) == [[], [2]]


def test_padding_begins_nothing():
    assert banned([(7, 1, 2)], [[], []]) == [[], []]
    assert banned([(1, 2)], [[], []]) == [[2], []]
    assert banned([(7, 7, 7, 1, 2)], [[], []]) == [[], []]  # longer than the prompt


def test_several_sequences_with_one_end():
    assert banned([(5, 2), (6, 2), (2, 2), (3, 5, 2)], [[5], [6]]) == [[2], [2]]


def test_rows_that_have_left():
    assert banned([(5, 2)], [[1], [5]], rows=(1,)) == [[2]]
    assert banned([(5, 2)], [[1], [5]], rows=(1, 0)) == [[2], []]


def test_a_word_is_what_begins_a_text_and_what_follows_a_space(tiny_tokenizer):
    found = tokens_of_words(["apple", "fig"], tiny_tokenizer, end_token_id=tiny_tokenizer.eos_token_id)
    texts = [tiny_tokenizer.decode(ids) for ids in found]
    assert texts == ["apple", " apple", "fig", " fig"]
    assert tokens_of_words([], tiny_tokenizer, end_token_id=0) == ()


def test_the_end_token_is_no_bad_word(tiny_tokenizer):
    with pytest.raises(
        ThreestepError, match=r"--bad_words expects texts other than .*, got '<\|endoftext\|>'.*leave it"
    ):
        tokens_of_words(["<|endoftext|>"], tiny_tokenizer, tiny_tokenizer.eos_token_id)
