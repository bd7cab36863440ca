"""PPO from a reward model in one file: plain PyTorch on models of transformers, to be read from top to bottom.

    python examples/ppo_in_one_file.py    # learns on one CPU core in half a minute

An actor learns to please a reward model without moving far from a frozen reference, with the help of a critic that
predicts its rewards (InstructGPT, Ouyang et al. 2022). Steps, settings and results are those of `training/step3_ppo`:
`tests/invariants/test_ppo_in_one_file.py` trains both on the same responses and holds their weights equal. What the
package adds is scale: ranks, sharding, rows without padding, caches, checkpoints.

Deviations from the papers (InstructGPT; PPO, Schulman et al. 2017):
  - the value loss is clipped like the policy's, as in openai/baselines;
  - advantages are whitened over the rollout, after the returns are computed; rewards are not;
  - a response cut by its length limit is scored at its last token, and its value after the end is 0;
  - actor and critic share no weights; there is no entropy bonus, and no pretraining loss.

Shapes: B sequences, P prompt tokens (left-padded), R response tokens (right-padded), T = P + R, V vocabulary, M the
response tokens of a minibatch, without padding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers import PreTrainedModel as Model


@dataclass(frozen=True)
class Settings:
    """Named as step 3's flags, but for the two sizes of a batch and the end token."""

    max_train_steps: int = 24  # rollouts, each with its updates
    prompts_per_rollout: int = 64
    max_answer_seq_len: int = 8  # tokens of a response
    temperature: float = 1.0
    end_token_id: int = 0  # pads too
    clip_reward: float = 5.0
    kl_coef: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    ppo_epochs: int = 2
    sequences_per_minibatch: int = 32
    clip_range: float = 0.2
    clip_range_value: float = 0.2
    actor_learning_rate: float = 1e-3
    critic_learning_rate: float = 1e-3
    adam_epsilon: float = 1e-5  # as openai/baselines
    max_grad_norm: float = 1.0


class Models(NamedTuple):
    actor: Model
    reference: Model  # the actor as it was, frozen
    reward_model: Model  # with a scalar head, frozen
    critic: Model  # with a scalar head; starts as the reward model


class Rollout(NamedTuple):
    """Masks are True on tokens that count. They come from lengths: the padding may be the end token."""

    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    response_ids_BR: Tensor
    response_mask_BR: Tensor  # with the end token


class Experience(NamedTuple):
    """Targets of the updates, which they leave as they are; 0 outside the responses."""

    old_logprobs_BR: Tensor
    old_values_BR: Tensor
    advantages_BR: Tensor
    returns_BR: Tensor


def ppo(models: Models, prompts: Iterator[list[list[int]]], settings: Settings) -> Iterator[tuple[Rollout, dict]]:
    """Train actor and critic; yield every rollout with its figures."""
    betas, eps = (0.9, 0.95), settings.adam_epsilon
    actor_adam = torch.optim.Adam(models.actor.parameters(), settings.actor_learning_rate, betas, eps)
    critic_adam = torch.optim.Adam(models.critic.parameters(), settings.critic_learning_rate, betas, eps)
    for _ in range(settings.max_train_steps):
        # 1. Prompts.
        prompt_ids_BP, prompt_mask_BP = left_padded(next(prompts), settings.end_token_id)

        with torch.no_grad():
            # 2. Roll out: the actor answers.
            rollout = roll_out(models.actor, prompt_ids_BP, prompt_mask_BP, settings)
            mask_BR = rollout.response_mask_BR

            # 3. Score: the reward model judges whole responses.
            scores_B = score(models.reward_model, rollout).clamp(-settings.clip_reward, settings.clip_reward)

            # 4. Log-probabilities and values, before anything is learned.
            old_logprobs_BR = logprobs(models.actor, rollout, settings) * mask_BR
            ref_logprobs_BR = logprobs(models.reference, rollout, settings) * mask_BR
            old_values_BR = values(models.critic, rollout) * mask_BR

        # 5. Shape: the score at the end, minus the price of the KL on every token.
        kl_BR = old_logprobs_BR - ref_logprobs_BR
        rewards_BR = shape_rewards(scores_B, kl_BR, mask_BR, settings)

        # 6. Advantages, and the returns that the critic should have predicted.
        raw_advantages_BR = gae(rewards_BR, old_values_BR, settings)
        returns_BR = raw_advantages_BR + old_values_BR
        advantages_BR = whiten(raw_advantages_BR, mask_BR)

        # 7. Learn: epochs of minibatches, each one optimizer step of actor and critic.
        experience = Experience(old_logprobs_BR, old_values_BR, advantages_BR, returns_BR)
        losses = []
        for _ in range(settings.ppo_epochs):
            for rows in torch.randperm(len(mask_BR)).split(settings.sequences_per_minibatch):
                part = Rollout(*(field[rows] for field in rollout))
                known = Experience(*(field[rows] for field in experience))
                policy_loss = clipped_policy_loss(models.actor, part, known, settings)
                value_loss = clipped_value_loss(models.critic, part, known, settings)
                update(models.actor, actor_adam, policy_loss, settings)
                update(models.critic, critic_adam, value_loss, settings)
                losses.append([policy_loss.item(), value_loss.item()])

        # 8. Report.
        figures = {"score": scores_B.mean().item(), "kl": kl_BR.sum(dim=1).mean().item()}
        figures["policy_loss"], figures["value_loss"] = torch.tensor(losses).mean(dim=0).tolist()
        yield rollout, figures


