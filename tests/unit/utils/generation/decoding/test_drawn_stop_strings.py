"""Texts that end a response, wherever tokens begin and end."""

from __future__ import annotations

import pytest

from training.utils.generation.decoding.drawn import StopStrings, first_completed


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
    """ "Huma" is completed inside of the token that writes more than its "a"."""
    ids = tiny_tokenizer("Human", add_special_tokens=False)["input_ids"]
    whole = ends(tiny_tokenizer, "x Human: What", "Hu")
    assert whole is not None and whole.startswith("x Hu") and len(ids) < 5
    assert ends(tiny_tokenizer, "x Human: What", "Hu") == tiny_tokenizer.decode(
        tiny_tokenizer("x Human: What", add_special_tokens=False)["input_ids"][
            : len(tiny_tokenizer("x Human")["input_ids"])
        ]
    )


def test_the_first_of_several_and_none(tiny_tokenizer):
    text = " 2 + 3 is 5. The"
    assert ends(tiny_tokenizer, text, "The", "is") == " 2 + 3 is"
    assert ends(tiny_tokenizer, text, "fox") is None


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
