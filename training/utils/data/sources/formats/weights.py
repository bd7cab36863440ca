"""The weight in a message: whether phase 1 puts loss on it. Knows nothing of tokens and templates.

Frameworks spell it differently: `weight` (OpenAI, Mistral), `loss_mask` (verl), `train` and `training` (Axolotl),
`loss` (ms-swift, XTuner), `loss_weight` (LLaMA-Factory), `step_loss_mask` (Slime). All mean the same here: 0 or false
takes the loss off a message of the assistant, 1 or true and no weight at all leave it on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from training.utils.data.sources.formats.messages import BadConversation, Message

SPELLINGS = ("weight", "loss_mask", "train", "training", "loss", "loss_weight", "step_loss_mask")
# Other keys of such names would be weights that are not read: train_detail, loss_scale, mask, ...
_LIKE_A_WEIGHT = re.compile(r"(^|_)(loss|weights?|mask(ed)?|train(ed|s|ing|able)?|learn(able)?)(_|$)")


def has_weights(messages: Sequence[Any]) -> bool:
    """True if any message has a key that looks like a weight."""
    return any(_is_like_a_weight(str(key)) for message in messages for key in message)


@lru_cache(maxsize=1024)  # a run's messages have few keys
def _is_like_a_weight(key: str) -> bool:
    return _LIKE_A_WEIGHT.search(key) is not None


def split_weights(messages: Sequence[Message], where: str) -> tuple[list[Message], list[bool | None]]:
    """The messages without their weights, and the weights: whether each is trained, None if it has no weight.

    Raises BadConversation for a weight other than 0 and 1, for two that differ, and for a key that looks like a weight
    and is none of `SPELLINGS`.
    """
    bare = [{key: value for key, value in message.items() if key not in SPELLINGS} for message in messages]
    return bare, [_weight(message, f"{where}, message {number}") for number, message in enumerate(messages, start=1)]


def _weight(message: Message, where: str) -> bool | None:
    weights: dict[str, bool] = {}
    for key, value in message.items():
        if value is None or not isinstance(key, str) or not _LIKE_A_WEIGHT.search(key):
            continue
        if key not in SPELLINGS:
            raise BadConversation(
                f"{where}: the key '{key}' is not read, and says what of a message is trained; expected one of "
                f"{', '.join(SPELLINGS)} with 0 or 1, got {value!r:.60}; rewrite it, or leave it out"
            )
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise BadConversation(
                f"{where}: '{key}': expected 0 or 1 (false or true), got {value!r:.60}; a message carries loss or it "
                "does not"
            )
        weights[key] = bool(value)
    if len(set(weights.values())) > 1:
        raise BadConversation(f"{where}: {' and '.join(f'{key!r}' for key in weights)} differ; leave one of them out")
    return next(iter(weights.values()), None)


def check_weights(messages: Sequence[Message], weights: Sequence[bool | None], loss_on: str, where: str) -> None:
    """Raise BadConversation for a weight that the loss of phase 1 (`--loss_on`) cannot honour."""
    for number, (message, weight) in enumerate(zip(messages, weights, strict=True), start=1):
        named = f"{where}, message {number} ({message.get('role')})"
        if weight is False and loss_on == "conversation":
            raise BadConversation(
                f"{named}: its weight is 0, and --loss_on conversation puts loss on every message; leave one of them "
                "out"
            )
        if weight and loss_on != "conversation" and message.get("role") != "assistant":
            raise BadConversation(
                f"{named}: its weight is 1, and the loss falls on the assistant's messages alone; set it to 0, or use "
                "--loss_on conversation"
            )
