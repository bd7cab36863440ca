"""Step 2's loop: batches of ranked responses, their scores, the ranking loss, evaluation.

Knows neither flags nor files; what it needs comes as arguments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from training.step2_reward.loss import ranking_loss
from training.utils.data.phases import ResponsesRow
from training.utils.engine.collectives import summed_numbers
from training.utils.engine.training_engine import TrainingEngine
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import PlanSettings, plan_step
from training.utils.layout.rows import TokenRows, TokenSequence, padded_rows
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
        return {
            "train/loss": totals["loss"],
            "train/accuracy": totals["right"] / totals["pairs"],
            "train/tokens_per_second": sum(_sentence_tokens(row) for row in batch) / seconds,
            **report.figures("train"),
        }

    def _scores(self, batch: RankedRows) -> tuple[torch.Tensor, torch.Tensor]:
        scores_B = self.engine(batch.rows)
        return scores_B.index_select(0, batch.better_Q), scores_B.index_select(0, batch.worse_Q)

    def _micro_batches(self, batch: Sequence[ResponsesRow], plan: PlanSettings) -> list[RankedRows]:
        """This rank's share of `batch`, laid out; the same number of micro-batches on every rank."""
        mine = plan_step([padded_tokens(row) for row in batch], plan).micro_batches[self.ranks.rank]
        return [
            ranked_rows([batch[index] for index in micro_batch], self.settings.pad_token_id, self.ranks.device)
            for micro_batch in mine
        ]


def ranked_rows(batch: Sequence[ResponsesRow], pad_token_id: int, device: torch.device) -> RankedRows:
    """Lay out every prompt with each of its responses, and list the pairs: best first, so i beats j where i < j."""
    sentences: list[TokenSequence] = []
    better: list[int] = []
    worse: list[int] = []
    weights: list[float] = []
    for row in batch:
        first = len(sentences)
        sentences += [_sentence(row, index) for index in range(len(row.response_ids))]
        pairs = list(combinations(range(first, len(sentences)), 2))
        better += [winner for winner, _ in pairs]
        worse += [loser for _, loser in pairs]
        weights += [1.0 / len(pairs)] * len(pairs)
    return RankedRows(
        rows=padded_rows(sentences, pad_token_id).to(device),
        better_Q=torch.tensor(better, dtype=torch.int64, device=device),
        worse_Q=torch.tensor(worse, dtype=torch.int64, device=device),
        weight_Q=torch.tensor(weights, dtype=torch.float32, device=device),
    )


def _sentence(row: ResponsesRow, index: int) -> TokenSequence:
    ids = [*row.prompt_ids.tolist(), *row.response_ids[index].tolist()]
    return TokenSequence(torch.tensor(ids, dtype=torch.int64), torch.zeros(len(ids), dtype=torch.bool))


def padded_tokens(row: ResponsesRow) -> int:
    """Tokens that a row of its own sentences takes, each padded to the longest: what the planner bounds."""
    return len(row.response_ids) * (len(row.prompt_ids) + max(len(ids) for ids in row.response_ids))


def _sentence_tokens(row: ResponsesRow) -> int:
    """Tokens of all sentences, the prompt counted in each."""
    return len(row.response_ids) * len(row.prompt_ids) + sum(len(ids) for ids in row.response_ids)
