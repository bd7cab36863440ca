"""Step 2's loop: batches of ranked responses, their scores, the ranking loss, evaluation.

Knows neither flags nor files; what it needs comes as arguments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from training.step2_reward.loss import ranking_loss
from training.utils.data.phases import ResponsesRow
from training.utils.engine.collectives import summed_numbers
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.documents import Document, TokenSequence, shared_prompt, unshared
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import TokenRows, packed_rows
from training.utils.run.metrics import MetricsWriter, progress_bar, show


@dataclass(frozen=True)
class RewardSettings:
    """prompts_per_step: of one optimizer step, over all ranks. eval_interval: 0 evaluates only before and after."""

    total_steps: int
    prompts_per_step: int
    train_plan: PlanSettings
    eval_plan: PlanSettings
    eval_interval: int
    pad_token_id: int
    seed: int


@dataclass(frozen=True)
class Evaluation:
    """Over the pairs of the evaluation rows: accuracy, the share whose better response scores strictly higher;
    score_gap, the mean of better - worse; loss, the ranking loss."""

    accuracy: float
    score_gap: float
    loss: float


@dataclass(frozen=True)
class RewardResult:
    """The evaluations before and after training."""

    before: Evaluation
    after: Evaluation
    seconds: float


@dataclass(frozen=True)
class RankedRows:
    """A micro-batch of prompts with their responses as sentences, and which score should beat which.

    better_Q, worse_Q: int64, indices of sentences in `rows.end_B`. weight_Q: see `ranking_loss`.
    """

    rows: TokenRows
    better_Q: torch.Tensor
    worse_Q: torch.Tensor
    weight_Q: torch.Tensor

    def to(self, device: torch.device) -> RankedRows:
        return RankedRows(
            self.rows.to(device), self.better_Q.to(device), self.worse_Q.to(device), self.weight_Q.to(device)
        )


class RewardTrainer:
    """Trains `engine`, a ScalarModel under DeepSpeed, on ranked responses."""

    def __init__(
        self,
        engine: TrainingEngine,
        train_rows: Sequence[ResponsesRow],
        eval_rows: Sequence[ResponsesRow],
        settings: RewardSettings,
        metrics: MetricsWriter,
    ) -> None:
        self.engine = engine
        self.train_rows = train_rows
        self.eval_rows = eval_rows
        self.settings = settings
        self.metrics = metrics
        self.ranks = engine.ranks

    def train(self) -> RewardResult:
        """Take every optimizer step; return the evaluations before and after."""
        settings = self.settings
        started = time.monotonic()
        stream = ShuffledStream(len(self.train_rows), settings.seed)
        before = after = self.evaluate(step=0)
        with progress_bar(settings.total_steps, "step 2, reward model", self.ranks.is_main) as bar:
            for step in range(1, settings.total_steps + 1):
                taken = stream.take((step - 1) * settings.prompts_per_step, settings.prompts_per_step)
                figures = self._optimizer_step([self.train_rows[row] for row in taken])
                self.metrics.write(step, figures)
                show(bar, f"loss {figures['train/loss']:.3f}, {figures['train/tokens_per_second']:,.0f} tok/s")
                if step == settings.total_steps or (settings.eval_interval and step % settings.eval_interval == 0):
                    after = self.evaluate(step)
        return RewardResult(before, after, time.monotonic() - started)

    def evaluate(self, step: int) -> Evaluation:
        """Return (and record) how the model ranks the evaluation rows."""
        self.engine.eval()
        sums = {"pairs": 0.0, "right": 0.0, "gap": 0.0, "loss": 0.0}
        with torch.no_grad():
            for batch in self._micro_batches(self.eval_rows, self.settings.eval_plan):
                better_Q, worse_Q = self._scores(batch)
                sums["pairs"] += better_Q.numel()
                sums["right"] += float((better_Q > worse_Q).sum())
                sums["gap"] += float((better_Q - worse_Q).sum())
                sums["loss"] += float(ranking_loss(better_Q, worse_Q, batch.weight_Q, 1.0))
        totals = summed_numbers(sums, self.ranks.device)
        result = Evaluation(
            accuracy=totals["right"] / totals["pairs"],
            score_gap=totals["gap"] / totals["pairs"],
            loss=totals["loss"] / len(self.eval_rows),
        )
        self.metrics.write(step, {f"eval/{name}": value for name, value in vars(result).items()})
        return result

    def _optimizer_step(self, batch: Sequence[ResponsesRow]) -> dict[str, float]:
        started = time.monotonic()
        sums = {"loss": 0.0, "pairs": 0.0, "right": 0.0}
        self.engine.train()
        for micro_batch in self._micro_batches(batch, self.settings.train_plan):
            better_Q, worse_Q = self._scores(micro_batch)
            loss = ranking_loss(better_Q, worse_Q, micro_batch.weight_Q, float(len(batch)))
            self.engine.backward(loss)
            sums["loss"] += float(loss.detach())
            sums["pairs"] += better_Q.numel()
            sums["right"] += float((better_Q > worse_Q).sum())
        report = self.engine.step()
        totals = summed_numbers(sums, self.ranks.device)
        seconds = time.monotonic() - started
        tokens = sum(_real_tokens(row, self.settings.train_plan.packed) for row in batch)
        return {
            "train/loss": totals["loss"],
            "train/accuracy": totals["right"] / totals["pairs"],
            "train/pairs_per_second": totals["pairs"] / seconds,
            "train/tokens_per_second": tokens / seconds,
            **report.figures("train"),
        }

    def _scores(self, batch: RankedRows) -> tuple[torch.Tensor, torch.Tensor]:
        scores_B = self.engine(batch.rows)
        return scores_B.index_select(0, batch.better_Q), scores_B.index_select(0, batch.worse_Q)

    def _micro_batches(self, batch: Sequence[ResponsesRow], plan: PlanSettings) -> list[RankedRows]:
        """This rank's share of `batch`, laid out; the same number of micro-batches on every rank."""
        shared = plan.packed
        mine = plan_step([planned_tokens(row, shared) for row in batch], plan).micro_batches[self.ranks.rank]
        return [
            ranked_rows([[batch[index] for index in row] for row in rows], shared, self.settings.pad_token_id).to(
                self.ranks.device
            )
            for rows in mine
        ]


