"""Texts of answers while they are drawn: what is shown when, and where they end."""

from __future__ import annotations

import pytest

from threestep.plugins.serve.endpoint.lines import DrawnToken
from threestep.plugins.serve.endpoint.text import AnswerText

END = 0


def decode(ids) -> str:
    return bytes(ids).decode("utf-8", "replace")


def shown(text: bytes, stop=(), strips: bool = False, end: bool = True) -> tuple[list[str], AnswerText]:
    """What is shown after each byte, a token here, and then the end token."""
    answer, news = AnswerText(decode, frozenset({END}), stop, strips), []
    for token in [*text, *([END] if end else [])]:
        answer.take(DrawnToken(token))
        news.append(answer.news())
    return news, answer


def test_each_token_is_shown_once():
    news, answer = shown(b"abc")
    assert news == ["a", "b", "c", ""] and answer.finish == "stop" and len(answer.tokens) == 4


def test_a_character_is_shown_once_it_is_complete():
    assert shown("é.".encode())[0] == ["", "é", ".", ""]


def test_what_may_begin_a_stop_text_waits():
    news, answer = shown(b"abENxENDyz", ["END"], end=False)
    assert news == ["a", "b", "", "", "ENx", "", "", "", "", ""]
    assert answer.finish == "stop" and len(answer.tokens) == 8  # with those of the stop text, and none behind it


def test_what_waited_is_shown_at_the_end():
    news, answer = shown(b"abEN", ["END"])
    assert news == ["a", "b", "", "", "EN"] and answer.finish == "stop"


def test_the_earliest_stop_text_cuts():
    answer = AnswerText(lambda ids: "one two", frozenset({END}), ["two", " "], False)
    answer.take(DrawnToken(5))  # a token that completes both
    assert answer.news() == "one" and answer.finish == "stop"


@pytest.mark.parametrize("strips", [True, False])
def test_spaces_around_an_answer_belong_to_the_style(strips):
    news, _ = shown(b" a b ", strips=strips)
    assert "".join(news) == ("a b" if strips else " a b ")
    assert news[0] == ("" if strips else " ")
