"""Records that pass between the numbered parts of step 3, every field with its shape; and two that plugins fill: the
correction of rollouts, and what the actor learns from beside them.

B sequences (of this rank), P prompt tokens, R response tokens (the longest response of the batch).

Worked example, B = 2, P = 3, R = 3, pad id 0, end-of-conversation token 9. Prompts [5 6 7] and [8]; the first
response is [4 9] (ended), the second [3 3 3] (cut by max_answer_seq_len):
    prompt_ids_BP [[5 6 7], [0 0 8]]      response_ids_BR [[4 9 0], [3 3 3]]
    response_lengths_B [2 3]              response_mask_BR [[T T F], [T T T]]      ended_B [T F]
Score 1.5 for the first, KL coefficient 0.1 and log-probability differences d: its
    rewards_BR[0] = [-0.1 d_0, 1.5 - 0.1 d_1, 0]: the score lands on the end token, the last real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from training.step3_ppo.contracts.measures import Measure
    from training.utils.contracts.rollout import DrawnTokens, Rollout
    from training.utils.contracts.rows import PromptRow
    from training.utils.contracts.run import ObservedStep
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.accumulate import MicroBatch
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.layout.trie import SequenceLayout
    from training.utils.models.token_model import TokenLogprobs


class Corrected(NamedTuple):
    """weights_BR: float32, of each token's policy loss, 0 outside the response and where rejected; None without a
    correction. kept_BR: bool, False where a token leaves the denominators of the actor's loss; None where all stay."""

    weights_BR: torch.Tensor | None = None
    kept_BR: torch.Tensor | None = None