def ranked_rows(rows: Sequence[Sequence[ResponsesRow]], shared: bool, pad_token_id: int) -> RankedRows:
    """Lay out every prompt with its responses, and list the pairs: best first, so i beats j where i < j.

    shared: the prompt once for all its responses; otherwise every response is a row of its own.
    """
    documents = [[_document(prompt) for prompt in row] for row in rows]
    better: list[int] = []
    worse: list[int] = []
    weights: list[float] = []
    first = 0
    for document in (document for row in documents for document in row):
        pairs = list(combinations(range(first, first + len(document.ends)), 2))
        better += [winner for winner, _ in pairs]
        worse += [loser for _, loser in pairs]
        weights += [1.0 / len(pairs)] * len(pairs)
        first += len(document.ends)
    if not shared:
        documents = [[alone] for row in documents for document in row for alone in unshared(document)]
    return RankedRows(
        rows=packed_rows(documents, pad_token_id),
        better_Q=torch.tensor(better, dtype=torch.int64),
        worse_Q=torch.tensor(worse, dtype=torch.int64),
        weight_Q=torch.tensor(weights, dtype=torch.float32),
    )


def _document(row: ResponsesRow) -> Document:
    def run(ids: Any) -> TokenSequence:
        return TokenSequence(torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.bool))

    return shared_prompt(run(row.prompt_ids), [run(ids) for ids in row.response_ids])


def planned_tokens(row: ResponsesRow, shared: bool) -> int:
    """Tokens that a prompt with its responses takes: what the planner bounds.

    shared: the prompt once; otherwise a row a response, each padded to the longest.
    """
    if shared:
        return row.length_tokens
    return len(row.response_ids) * (len(row.prompt_ids) + max(len(ids) for ids in row.response_ids))


def _real_tokens(row: ResponsesRow, shared: bool) -> int:
    """Tokens computed that are no padding."""
    copies = 1 if shared else len(row.response_ids)
    return copies * len(row.prompt_ids) + sum(len(ids) for ids in row.response_ids)
