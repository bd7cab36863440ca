"""Rows of ranked responses as the micro-batches of one rank, which know the row and response of each sequence; their
scores, computed by all ranks together and known to each of them; and rows whose prompt is paired with the response of
another row, by which KTO estimates how far the policy is from its start.

Knows no model and no loss. B sequences (responses), Q pairs of responses to the same prompt, K responses of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.transfer import moved, pinned
from training.utils.contracts.documents import Document, unshared
from training.utils.data.rows.documents import group_document, group_size, responses_document, row_groups
from training.utils.engine.ranks.collectives import gathered
from training.utils.layout.planner import DocumentSize, PlanSettings, plan_step
from training.utils.layout.rows import RankedRows, lacks_media, planned_size, ranked_rows
from training.utils.preference.evaluation import ScoredResponses

if TYPE_CHECKING:
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.setup.training_run import TrainingRun

_PLANNED_ROWS = 1024  # laid out at a time, so that memory does not grow with the dataset
_FORWARDS_AT_A_TIME = 16  # of each rank, where a whole split is read: enough to balance and to sort


@dataclass(frozen=True)
class PreferenceBatch:
    """A micro-batch of prompts with their ranked responses.

    ranked: the responses as sequences, and the pairs among them.
    row_B: int64, the row of each sequence, as an index into the split.
    place_B: int64, its rank among that row's responses, 0 the best.
    tokens_B: int64, its response's tokens.
    margin_Q: float32, the margin of the data by which the better response should beat the worse; 0 if it has none.
    is_best_B: bool, whether the response is its row's best.
    documents: its rows, before they were laid out.
    columns: float32 [B] each, the numbers of its rows that are `batched`, by their names.
    """

    ranked: RankedRows
    row_B: np.ndarray
    place_B: np.ndarray
    tokens_B: np.ndarray
    margin_Q: torch.Tensor
    is_best_B: torch.Tensor
    documents: tuple[Document, ...] = ()
    columns: dict[str, torch.Tensor] = field(default_factory=dict)


def preference_batches(
    rows: Sequence[ResponsesRow],
    indices: Sequence[int],
    plan: PlanSettings,
    ranks: Ranks,
    *,
    pad_token_id: int,
    are_targets: bool,
    rows_at_a_time: int | None = None,
    media: RunMedia | None = None,
) -> Iterator[PreferenceBatch]:
    """Lay out this rank's share of the rows `indices`, in parts of `rows_at_a_time` (default: of some forwards of each
    rank), on the CPU (pinned, where the ranks' device is a GPU); every rank gets the same number of micro-batches. The
    same rows, plan and parts give the same micro-batches, and so bit-identical numbers.

    are_targets: whether a policy reads log-probabilities of the responses; a reward model predicts no tokens.
    media: of the rows, if they have some.
    """
    at_a_time = rows_at_a_time or _FORWARDS_AT_A_TIME * plan.ranks * (plan.max_rows_per_micro_batch or 1)
    for start in range(0, len(indices), at_a_time):
        part = indices[start : start + at_a_time]
        taken = [rows[index] for index in part]
        groups = row_groups(taken, plan)
        sizes = [_size([taken[number] for number in group], plan) for group in groups]
        step = plan_step([size.tokens for size in sizes], plan, pairs=[size.pairs for size in sizes])
        lacking = lacks_media(step, ranks.group, [any(taken[number].media for number in group) for group in groups])
        for layout, lacks in zip(step[ranks.group], lacking, strict=True):
            rows_of = [[[taken[number] for number in groups[place]] for place in row] for row in layout]
            documents = [[_document(group, plan, are_targets) for group in row] for row in rows_of]
            numbers = [number for row in layout for place in row for number in groups[place]]
            responses = [len(taken[number].response_ids) for number in numbers]
            ranked = ranked_rows(documents, plan.packed, pad_token_id, responses, media=media, lacks=lacks)
            sequences = [
                (part[number], place, tokens)
                for number in numbers
                for place, tokens in enumerate(response_tokens(taken[number]))
            ]
            row_B, place_B, tokens_B = np.array(sequences, dtype=np.int64).reshape(-1, 3).T
            level_B = torch.from_numpy(
                np.concatenate([np.zeros(0, np.float32), *(margin_levels(taken[at]) for at in numbers)])
            )
            margin_Q = level_B[ranked.better_Q] - level_B[ranked.worse_Q]
            is_best_B = torch.from_numpy(place_B == 0)
            flat = tuple(document for row in documents for document in row)
            columns = {
                name: torch.tensor([getattr(rows[index], name) for index in row_B], dtype=torch.float32)
                for name in taken[0].batched
            }
            batch = PreferenceBatch(ranked, row_B, place_B, tokens_B, margin_Q, is_best_B, flat, columns)
            yield pinned(batch, ranks.device)


def _size(rows: Sequence[ResponsesRow], plan: PlanSettings) -> DocumentSize:
    """Return the size of `_document`."""
    if len(rows) > 1:
        return group_size(rows, plan)
    return planned_size(len(rows[0].prompt_ids), response_tokens(rows[0]), plan.packed)


def _document(rows: Sequence[ResponsesRow], plan: PlanSettings, are_targets: bool) -> Document:
    return group_document(rows, plan, are_targets) if len(rows) > 1 else responses_document(rows[0], are_targets)


@dataclass(frozen=True)
class PreferenceStep:
    """batches: this rank's of an optimizer step, on the CPU. work: this rank's, as in `TrainingRun.work_of`."""

    batches: list[PreferenceBatch]
    work: dict[str, float]


def train_batches(run: TrainingRun[ResponsesRow], taken: Sequence[int], are_targets: bool) -> PreferenceStep:
    """Lay out an optimizer step on the training rows `taken`. MFU counts the trained model's forward and backward."""
    plan, pad = run.settings.train_plan, run.settings.pad_token_id
    batches = list(
        preference_batches(
            run.train_rows,
            taken,
            plan,
            run.ranks,
            pad_token_id=pad,
            are_targets=are_targets,
            rows_at_a_time=len(taken),
            media=run.settings.media,
        )
    )
    documents = [document for batch in batches for document in batch.documents]
    if not plan.packed:
        documents = [alone for document in documents for alone in unshared(document)]
    outputs = sum(document.reads if are_targets else len(document.ends) for document in documents)
    return PreferenceStep(batches, run.work_of(documents, outputs))


def eval_batches(run: TrainingRun[ResponsesRow]) -> Iterator[PreferenceBatch]:
    """This rank's micro-batches of all evaluation rows, for a policy."""
    plan, pad = run.settings.eval_plan, run.settings.pad_token_id
    rows = run.eval_rows
    return preference_batches(
        rows, range(len(rows)), plan, run.ranks, pad_token_id=pad, are_targets=True, media=run.settings.media
    )


def response_tokens(row: ResponsesRow) -> list[int]:
    """Tokens of each response."""
    return [len(ids) for ids in row.response_ids]


def margin_levels(row: ResponsesRow) -> np.ndarray:
    """float32 [K]: for each response the sum of the margins below it in the ranking.

    The margin of a pair is the difference of its levels. Worked example, margins (0.5, 2): levels (2.5, 2, 0), so the
    first is to beat the second by 0.5, the second the third by 2, and the first the third by 2.5.
    """
    if row.margins is None:
        return np.zeros(len(row.response_ids), np.float32)
    return np.append(np.cumsum(row.margins[::-1])[::-1], 0).astype(np.float32)


def score_responses(
    read: Callable[[TokenRows], torch.Tensor],
    rows: Sequence[ResponsesRow],
    plan: PlanSettings,
    pad_token_id: int,
    *,
    ranks: Ranks,
    media: RunMedia | None = None,
) -> ScoredResponses:
    """Score every response of `rows`. A collective: all ranks call it with the same rows and get the same result.

    read: TokenRows -> float32 [sequences], in eval mode. media: of the rows, if they have some.
    Raises ThreestepError where a score is not finite.
    """
    mine, everywhere = [], range(len(rows))
    for batch in preference_batches(
        rows,
        everywhere,
        plan,
        ranks,
        pad_token_id=pad_token_id,
        are_targets=False,
        rows_at_a_time=_PLANNED_ROWS,
        media=media,
    ):
        with torch.no_grad():
            scores_B = read(moved(batch.ranked.rows, ranks.device))
        batch_scores = scores_B.double().cpu().numpy()[: len(batch.row_B)]
        mine.append(np.column_stack([batch.row_B, batch.place_B, batch.tokens_B, batch_scores]))
    scored = gathered_scores(mine if ranks.leads else [])
    scores = scored.score_R
    not_finite = int(np.count_nonzero(~np.isfinite(scores)))
    if not_finite:
        raise ThreestepError(
            f"{not_finite:,} of {len(scores):,} scores are not finite: the model has diverged; train it with a lower "
            "--learning_rate or another --dtype"
        )
    return scored


def gathered_scores(mine: Sequence[np.ndarray]) -> ScoredResponses:
    """Put all ranks' scores in order. A collective. mine: of micro-batches, float64 [responses, 4]: the row, the place
    among its responses, tokens, score."""
    prompts, places, tokens, scores = np.concatenate(gathered(np.concatenate([np.zeros((0, 4)), *mine]))).T
    order = np.lexsort((places, prompts))
    return ScoredResponses(prompts[order].astype(np.int64), scores[order], tokens[order].astype(np.int64))


def chosen_alone(rows: Sequence[ResponsesRow]) -> list[ResponsesRow]:
    """The same rows with their best response only."""
    return [replace(row, response_ids=row.response_ids[:1], margins=None) for row in rows]


_SHUFFLED_BY = 0  # not --seed: the reference's log-probabilities of these rows are found again by another run


class MismatchedRows(Sequence):
    """The rows of a split, each with the response of the row that follows it in one fixed shuffled order, cyclically;
    rows with the same prompt are passed over, unless all have it.

    Worked example, prompts a, b, b, c and the order 2, 0, 1, 3: row 2 (b) takes the response of row 0, row 0 of row 1,
    row 1 (b) of row 3, row 3 of row 2.
    """

    def __init__(self, rows: Sequence[ResponsesRow], most_tokens: int) -> None:
        """most_tokens: of a prompt and its response; a longer response is cut at its end."""
        self._rows, self._most_tokens = rows, most_tokens
        self._order = np.random.RandomState(_SHUFFLED_BY).permutation(len(rows))
        self._place = np.argsort(self._order)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        response = self._rows[self.other(int(index))].response_ids[0]
        return replace(row, response_ids=(response[: self._most_tokens - len(row.prompt_ids)],), form=None)

    def other(self, index: int) -> int:
        """The row whose response the row `index` takes."""
        prompt, place = self._rows[index].prompt_ids, int(self._place[index])
        for step in range(1, len(self)):
            other = int(self._order[(place + step) % len(self)])
            if not np.array_equal(self._rows[other].prompt_ids, prompt):
                return other
        return int(self._order[(place + 1) % len(self)])


def mismatched(run: TrainingRun[ResponsesRow], most_tokens: int) -> TrainingRun[ResponsesRow]:
    """The same run on such rows."""
    train, evaluation = (MismatchedRows(rows, most_tokens) for rows in (run.train_rows, run.eval_rows))
    return replace(run, train_rows=train, eval_rows=evaluation)
