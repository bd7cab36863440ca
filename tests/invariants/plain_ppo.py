"""PPO in plain PyTorch, one sequence at a time, from the formulas: what step 3 is compared with.

Takes the responses as they were rolled out, and works everything else out itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from tests.invariants import ppo_program as program
from tests.invariants.plain import Stepper, balancing, recorded_routers
from tests.support import plain_losses
from training.utils.layout.order import ShuffledStream

Pair = tuple[list[int], list[int]]  # prompt and response


class Learner:
    """A model, its AdamW and its cosine schedule over all steps."""

    def __init__(self, model: nn.Module, peak_rate: float, total_steps: int) -> None:
        self.model, self.peak_rate, self.total_steps, self.steps = model, peak_rate, total_steps, 0
        self.stepper = Stepper(dict(model.named_parameters()), program.DECAY, program.CLIP_NORM)

    def step(self, loss: torch.Tensor) -> None:
        self.model.zero_grad()
        loss.backward()
        self.stepper.step(self.peak_rate * 0.5 * (1.0 + math.cos(math.pi * self.steps / self.total_steps)))
        self.steps += 1


def logprobs(actor: nn.Module, pair: Pair) -> torch.Tensor:
    """Of the response's tokens, at the sampling temperature."""
    prompt, response = pair
    logits = actor(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    scaled = torch.log_softmax(logits / program.TEMPERATURE, dim=-1)
    return scaled[torch.arange(len(response)), torch.tensor(response)]


def values(critic: nn.Module, pair: Pair) -> torch.Tensor:
    """In the states from which the response's tokens are drawn."""
    prompt, response = pair
    hidden = critic.model(input_ids=torch.tensor([prompt + response]))[0][0]
    return critic.score(hidden)[len(prompt) - 1 : -1, 0]


def score(reward_model: nn.Module, pair: Pair) -> float:
    prompt, response = pair
    raw = float(reward_model(input_ids=torch.tensor([prompt + response])).logits[0, 0])
    return min(max(raw, -program.CLIP_REWARD), program.CLIP_REWARD)


def text_loss(actor: nn.Module, blocks: Sequence) -> torch.Tensor:
    losses = []
    for block in blocks:
        ids = torch.tensor(block.input_ids, dtype=torch.int64)
        logits = actor(input_ids=ids.unsqueeze(0)).logits[0, :-1]
        losses.append(nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
    return torch.cat(losses).mean()


@dataclass(frozen=True)
class Outcome:
    """Per iteration: scores of the pairs as given, and figures averaged over the epochs. Models: as they ended."""

    scores: list[list[float]]
    figures: list[dict[str, float]]
    actor: nn.Module
    critic: nn.Module


def routed(model: nn.Module) -> AbstractContextManager[list]:
    """Inside, the router logits of a mixture of experts are recorded."""
    return recorded_routers(model) if hasattr(model.config, "router_aux_loss_coef") else nullcontext([])


def balanced(model: nn.Module, read: list, group: str, sums: dict[str, float]) -> torch.Tensor:
    """Return the coefficient x the balancing loss of all that was read in a step; add its figures to `sums`."""
    if not read:
        return torch.zeros(())
    loss, largest = balancing(read, model.config.num_experts_per_tok)
    for name, figure in (("loss", float(loss.detach())), ("load_max", largest)):
        sums[f"{group}/router_{name}"] = sums.get(f"{group}/router_{name}", 0.0) + figure / program.EPOCHS
    return model.config.router_aux_loss_coef * loss


def ppo(actor: nn.Module, critic: nn.Module, pairs_of_iterations: Sequence[Sequence[Pair]]) -> Outcome:
    """Every iteration: experience from the present weights, then epochs of one minibatch that holds all pairs. Mixtures
    of experts learn with their balancing loss, over the pairs and, of the actor, the texts."""
    reference, reward_model = copy.deepcopy(actor).requires_grad_(False), copy.deepcopy(critic).requires_grad_(False)
    total_steps = program.ITERATIONS * program.EPOCHS
    actor_learner = Learner(actor, program.ACTOR_RATE, total_steps)
    critic_learner = Learner(critic, program.CRITIC_RATE, total_steps)
    texts = program.texts()
    text_order = ShuffledStream(len(texts), program.SEED)
    texts_taken = 0
    outcome = Outcome([], [], actor, critic)
    for pairs in pairs_of_iterations:
        with torch.no_grad():
            old = [logprobs(actor, pair) for pair in pairs]
            old_values = [values(critic, pair) for pair in pairs]
            kl = [mine - logprobs(reference, pair) for mine, pair in zip(old, pairs, strict=True)]
            scores = [score(reward_model, pair) for pair in pairs]
        advantages = []
        for one_kl, one_score, one_values in zip(kl, scores, old_values, strict=True):
            rewards = -program.KL_COEF * one_kl.double()
            rewards[-1] += one_score
            advantages.append(plain_losses.gae(rewards, one_values.double(), program.GAMMA, program.LAM))
        returns = [one + two for one, two in zip(advantages, old_values, strict=True)]
        everything = torch.cat(advantages)
        white = [(one - everything.mean()) / everything.std() for one in advantages]

        sums = {
            "actor/policy_loss": 0.0,
            "critic/value_loss": 0.0,
            "actor/pretraining_loss": 0.0,
            "actor/clip_fraction": 0.0,
            "actor/ratio": 0.0,
        }
        routers: dict[str, float] = {}
        for _ in range(program.EPOCHS):
            blocks = [texts[row] for row in text_order.take(texts_taken, len(pairs))]
            texts_taken += len(pairs)
            with routed(actor) as actor_read:
                ratio = torch.exp(torch.cat([logprobs(actor, pair) for pair in pairs]) - torch.cat(old))
                pretraining = text_loss(actor, blocks)
            gain = torch.cat(white)
            clipped = ratio.clamp(1 - program.CLIP_RANGE, 1 + program.CLIP_RANGE)
            policy = -torch.minimum(ratio * gain, clipped * gain).mean()

            with routed(critic) as critic_read:
                now, before = torch.cat([values(critic, pair) for pair in pairs]), torch.cat(old_values)
            near = torch.maximum(
                torch.minimum(now, before + program.CLIP_RANGE_VALUE), before - program.CLIP_RANGE_VALUE
            )
            target = torch.cat(returns)
            value = 0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2).mean()

            actor_balance = balanced(actor, actor_read, "actor", routers)
            critic_balance = balanced(critic, critic_read, "critic", routers)
            actor_learner.step(policy + program.UNSUP_COEF * pretraining + actor_balance)
            critic_learner.step(value + critic_balance)
            for name, figure in zip(
                sums,
                (policy, value, pretraining, (clipped * gain < ratio * gain).double().mean(), ratio.mean()),
                strict=True,
            ):
                sums[name] += float(figure.detach()) / program.EPOCHS
        outcome.scores.append(scores)
        outcome.figures.append(sums | routers)
    return outcome


def entropies(actor: nn.Module, pair: Pair) -> torch.Tensor:
    """Of the policy in the states from which the response's tokens are drawn."""
    prompt, response = pair
    logits = actor(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    scaled = torch.log_softmax(logits / program.TEMPERATURE, dim=-1)
    return -(scaled.exp() * scaled).sum(-1)


def grpo(
    actor: nn.Module,
    reward_model: nn.Module,
    pairs_of_iterations: Sequence[Sequence[Pair]],
    ended_of_iterations: Sequence[Sequence[bool]],
    scores_of_iterations: Sequence[Sequence[float]],
    epochs: int,
) -> Outcome:
    """scores_of_iterations: the run's, from which its advantages come: where two samples of a prompt are the same text,
    their scores differ by rounding alone, which an advantage divides by 1e-6.

    Samples of a prompt are adjacent; the loss is the mean over ended responses of the mean over their tokens of
    -min(r A, clip(r) A) + KL_COEF k3 - ENTROPY_COEF H, k3 at most 10."""
    reference = copy.deepcopy(actor).requires_grad_(False)
    learner = Learner(actor, program.ACTOR_RATE, program.ITERATIONS * epochs)
    outcome = Outcome([], [], actor, reward_model)
    iterations = zip(pairs_of_iterations, ended_of_iterations, scores_of_iterations, strict=True)
    for pairs, ended, told in iterations:
        with torch.no_grad():
            old = [logprobs(actor, pair) for pair in pairs]
            ref = [logprobs(reference, pair) for pair in pairs]
            scores = torch.tensor([score(reward_model, pair) for pair in pairs], dtype=torch.float64)
        groups = torch.tensor(told, dtype=torch.float64).view(-1, program.SAMPLES)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
        chosen = [index for index, end in enumerate(ended) if end]
        names = ("actor/policy_loss", "actor/kl_loss", "actor/entropy", "actor/clip_fraction", "actor/ratio")
        sums = dict.fromkeys(names, 0.0)
        for _ in range(epochs):
            policy = kl = entropy = torch.zeros((), dtype=torch.float64)
            entropy_sum = clipped = ratio_sum = tokens = 0.0
            for index in chosen:
                now, gain = logprobs(actor, pairs[index]), advantages[index]
                ratio = torch.exp(now - old[index])
                held = ratio.clamp(1 - program.CLIP_RANGE, 1 + program.CLIP_RANGE)
                gap = ref[index] - now
                own_entropies = entropies(actor, pairs[index])
                policy = policy - torch.minimum(ratio * gain, held * gain).mean() / len(chosen)
                kl = kl + (torch.exp(gap) - gap - 1).clamp(max=10.0).mean() / len(chosen)
                entropy = entropy + own_entropies.mean() / len(chosen)
                entropy_sum += float(own_entropies.detach().sum())
                # Equal scores leave a gain of 1e-10 here (1e-16 over 1e-6), where there is none: it clips nothing.
                clipped += float((ratio * gain - held * gain > 1e-8).sum())
                ratio_sum += float(ratio.detach().sum())
                tokens += len(now)
            learner.step(policy + program.KL_COEF * kl - program.ENTROPY_COEF * entropy)
            figures = (policy.item(), kl.item(), entropy_sum / tokens, clipped / tokens, ratio_sum / tokens)
            for name, figure in zip(names, figures, strict=True):
                sums[name] += figure / epochs
        outcome.scores.append(scores.tolist())
        outcome.figures.append(sums)
    return outcome
