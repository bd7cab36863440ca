"""Samples of an evaluation on ranked responses: each row's responses, their scores, and how far the order holds.

Some rows at every evaluation; before and after training enough of them to find the pairs that are judged worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.samples.samples import SampleTexts, sample_uid

if TYPE_CHECKING:
    from training.utils.contracts.rows import ResponsesRow

MOST_ROWS = 1000  # written before and after training


def ranked_samples(
    rows: Sequence[ResponsesRow], scores_of: Mapping[int, Sequence[float]], samples: SampleTexts
) -> list[dict[str, Any]]:
    """The lines of samples.jsonl of some rows: `responses` and `scores`, best first, numbers of the row, and of several
    responses `margin`, the least difference between the scores of a better and a worse one; below 0 a pair is judged
    the wrong way round.

    scores_of: by the rows' indices
    """
    found = []
    for index, scores in scores_of.items():
        row = rows[index]
        prompt, responses = (
            samples.text(row.prompt_ids.tolist()),
            [samples.text(ids.tolist()) for ids in row.response_ids],
        )
        media = samples.media(row.media)
        found.append(
            {
                "prompt_index": index,
                "uid": sample_uid(prompt, *responses, *media.names),
                "prompt": prompt,
                **media.columns,
                "responses": responses,
                "scores": [*scores],
                **{name: getattr(row, name) for name in row.batched},
                **({"margin": least_margin(scores)} if len(scores) > 1 else {}),
            }
        )
    return found


def least_margin(scores: Sequence[float]) -> float:
    """Return the least difference between a score and one that is ranked below it. scores: two or more, best first."""
    return min(better - worse for place, better in enumerate(scores) for worse in scores[place + 1 :])
