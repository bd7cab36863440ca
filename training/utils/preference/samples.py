"""Samples of an evaluation on ranked responses: each row's responses, their scores, and how far the order holds.

Some rows at every evaluation; before and after training enough of them to find the pairs that are judged worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from training.utils.setup.samples import EvaluationSamples, sample_uid

if TYPE_CHECKING:
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.preference.evaluation import ScoredResponses
    from training.utils.setup.training_run import TrainingRun

MOST_ROWS = 1000  # written before and after training


def write_ranked_samples(run: TrainingRun[ResponsesRow], step: int, scored: ScoredResponses) -> None:
    """Append the samples of an evaluation to samples.jsonl. scored: of all evaluation rows, on every rank."""
    total, settings = len(run.eval_rows), run.settings
    shown = run.samples.rows(total, settings.seed)
    if not shown:
        return
    others: Sequence[int] = range(min(total, MOST_ROWS)) if step in (0, settings.total_steps) else ()
    taken = list(dict.fromkeys([*shown, *others]))
    run.samples.write(run.metrics, step, ranked_samples(run.eval_rows, taken, scored, run.samples))


def ranked_samples(
    rows: Sequence[ResponsesRow], taken: Sequence[int], scored: ScoredResponses, samples: EvaluationSamples
) -> list[dict[str, Any]]:
    """The lines of samples.jsonl of the rows `taken`: `responses` and `scores`, best first, numbers of the row, and of
    several responses `margin`, the least difference between the scores of a better and a worse one; below 0 a pair is
    judged the wrong way round."""
    starts = np.searchsorted(scored.prompt_R, np.arange(len(rows)))
    found = []
    for index in taken:
        row = rows[index]
        scores = scored.score_R[starts[index] : starts[index] + len(row.response_ids)].tolist()
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
                "scores": scores,
                **{name: getattr(row, name) for name in row.batched},
                **({"margin": least_margin(scores)} if len(scores) > 1 else {}),
            }
        )
    return found


def least_margin(scores: Sequence[float]) -> float:
    """Return the least difference between a score and one that is ranked below it. scores: two or more, best first."""
    return min(better - worse for place, better in enumerate(scores) for worse in scores[place + 1 :])
