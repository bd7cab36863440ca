"""Reward functions as TRL calls them: `reward(completions, **columns)`, prompts among the columns, every argument by
its name. Of rows whose prompt is a conversation, prompts and completions are lists of messages.

A function is one of these if it has a parameter `completions` and none named `responses`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.rewards.calling.calling import MESSAGES

# What TRL 1.16 hands to functions besides, and what to write without it.
_WITHOUT = {
    "completion_ids": "take completions, and tokenize them",
    "completions_ids": "take completions, and tokenize them",
    "prompt_ids": "take prompts, or --return_columns raw_prompt_ids",
    "trainer_state": "a callback (step, figures) follows the run",
    "log_extra": "return (scores, {name: one number per response})",
    "log_metric": "return (scores, {name: one number per response})",
    "environments": "--environment gives rewards itself",
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes_completions(function: Callable[..., Any]) -> bool:
    """True if a function is called as TRL calls it."""
    names = _parameters(function)
    return "completions" in names and "responses" not in names


class CompletionsRule:
    """Such a function as a rule, which is called with (prompts, responses, **columns).

    name: of the reward, for errors. ThreestepError for an argument that only TRL has.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function
        parameters = _parameters(function)
        self._takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._names = {name for name, each in parameters.items() if each.kind in _NAMED}
        self._needed = {name for name in self._names if parameters[name].default is inspect.Parameter.empty}
        for argument, remedy in _WITHOUT.items():
            if argument in self._needed:
                raise ThreestepError(
                    f"reward function '{name}' expects the argument {argument}, which only TRL has; {remedy}, and "
                    f"leave {argument} out or give it a default"
                )

    @property
    def needed_columns(self) -> set[str]:
        """The columns without which the function cannot be called."""
        return self._needed - {"prompts", "completions"}

    def __call__(self, prompts: list[str], responses: list[str], **columns: Any) -> Any:
        messages = columns.pop(MESSAGES, None) or [None] * len(prompts)
        given = {
            **columns,
            "prompts": [text if own is None else own for text, own in zip(prompts, messages, strict=True)],
            "completions": [
                text if own is None else [{"role": "assistant", "content": text}]
                for text, own in zip(responses, messages, strict=True)
            ],
        }
        lacking = sorted(self._needed - given.keys())
        if lacking:
            raise ThreestepError(
                f"reward function '{self._name}' expects the columns {', '.join(lacking)}, and the rows have "
                f"{', '.join(sorted(columns))}; a column that a format reads as the response or the reference is not "
                "among them: name another for it, or take ground_truth"
            )
        if not self._takes_all:
            given = {name: value for name, value in given.items() if name in self._names}
        return self._function(**given)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a built-in function
        return {}
