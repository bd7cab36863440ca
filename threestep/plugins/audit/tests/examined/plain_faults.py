"""Faults that are planted into the plain trainer, each a replaced method."""

from __future__ import annotations

from typing import Any

import torch

from threestep.plugins.audit.tests.examined.fault import PlainFault
from threestep.plugins.audit.tests.examined.plain import BOS, EOS, GROUP, PAD, Batch, PlainTrainer, Text
from threestep.plugins.audit.tests.examined.plain_policy import PolicyTrainer


def _mean_of_means(self: Any, values_T: torch.Tensor, mask_T: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (values_T * mask_T).sum() / mask_T.sum() / (self.setup.ranks * self.setup.micro_batches)


def _count_of_ranks(self: Any, ranks: list[list[Batch]]) -> None:
    PlainTrainer.count(self, ranks)
    self.rank_tokens = [sum(self.loss_mask(batch).sum() for batch in batches) for batches in ranks]


def _over_own_tokens(self: Any, values_T: torch.Tensor, mask_T: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (values_T * mask_T).sum() / self.rank_tokens[self.rank] / self.setup.ranks


def _unshifted(self: Any, batch: Batch) -> torch.Tensor:
    """The mask of the token that a place predicts stands at the place."""
    same = batch.sequence_T[1:] == batch.sequence_T[:-1]
    return torch.cat([batch.data_T[1:] & same, torch.tensor([False])]) & ~batch.first_T


def _shifted_twice(self: Any, logits_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    return PlainTrainer.logprobs(self, torch.cat([logits_TV[:1], logits_TV[:-1]]), ids_T)


def _in_bf16(self: Any, logits_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    return logits_TV.bfloat16().log_softmax(-1).gather(-1, ids_T.unsqueeze(-1)).squeeze(-1).float()


def _partial(self: Any, values_T: torch.Tensor, mask_T: torch.Tensor, batch: Batch) -> torch.Tensor:
    part = PlainTrainer.reduced(self, values_T, mask_T, batch)
    return part * self.setup.micro_batches / self.settings["accumulation_steps"]


def _no_correction(
    self: Any, weight: torch.Tensor, gradient: torch.Tensor, moments: Any, rate: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    own = self.settings
    first = own["beta1"] * moments[0] + (1 - own["beta1"]) * gradient
    second = own["beta2"] * moments[1] + (1 - own["beta2"]) * gradient.square()
    decay = own["weight_decay"] if self.decays(weight) else 0.0
    return weight * (1 - rate * decay) - rate * first / (second.sqrt() + own["adam_epsilon"]), [first, second]


def _epsilon_inside(
    self: Any, weight: torch.Tensor, gradient: torch.Tensor, moments: Any, rate: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    own, count = self.settings, self.updates + 1
    first = own["beta1"] * moments[0] + (1 - own["beta1"]) * gradient
    second = own["beta2"] * moments[1] + (1 - own["beta2"]) * gradient.square()
    mean, square = first / (1 - own["beta1"] ** count), second / (1 - own["beta2"] ** count)
    decay = own["weight_decay"] if self.decays(weight) else 0.0
    return weight * (1 - rate * decay) - rate * mean / (square + own["adam_epsilon"]).sqrt(), [first, second]


def _tied_twice(self: Any, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack(
        [*(each.norm() for each in gradients.values()), gradients["model.embed_tokens.weight"].norm()]
    ).norm()


def _begins_twice(self: Any, prompt: list[int], number: int) -> Text:
    return PlainTrainer.text(self, [BOS, *prompt], number)


def _across_rows(self: Any, model: Any, batch: Batch) -> torch.Tensor:
    mixed = Batch([Text(batch.ids_T.tolist(), 1, 0, 0)], True, False)
    hidden_TE = PlainTrainer.hidden(self, model, mixed)
    return hidden_TE.masked_fill(batch.first_T.unsqueeze(1), 0.0)


def _cut_unequally(self: Any, prompt: list[int], number: int) -> Text:
    """Rejected ones keep the last three tokens of the prompt."""
    return PlainTrainer.text(self, prompt[-3:] if number % 2 else prompt, number)


def _beta_twice(self: Any, *logprobs_Q: torch.Tensor) -> torch.Tensor:
    chosen_Q, rejected_Q, ref_chosen_Q, ref_rejected_Q = logprobs_Q
    return self.logistic(self.settings["beta"] ** 2 * ((chosen_Q - ref_chosen_Q) - (rejected_Q - ref_rejected_Q)))


def _own_reference(self: Any, batch: Batch) -> torch.Tensor:
    logprobs_T = self.logprobs(self.logits(self.model, batch), batch.ids_T)
    return self.logprob_sums(logprobs_T * self.loss_mask(batch), batch)


def _margin_added(self: Any, chosen_Q: torch.Tensor, rejected_Q: torch.Tensor, margins_Q: torch.Tensor) -> torch.Tensor:
    return PlainTrainer.reward_losses(self, chosen_Q, rejected_Q, -margins_Q)


def _centred_difference(
    self: Any, chosen_Q: torch.Tensor, rejected_Q: torch.Tensor, margins_Q: torch.Tensor
) -> torch.Tensor:
    losses_Q = self.logistic(chosen_Q - rejected_Q - self.settings["margin_scale"] * margins_Q)
    return losses_Q + self.settings["center_coef"] * (chosen_Q - rejected_Q).square()


def _wrong_side(self: Any, logprobs_T: torch.Tensor, old_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    ratio_T = self.ratio(logprobs_T, old_T)
    held_T = ratio_T.clamp(1 - self.settings["clip_low"], 1 + self.settings["clip_high"])
    return -torch.maximum(ratio_T * advantages_T, held_T * advantages_T)


def _kl_in_both(self: Any, text: Text) -> torch.Tensor:
    kl_R = self.kl(self.old[text.number], self.ref[text.number])
    return PolicyTrainer.token_rewards(self, text) - self.settings["kl_coef"] * kl_R


def _no_temperature(self: Any, logits_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    return logits_TV.float().log_softmax(-1).gather(-1, ids_T.unsqueeze(-1)).squeeze(-1)


def _interleaved(self: Any, outcomes_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """Repeated prompts are taken for p1 p2 p3 p1 p2 p3, and stand as p1 p1 p2 p2."""
    return PolicyTrainer.grpo(self, outcomes_B, torch.arange(len(group_B)) % (len(group_B) // GROUP))


def _white_with_padding(self: Any, advantages: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    rows_BR = torch.nn.utils.rnn.pad_sequence([*advantages.values()], batch_first=True)
    white_BR = (rows_BR - rows_BR.mean()) / (rows_BR.var() + 1e-8).sqrt()
    return {n: row_R[: len(own_R)] for (n, own_R), row_R in zip(advantages.items(), white_BR, strict=True)}


def _value_after_cut(self: Any, text: Text) -> torch.Tensor:
    """The critic's value of the state after the last token, where the length limit cut the response."""
    if text.ended:
        return torch.zeros(())
    return self.new_values(Batch([Text([*text.ids, PAD], text.prompt, 0, 0)], True, False))[-1]


def _swapped(self: Any, text: Text) -> torch.Tensor:
    own = {"gamma": self.settings["lam"], "lam": self.settings["gamma"]}
    right, self.settings = self.settings, {**self.settings, **own}
    found_R = PolicyTrainer.gae(self, text)
    self.settings = right
    return found_R


def _least_error(self: Any, new_T: torch.Tensor, old_T: torch.Tensor, returns_T: torch.Tensor) -> torch.Tensor:
    bound = self.settings["clip_value"]
    held_T = old_T + (new_T - old_T).clamp(-bound, bound)
    return 0.5 * torch.minimum((new_T - returns_T).square(), (held_T - returns_T).square())


def _one_early(self: Any, text: Text) -> torch.Tensor:
    rewards_R, score = PolicyTrainer.token_rewards(self, text), self.score[text.number]
    rewards_R[-1] -= score
    rewards_R[max(len(rewards_R) - 2, 0)] += score
    return rewards_R


def _with_dropout(self: Any, texts: list[Text]) -> dict[int, torch.Tensor]:
    self.model.train()
    found = PolicyTrainer.of_policy(self, texts)
    self.model.eval()
    return found


def _fault(name: str, words: str, quantity: str, cause: str, names: str = "", **more: Any) -> PlainFault:
    """setup and replaced: those of PlainFault, joined. quantity: several with | between."""
    setup = {"objective": name.split()[0], **more.pop("setup", {})}
    return PlainFault(name, words, tuple(quantity.split("|")), cause, names, setup, more)


_LATER = {"packed": False}

PLAIN_FAULTS = [
    _fault(
        "sft mean of means", "each micro-batch's mean, averaged over the micro-batches of all ranks", "loss",
        "mean over micro-batches in place of tokens", "mean over micro-batches of their means",
        reduced=_mean_of_means,
    ),
    _fault(
        "sft local denominators", "each rank divides by its own count, then ranks are averaged", "loss",
        "denominators are local to a rank", "denominators are local", count=_count_of_ranks, reduced=_over_own_tokens,
    ),
    _fault(
        "sft mask one early", "the mask is shifted as the labels are, one time too many", "loss_mask",
        "the loss mask is one token early", "mask is one token early", loss_mask=_unshifted, setup=_LATER,
    ),
    _fault(
        "sft padding counted", "the labels of padding are not set to -100", "loss_mask", "padding carries loss",
        "^padding carries loss", loss_mask=lambda self, b: (b.data_T | ~b.is_real_T) & ~b.first_T, setup=_LATER,
    ),
    _fault(
        "sft end untrained", "labels equal to the pad id are masked, and the pad is the end token", "loss_mask",
        "the end token is not trained", "end token is not trained",
        loss_mask=lambda self, b: b.data_T & ~b.first_T & (b.ids_T != EOS),
    ),
    _fault(
        "sft shifted twice", "the collator shifts the labels, and the model shifts them again", "logprobs",
        "labels are shifted twice", "place before the one that predicts", logprobs=_shifted_twice,
    ),
    _fault(
        "sft bf16 softmax", "log-softmax of logits in bf16", "logprobs", "logits are in bf16, not in float32",
        "bf16", logprobs=_in_bf16,
    ),
    _fault(
        "sft last accumulation", "3 micro-batches are left at the end of the epoch, and 4 are divided by", "loss",
        "the last, partial accumulation is divided by the whole one's count",
        "partial accumulation|micro-batches of a whole",
        reduced=_partial, setup={"settings": {"accumulation_steps": 4, "reduction": "sequence mean"}},
    ),
    _fault(
        "sft ranks twice", "a loss over the global count, and gradients that are averaged over ranks", "gradients",
        "gradients are divided by the ranks once more", "divided by the number of ranks",
        backward=lambda self, part: part.backward(),
    ),
    _fault(
        "sft norms decay", "one parameter group with weight decay", "weights_after",
        "weight decay on norms and biases", "norms and biases decay", decays=lambda self, weight: True,
    ),
    _fault(
        "sft clip after the step", "clip_grad_norm_ stands after optimizer.step()", "clipped_gradients",
        "gradients are not clipped when the optimizer takes them", "not clipped",
        clipped=lambda self, gradients, norm: gradients,
    ),
    _fault(
        "sft no bias correction", "Adam written by hand without bias correction", "weights_after",
        "no bias correction", "no bias correction", adamw=_no_correction,
    ),
    _fault(
        "sft epsilon in the root", "sqrt(v + epsilon) in Adam, as some kernels have it", "weights_after",
        "Adam's epsilon is inside the square root", "epsilon.*root|inside.*root", adamw=_epsilon_inside,
        setup={"settings": {"adam_epsilon": 1e-5}},
    ),
    _fault(
        "sft tied weight twice", "the norm runs over state_dict, in which a tied weight has two names", "grad_norm",
        "the tied weight counts twice in the norm", "tied|counts? twice", norm=_tied_twice,
    ),
    _fault(
        "sft special tokens twice", "a template with the beginning token, and a tokenizer that adds it", "token_ids",
        "the beginning token is there twice", "twice", text=_begins_twice,
    ),
    _fault(
        "sft attention across rows", "packed rows under a plain causal mask and running positions", "logits|logprobs",
        "packed sequences see each other", "see each other|across", hidden=_across_rows,
    ),
    _fault(
        "dpo unequal truncation", "prompts are cut from the left for the longer of the two alone", "token_ids",
        "chosen and rejected have different prompts: truncated unequally", "prompt.*(differ|unequal|cut|same)",
        text=_cut_unequally,
    ),
    _fault(
        "dpo beta twice", "log-ratios that were multiplied by beta already", "pair_losses", "beta counts twice",
        "beta.*(twice|squared)", dpo_losses=_beta_twice,
    ),
    _fault(
        "dpo reference is the policy", "the reference is not a copy: it trains along", "ref_logprob_sums",
        "the reference is the trained policy",
        "reference is the (trained )?(policy|model)|policy.*stand for.*reference",
        reference_sums=_own_reference,
    ),
    _fault(
        "reward margin added", "the margin is added to the difference of scores", "pair_losses",
        "the sign of the margin is wrong", "margin is added", reward_losses=_margin_added,
    ),
    _fault(
        "reward centred difference", "(chosen - rejected)^2 in place of (chosen + rejected)^2", "pair_losses",
        "the centring is of the difference, not of the sum", "cent.*differen", reward_losses=_centred_difference,
        setup={"settings": {"center_coef": 0.1}},
    ),
    _fault(
        "grpo ddof 0", "numpy's std in place of torch's", "rollout_advantages",
        "the standard deviation has the denominator n", "ddof 0",
        std=lambda self, outcomes: outcomes.std(1, keepdim=True, correction=0),
    ),
    _fault(
        "grpo clip on the wrong side", "max of the surrogates in place of min", "policy_loss",
        "the clip takes the wrong side", "wrong side", policy_losses=_wrong_side,
    ),
    _fault(
        "grpo k1 for k3", "logp - ref in the loss, where k3 is configured", "kl_loss", "k1 in place of k3",
        "estimator is k1", kl=lambda self, logprobs, ref: logprobs - ref,
    ),
    _fault(
        "grpo KL twice", "the KL is subtracted from the reward, and added to the loss", "rollout_rewards",
        "the KL is in the reward and in the loss", "in the reward and in the loss", token_rewards=_kl_in_both,
    ),
    _fault(
        "grpo no temperature", "the training forward does not divide by the sampling temperature",
        "rollout_old_logprobs|logprobs", "the temperature is left out of the log-probabilities",
        "temperature is left out", logprobs=_no_temperature,
    ),
    _fault(
        "grpo groups across prompts", "repeat in place of repeat_interleave", "rollout_advantages",
        "responses are grouped across prompts", "across prompts", grpo=_interleaved,
    ),
    _fault(
        "ppo whitened with padding", "mean and variance over the padded rectangle", "rollout_advantages",
        "advantages are whitened with padding", "whitened with padding", whitened=_white_with_padding,
    ),
    _fault(
        "ppo bootstrap across the cut", "the critic's value follows a response that the limit cut",
        "rollout_advantages", "the value is bootstrapped across truncation", "bootstrapped (where|across)",
        last_value=_value_after_cut,
    ),
    _fault(
        "ppo gamma and lambda swapped", "gae(lam, gamma)", "rollout_advantages", "gamma and lambda are swapped",
        "gamma and lambda are swapped", gae=_swapped,
    ),
    _fault(
        "ppo reward one early", "rewards[length - 2], off by one", "rollout_rewards",
        "the score is one token before the last", "one token before the last", token_rewards=_one_early,
    ),
    _fault(
        "ppo dropout in the old policy", "old log-probabilities are read in training mode",
        "rollout_old_logprobs|old_logprobs", "dropout was on when the old log-probabilities were read", "dropout",
        of_policy=_with_dropout, setup={"step": 3},
    ),
]  # fmt: skip
