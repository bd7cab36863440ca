"""Samples of supervised fine-tuning: held-out rows with their loss, the response of the data and the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.contracts.media_spans import media_between
from training.utils.setup.samples import EvaluationSamples, sample_uid

if TYPE_CHECKING:
    from training.utils.contracts.rows import SentenceRow

MOST_TOKENS = 64  # of a drawn response: enough to see, and as cheap as a few forwards


@dataclass(frozen=True)
class Parts:
    """Token ids of a row up to its first response, and of that response. media: of the prompt."""

    prompt: list[int]
    response: list[int]
    media: tuple[Any, ...] = ()


def parts_of(row: SentenceRow) -> Parts:
    """Split a row where its loss begins, and where it first ends: of a chat, the first turn."""
    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    first = mask.index(True)
    end = next((place for place in range(first, len(ids)) if not mask[place]), len(ids))
    return Parts(ids[:first], ids[first:end], media_between(row.media, 0, first))


@dataclass(frozen=True)
class Drawn:
    """A response: its token ids, and whether it ended before `MOST_TOKENS`."""

    ids: list[int]
    ended: bool


def sentence_samples(
    rows: Mapping[int, SentenceRow], losses: Mapping[int, float], drawn: Mapping[int, Drawn], samples: EvaluationSamples
) -> list[dict[str, Any]]:
    """The lines of samples.jsonl. losses: nats a token, by row; a row that was not drawn has no response."""
    written = []
    for index, row in rows.items():
        parts = parts_of(row)
        prompt, truth = samples.text(parts.prompt), samples.text(parts.response)
        media = samples.media(row.media)
        sample: dict[str, Any] = {
            "prompt_index": index,
            "uid": sample_uid(prompt, truth, *media.names),
            "prompt": prompt,
            **media.columns,
            "ground_truth": truth,
            "loss": losses[index],
        }
        if index in drawn:
            response = drawn[index]
            sample |= {
                "response": samples.text(response.ids),
                "response_tokens": len(response.ids),
                "ended": response.ended,
            }
        written.append(sample)
    return written
