"""Step 3's loop: roll out, score, advantages, epochs of minibatches.

Deviations from InstructGPT's PPO, stated up front: advantages are whitened over all ranks; rewards are not; the
critic is a whole model of its own; a response that is cut by its length limit is scored at its last token and its
value after the end is 0. Knows neither flags nor files; what it needs comes as arguments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from training.step3_ppo.evaluation import Evaluator
from training.step3_ppo.experience import laid_out, make_experience, sequences_of
from training.step3_ppo.losses import policy_loss, pretraining_loss, value_loss
from training.step3_ppo.prompt_source import PromptSource
from training.step3_ppo.records import Experience, Rollout
from training.step3_ppo.roles import Roles
from training.step3_ppo.rollout.base import RolloutEngine
from training.step3_ppo.settings import PpoResult, PpoSettings
from training.utils.data.collate import PromptBatch, collate_prompts
from training.utils.data.phases import TextBlock
from training.utils.engine.collectives import summed_numbers
from training.utils.layout.documents import TokenSequence
from training.utils.layout.order import ShuffledStream
from training.utils.run.metrics import MetricsWriter, progress_bar, show
from training.utils.run.seeds import derived_seed


class PpoTrainer:
    """Trains the actor and the critic of `roles`."""

    def __init__(
        self,
        roles: Roles,
        rollout_engine: RolloutEngine,
        prompt_source: PromptSource,
        texts: Sequence[TextBlock] | None,
        evaluator: Evaluator,
        settings: PpoSettings,
        metrics: MetricsWriter,
    ) -> None:
        self.roles = roles
        self.rollout_engine = rollout_engine
        self.prompt_source = prompt_source
        self.evaluator = evaluator
        self.settings = settings
        self.metrics = metrics
        self.ranks = roles.actor.ranks
        self.texts = texts
        self.text_stream = ShuffledStream(len(texts), settings.seed) if texts is not None else None
        self.texts_taken = 0

    def train(self) -> PpoResult:
        """Run every rollout with its updates; return the evaluations on held-out prompts."""
        settings = self.settings
        started = time.monotonic()
        before = after = self.evaluator.evaluate(step=0)
        with progress_bar(settings.total_rollouts, "step 3, PPO", self.ranks.is_main) as bar:
            for iteration in range(1, settings.total_rollouts + 1):
                times = [time.monotonic()]
                experiences = []
                for batch in range(settings.generation_batches):
                    prompts, seeds = self.next_prompts(iteration, batch)  # 1
                    rollout = self.roll_out(prompts, seeds)  # 2
                    experiences.append(make_experience(rollout, self.roles, settings.experience))  # 3 to 6
                    self.prompt_source.tell(prompts, experiences[-1])
                times.append(time.monotonic())
                figures = self.learn(experiences, iteration)  # 7
                times.append(time.monotonic())
                self.report(iteration, figures | self.describe(experiences), times, bar)  # 8
                due = settings.eval_interval and iteration % settings.eval_interval == 0
                if due or iteration == settings.total_rollouts:
                    after = self.evaluator.evaluate(iteration)
        return PpoResult(before, after, time.monotonic() - started)

    def next_prompts(self, iteration: int, batch: int) -> tuple[PromptBatch, list[int]]:
        """Part 1: this rank's prompts, left-padded, and the seed of each one's response."""
        settings, ranks = self.settings, self.ranks
        count = settings.prompts_per_batch * ranks.world_size
        first = ((iteration - 1) * settings.generation_batches + batch) * count
        taken = list(enumerate(self.prompt_source.take(first, count), start=first))[ranks.rank :: ranks.world_size]
        rows = [row for _, row in taken]
        seeds = [derived_seed(settings.seed, "rollout", position) for position, _ in taken]
        return collate_prompts(rows, settings.sampling.pad_token_id), seeds

    def roll_out(self, prompts: PromptBatch, seeds: Sequence[int]) -> Rollout:
        """Part 2: responses from the actor's present weights."""
        device = self.ranks.device
        with self.roles.whole_actor.lent() as model:
            return self.rollout_engine.roll_out(
                model,
                prompts.prompt_ids_BP.to(device),
                prompts.prompt_mask_BP.to(device),
                self.settings.sampling,
                seeds,
            )

    def learn(self, experiences: Sequence[Experience], iteration: int) -> dict[str, float]:
        """Part 7: epochs of minibatches, each one optimizer step of actor and critic."""
        pieces = [piece for experience in experiences for piece in pieces_of(experience)]
        size = self.settings.sequences_per_minibatch
        sums: dict[str, float] = {}
        steps = 0
        for epoch in range(self.settings.ppo_epochs):
            order = ShuffledStream(len(pieces), derived_seed(self.settings.seed, "minibatch", iteration, epoch))
            for start in range(0, len(pieces), size):
                minibatch = [pieces[index] for index in order.take(start, size)]
                for name, value in self._minibatch_step(minibatch).items():
                    sums[name] = sums.get(name, 0.0) + value
                steps += 1
        return {name: value / steps for name, value in sums.items()}

    def report(self, iteration: int, figures: dict[str, float], times: Sequence[float], bar: tqdm) -> None:
        """Part 8: record the figures, and show some. times: in seconds, at the start, after part 6 and after part 7."""
        start, rolled_out, learned = times
        tokens = figures.pop("rollout/tokens")
        figures["time/rollout_and_experience"] = rolled_out - start
        figures["time/learn"] = learned - rolled_out
        figures["train/tokens_per_second"] = tokens / (learned - start)
        self.metrics.write(iteration, figures)
        speed = f"{figures['train/tokens_per_second']:,.0f} tok/s"
        show(bar, f"score {figures['rollout/score']:.3f}, KL {figures['rollout/kl']:.3f}, {speed}")

    def describe(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """What the rollouts were like, over all ranks."""
        names = ("n", "tokens", "prompt_tokens", "score", "kl", "ended", "mismatch", "values", "returns")
        sums = dict.fromkeys(names, 0.0)
        for item in experiences:
            mask_BR = item.rollout.response_mask_BR
            sums["n"] += mask_BR.shape[0]
            sums["tokens"] += float(mask_BR.sum())
            sums["prompt_tokens"] += float(item.rollout.prompt_mask_BP.sum())
            sums["score"] += float(item.scores_B.sum())
            sums["kl"] += float((item.old_logprobs_BR - item.ref_logprobs_BR).sum())
            sums["ended"] += float(item.rollout.ended_B.sum())
            sums["mismatch"] += float((item.rollout.sampled_logprobs_BR - item.old_logprobs_BR).abs().sum())
            sums["values"] += float(item.values_BR.sum())
            sums["returns"] += float(item.returns_BR.sum())
        total = summed_numbers(sums, self.ranks.device)
        return {
            "rollout/tokens": total["tokens"] + total["prompt_tokens"],
            "rollout/score": total["score"] / total["n"],
            "rollout/kl": total["kl"] / total["n"],
            "rollout/response_tokens": total["tokens"] / total["n"],
            "rollout/ended_share": total["ended"] / total["n"],
            "rollout/logprob_mismatch": total["mismatch"] / total["tokens"],
            "critic/value_mean": total["values"] / total["tokens"],
            "critic/return_mean": total["returns"] / total["tokens"],
        }

    def _minibatch_step(self, minibatch: Sequence[Piece]) -> dict[str, float]:
        """One optimizer step of actor and critic on this rank's share of a minibatch."""
        settings, roles, device = self.settings, self.roles, self.ranks.device
        texts = self._next_texts(len(minibatch))
        own_counts = {"tokens": float(sum(len(piece.advantages_r) for piece in minibatch)), "text_tokens": 0.0}
        own_counts["text_tokens"] = float(sum(int(text.is_target.sum()) for text in texts))
        counts = summed_numbers(own_counts, device)
        sums = {"policy_loss": 0.0, "value_loss": 0.0, "text_loss": 0.0, "clipped": 0.0, "ratio": 0.0, "kl": 0.0}
        sums["value_clipped"] = 0.0
        plan, pad_token_id = settings.experience.plan, settings.sampling.pad_token_id
        for chosen, rows in laid_out([piece.sequence for piece in minibatch], plan, pad_token_id, device):
            batch = Columns([minibatch[index] for index in chosen], device)
            logprobs_M = roles.actor(rows, settings.sampling.temperature).logprobs_M
            loss, seen = policy_loss(
                logprobs_M, batch.old_logprobs_M, batch.advantages_M, settings.clip_range, counts["tokens"]
            )
            roles.actor.backward(loss)
            values_M = roles.critic(rows, at="targets")
            critic_loss, critic_seen = value_loss(
                values_M, batch.values_M, batch.returns_M, settings.clip_range_value, counts["tokens"]
            )
            roles.critic.backward(critic_loss)
            sums["policy_loss"] += float(loss.detach())
            sums["value_loss"] += float(critic_loss.detach())
            sums["value_clipped"] += critic_seen["clipped"]
            for name, value in seen.items():
                sums[name] += value
        if texts:
            for _, rows in laid_out(texts, plan, pad_token_id, device):
                loss = pretraining_loss(roles.actor(rows).logprobs_M, settings.unsup_coef, counts["text_tokens"])
                roles.actor.backward(loss)
                sums["text_loss"] += float(loss.detach())
        actor_report, critic_report = roles.actor.step(), roles.critic.step()
        total = summed_numbers(sums, device)
        tokens = counts["tokens"]
        figures = {
            "actor/policy_loss": total["policy_loss"],
            "actor/clip_fraction": total["clipped"] / tokens,
            "actor/ratio": total["ratio"] / tokens,
            "actor/update_kl": total["kl"] / tokens,
            "critic/value_loss": total["value_loss"],
            "critic/clip_fraction": total["value_clipped"] / tokens,
            **actor_report.figures("actor"),
            **critic_report.figures("critic"),
        }
        if texts:
            figures["actor/pretraining_loss"] = total["text_loss"] / settings.unsup_coef
        return figures

    def _next_texts(self, count: int) -> list[TokenSequence]:
        """As many blocks of unsupervised text as the minibatch has sequences; none where no text is given."""
        if self.texts is None or self.text_stream is None:
            return []
        everyone = count * self.ranks.world_size
        taken = self.text_stream.take(self.texts_taken, everyone)[self.ranks.rank :: self.ranks.world_size]
        self.texts_taken += everyone
        return [_text_sequence(self.texts[row]) for row in taken]


@dataclass(frozen=True)
class Piece:
    """One sequence of an Experience: r response tokens, on the CPU's side the sequence, on the device the rest."""

    sequence: TokenSequence
    old_logprobs_r: torch.Tensor
    values_r: torch.Tensor
    advantages_r: torch.Tensor
    returns_r: torch.Tensor


class Columns:
    """The per-token fields of several pieces, one after the other, in the order in which rows list their targets."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        nothing = torch.empty(0, device=device)
        self.old_logprobs_M = torch.cat([nothing, *(piece.old_logprobs_r for piece in pieces)])
        self.values_M = torch.cat([nothing, *(piece.values_r for piece in pieces)])
        self.advantages_M = torch.cat([nothing, *(piece.advantages_r for piece in pieces)])
        self.returns_M = torch.cat([nothing, *(piece.returns_r for piece in pieces)])


def pieces_of(experience: Experience) -> list[Piece]:
    """Cut an experience into its sequences, so that minibatches can mix those of several rollouts."""
    lengths = experience.rollout.response_lengths_B.tolist()
    return [
        Piece(
            sequence=sequence,
            old_logprobs_r=experience.old_logprobs_BR[index, :length],
            values_r=experience.values_BR[index, :length],
            advantages_r=experience.advantages_BR[index, :length],
            returns_r=experience.returns_BR[index, :length],
        )
        for index, (sequence, length) in enumerate(zip(sequences_of(experience.rollout), lengths, strict=True))
    ]


def _text_sequence(block: Any) -> TokenSequence:
    is_target = torch.ones(len(block.input_ids), dtype=torch.bool)
    is_target[0] = False
    return TokenSequence(torch.as_tensor(block.input_ids.astype("int64")), is_target)