# 1. Prompts.
def left_padded(prompts: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return (ids_BP, mask_BP): all prompts end in the last column, behind which the responses begin."""
    longest = max(len(prompt) for prompt in prompts)
    ids_BP = torch.tensor([[pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts])
    return ids_BP, torch.arange(longest) >= longest - lengths_B1


# 2. Roll out.
def roll_out(actor: Model, prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, settings: Settings) -> Rollout:
    """Sample a response to each prompt, token by token, until it ends or is cut."""
    ids_BR, mask_BR = prompt_ids_BP[:, :0], prompt_mask_BP[:, :0]
    is_open_B1 = torch.ones(len(ids_BR), 1, dtype=torch.bool)
    for _ in range(settings.max_answer_seq_len):
        rollout = Rollout(prompt_ids_BP, prompt_mask_BP, ids_BR, mask_BR)
        logits_BV = actor(**inputs(rollout)).logits[:, -1]  # reads everything again: there is no cache here
        next_B1 = torch.multinomial(torch.softmax(logits_BV / settings.temperature, dim=-1), num_samples=1)
        ids_BR, mask_BR = torch.cat([ids_BR, next_B1], dim=1), torch.cat([mask_BR, is_open_B1], dim=1)
        is_open_B1 = is_open_B1 & (next_B1 != settings.end_token_id)
    return Rollout(prompt_ids_BP, prompt_mask_BP, ids_BR, mask_BR)


# 3 and 4. Scores, log-probabilities, values: the models read prompts with their responses.
def inputs(rollout: Rollout) -> dict[str, Tensor]:
    """Return what transformers takes; positions count from each prompt's first token."""
    mask_BT = torch.cat([rollout.prompt_mask_BP, rollout.response_mask_BR], dim=1)
    return {
        "input_ids": torch.cat([rollout.prompt_ids_BP, rollout.response_ids_BR], dim=1),
        "attention_mask": mask_BT.long(),
        "position_ids": (mask_BT.cumsum(dim=1) - 1).clamp(min=0),
    }


def logprobs(model: Model, rollout: Rollout, settings: Settings) -> Tensor:
    """Log-probabilities [B, R] of the response tokens; each is chosen in the state before it."""
    first = rollout.prompt_ids_BP.shape[1]
    logits_BRV = model(**inputs(rollout)).logits[:, first - 1 : -1] / settings.temperature
    return logits_BRV.log_softmax(dim=-1).gather(-1, rollout.response_ids_BR.unsqueeze(-1)).squeeze(-1)


def scalars(model: Model, rollout: Rollout) -> Tensor:
    """Outputs [B, 1 + R] of the scalar head: at the prompt's end, and at each response token."""
    first = rollout.prompt_ids_BP.shape[1]
    return model.score(model.base_model(**inputs(rollout)).last_hidden_state[:, first - 1 :]).squeeze(-1)


def values(critic: Model, rollout: Rollout) -> Tensor:
    """Values [B, R] of the states in which the response tokens are chosen."""
    return scalars(critic, rollout)[:, :-1]


def score(reward_model: Model, rollout: Rollout) -> Tensor:
    """Scores [B], read at each response's last token."""
    length_B1 = rollout.response_mask_BR.sum(dim=1, keepdim=True)
    return scalars(reward_model, rollout).gather(1, length_B1).squeeze(1)


# 5. Shape.
def shape_rewards(scores_B: Tensor, kl_BR: Tensor, mask_BR: Tensor, settings: Settings) -> Tensor:
    """r_t = [t is last] score - kl_coef (log p - log p_ref): InstructGPT, equation 2."""
    last_B1 = mask_BR.sum(dim=1, keepdim=True) - 1
    return (-settings.kl_coef * kl_BR).scatter_add(1, last_B1, scores_B.unsqueeze(1))


# 6. Advantages.
def gae(rewards_BR: Tensor, values_BR: Tensor, settings: Settings) -> Tensor:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t: Schulman et al. 2016, equation 16."""
    advantages_BR = torch.zeros_like(rewards_BR)
    next_value_B = next_advantage_B = torch.zeros_like(rewards_BR[:, 0])
    for t in reversed(range(rewards_BR.shape[1])):
        delta_B = rewards_BR[:, t] + settings.gamma * next_value_B - values_BR[:, t]
        advantages_BR[:, t] = delta_B + settings.gamma * settings.lam * next_advantage_B
        next_value_B, next_advantage_B = values_BR[:, t], advantages_BR[:, t]
    return advantages_BR


def whiten(advantages_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Mean 0 and variance 1 over all response tokens of the rollout."""
    advantages_M = advantages_BR[mask_BR]
    return (advantages_BR - advantages_M.mean()) / (advantages_M.var() + 1e-8).sqrt() * mask_BR


# 7. Learn.
def clipped_policy_loss(actor: Model, rollout: Rollout, experience: Experience, settings: Settings) -> Tensor:
    """Mean over tokens of -min(r A, clip(r) A), r = p / p_old: Schulman et al. 2017, equation 7."""
    mask_BR = rollout.response_mask_BR
    ratio_M = torch.exp(logprobs(actor, rollout, settings) - experience.old_logprobs_BR)[mask_BR]
    clipped_M = ratio_M.clamp(1 - settings.clip_range, 1 + settings.clip_range)
    advantages_M = experience.advantages_BR[mask_BR]
    return -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M).mean()


