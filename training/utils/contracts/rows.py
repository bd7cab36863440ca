"""Tokenized rows, and the media among their tokens: small records that know nothing of padding, batches or tensors.
`stored` names the form in which each field of a row is kept in files (see `data.rows.dataset`). Cheap to import.

Token ids are ragged numpy int32 arrays; a row of a cached split is a read-only view of the memory map, so copy it
before writing into it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np

    from training.utils.contracts.documents import MediaSpan
    from training.utils.contracts.drawing import RowForm

MEDIA_COLUMN = "images"  # of rows in the cache, and of samples, which have names: the sha256 of each medium in hex
DIGESTS_COLUMN = "picture_digests"  # of prompts in the cache: the same
SAMPLE_MEDIA = "sample_pictures"  # a run's folder: small copies of the media that samples.jsonl names, NAME.png
STORED_MEDIA = "pictures"  # of rows in the cache: their file, its entry, and the name of their number
MOST_FILE_BYTES = 2**26  # of one medium in a file
SPAN_NUMBERS, KEY_AT = 6, 4  # begin, tokens, height and width (0: none), key, sees_itself


def span_numbers(spans: Sequence[MediaSpan]) -> np.ndarray:
    """Return the media of a row as int32 [media * SPAN_NUMBERS]."""
    import numpy as np  # which `--help` does without

    numbers = [(one.begin, one.tokens, *(one.sides or (0, 0)), one.key, one.sees_itself) for one in spans]
    return np.array(numbers, np.int32).reshape(-1)


def spans_of(numbers: np.ndarray) -> tuple[MediaSpan, ...]:
    """Return the media that `span_numbers` stored."""
    if len(numbers) == 0:
        return ()
    from training.utils.contracts.documents import MediaSpan  # torch, which rows of text do without

    return tuple(
        MediaSpan(begin, tokens, (height, width) if height else None, key, bool(sees_itself))
        for begin, tokens, height, width, key, sees_itself in numbers.reshape(-1, SPAN_NUMBERS).tolist()
    )


PHASES = (1, 2, 3)
PHASE_NAMES = {1: "supervised fine-tuning", 2: "reward model or DPO", 3: "PPO"}


@dataclass(frozen=True, eq=False)
class SentenceRow:
    """Phase 1: a prompt and its chosen response, as one sentence.

    input_ids: int32 [T], prompt + response + end-of-conversation token (none where the response's end was cut).
    loss_mask: bool [T], True where the token *itself* is to be predicted: the first response token up to and including
        the end-of-conversation token. `loss_mask[0]` is always False: nothing precedes the first token.
    form: of the tokens that carry loss, where they are more than one run; otherwise None.
    media: among the tokens, none of which carries loss.

    Worked example, prompt ids (5, 6), response ids (7,), end-of-conversation 0:
    input_ids (5, 6, 7, 0), loss_mask (False, False, True, True).
    """

    stored: ClassVar[dict[str, str]] = {
        "input_ids": "ids", "loss_mask": "spans", "form": "form", "media": "media",
    }  # fmt: skip

    row_id: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    form: RowForm | None = None
    media: tuple[MediaSpan, ...] = ()

    @property
    def length_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, eq=False)
class ResponsesRow:
    """Phase 2: a prompt and K >= 2 responses to it, ranked best first; no two of them are equal.

    prompt_ids: int32 [P], the same ids as the prompt of phases 1 and 3.
    response_ids: K int32 arrays, each ending with the end-of-conversation token (also where truncation cut it).
    margins: float32 [K - 1], the dataset's `get_margin` between neighbours in the ranking, or None.
    form: as in SentenceRow, of the responses.
    are_drawn: a model drew the responses in this form. Not of rows that are stored.
    batched: numbers of the row, by the names of their fields, that a batch holds for each of its sequences.
    media: of the prompt.
    """

    stored: ClassVar[dict[str, str]] = {
        "prompt_ids": "ids", "response_ids": "lists of ids", "margins": "numbers or none",
        "form": "form", "media": "media",
    }  # fmt: skip
    batched: ClassVar[tuple[str, ...]] = ()

    row_id: int
    prompt_ids: np.ndarray
    response_ids: tuple[np.ndarray, ...]
    margins: np.ndarray | None = None
    form: RowForm | None = None
    are_drawn: bool = False
    media: tuple[MediaSpan, ...] = ()

    @property
    def length_tokens(self) -> int:
        return len(self.prompt_ids) + sum(len(ids) for ids in self.response_ids)


@dataclass(frozen=True, eq=False)
class MarkedRow(ResponsesRow):
    """Phase 2, unpaired: a prompt and one response to it. is_good: the dataset's `get_mark`."""

    stored: ClassVar[dict[str, str]] = {**ResponsesRow.stored, "is_good": "json"}
    batched: ClassVar[tuple[str, ...]] = ("is_good",)

    is_good: bool = True


@dataclass(frozen=True, eq=False)
class PromptRow:
    """Phase 3: a prompt, its ids stored from last to first (see `documents.collate_prompts`).

    flipped_prompt_ids: int32 [P]; `flipped_prompt_ids[0]` is the last token of the prompt.
    prompt_text: the text as the dataset gave it (messages: as the chat template renders them), never truncated.
    reference: the dataset's `get_reference` (a string, or any other JSON value), or None.
    columns: JSON values by name that rewards and samples get (see `samples.read_carried`), always with `data_source`.
    media: counted from the first token of the prompt. media_digests: the sha256 of each, in hex.
    """

    stored: ClassVar[dict[str, str]] = {
        "flipped_prompt_ids": "ids", "prompt_text": "text", "reference": "json", "columns": "json of names",
        "media": "media", "media_digests": "json of a list",
    }  # fmt: skip

    row_id: int
    flipped_prompt_ids: np.ndarray
    prompt_text: str
    reference: Any
    columns: dict[str, Any] = field(default_factory=dict)
    media: tuple[MediaSpan, ...] = ()
    media_digests: tuple[str, ...] = ()

    @property
    def length_tokens(self) -> int:
        return len(self.flipped_prompt_ids)

    @cached_property
    def uid(self) -> str:
        """16 hex digits of the prompt's text, reference and media: the same in every run, epoch and data order."""
        content = json.dumps([self.prompt_text, self.reference, *self.media_digests], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class TextBlock:
    """Unsupervised text: `input_ids` int32 [T], exactly the block length; all but the first are predicted."""

    stored: ClassVar[dict[str, str]] = {"input_ids": "ids"}

    row_id: int
    input_ids: np.ndarray

    @property
    def length_tokens(self) -> int:
        return len(self.input_ids)


Row = SentenceRow | ResponsesRow | MarkedRow | PromptRow | TextBlock