class Correction:
    """No correction, and nothing reported.

    reads_old_policy: it compares the rollout's log-probabilities with the training forward's.
    bypasses: the rollout's log-probabilities are the old policy's, and no forward is read for these.
    """

    reads_old_policy = False
    bypasses = False

    def corrected(self, old_logprobs_BR: torch.Tensor | None, drawn: DrawnTokens, counts_B: torch.Tensor) -> Corrected:
        """Weigh and reject the tokens of a rollout. old_logprobs_BR, counts_B: as of Experience. A collective."""
        return Corrected()

    def loss_weights(self, log_ratio_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor | None:
        """Return weights that the policy of each update decides; None where `corrected` has them. log_ratio_M: log p of
        the policy in training - old log p."""
        return None

    def measures(self, old_logprobs_BR: torch.Tensor, drawn: DrawnTokens, corrected: Corrected) -> list[Measure]:
        """Return measures of the distance between both policies, and of what was corrected."""
        return []

    def figures(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return figures that follow from others, such as those of `measures`."""
        return {}


NO_CORRECTION = Correction()


class LearntBeside:
    """This one has nothing to learn from. fingerprint: of its data, by which a run that resumes knows them."""

    fingerprint = ""

    def beside(self, count: int, actor: TrainingEngine, layout: SequenceLayout) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches of the actor for the next minibatch, of `count` sequences of all ranks."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return what steps change, as JSON holds it, by names that the trainer's state has for nothing else."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class Scored:
    """float32 [B] each.

    scores_B: the weighted sum of the rewards.
    outcomes_B: the scores minus what lengths and ends take off; samples of a prompt are compared by them. The same
        number for all samples of a prompt whose outcomes are all alike (`advantages.inputs.settled`).
    parts: each reward by its name, and a function's further values as NAME/KEY; NaN where it gave none.
    """

    scores_B: torch.Tensor
    outcomes_B: torch.Tensor
    parts: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """rows: the prompts.
    rollout: their samples, those of a prompt adjacent.
    collect: waits for running reward functions; called once, by the first reader of `scored`.
    """

    rows: tuple[PromptRow, ...]
    rollout: Rollout
    collect: Callable[[], Scored]

    @cached_property
    def scored(self) -> Scored:
        return self.collect()


@dataclass(frozen=True)
class LeftOut:
    """Groups that were drawn and scored, and that nothing is trained on.

    keys: of each group; all ranks' groups have an order by them, the same for any number of ranks.
    rows, rollout: as of Samples. scores_B: float32, as of Scored.
    """

    keys: Sequence[tuple[int, ...]]
    rows: tuple[PromptRow, ...]
    rollout: Rollout
    scores_B: torch.Tensor


@dataclass(frozen=True)
class Forward:
    """A micro-batch to learn from. numbers: of its sequences among all ranks' (`sequence_number`), in the order of the
    rows. policy: with its graph, if the micro-batch was read for learning too. for_guests: of the actor
    (`Guests.prepare`)."""

    numbers: Sequence[int]
    rows: TokenRows
    policy: TokenLogprobs | None = None
    for_guests: tuple[Any, ...] = ()


def sequence_number(rank: int, index: int, samples_per_prompt: int, world_size: int) -> int:
    """Return the number of a rank's own sequence among all ranks', the same for any number of ranks. Prompts are dealt
    to ranks one by one."""
    prompt, sample = divmod(index, samples_per_prompt)
    return (prompt * world_size + rank) * samples_per_prompt + sample


@dataclass(frozen=True)
class Readings:
    """Numbers that the models' forwards give for each token that was drawn, as of Experience; None where not read.

    logprobs_BR: of the actor that rolled out, by the training forward, at the sampling temperature.
    collisions_BR: of the same policy, the sum of p^2 over the vocabulary.
    ref_logprobs_BR: of the reference; None without a KL.
    kl_BR: the exact KL to the reference.
    values_BR: of the critic, in the state that chooses the token; None without a critic.
    experts_differ_BR: 1 where the actor's own experts of the position that predicts the token are not the rollout's.
    greedy_scores_B: the score of the greedy response to each one's prompt, for ReMax.
    """

    logprobs_BR: torch.Tensor | None = None
    collisions_BR: torch.Tensor | None = None
    ref_logprobs_BR: torch.Tensor | None = None
    kl_BR: torch.Tensor | None = None
    values_BR: torch.Tensor | None = None
    experts_differ_BR: torch.Tensor | None = None
    greedy_scores_B: torch.Tensor | None = None


class LearntValues(NamedTuple):
    """The critic's part of a step, learned as it was read.

    values_BR: of before the step, as of Readings. figures: of its loss, this rank's summands. observed: the step.
    """

    values_BR: torch.Tensor
    figures: Mapping[str, float | torch.Tensor]
    observed: ObservedStep


class Reused(NamedTuple):
    """forwards: this rank's with the actor's graphs, for --reuse_forwards. values: for --reuse_values; None where the
    critic is still to learn."""

    forwards: Sequence[Forward] = ()
    values: LearntValues | None = None


@dataclass(frozen=True)
class Experience:
    """A rollout with everything that learning needs. All [B, R] are float32, of the tokens that were drawn
    (`Rollout.drawn`: all of a response, but for tokens that a form inserts), and 0 behind them.

    counts_B: bool, False where the response is left out of the loss.
    rewards_BR: score at the last token, minus the KL at each token if the KL is in the reward.
    advantages_BR: whitened over all ranks if the estimator or the user asks for it, over what counts; then 0 where the
        response is left out.
    returns_BR: advantages before whitening + values; None without a critic.
    old_logprobs_BR: those that were read, or the rollout's own (`Correction.bypasses`); None where the update is
        exactly on-policy and nothing else reads them.
    corrected: the tokens, weighed and rejected.
    reused: what of part 7 has been done by reading.
    """

    rollout: Rollout
    scored: Scored
    counts_B: torch.Tensor
    rewards_BR: torch.Tensor
    advantages_BR: torch.Tensor
    returns_BR: torch.Tensor | None
    read: Readings
    old_logprobs_BR: torch.Tensor | None
    corrected: Corrected
    reused: Reused = Reused()
