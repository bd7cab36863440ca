"""A look-up: the answer is a number that stands nowhere in the prompt, and one call of a tool returns it.

    Human: Code of owl elk?
    Assistant: [look_up(key="owl elk")]
    Tool: 37
    Assistant: 37

`--environment examples/environments/lookup.py:Lookup`, with the rows below (`--dataset_module
examples/environments/lookup.py --data_path lookup`) or your own: a reference answer and a column `key`. The reward is
1.0 for exactly the answer, 0.0 for any other. Of the demonstrations a third calls; the others guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from made_conversations import MadeConversations, call_message

from threestep.plugins.embedded.task import WORDS, Draws
from threestep.plugins.environments.interface import AssistantMessage, Call, EnvironmentReply, Opening
from training.utils.data.registry import register_dataset

CALLS, GUESSES = 1, 2  # weights of the demonstrations
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The code of a key.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "The key, two words."}},
            "required": ["key"],
        },
    },
}


class Lookup:
    """One table of one entry, the row's."""

    def reset(self, row: Mapping[str, Any]) -> Opening:
        self._key, self._code = row["key"], row["ground_truth"]
        return Opening(row["messages"], [TOOL])

    def step(self, message: AssistantMessage) -> EnvironmentReply:
        answers = [self._answer(call) for call in message.calls] + [f"Error: {own}" for own in message.problems]
        if answers:
            return EnvironmentReply([{"role": "tool", "content": answer} for answer in answers])
        is_right = message.content == self._code
        return EnvironmentReply([], reward=float(is_right), done=True, figures={"right": is_right})

    def close(self) -> None:
        pass

    def _answer(self, call: Call) -> str:
        if call.name != "look_up":
            return f"Error: there is no tool '{call.name}'"
        return self._code if call.arguments.get("key") == self._key else "unknown"


@register_dataset("lookup")
class LookupRows(MadeConversations):
    """Rows of two words and a code of two digits, drawn independently."""

    def make_row(self, draws: Draws) -> dict[str, Any]:
        key, code = " ".join(draws.some_of(WORDS, 2)), _code(draws)
        acts = draws.weighted((GUESSES, CALLS))
        tool_turns = [call_message("look_up", key=key), {"role": "tool", "content": code}] if acts else []
        answer = {"role": "assistant", "content": code if acts else _code(draws)}
        return {
            "question": f"Code of {key}?",
            "turns": [*tool_turns, answer],
            "tools": [TOOL],
            "answer": code,
            "environment": "Lookup",
            "key": key,
        }

    def get_extra(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**super().get_extra(sample), "key": sample["key"]}


def _code(draws: Draws) -> str:
    return str(10 + draws.below(90))
