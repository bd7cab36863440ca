"""The flags of rows: prompt style, chat template and end token; lengths, truncation and loss. Cheap to import: `--help`
reads it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.base.storage import parse_json
from training.utils.flags.flags import AUTO, flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

HUMAN_ASSISTANT, AS_STORED, CHAT_TEMPLATE = PROMPT_STYLES = ("human_assistant", "as_stored", "chat_template")
TRAIN_TURNS = ("all", "last")
BAD_CONVERSATIONS = ("error", "drop")
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
class ChatArguments:
    """The text of prompts and responses, and its end."""

    topic: ClassVar[str] = "chat"

    end_of_conversation_token: str | None = flag(
        None,
        "Token that ends every response, in all steps; default: the tokenizer's eos token, or the chat template's "
        "end-of-turn token.",
        "token",
    )
    add_end_of_conversation_token: bool = flag(
        False,
        "Steps 1 and 2: add --end_of_conversation_token to the tokenizer and the model if they lack it. Step 3 "
        "expects it in the tokenizers that those steps saved.",
    )
    prompt_style: str = flag(
        AUTO,
        "How prompts and responses become text: 'human_assistant' (DeepSpeed-Chat's \"Human: ... Assistant:\"), "
        "'as_stored' (the prompt unchanged), 'chat_template', or 'auto': the style saved with the model, otherwise "
        "the tokenizer's chat template, otherwise the style of the rows.",
        "style",
        choices=(AUTO, *PROMPT_STYLES),
    )
    chat_template: str | None = flag(None, "File with a Jinja chat template; default: the tokenizer's own.", "file")
    chat_template_kwargs: str | None = flag(
        None, "Extra variables for the chat template, as a JSON object, such as '{\"enable_thinking\": false}'.", "json"
    )
    train_turns: str = flag(
        "all", "Step 1 with a chat template: train on 'all' assistant turns or only on the 'last'.", choices=TRAIN_TURNS
    )
    bad_conversations: str = flag(
        "error",
        "Rows that the chat template rejects, or whose assistant turns are ambiguous: 'error' stops and names the row, "
        "'drop' drops and counts them.",
        choices=BAD_CONVERSATIONS,
    )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template for every row."""
        return json.loads(self.chat_template_kwargs) if self.chat_template_kwargs else {}

    @property
    def given_template(self) -> str | None:
        """The text of the file that `--chat_template` names; None without the flag."""
        return None if self.chat_template is None else Path(self.chat_template).read_text("utf-8")

    @property
    def template_flags(self) -> list[str]:
        """The flags of a chat template that are set."""
        names = ("chat_template", "chat_template_kwargs")
        return [f"--{name}" for name in names if getattr(self, name) is not None]

    @property
    def tokens_in_need(self) -> list[str]:
        """Tokens that the tokenizer must have; those that it lacks are added."""
        end = self.end_of_conversation_token if self.add_end_of_conversation_token else None
        return [end] if end else []

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            bool(self.end_of_conversation_token) or not self.add_end_of_conversation_token,
            "--add_end_of_conversation_token needs --end_of_conversation_token; set it to the token to add",
        )
        self._validate_chat(mistakes)

    def _validate_chat(self, mistakes: Mistakes) -> None:
        mistakes.require(
            self.prompt_style in (AUTO, CHAT_TEMPLATE) or not self.template_flags,
            f"{', '.join(self.template_flags)} needs --prompt_style chat_template, got {self.prompt_style}; set it, or "
            "remove these flags",
        )
        if self.chat_template is not None and not os.path.isfile(self.chat_template):
            mistakes.add(f"--chat_template expects a file, got '{self.chat_template}', which does not exist")
        elif self.chat_template is not None:
            try:
                Path(self.chat_template).read_text("utf-8")
            except (UnicodeDecodeError, OSError) as error:
                mistakes.add(f"--chat_template expects a UTF-8 text file, got '{self.chat_template}': {error}")
        try:
            kwargs = parse_json(self.chat_template_kwargs or "{}")
        except ValueError as error:
            kwargs = error
        if not isinstance(kwargs, dict):
            mistakes.add(
                f"--chat_template_kwargs expects a JSON object such as '{{\"enable_thinking\": false}}', got "
                f"'{self.chat_template_kwargs}'"
            )
            return
        own = sorted(set(kwargs) & {"messages", "tools", "add_generation_prompt"})
        mistakes.require(not own, f"--chat_template_kwargs: {', '.join(own)} come from the data; remove them")


@dataclass
class RowArguments:
    """Limits of a row's length, the place of the loss, and the values that prompts carry."""

    topic: ClassVar[str] = "length"

    max_seq_len: int = flag(512, "Steps 1 and 2: maximum length of a prompt with its response.", "tokens >= 2")
    max_prompt_seq_len: int = flag(256, "Step 3: maximum length of a prompt.", "tokens >= 1")
    truncation: str = flag(
        "right",
        "Steps 1 and 2, for rows longer than --max_seq_len: 'right' cuts the end of the response, 'left' the "
        "beginning of the prompt, 'middle' the middle of the prompt, 'drop' drops the row, 'error' stops the run.",
        choices=TRUNCATIONS,
    )
    prompt_truncation: str = flag(
        "drop",
        "Step 3, if a prompt is longer than --max_prompt_seq_len: 'drop' drops it, 'left', 'right' and 'middle' cut "
        "it there, 'error' stops the run.",
        choices=TRUNCATIONS,
    )
    loss_on: str = flag(
        "response",
        "Step 1: train on the tokens of the 'response' or of the whole 'conversation' (prompt included).",
        choices=LOSS_PLACES,
        topic="loss",
    )
    return_columns: list[str] = flag(
        [],
        "Step 3: extra prompt columns for rewards and samples: 'raw_prompt_ids', token ids (truncated, not padded); "
        "'raw_prompt', messages; 'prompt_messages', the same but only if the data have messages (automatic with a "
        "reward that takes completions); 'full_prompts', the untruncated text.",
        "column",
        choices=RETURN_COLUMNS,
        topic="data",
    )

    def with_columns(self, *names: str) -> RowArguments:
        """The same with these among `return_columns`."""
        return replace(self, return_columns=[*self.return_columns, *names])
