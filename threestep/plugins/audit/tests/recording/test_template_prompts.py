"""The ids that a chat template writes by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from threestep.plugins.audit.recording.template_prompts import template_prompt

pytestmark = pytest.mark.unit


class Letters:
    """Every character is a token; `<` is a special one."""

    all_special_ids = (ord("<"),)

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def rendered(messages: list[dict[str, str]], system: str, end: str = "\n") -> str:
    own = "" if messages[0]["role"] == "system" else system
    return own + "".join(f"{message['role']}: {message['content']}{end}" for message in messages)


@pytest.mark.parametrize(
    ("system", "found"),
    [("", ""), ("<", ""), ("<<", ""), ("<system: be kind\n", "<system: be kin"), ("be\n", "be")],
)
def test_what_stands_before_a_first_message_alone(system: str, found: str):
    ids = template_prompt(lambda messages: rendered(messages, system), Letters())
    assert "".join(chr(int(word)) for word in ids.split()) == found


def test_a_template_that_leaves_messages_out():
    assert template_prompt(lambda messages: messages[-1]["content"], SimpleNamespace()) == ""
