"""Loads a reward model, ours or another's, to score rows of responses as plain transformers does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from training.utils.base.console import log
from training.utils.data.chat.style import conversation_end
from training.utils.data.rows.tokenize import end_of_conversation_id
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.training_engine import FrozenModel
from training.utils.loading.configurations import check_positions, load_config
from training.utils.loading.models import load_scalar_model
from training.utils.models.attention import plan_for
from training.utils.models.layout_check import check_padded, check_segments, notes_on, why_not_packed
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import ScalarModel
from training.utils.preference.batches import score_responses
from training.utils.setup.setup import load_under

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.data.arguments import DataArguments
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.preference.evaluation import ScoredResponses


class ScoreRows(Protocol):
    """Scores rows by a model that is loaded."""

    def __call__(self, rows: Sequence[ResponsesRow], media: RunMedia | None = None) -> ScoredResponses:
        """media: of these rows, if they are not those that the model was loaded with. A collective."""


@dataclass(frozen=True)
class ScorerSettings:
    """Settings of a reward model that only scores.

    model_name_or_path: a sequence-classification model with one label.
    dtype: bf16 rounds so far that some scores become equal.
    zero_stage: 3 shards the model over the ranks.
    per_device_eval_batch_size: prompts of one forward of one rank; packed, the tokens of that many.
    max_tokens_per_micro_batch: padding included; None sets no bound.
    padded: one sequence a row.
    """

    model_name_or_path: str
    dtype: str = "fp32"
    zero_stage: int = 0
    per_device_eval_batch_size: int = 16
    max_tokens_per_micro_batch: int | None = None
    padded: bool = False


def load_scorer(
    settings: ScorerSettings,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
    *,
    media: RunMedia | None = None,
) -> ScoreRows:
    """Load the model; return the function that scores rows with it. media: of these rows, if they have some."""
    engine = EngineSettings(dtype=settings.dtype, zero_stage=settings.zero_stage)
    loading = ModelSettings(settings.model_name_or_path, takes_media=True)
    check_positions(loading, data.rows.max_seq_len, "--max_seq_len")
    own_pad_token_id = load_config(settings.model_name_or_path).get_text_config().pad_token_id
    longest_tokens = data.rows.max_seq_len
    reading: Any = {"longest_tokens": longest_tokens, "device": ranks.device, "media": media}
    model = load_under(
        engine, ranks, lambda dtype: load_scalar_model(loading, dtype, tokenizer, must_have_head=True, **reading)
    )
    read = FrozenModel(ScalarModel(model), engine, ranks)
    check_padded(model, read, ranks.device)
    needed = data.needs_segments
    reason = None if settings.padded and needed is None else why_not_packed(model, read, longest_tokens, ranks.device)
    for note in notes_on(model):
        log(f"{type(model).__name__}: {note}", ranks.is_main)
    check_segments(reason, needed, type(model).__name__)
    if reason is not None:
        log(f"warning: {type(model).__name__} uses padded rows: {reason}", ranks.is_main)
    plan = plan_for(
        model,
        sequences=settings.per_device_eval_batch_size,
        longest_tokens=longest_tokens,
        packed=not settings.padded and reason is None,
        ranks=ranks.world_size,
        max_tokens_per_micro_batch=settings.max_tokens_per_micro_batch,
    )
    # Plain transformers reads a score at the last token that is not the pad token, and its trainers have trained it
    # there: where pad ends a response, the end token is not seen.
    end_token_id = end_of_conversation_id(tokenizer, conversation_end(data.chat, tokenizer))

    def score(rows: Sequence[ResponsesRow], media: RunMedia | None = media) -> ScoredResponses:
        rows = [without_end(row, end_token_id) for row in rows] if own_pad_token_id == end_token_id else rows
        return score_responses(read, rows, plan, tokenizer.pad_token_id, ranks=ranks, media=media)

    return score


def without_end(row: ResponsesRow, end_token_id: int) -> ResponsesRow:
    """The same row, its responses without the end-of-conversation token. A response that was cut has none and stays
    whole; one that holds nothing else keeps it."""
    ends = [len(ids) > 1 and ids[-1] == end_token_id for ids in row.response_ids]
    return replace(
        row, response_ids=tuple(ids[:-1] if end else ids for ids, end in zip(row.response_ids, ends, strict=True))
    )
