"""One conversation in the terminal: what is shown, and the tokens with their mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.chat_templates import chat_tokenizer
from threestep.plugins.environments.acting import ActingSettings, acting_engine
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.conversation_arguments import ConversationArguments
from threestep.plugins.environments.interface import Call
from threestep.plugins.environments.playing import (
    HandEngine,
    any_form,
    hand_sampling,
    play,
    play_by_hand,
    request_of,
    token_lines,
)
from threestep.plugins.environments.rows import whole_row
from training.utils.data.rows.arguments import CHAT_TEMPLATE, ChatArguments

pytestmark = pytest.mark.unit

ROW = whole_row({"ground_truth": "ab", "prompt": "What?"})


def asking(*lines):
    """Lines of a person, then the end of input."""
    waiting = list(lines)

    def ask():
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return ask


def test_a_person_plays_without_tokens(load):
    told = []
    play_by_hand(load("Sound").episode(ROW, 1), any_form, 8, asking("b", "ab", "never"), tell=told.append)
    assert told == ["user> Say it.", "user> no, 2 left", "reward 0.9"]


def test_the_turns_are_limited(load):
    told = []
    play_by_hand(load("Sound").episode(ROW, 1), any_form, 2, asking("b", "b", "ab"), tell=told.append)
    assert told[-2:] == ["(cut: 2 turns)", "reward -0.2"]


def test_a_person_may_leave(load):
    with pytest.raises(EOFError):
        play_by_hand(load("Sound").episode(ROW, 1), any_form, 8, asking("b"), tell=lambda line: None)


def test_calls_are_read_in_any_form():
    call = Call("look", {"key": "a"})
    for text in (
        '<tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>',
        '[look(key="a")]',
        '{"name": "look", "parameters": {"key": "a"}}',
    ):
        assert any_form(text).calls == (call,)
    assert any_form("look at a").calls == ()
    assert any_form("look at a").content == "look at a"
    assert any_form('<tool_call>{"name": ').problems


def test_a_persons_tokens_are_those_of_step_3(load):
    tokenizer = chat_tokenizer(Path("examples/environments/template.jinja").read_text())
    chat = ChatArguments(prompt_style=CHAT_TEMPLATE)
    settings = ActingSettings(chat, EnvironmentArguments(environment="x.py:y"), ConversationArguments(), 100)
    end = tokenizer.eos_token_id

    def acting(engine, partner_of):
        return acting_engine(engine, partner_of, settings, tokenizer, end_token_ids=[end])

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    told = []
    request = request_of(ROW, 1, hand_sampling(200, [end], tokenizer.pad_token_id or end), "cpu")
    engine = HandEngine(encode, asking("b", "ab"))
    rollout = play(acting, engine, request, load("Sound").episode(ROW, 1), model=None, tell=told.append, says="me")
    assert told == ["user> Say it.", "me> b", "user> no, 2 left", "me> ab", "reward 0.9"]
    first, last = [*encode("b"), end], [*encode("ab"), end]
    ids = rollout.response_of(0).tolist()
    assert ids[: len(first)] == first and ids[-len(last) :] == last
    lines = list(token_lines(rollout, tokenizer.decode))
    assert [line[:6] for line in lines] == ["mask 0", "mask 1", "mask 0", "mask 1"]
    counts = [int(line.split()[2]) for line in lines]
    assert counts[1::2] == [len(first), len(last)]
    assert sum(counts[1:]) == len(ids)
    assert counts[0] == int(rollout.prompt_mask_BP.sum())
    drawn = ~rollout.conversations.inserted_BR[0]
    assert int(drawn.sum()) == len(first) + len(last)
    assert torch.tensor(ids)[drawn].tolist() == first + last


def test_a_turn_without_room_is_cut(load):
    engine = HandEngine(lambda text: [1] * len(text), asking("abcdef"))
    rollout = engine.roll_out(None, request_of(ROW, 1, hand_sampling(4, [0], 0), "cpu"))
    assert rollout.response_of(0).tolist() == [1] * 4
    assert rollout.ended_B.tolist() == [False]
