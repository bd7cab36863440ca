"""Rows that code makes for the environments beside this file: a prompt, a demonstration for step 1, and what the
environment knows and the model does not.

Some demonstrations act and some do not, so that a model that imitates them leaves something to learn from rewards.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from threestep.plugins.embedded.task import Draws
from training.utils.data.raw_dataset import PromptRawDataset

Message = dict[str, Any]
TRAINING_ROWS, HELD_OUT_ROWS = 4_000, 200


class MadeConversations(PromptRawDataset):
    """Rows: {"question", "turns" (the demonstration's messages), "tools", "answer", "environment"}. The held-out rows
    are those made last."""

    def make_row(self, draws: Draws) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} has no make_row")

    def load_raw_datasets(self, dataset_name: str) -> None:
        """Rows are made when first read."""

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        draws = Draws(self.seed)
        return [self.make_row(draws) for _ in range(TRAINING_ROWS + HELD_OUT_ROWS)]

    def get_fingerprint(self) -> str:
        return f"seed {self.seed}"

    def get_train_data(self) -> list[dict[str, Any]]:
        return self._rows[:TRAINING_ROWS]

    def get_eval_data(self) -> list[dict[str, Any]]:
        return self._rows[TRAINING_ROWS:]

    def get_prompt_messages(self, sample: dict[str, Any]) -> list[Message]:
        return [{"role": "user", "content": sample["question"]}]

    def get_chosen_messages(self, sample: dict[str, Any]) -> list[Message]:
        return sample["turns"]

    def get_tools(self, sample: dict[str, Any]) -> list[dict[str, Any]] | None:
        return sample["tools"]

    def get_reference(self, sample: dict[str, Any]) -> str:
        return sample["answer"]

    def get_extra(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"environment": sample["environment"]}

    # As template.jinja writes them: what `threestep new-model` makes a tokenizer of.

    def get_prompt(self, sample: dict[str, Any]) -> str:
        return f"Human: {sample['question']}\nAssistant:"

    def get_chosen(self, sample: dict[str, Any]) -> str:
        return "\n".join(f" {message['content']}{_written_calls(message)}" for message in sample["turns"])


def call_message(name: str, **arguments: str) -> Message:
    """The assistant's message that calls a tool."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def _written_calls(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "".join(f'[{call["name"]}({name}="{value}")]' for call in calls for name, value in call["arguments"].items())
