"""Token sequences that are never completed, and texts that end a response, wherever tokens begin and end."""

from __future__ import annotations

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.drawn import BadWords, StopStrings, first_completed, tokens_of_words

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


@pytest.mark.parametrize(
    ("words", "responses", "found"),
    [
        ([(3,), (8,)], [[], []], [[3, 8], [3, 8]]),
        ([(3,)], [[5, 5, 5], [3, 1, 2]], [[3], [3]]),
        # several tokens, where all before the last were said
        ([(5, 6, 2)], [[5, 6], [6, 5]], [[2], []]),
        ([(5, 6, 2)], [[1, 5, 6], [5, 6, 1]], [[2], []]),
        ([(5, 6, 2), (6, 2), (6, 9), (4,)], [[5, 6], [1, 6]], [[2, 4, 9], [2, 4, 9]]),
        # a sequence may begin in the prompt
        ([(5, 2)], [[], []], [[], [2]]),
        ([(7, 5, 6, 2)], [[6], [6]], [[], [2]]),
        # padding begins nothing
        ([(7, 1, 2)], [[], []], [[], []]),
        ([(1, 2)], [[], []], [[2], []]),
        ([(7, 7, 7, 1, 2)], [[], []], [[], []]),  # longer than the prompt
        # several sequences with one end
        ([(5, 2), (6, 2), (2, 2), (3, 5, 2)], [[5], [6]], [[2], [2]]),
    ],
)
def test_what_is_banned(words, responses, found):
    assert banned(words, responses) == found
    assert banned(words, responses, rows=(1,)) == found[1:]  # row 0 has left
    assert banned(words, responses, rows=(1, 0)) == found[::-1]


def test_a_word_is_what_begins_a_text_and_what_follows_a_space(tiny_tokenizer):
    found = tokens_of_words(["apple", "fig"], tiny_tokenizer, end_token_id=tiny_tokenizer.eos_token_id)
    texts = [tiny_tokenizer.decode(ids) for ids in found]
    assert texts == ["apple", " apple", "fig", " fig"]
    assert tokens_of_words([], tiny_tokenizer, end_token_id=0) == ()

    with pytest.raises(
        ThreestepError, match=r"--bad_words expects strings other than .*, got '<\|endoftext\|>'.*remove it"
    ):
        tokens_of_words(["<|endoftext|>"], tiny_tokenizer, tiny_tokenizer.eos_token_id)


def ends(tokenizer, text: str, *stops: str) -> str | None:
    """The text of a response up to where it is ended; None where it is not."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    length = first_completed(StopStrings(stops, tokenizer.decode), ids)
    return None if length is None else tokenizer.decode(ids[:length])


def test_across_the_boundaries_of_tokens(tiny_tokenizer):
    ids = tiny_tokenizer(" pear apple\n\nHuman: What", add_special_tokens=False)["input_ids"]
    pieces = [tiny_tokenizer.decode([index]) for index in ids]
    assert "Human:" not in pieces and "\n\nHuman" not in pieces and len(pieces) > 5
    assert ends(tiny_tokenizer, " pear apple\n\nHuman: What", "\n\nHuman") == " pear apple\n\nHuman"
    assert ends(tiny_tokenizer, " pear apple\n\nHuman: What", "\n\n") == " pear apple\n\n"


def test_the_token_that_completes_it_stays_whole(tiny_tokenizer):
    """ "Huma" is completed inside of the token that writes more than its "a"; the first of several counts."""
    ids = tiny_tokenizer("x Human: What", add_special_tokens=False)["input_ids"]
    whole = tiny_tokenizer.decode(ids[: len(tiny_tokenizer("x Human")["input_ids"])])
    assert ends(tiny_tokenizer, "x Human: What", "Hu") == whole and len(tiny_tokenizer("Human")["input_ids"]) < 5
    assert ends(tiny_tokenizer, " 2 + 3 is 5. The", "The", "is") == " 2 + 3 is"
    assert ends(tiny_tokenizer, " 2 + 3 is 5. The", "fox") is None


@pytest.mark.parametrize("text", ["né plus", "価格 is 5", "so 🙂 it is"])
def test_characters_of_several_tokens(tiny_tokenizer, text):
    """These are written in bytes: the character is there when its last byte is."""
    stop = next(character for character in text if ord(character) > 127)
    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "\ufffd" in tiny_tokenizer.decode(ids[: len(tiny_tokenizer(text[: text.index(stop)])["input_ids"]) + 1])
    assert ends(tiny_tokenizer, text, stop) == text[: text.index(stop) + 1]


def test_few_tokens_ask_for_the_whole_text(tiny_tokenizer):
    """A response is decoded where a token can complete a text, and not at every other token."""
    asked: list[int] = []

    def decode(ids) -> str:
        asked.append(len(ids))
        return tiny_tokenizer.decode(ids)

    ids = tiny_tokenizer("The quick brown fox jumps over the lazy dog, 0123456789 times!")["input_ids"]
    stop = StopStrings(["!!"], decode)
    assert first_completed(stop, ids) is None
    whole = [length for length in asked if length > 2]
    assert whole == [len(ids)]  # the last token alone has a "!"
    before = len(asked)
    first_completed(stop, ids)
    assert len(asked) == before + 1  # what a token writes is known by now


def test_a_decoder_that_drops_the_first_space():
    """As SentencePiece's do: a space that a token writes inside of a text counts, though alone it writes none."""

    def decode(ids) -> str:
        return "".join((" a", " b")[index] for index in ids).lstrip()

    stop = StopStrings(["a b"], decode)
    assert first_completed(stop, [0, 0, 1, 0]) == 3
    assert first_completed(StopStrings(["a "], decode), [0, 1]) == 2
