"""The flags of lengths, truncation and loss; cheap to import: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag

TRUNCATIONS = ("right", "left", "middle", "error", "drop")
LOSS_PLACES = ("response", "conversation")


@dataclass
class RowArguments:
    """Limits of a row's length, the place of the loss, and the values that prompts carry."""

    topic: ClassVar[str] = "length"

    max_seq_len: int = flag(512, "Steps 1 and 2: maximum length of a prompt with its response.", "tokens >= 2")
    max_prompt_seq_len: int = flag(256, "Step 3: maximum length of a prompt.", "tokens >= 1")
    truncation: str = flag(
        "right",
        "Steps 1 and 2, what happens to a text longer than --max_seq_len: 'right' cuts the end of the response, "
        "'left' the beginning of the prompt, 'middle' the middle of the prompt, 'drop' drops the row, 'error' "
        "stops.",
        choices=TRUNCATIONS,
    )
    prompt_truncation: str = flag(
        "drop",
        "Step 3, what happens to a prompt longer than --max_prompt_seq_len: 'drop' drops it, 'left', 'right' and "
        "'middle' cut it there, 'error' stops.",
        choices=TRUNCATIONS,
    )
    loss_on: str = flag(
        "response",
        "Step 1: the tokens that the loss is on, those of the 'response' or of the whole 'conversation' (the "
        "prompt too).",
        choices=LOSS_PLACES,
        topic="loss",
    )
    return_raw_ids: bool = flag(
        False,
        "Step 3: pass the prompt's token ids (cut, not padded) to rewards and samples as raw_prompt_ids.",
        topic="data",
    )
    return_raw_chat: bool = flag(
        False, "Step 3: pass the prompt's messages to rewards and samples as raw_prompt.", topic="data"
    )
    return_prompt_messages: bool = flag(
        False,
        "Step 3: pass the prompt's messages to rewards and samples as prompt_messages, where the data have messages; "
        "on by itself with a reward that takes completions.",
        topic="data",
    )
    return_full_prompt: bool = flag(
        False, "Step 3: pass the prompt's text, uncut, to rewards and samples as full_prompts.", topic="data"
    )
