"""A reward model that scores answers, even of models with another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.evaluation.reward_evaluation.scorer import ScoreRows, ScorerSettings, load_scorer
from training.utils.base.console import note
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import MEDIA_COLUMN, ResponsesRow
from training.utils.data.chat.chat import ChatTokenizer
from training.utils.data.chat.style import adopt_style, saved_style, text_maker
from training.utils.data.formats.messages import (
    FRAME,
    Conversation,
    Message,
    checked_messages,
    prompt_text,
    stored_prompt,
)
from training.utils.data.rows.arguments import AS_STORED
from training.utils.loading.configurations import load_config, positions_of
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.plugins.registry import missing_plugin
from training.utils.setup.media import has_media_kind, media_kind, reader_of_folder

if TYPE_CHECKING:
    from training.utils.contracts.drawing import RowForm
    from training.utils.contracts.media import MediaReader, RunMedia
    from training.utils.data.arguments import DataArguments
    from training.utils.data.rows.tokenize import Ids, TextTokenizer
    from training.utils.engine.ranks.startup import Ranks

_LONGEST_TOKENS = 2**20  # of a model without a limit
_WHERE = "the conversation"


@dataclass(frozen=True)
class Scorer:
    """name: the reward model's path.
    texts: tokenizes as this model reads texts.
    form: of responses; None: one run of tokens.
    unread: why it scores no answers about media; None where it does.
    reads_as_stored: its style is as_stored.
    frame: of its prompts (see `SavedStyle`).
    """

    name: str
    tokenizer: Any
    texts: TextTokenizer | ChatTokenizer
    score_rows: ScoreRows
    form: RowForm | None = None
    unread: str | None = None
    reads_as_stored: bool = False
    frame: tuple[str, str] = FRAME

    def score_ids(
        self,
        prompts: Sequence[Ids],
        responses: Sequence[Ids],
        of_prompts: Sequence[tuple[Any, ...]] = (),
        media: RunMedia | None = None,
    ) -> list[float]:
        """The scores of responses in this model's tokens, end token included. A collective.

        of_prompts: the media of each prompt, which are of `media`; without `media` there are none.
        """
        rows = [
            ResponsesRow(
                place, np.array(prompt, np.int32), (np.array(response, np.int32),), form=self.form, are_drawn=True
            )
            for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        if media is None:
            return self.score_rows(rows).score_R.tolist()
        rows = [replace(row, media=own) for row, own in zip(rows, of_prompts, strict=True)]
        return self.score_rows(rows, media).score_R.tolist()

    def ids_of_text(self, prompt: str | Sequence[Message], response: str) -> tuple[Ids, Ids]:
        """Tokenize a prompt (text as the data room writes it, or messages) and a response for this model."""
        if isinstance(self.texts, ChatTokenizer):
            if isinstance(prompt, str):
                raise ThreestepError(
                    f"the reward model '{self.name}' formats conversations with its chat template, but its tokenizer "
                    "differs from the answering model's; use a reward model with the same tokenizer, or "
                    "--prompt_style human_assistant"
                )
            return _ids_of_messages(self.texts, prompt, response)
        if self.reads_as_stored:
            text = prompt if isinstance(prompt, str) else stored_prompt(prompt, _WHERE)
        else:
            text = prompt if isinstance(prompt, str) else prompt_text(prompt, None, _WHERE, self.frame)
            response = f" {response.strip()}"
        [encoded] = self.texts.encode_sentences([text], [[response]])
        prompt_ids, response_ids = encoded.parts
        return prompt_ids, response_ids


def _ids_of_messages(texts: ChatTokenizer, messages: Sequence[Message], response: str) -> tuple[Ids, Ids]:
    found = texts.responses(
        Conversation(checked_messages(list(messages), _WHERE), _WHERE), [{"role": "assistant", "content": response}]
    )
    if found is None:
        raise ThreestepError(f"{_WHERE}: the reward model's chat template does not render the answer after its prompt")
    prompt, answers = found
    [encoded] = texts.encode([[*prompt, *answers]], [len(prompt)])
    return [token for piece in encoded.parts[: len(prompt)] for token in piece], encoded.parts[-1]


def load_answer_scorer(
    name_or_path: str,
    dtype: str | None,
    data: DataArguments,
    ranks: Ranks,
    *,
    media: RunMedia | None = None,
    unread: str | None = None,
) -> Scorer:
    """Load a reward model that reads conversations in data's style; float32 by default.

    media: that answers may be about, if it scores such answers. unread: of `why_unscored`.
    """
    tokenizer = load_tokenizer(name_or_path, end_may_pad=True)
    positions = positions_of(load_config(name_or_path))
    data = replace(data, rows=replace(data.rows, max_seq_len=positions or _LONGEST_TOKENS))
    settings = ScorerSettings(name_or_path, dtype=dtype or ScorerSettings.dtype, padded=True)
    style = adopt_style(tokenizer, data.chat)
    note(f"{name_or_path}: {style.sentence}")
    data = replace(data, chat=style.chat)
    texts = text_maker(data.chat, tokenizer)
    form = data.opened_form(tokenizer)
    layout = None if form is None else form.layout
    score_rows = load_scorer(settings, data, tokenizer, ranks, media=media)
    as_stored = style.chat.prompt_style == AS_STORED
    saved = saved_style(tokenizer)
    frame = saved.frame if saved else FRAME
    return Scorer(name_or_path, tokenizer, texts, score_rows, layout, unread, as_stored, frame)


def why_unscored(name_or_path: str, sides: Sequence[tuple[Any, MediaReader]]) -> str | None:
    """Return why a reward model does not score answers about media; None where it does. sides: see `MediaKind`."""
    if not has_media_kind():
        return missing_plugin("media", MEDIA_COLUMN)
    tokenizer = load_tokenizer(name_or_path, end_may_pad=True)
    return media_kind().why_unscored(name_or_path, tokenizer, reader_of_folder(name_or_path, tokenizer), sides)


def check_scored(name_or_path: str, sides: Sequence[tuple[Any, MediaReader]]) -> None:
    """ThreestepError if a reward model does not score answers about the media of rows. sides: see `MediaKind`."""
    unread = why_unscored(name_or_path, sides)
    if unread is not None:
        raise ThreestepError(
            f"--reward includes `model`, but rows have {MEDIA_COLUMN}: {unread}; use another reward model, a rule "
            "(--reward exact_match) or a function"
        )
