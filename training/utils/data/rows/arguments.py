"""The flags of lengths, truncation and loss; cheap to import: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from training.utils.flags.flags import flag

TRUNCATIONS = ("right", "left", "middle", "error", "drop")
LOSS_PLACES = ("response", "conversation")
# More of a prompt that its row may carry, by verl's and TRL's names.
RAW_IDS, RAW_CHAT, MESSAGES, FULL_PROMPT = RETURN_COLUMNS = (
    "raw_prompt_ids",
    "raw_prompt",
    "prompt_messages",
    "full_prompts",
)


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
    return_columns: list[str] = flag(
        [],
        "Step 3: more of a prompt for rewards and samples: 'raw_prompt_ids', its token ids (cut, not padded), "
        "'raw_prompt', its messages, 'prompt_messages', the same where the data have messages (on by itself with a "
        "reward that takes completions), 'full_prompts', its text, uncut.",
        "column",
        choices=RETURN_COLUMNS,
        topic="data",
    )

    def with_columns(self, *names: str) -> RowArguments:
        """The same with these among `return_columns`."""
        return replace(self, return_columns=[*self.return_columns, *names])