def clipped_value_loss(critic: Model, rollout: Rollout, experience: Experience, settings: Settings) -> Tensor:
    """Mean over tokens of 1/2 max((v - R)^2, (v_clipped - R)^2), v_clipped at most clip_range_value from v_old."""
    mask_BR = rollout.response_mask_BR
    values_M, old_values_M = values(critic, rollout)[mask_BR], experience.old_values_BR[mask_BR]
    change_M = (values_M - old_values_M).clamp(-settings.clip_range_value, settings.clip_range_value)
    returns_M = experience.returns_BR[mask_BR]
    return 0.5 * torch.maximum((values_M - returns_M) ** 2, (old_values_M + change_M - returns_M) ** 2).mean()


def update(model: Model, optimizer: torch.optim.Optimizer, loss: Tensor, settings: Settings) -> None:
    """Take one optimizer step, with the gradient's norm held below the maximum."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()


# A tiny task: prompts are random letters, and people prefer the response with more vowels.

LETTERS = ".abcdefghijklmnopqrstuvwxyz"  # a token's id is its place; the dot ends a response
IS_VOWEL_V = torch.tensor([letter in "aeiou" for letter in LETTERS])


def random_prompts(count: int) -> Iterator[list[list[int]]]:
    """Yield `count` prompts at a time, of one to four letters."""
    while True:
        yield [torch.randint(1, len(LETTERS), (1 + row % 4,)).tolist() for row in range(count)]


def vowels(rollout: Rollout) -> Tensor:
    """The number [B] of vowels in each response."""
    return (IS_VOWEL_V[rollout.response_ids_BR] & rollout.response_mask_BR).sum(dim=1)


def learn_preferences(reward_model: Model, actor: Model, settings: Settings) -> None:
    """Step 2 in small: minimise -log sigmoid(score of the preferred response - score of the other)."""
    adam = torch.optim.Adam(reward_model.parameters(), 1e-3)
    prompts = random_prompts(settings.prompts_per_rollout)
    for _ in range(100):
        padded = left_padded(next(prompts), settings.end_token_id)
        with torch.no_grad():
            one, other = roll_out(actor, *padded, settings), roll_out(actor, *padded, settings)
        preference_B = (vowels(one) - vowels(other)).sign()  # 0 teaches nothing
        margin_B = score(reward_model, one) - score(reward_model, other)
        update(reward_model, adam, -nn.functional.logsigmoid(preference_B * margin_B).mean(), settings)


def shown(rollout: Rollout) -> str:
    """Three prompts with their responses."""
    rows = zip(*(field[:3] for field in rollout), strict=True)
    pairs = [(prompt[is_prompt], response[is_response]) for prompt, is_prompt, response, is_response in rows]
    return "  ".join(":".join("".join(LETTERS[place] for place in ids) for ids in pair) for pair in pairs)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    settings = Settings()
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, pad_token_id=settings.end_token_id,
    )  # fmt: skip
    actor, reward_model = LlamaForCausalLM(config), LlamaForSequenceClassification(config)
    learn_preferences(reward_model, actor, settings)
    models = Models(actor, copy.deepcopy(actor), reward_model, copy.deepcopy(reward_model))
    print("rollout   score  vowels      KL  policy loss  value loss   prompts with responses")
    line = "{:7} {score:7.2f} {vowels:7.2f} {kl:7.2f} {policy_loss:12.4f} {value_loss:11.4f}   {shown}"
    for number, (rollout, figures) in enumerate(ppo(models, random_prompts(settings.prompts_per_rollout), settings), 1):
        print(line.format(number, **figures, vowels=vowels(rollout).float().mean(), shown=shown(rollout)))


if __name__ == "__main__":
    main()
