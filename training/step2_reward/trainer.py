"""Step 2's loop: batches of ranked responses, their scores, the ranking loss, evaluation.

Knows neither flags nor files; what it needs comes as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from training.step2_reward.loss import LossOptions, compared_tokens, ranking_loss
from training.utils.contracts.run import StepTaken
from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee, on_device
from training.utils.layout.order import ShuffledStream
from training.utils.preference.batches import (
    PreferenceBatch,
    PreferenceStep,
    chosen_alone,
    score_responses,
    train_batches,
)
from training.utils.preference.evaluation import (
    RewardEvaluation,
    ScoredResponses,
    Spread,
    evaluate,
    evaluation_from,
    gain_sentence,
    spread,
)
from training.utils.run.divergence import EQUAL_PAIRS
from training.utils.setup.training_run import NextStep, TrainingLoop, TrainingRun

if TYPE_CHECKING:
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.setup.training_run import TrainingResult


def closing_figures(before: RewardEvaluation, after: RewardEvaluation) -> dict[str, float | None]:
    """Figures of the evaluations before and after training."""
    return {
        "eval_accuracy_before": before.accuracy,
        "eval_accuracy": after.accuracy,
        "eval_score_gap": after.score_gap,
        "eval_loss": after.loss,
    }


class ReadPairs(NamedTuple):
    """M scores to compare with M others, float32, with the margin and the weight of each comparison.

    end_Q: int64, for each pair the comparison of its ends
    """

    better_M: torch.Tensor
    worse_M: torch.Tensor
    margin_M: torch.Tensor
    weight_M: torch.Tensor
    end_Q: torch.Tensor


def read_ends(model: Callable[..., torch.Tensor], batch: PreferenceBatch) -> ReadPairs:
    """The scores of whole responses: M is Q."""
    ranked = batch.ranked
    scores_B = model(ranked.rows)
    better_Q, worse_Q = scores_B.index_select(0, ranked.better_Q), scores_B.index_select(0, ranked.worse_Q)
    all_Q = torch.arange(len(better_Q), device=better_Q.device)
    return ReadPairs(better_Q, worse_Q, batch.margin_Q, ranked.weight_Q, all_Q)


def read_differing_tokens(model: Callable[..., torch.Tensor], batch: PreferenceBatch) -> ReadPairs:
    """The scores at all tokens from the first difference of a pair on, which share the pair's weight."""
    ranked = batch.ranked
    rows = ranked.rows
    found = compared_tokens(
        rows.input_ids_NT, rows.end_B, batch.tokens_B.tolist(), ranked.better_Q, worse_Q=ranked.worse_Q
    )
    read_at = replace(rows, predictor_M=torch.cat([found.better_M, found.worse_M]))
    better_M, worse_M = model(read_at, at="targets").chunk(2)
    weight_M = ranked.weight_Q[found.pair_M] * found.share_M
    return ReadPairs(better_M, worse_M, batch.margin_Q[found.pair_M], weight_M, found.end_Q)


@dataclass(frozen=True)
class RewardStep(StepTaken):
    """batches: this rank's. reads_ends: the loss compares the scores of whole responses."""

    kind: ClassVar[str] = "reward"

    batches: Sequence[PreferenceBatch]
    options: LossOptions
    reads_ends: bool


class RewardTrainer:
    """Trains `run.engine`, a ScalarModel under DeepSpeed, on ranked responses.

    from_first_difference: compare all scores from the first token on in which a pair differs, not those of its ends
    """

    def __init__(
        self, run: TrainingRun[ResponsesRow], options: LossOptions, from_first_difference: bool = False
    ) -> None:
        self.run = run
        self.options = options
        self.read = read_differing_tokens if from_first_difference else read_ends

    def train(self) -> TrainingResult:
        """Take every optimizer step."""
        # With options, a loss of training has another value where all scores are equal.
        loop = TrainingLoop(
            self.run, self.evaluate, evaluation_from, EQUAL_PAIRS, of_training=self.options == LossOptions()
        )
        for step in loop.steps(lambda taken: train_batches(self.run, taken, are_targets=False)):
            loop.record(step.number, self._optimizer_step(step), step.taken)
        return loop.result(closing_figures, gain_sentence)

    def evaluate(self, step: int) -> RewardEvaluation:
        """Return (and record) how the model ranks the evaluation rows."""
        scored = self._scored(self.run.eval_rows)
        result = evaluate(scored)
        self.run.metrics.write(step, {f"eval/{name}": value for name, value in result.figures().items()})
        wanted = self.run.sampled_rows(step)
        if wanted:
            self.run.write_samples(step, scored.of_prompts(wanted))
        return result

    def chosen_scores(self, most_rows: int) -> Spread | None:
        """Scores of the chosen responses of at most `most_rows` training rows, drawn by the seed; None without rows."""
        rows = self.run.train_rows
        drawn = ShuffledStream(len(rows), self.run.settings.seed).take(0, min(most_rows, len(rows)))
        return spread(self._scored(chosen_alone([rows[index] for index in drawn])).score_R)

    def _scored(self, rows: Sequence[ResponsesRow]) -> ScoredResponses:
        engine, settings = self.run.engine, self.run.settings
        engine.eval()
        return score_responses(
            engine, rows, settings.eval_plan, settings.pad_token_id, ranks=engine.ranks, media=settings.media
        )

    def _optimizer_step(self, step: NextStep[PreferenceStep]) -> dict[str, float]:
        run, prepared = self.run, step.ready()

        def loss_of(batch: PreferenceBatch) -> MicroLoss:
            read, prompts = self.read(run.engine, batch), float(len(step.taken))
            loss = ranking_loss(
                read.better_M, read.worse_M, read.margin_M, read.weight_M, prompts_in_step=prompts, options=self.options
            )
            right = (read.better_M > read.worse_M)[read.end_Q].sum()
            return MicroLoss(loss, {"loss": loss, "pairs": read.end_Q.numel(), "right": right})

        batches = on_device(prepared.batches, run.ranks.device)
        micro_batches = [MicroBatch(batch.ranked.rows, partial(loss_of, batch)) for batch in batches]
        seen = partial(RewardStep, batches=batches, options=self.options, reads_ends=self.read is read_ends)
        totals, figures = run.take(step, Trainee("train", run.engine, micro_batches, run.guests), prepared.work, seen)
        return {"train/loss": totals["loss"], "train/accuracy": totals["right"] / totals["pairs"], **figures}
