"""A tokenizer that needs no files: a token is a character. It shows which text carries loss where no model is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

END = "<end>"
_END_ID = 0x110000  # the first number that is no character


class Characters:
    """A tokenizer as the builder of rows needs it, with characters for tokens and no chat template."""

    eos_token = pad_token = END
    eos_token_id = pad_token_id = _END_ID
    unk_token_id = None
    chat_template = None
    name_or_path = "characters"
    special_tokens_map: Mapping[str, str] = {}

    def __call__(self, text: str | Sequence[str], **settings: Any) -> dict[str, Any]:
        """The ids of a text, or of each of several."""
        ids = list(map(ord, text)) if isinstance(text, str) else [list(map(ord, each)) for each in text]
        return {"input_ids": ids}

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.decode([token])

    def decode(self, ids: Sequence[int], **settings: Any) -> str:
        return "".join(END if token == _END_ID else chr(token) for token in ids)
