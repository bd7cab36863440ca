"""GRPO and PPO of the plain trainer: rollouts of made-up responses, their advantages by GAE, by groups or by rewards to
go, the losses of actor and critic.

Two updates on each rollout: the first (odd steps) with the policy that drew it, the second after one update.
"""

from __future__ import annotations

import torch

from tests.support.plain_losses import DrawnTokens, policy_loss
from threestep.plugins.audit.tests.plain_trainer import GROUP, Batch, PlainTrainer, Setup, Text, TinyModel

Numbers = dict[int, torch.Tensor]  # by a response's number, of its drawn tokens


class PolicyTrainer(PlainTrainer):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.critic = TinyModel()
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        if number % 2:
            self.roll_out()
        ranks = self.minibatch()
        self.count(ranks)
        self.take(ranks, number)
        if self.setup.objective == "ppo":
            for name, weight in self.critic.named_parameters():
                if weight.grad is not None:
                    self.state[f"critic_weights_before.{name}"] = weight.detach().clone()
                    self.state[f"critic_gradients.{name}"] = weight.grad.clone()
            self.critic_optimizer.step()
            self.critic_optimizer.zero_grad()

    # ---- the rollout: [R] of each response by its number

    @torch.no_grad()
    def roll_out(self) -> None:
        self.responses: list[list[Text]] = []  # of each rank
        for rank in range(self.setup.ranks):
            first = rank * 2 * GROUP
            prompts = [self.prompt() for _ in range(2)]
            self.responses.append([self.text(prompts[n // GROUP], first + n) for n in range(2 * GROUP)])
        everything = [text for texts in self.responses for text in texts]
        self.everything = everything
        self.score = {text.number: torch.tensor(self.random.normal(), dtype=torch.float32) for text in everything}
        self.greedy = {group: self.random.normal() for group in range(2 * self.setup.ranks)}
        self.counts = {t.number: t.ended or t.number % GROUP == 0 or not self.setup.leaves_out for t in everything}
        self.sampling = self.sampled(everything)
        self.old = self.of_policy(everything)
        self.ref = self.of_model(self.reference, everything)
        self.values = self.of_critic(everything)
        self.rewards = {text.number: self.token_rewards(text) for text in everything}
        self.advantages, self.returns = self.estimated()
        if self.settings.get("whiten"):
            self.advantages = self.whitened(self.advantages)

    def sampled(self, texts: list[Text]) -> Numbers:
        """As another program's kernels gave them."""
        batch, noise = self.batch(texts), 0.02
        scaled_TV = self.logits(self.model, batch).float() / self.settings["temperature"]
        logprobs_T = scaled_TV.log_softmax(-1).gather(-1, batch.ids_T.unsqueeze(-1)).squeeze(-1)
        return _split((logprobs_T + noise * torch.randn_like(logprobs_T))[batch.data_T], texts)

    def of_policy(self, texts: list[Text]) -> Numbers:
        return self.of_model(self.model, texts)

    def of_model(self, model: TinyModel, texts: list[Text]) -> Numbers:
        batch = self.batch(texts)
        return _split(self.logprobs(self.logits(model, batch), batch.ids_T)[batch.data_T], texts)

    def of_critic(self, texts: list[Text]) -> Numbers:
        batch = self.batch(texts)
        return _split(self.new_values(batch)[batch.data_T], texts)

    def new_values(self, batch: Batch) -> torch.Tensor:
        return (self.hidden(self.critic, batch).float() @ self.critic.score.weight.T).squeeze(-1)

    def kl(self, logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
        apart = logprobs - ref
        return {"k1": apart, "k2": apart.square() / 2, "k3": torch.exp(-apart) + apart - 1}[
            self.settings["kl_estimator"]
        ]

    def token_rewards(self, text: Text) -> torch.Tensor:
        """[R]: the score on the last token, and the KL on all if it is in the reward."""
        rewards_R = torch.zeros(text.drawn)
        if self.settings["kl_in"] == "reward":
            rewards_R -= self.settings["kl_coef"] * self.kl(self.rolled_out(text), self.ref[text.number])
        rewards_R[-1] += self.score[text.number]
        return rewards_R

    def rolled_out(self, text: Text) -> torch.Tensor:
        """[R], the log-probabilities of the KL in the reward."""
        return self.old[text.number]

    def estimated(self) -> tuple[Numbers, Numbers]:
        everything, name = self.everything, self.settings["advantage"]
        if name == "gae":
            found = {text.number: self.gae(text) for text in everything}
            return found, {n: advantages_R + self.values[n] for n, advantages_R in found.items()}
        if name in ("reinforce++", "remax"):
            return {text.number: self.to_go(text) - self.of_greedy(text) for text in everything}, {}
        outcomes_B = torch.stack([self.rewards[text.number].sum() for text in everything])
        advantages_B = self.compared(outcomes_B, torch.tensor([text.number // GROUP for text in everything]))
        pairs = zip(everything, advantages_B, strict=True)
        return {text.number: advantage.expand(text.drawn).clone() for text, advantage in pairs}, {}

    def to_go(self, text: Text) -> torch.Tensor:
        gamma, found = 1.0 if self.settings["advantage"] == "remax" else self.settings["gamma"], []
        for reward in reversed(self.rewards[text.number]):
            found.append(reward + gamma * (found[-1] if found else 0.0))
        return torch.stack(found[::-1])

    def of_greedy(self, text: Text) -> float:
        return self.greedy[text.number // GROUP] if self.settings["advantage"] == "remax" else 0.0

    def compared(self, outcomes_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
        own_GB = (group_B.unique().unsqueeze(1) == group_B).nonzero()[:, 1].view(-1, GROUP)
        outcomes, name = outcomes_B[own_GB], self.settings["advantage"]
        if name == "opo":
            lengths = torch.tensor([float(text.drawn) for text in self.everything])[own_GB]
            found = outcomes - (lengths * outcomes).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
        elif name == "grpo_passk":
            best = outcomes.topk(2, dim=1)
            found = torch.zeros_like(outcomes).scatter(1, best.indices[:, :1], best.values[:, :1] - best.values[:, 1:])
        else:
            found = (outcomes - self.baseline(outcomes)) * (GROUP / (GROUP - 1) if name == "rloo" else 1.0)
        if self.settings["norm_by"] == "group":
            found = found / (self.std(outcomes) + self.settings["std_epsilon"])
        return torch.zeros_like(outcomes_B).scatter(0, own_GB.flatten(), found.flatten())

    def baseline(self, outcomes: torch.Tensor) -> torch.Tensor:
        return outcomes.mean(1, keepdim=True)

    def std(self, outcomes: torch.Tensor) -> torch.Tensor:
        return outcomes.std(1, keepdim=True, correction=1)

    def gae(self, text: Text) -> torch.Tensor:
        gamma, lam = self.settings["gamma"], self.settings["lam"]
        values_R, rewards_R = self.values[text.number], self.rewards[text.number]
        following_R = torch.cat([values_R[1:], self.last_value(text).reshape(1)])
        deltas_R = rewards_R + gamma * following_R - values_R
        found_R, last = torch.zeros_like(deltas_R), torch.zeros(())
        for t in reversed(range(text.drawn)):
            last = deltas_R[t] + gamma * lam * last
            found_R[t] = last
        return found_R

    def last_value(self, text: Text) -> torch.Tensor:
        return torch.zeros(())

    def whitened(self, advantages: Numbers, correction: int = 1) -> Numbers:
        """Over the tokens of responses that count."""
        flat = torch.cat([own_R for number, own_R in advantages.items() if self.counts[number]])
        mean, deviation = flat.mean(), (flat.var(correction=correction) + 1e-8).sqrt()
        return {number: (own_R - mean) / deviation * self.counts[number] for number, own_R in advantages.items()}

    # ---- an update

    def minibatch(self) -> list[list[Batch]]:
        """All responses of each rank, shuffled."""
        found = []
        for texts in self.responses:
            order = self.random.permutation(len(texts))
            parts = [part for part in torch.tensor(order).tensor_split(self.setup.micro_batches) if len(part)]
            found.append([self.batch([texts[n] for n in part.tolist()]) for part in parts])
        return found

    def loss_mask(self, batch: Batch) -> torch.Tensor:
        counts_S = torch.tensor([self.counts.get(text.number, True) for text in batch.texts])
        return super().loss_mask(batch) & counts_S[batch.sequence_T]

    def handed(self, name: str, batch: Batch) -> torch.Tensor:
        """[T], of the rollout."""
        return batch.spread(getattr(self, name))

    def part(self, batch: Batch) -> torch.Tensor:
        mask_T, logprobs_T = self.loss_mask(batch), self.read(batch)
        old_T, ref_T, advantages_T = (self.handed(name, batch) for name in ("old", "ref", "advantages"))
        self.keep(old_logprobs=old_T, ref_logprobs=ref_T, advantages=advantages_T)
        self.selected_T = mask_T & (torch.rand(len(mask_T)) > 0.7)
        if self.told.get("policy_loss") == "clip_cov":
            self.keep(selected=self.selected_T)
        loss = policy = self.reduced(self.policy_losses(logprobs_T, old_T, advantages_T), mask_T, batch)
        self.add("policy_loss", policy)
        if self.settings["kl_in"] == "loss":
            kl = self.reduced(self.kl_losses(logprobs_T, old_T, ref_T), mask_T, batch)
            self.add("kl_loss", kl)
            loss = policy + self.settings["kl_coef"] * kl
        self.add("loss", loss)
        if self.setup.objective == "ppo":
            self.learn_values(batch, mask_T)
        return loss

    def kl_losses(self, logprobs_T: torch.Tensor, old_T: torch.Tensor, ref_T: torch.Tensor) -> torch.Tensor:
        return self.kl(logprobs_T, ref_T)

    def policy_losses(self, logprobs_T: torch.Tensor, old_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
        name, batch = self.settings.get("policy_loss", "ppo"), self.now
        if name != "ppo":  # sequence by sequence, as the papers have them
            given = (logprobs_T, old_T, advantages_T, self.loss_mask(batch), self.selected_T)
            rows = zip(*(values_T.split(batch.lengths) for values_T in given), strict=True)
            constants = {"sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05, **self.settings}
            return torch.cat(
                [policy_loss(name, DrawnTokens(*row, constants)) if row[3].any() else 0 * row[0] for row in rows]
            )
        ratio_T = torch.exp(logprobs_T - old_T)
        held_T = ratio_T.clamp(1 - self.settings["clip_low"], 1 + self.settings["clip_high"])
        return self.side(ratio_T * advantages_T, held_T * advantages_T)

    def side(self, free_T: torch.Tensor, held_T: torch.Tensor) -> torch.Tensor:
        return -torch.minimum(free_T, held_T)

    def learn_values(self, batch: Batch, mask_T: torch.Tensor) -> None:
        old_T, returns_T = batch.spread(self.values), batch.spread(self.returns)
        new_T = self.new_values(batch) * mask_T
        self.keep(new_values=new_T, old_values=old_T, returns=returns_T)
        loss = (self.value_losses(new_T, old_T, returns_T) * mask_T).sum() / self.tokens
        self.add("value_loss", loss)
        loss.backward()

    def value_losses(self, new_T: torch.Tensor, old_T: torch.Tensor, returns_T: torch.Tensor) -> torch.Tensor:
        bound = self.settings["clip_value"]
        held_T = old_T + (new_T - old_T).clamp(-bound, bound)
        return 0.5 * torch.maximum((new_T - returns_T).square(), (held_T - returns_T).square())

    # ---- the record

    def of_rollout(self, rank: int) -> dict[str, list[torch.Tensor]]:
        texts = self.responses[rank]
        numbers = torch.tensor([text.number for text in texts])
        tokens = {
            "sampling_logprobs": self.sampling, "old_logprobs": self.old, "ref_logprobs": self.ref,
            "rewards": self.rewards, "advantages": self.advantages,
        }  # fmt: skip
        if self.setup.objective == "ppo":
            tokens |= {"values": self.values, "returns": self.returns}
        found = {f"rollout_{name}": [by[text.number] for text in texts] for name, by in tokens.items()}
        return {
            **found,
            "rollout_numbers": [numbers],
            "rollout_groups": [numbers // GROUP],
            "rollout_lengths": [torch.tensor([text.drawn for text in texts])],
            "rollout_counts": [torch.tensor([self.counts[text.number] for text in texts])],
            "rollout_greedy_scores": [torch.tensor([self.greedy[text.number // GROUP] for text in texts]).float()],
            "rollout_ended": [torch.tensor([text.ended for text in texts])],
            "rollout_scores": [torch.stack([self.score[text.number] for text in texts])],
        }

    def of_batch(self, batch: Batch, place: int) -> None:
        super().of_batch(batch, place)
        self.keep(numbers=torch.tensor([text.number for text in batch.texts]))


def _split(values: torch.Tensor, texts: list[Text]) -> Numbers:
    parts = values.split([text.drawn for text in texts])
    return {text.number: part.clone() for text, part in zip(texts, parts, strict=True)}
