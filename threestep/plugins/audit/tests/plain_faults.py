"""Faults that are planted into the plain trainer: other settings than those it records, or replaced methods.

`EXAMINED` are of one who did not write the judge's causes, and chose them before the judge had seen one; `FAULTS` are
of the author of the causes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tests.support.plain_losses import Sums, comparison, pair_loss
from threestep.plugins.audit.tests.plain_policy import PolicyTrainer
from threestep.plugins.audit.tests.plain_trainer import BOS, EOS, GROUP, PAD, Batch, PlainTrainer, Text


@dataclass(frozen=True)
class Fault:
    """objective: of the setup, whose other fields are in `setup`. quantity: where it must first show; with | between:
    the record may lack the first. names: a regular expression, which a sentence of the judge has that names the same
    mistake. replaced: methods of the trainer."""

    objective: str
    name: str
    quantity: str
    names: str
    setup: dict
    replaced: dict


# Fields of a Setup; other words of a fault are methods.
FIELDS = ("ranks", "micro_batches", "packed", "left", "step", "settings", "uses", "leaves_out", "keeps")


def _fault(objective: str, name: str, quantity: str, names: str, **more) -> Fault:
    setup = {field: more.pop(field) for field in FIELDS if field in more}
    return Fault(objective, name, quantity, names, setup, more)


# --- masks, log-probabilities


def _unshifted(self, batch):
    """The mask of the token that a place predicts stands at the place."""
    return batch.moved(batch.data_T, -1) & ~batch.first_T


def _last_turn(self, batch):
    right_T = PlainTrainer.loss_mask(self, batch)
    later_T = torch.cat([torch.tensor([place >= text.asked.stop for place in range(len(text.ids))] + [True] * pad)
                         for text, pad in zip(batch.texts, batch.pads, strict=True)])  # fmt: skip
    return right_T & later_T


def _shifted_twice(self, logits_TV, ids_T):
    return PlainTrainer.logprobs(self, torch.cat([logits_TV[:1], logits_TV[:-1]]), ids_T)


def _of_own_place(self, logits_TV, ids_T):
    return PlainTrainer.logprobs(self, torch.cat([logits_TV[1:], logits_TV[:1]]), ids_T)


def _in_bf16(self, logits_TV, ids_T):
    return logits_TV.bfloat16().log_softmax(-1).gather(-1, ids_T.unsqueeze(-1)).squeeze(-1).float()


def _begins_twice(self, prompt, number):
    return PlainTrainer.text(self, [BOS, *prompt], number)


def _cut_unequally(self, prompt, number):
    """Rejected ones keep the last three tokens of the prompt."""
    return PlainTrainer.text(self, prompt[-3:] if number % 2 else prompt, number)


def _all_seen(self, sequence_NT):
    width = sequence_NT.shape[1]
    return torch.ones(len(sequence_NT), width, width, dtype=torch.bool)


_JOINED = {"same": _all_seen, "positions": lambda self, batch: torch.arange(len(batch.ids_T))}

# --- reductions


def _counted(change):
    """Denominators that `change` makes of the right ones."""

    def count(self, ranks):
        PlainTrainer.count(self, ranks)
        self.rank_tokens = [sum(self.loss_mask(batch).sum() for batch in batches) for batches in ranks]
        self.last = ranks[-1][-1]
        change(self)

    return count


def _divide(by):
    def change(self):
        self.tokens, self.sequences, self.units = (x / by(self) for x in (self.tokens, self.sequences, self.units))

    return _counted(change)


def _undivided(self):
    self.tokens = self.sequences = self.units = 1.0


def _first_labels(self):
    self.tokens += self.sequences
    self.denominator = self.tokens


def _empty_rows(self):
    self.sequences = sum(len(texts) for texts in self.responses)


def _mean_of(share):
    """Each micro-batch's mean, times `share`."""
    return lambda self, values_T, mask_T, batch: (values_T * mask_T).sum() / mask_T.sum() * share(self, batch)


def _each(self, batch):
    return 1 / (self.setup.ranks * self.setup.micro_batches)


def _over_own_tokens(self, values_T, mask_T, batch):
    return (values_T * mask_T).sum() / self.rank_tokens[self.rank] / self.setup.ranks


def _mean_of_pairs(self, losses):
    self.keep(pair_losses=losses)
    return losses.mean() * _each(self, None)


_LOCAL = {"count": _counted(lambda self: None), "reduced": _over_own_tokens}
_ACCUMULATED = {"count": _divide(lambda self: self.setup.micro_batches)}

# --- gradients and the optimizer


def _scaled(factor):
    return lambda self, gradients: PlainTrainer.over_ranks(self, gradients) * factor(self.setup)


def _dropped(where):
    """Micro-batches whose gradients are lost."""
    return lambda self, part: PlainTrainer.backward(self, 0 * part if where(self) else part)


def _own_means(self, part):
    own = self.loss_mask(self.now).sum()
    PlainTrainer.backward(self, part * self.tokens / own / (self.setup.ranks * self.setup.micro_batches))


def _without_temperature(self, part):
    right, self.settings = self.settings, {**self.settings, "temperature": 1.0}
    logprobs_T = self.logprobs(self.logits(self.model, self.now), self.now.ids_T)
    PlainTrainer.backward(self, self.reduced(-logprobs_T, self.loss_mask(self.now), self.now))
    self.settings = right


def _each_clipped(self, gradients, norm):
    return {name: PlainTrainer.clipped(self, {name: own}, own.norm())[name] for name, own in gradients.items()}


def _tied_twice(self, gradients):
    norms = [*(each.norm() for each in gradients.values()), gradients["model.embed_tokens.weight"].norm()]
    return torch.stack(norms).norm()


def _adam(self, weight, gradient, moments, rate, *, corrects=True, inside=False, l2=False):
    own, count = self.settings, self.updates + 1
    decay = own["weight_decay"] if self.decays(weight) else 0.0
    gradient, decay = (gradient + decay * weight, 0.0) if l2 else (gradient, decay)
    first = own["beta1"] * moments[0] + (1 - own["beta1"]) * gradient
    second = own["beta2"] * moments[1] + (1 - own["beta2"]) * gradient.square()
    mean, square = first, second
    if corrects:
        mean, square = first / (1 - own["beta1"] ** count), second / (1 - own["beta2"] ** count)
    root = (square + own["adam_epsilon"]).sqrt() if inside else square.sqrt() + own["adam_epsilon"]
    return weight * (1 - rate * decay) - rate * mean / root, [first, second]


def _adam_with(**how):
    return lambda self, *given: _adam(self, *given, **how)


def _ahead(self, *given):
    self.updates += 1
    found = PlainTrainer.adamw(self, *given)
    self.updates -= 1
    return found


# --- pairs and marked responses


def _sums(**changes):
    """Each a function of the right sums."""
    return lambda self, own: PlainTrainer.dpo_losses(self, replace(own, **{n: of(own) for n, of in changes.items()}))


def _exchanged(values_S):
    return values_S.view(-1, 2).flip(1).flatten()


_SWAPPED = _sums(
    sums_S=lambda own: _exchanged(own.sums_S), weighted_S=lambda own: _exchanged(own.sums_S),
    reference_S=lambda own: _exchanged(own.reference_S), counts_S=lambda own: _exchanged(own.counts_S),
)  # fmt: skip
_ONE_TOKEN = {"counts_S": lambda own: torch.ones_like(own.counts_S)}


def _prompt_in_sums(self, batch):
    return batch.sums(self.read(batch, batch.is_real_T & ~batch.first_T))


def _means(self, batch):
    return PlainTrainer.policy_sums(self, batch) / batch.sums(self.loss_mask(batch).float())


def _mean_ratios(self, own: Sums):
    ratios_S = (own.sums_S - own.reference_S) / own.counts_S
    return pair_loss("sigmoid", replace(own, weighted_S=ratios_S, reference_S=torch.zeros_like(ratios_S)))


def _ipo_on_sums(self, own: Sums):
    return pair_loss("ipo", replace(own, counts_S=torch.ones_like(own.counts_S)))


def _unweighted(self, own: Sums):
    return comparison("sigmoid", own) + pair_loss("sft", own)


def _of_the_policy(self, batch):
    return batch.sums(self.logprobs(self.logits(self.model, batch), batch.ids_T) * self.loss_mask(batch))


def _points(*, of_micro_batches=False, of_ratios=False):
    def point(self, ranks):
        flat = [batch for batches in ranks for batch in batches]
        means = [(self.ratios(batch) if of_ratios else batch.mismatched_S) for batch in flat]
        if of_micro_batches:
            return float(torch.stack([each.mean().clamp(min=0) for each in means]).mean())
        return max(0.0, float(torch.cat(means).mean()))

    return point


def _pairs(loss, **more):
    return {"preference_loss": loss, **more}


# --- rollouts: rewards, advantages


def _one_early(self, text):
    rewards_R, score = PolicyTrainer.token_rewards(self, text), self.score[text.number]
    rewards_R[-1] -= score
    rewards_R[max(len(rewards_R) - 2, 0)] += score
    return rewards_R


def _kl_in_both(self, text):
    kl_R = self.kl(self.old[text.number], self.ref[text.number])
    return PolicyTrainer.token_rewards(self, text) - self.settings["kl_coef"] * kl_R


def _of_ranks(self, values, statistic):
    """[groups, 1], of each rank's responses together."""
    own = statistic(values.view(self.setup.ranks, -1))
    return own.repeat_interleave(len(values) // self.setup.ranks).unsqueeze(1)


def _interleaved(self, outcomes_B, group_B):
    """Repeated prompts are taken for p1 p2 p3 p1 p2 p3, and stand as p1 p1 p2 p2."""
    return PolicyTrainer.compared(self, outcomes_B, torch.arange(len(group_B)) % (len(group_B) // GROUP))


def _white_with_padding(self, advantages):
    rows_BR = torch.nn.utils.rnn.pad_sequence([*advantages.values()], batch_first=True)
    white_BR = (rows_BR - rows_BR.mean()) / (rows_BR.var() + 1e-8).sqrt()
    return {n: row_R[: len(own_R)] for (n, own_R), row_R in zip(advantages.items(), white_BR, strict=True)}


def _white_by_rank(self, advantages):
    found = {}
    for rank in range(self.setup.ranks):
        own = {n: values for n, values in advantages.items() if n // (2 * GROUP) == rank}
        found |= PolicyTrainer.whitened(self, own)
    return found


def _unmoved(self, advantages):
    deviation = (torch.cat([*advantages.values()]).var() + 1e-8).sqrt()
    return {n: values / deviation for n, values in advantages.items()}


def _white_returns(self, advantages):
    found = PolicyTrainer.whitened(self, advantages)
    self.returns = {n: values + self.values[n] for n, values in found.items()}
    return found


def _value_after_cut(self, text):
    """The critic's value of the state after the last token, where the length limit cut the response."""
    if text.ended:
        return torch.zeros(())
    return self.new_values(Batch([Text([*text.ids, PAD], text.prompt, 0, 0)], True, False))[-1]


def _swapped_discounts(self, text):
    own = {"gamma": self.settings["lam"], "lam": self.settings["gamma"]}
    right, self.settings = self.settings, {**self.settings, **own}
    found_R = PolicyTrainer.gae(self, text)
    self.settings = right
    return found_R


def _with_dropout(self, texts):
    self.model.train()
    found = PolicyTrainer.of_policy(self, texts)
    self.model.eval()
    return found


# --- the losses of a policy and of a critic


def _handed(name, change):
    """`change` of the right numbers where they are handed on."""

    def handed(self, own, batch):
        found_T = PolicyTrainer.handed(self, own, batch)
        return change(self, found_T, batch) if own == name else found_T

    return handed


def _of_next(self, found_T, batch):
    values, size = {}, 2 * GROUP
    for text in batch.texts:
        given = self.advantages[text.number // size * size + (text.number + 1) % size]
        values[text.number] = torch.cat([given, torch.zeros(text.drawn)])[: text.drawn]
    return batch.spread(values)


def _surrogate(of):
    """The policy's loss, of (new, old, advantages) that `of` makes."""
    return lambda self, *given: PolicyTrainer.policy_losses(self, *of(self, *given))


def _none_selected(self, *given):
    self.selected_T = torch.zeros_like(self.selected_T)
    return PolicyTrainer.policy_losses(self, *given)


def _least_error(self, new_T, old_T, returns_T):
    bound = self.settings["clip_value"]
    held_T = old_T + (new_T - old_T).clamp(-bound, bound)
    return 0.5 * torch.minimum((new_T - returns_T).square(), (held_T - returns_T).square())


def _one_late(self, batch):
    """The state behind the token, not behind the one before it."""
    before_T = PolicyTrainer.new_values(self, batch)
    return torch.cat([before_T[1:], before_T[:1]])


def _learns_of_ranks(self, batch, mask_T):
    """The loss is logged as it is, and its gradient is divided by the ranks."""
    before = {name: weight.grad.clone() for name, weight in self.critic.named_parameters() if weight.grad is not None}
    PolicyTrainer.learn_values(self, batch, mask_T)
    for name, weight in self.critic.named_parameters():
        if weight.grad is not None:
            old = before.get(name, torch.zeros_like(weight))
            weight.grad = old + (weight.grad - old) / self.setup.ranks


_TEMPERED = {"settings": {"temperature": 0.7}}
_MODEL = {"keeps": "model", **_TEMPERED}
_ROLLED = {"norm_by": "none", "gamma": 0.95}
_REINFORCE = {**_ROLLED, "advantage": "reinforce++", "whiten": True}

EXAMINED = (
    _fault("sft", "mean of means", "loss", "mean over micro-batches of their means", reduced=_mean_of(_each)),
    _fault("sft", "local denominators", "loss", "denominators are local", **_LOCAL),
    _fault("sft", "mask one early", "loss_mask", "mask is one token early", loss_mask=_unshifted, packed=False),
    _fault("sft", "padding counted", "loss_mask", "^padding carries loss",
           loss_mask=lambda self, b: (b.data_T | ~b.is_real_T) & ~b.first_T, packed=False),
    _fault("sft", "end untrained", "loss_mask", "end token is not trained",
           loss_mask=lambda self, b: b.data_T & ~b.first_T & (b.ids_T != EOS)),
    _fault("sft", "shifted twice", "logprobs", "place before the one that predicts", logprobs=_shifted_twice),
    _fault("sft", "bf16 softmax", "logprobs", "bf16", logprobs=_in_bf16),
    _fault("sft", "last accumulation", "loss", "partial accumulation|micro-batches of a whole",
           count=_divide(lambda self: 3 / 4), settings={"accumulation_steps": 4, "reduction": "sequence mean"}),
    _fault("sft", "ranks twice", "gradients", "divided by the number of ranks",
           backward=lambda self, part: part.backward()),
    _fault("sft", "norms decay", "weights_after", "norms and biases decay", decays=lambda self, weight: True),
    _fault("sft", "clip after the step", "clipped_gradients", "not clipped",
           clipped=lambda self, gradients, norm: gradients),
    _fault("sft", "no bias correction", "weights_after", "no bias correction", adamw=_adam_with(corrects=False)),
    _fault("sft", "epsilon in the root", "weights_after", "epsilon.*root|inside.*root", adamw=_adam_with(inside=True),
           settings={"adam_epsilon": 1e-5}),
    _fault("sft", "tied weight twice", "grad_norm", "tied|counts? twice", norm=_tied_twice),
    _fault("sft", "special tokens twice", "token_ids", "twice", text=_begins_twice),
    _fault("sft", "attention across rows", "logits", "see each other|across", packed=True, **_JOINED),
    _fault("dpo", "unequal truncation", "token_ids", "prompt.*(differ|unequal|cut|same)", text=_cut_unequally),
    _fault("dpo", "beta twice", "pair_losses", "beta.*(twice|squared)", uses={"beta": 0.09}),
    _fault("dpo", "reference is the policy", "ref_logprob_sums",
           "reference is the (trained )?(policy|model)|policy.*stand for.*reference", reference_sums=_of_the_policy),
    _fault("reward", "margin added", "pair_losses", "margin is added", uses={"margin_scale": -1.0}),
    _fault("reward", "centred difference", "pair_losses", "cent.*differen", settings={"center_coef": 0.1},
           centring=lambda self, chosen, rejected: self.settings["center_coef"] * (chosen - rejected).square()),
    _fault("grpo", "ddof 0", "rollout_advantages", "ddof 0", std=lambda self, x: x.std(1, keepdim=True, correction=0)),
    _fault("grpo", "clip on the wrong side", "policy_loss", "wrong side",
           side=lambda self, free_T, held_T: -torch.maximum(free_T, held_T)),
    _fault("grpo", "k1 for k3", "kl_loss", "estimator is k1", uses={"kl_estimator": "k1"}),
    _fault("grpo", "KL twice", "rollout_rewards", "in the reward and in the loss", token_rewards=_kl_in_both),
    # Of this one the first quantity has no known cause; the sentence names that of the next.
    _fault("grpo", "no temperature", "rollout_old_logprobs|logprobs", "", uses={"temperature": 1.0},
           sampled=lambda self, texts: self.of_model(self.model, texts)),
    _fault("grpo", "groups across prompts", "rollout_advantages", "across prompts", compared=_interleaved),
    _fault("ppo", "whitened with padding", "rollout_advantages", "whitened with padding", whitened=_white_with_padding),
    _fault("ppo", "bootstrap across the cut", "rollout_advantages", "bootstrapped (where|across)",
           last_value=_value_after_cut),
    _fault("ppo", "gamma and lambda swapped", "rollout_advantages", "gamma and lambda are swapped",
           gae=_swapped_discounts),
    _fault("ppo", "reward one early", "rollout_rewards", "one token before the last", token_rewards=_one_early),
    _fault("ppo", "dropout in the old policy", "rollout_old_logprobs", "dropout", of_policy=_with_dropout, step=3),
)  # fmt: skip
FAULTS = (
    _fault("sft", "mask one late", "loss_mask", "one token late",
           loss_mask=lambda self, b: b.moved(b.data_T, 1) & b.is_real_T & ~b.first_T),
    _fault("sft", "prompt trained", "loss_mask", "the prompt carries loss",
           loss_mask=lambda self, b: b.is_real_T & ~b.first_T & torch.cat([b.first_T[:1] * False, b.is_real_T[:-1]])),
    _fault("sft", "first answer token lost", "loss_mask", "first token of each response",
           loss_mask=lambda self, b: b.data_T & b.moved(b.data_T, 1) & ~b.first_T),
    _fault("sft", "last turn alone", "loss_mask", "only the last response", loss_mask=_last_turn),
    _fault("sft", "all masked", "loss_mask", "no token carries loss",
           loss_mask=lambda self, b: torch.zeros_like(b.data_T)),
    _fault("sft", "temperature left out", "logprobs", "temperature is left out", **_TEMPERED,
           uses={"temperature": 1.0}),
    _fault("sft", "temperature multiplies", "logprobs", "multiplied by the temperature", **_TEMPERED,
           uses={"temperature": 1 / 0.7}),
    _fault("sft", "logits of the own place", "logprobs", "logits of its own place", logprobs=_of_own_place),
    _fault("sft", "sign of the token losses", "token_losses", "sign", token_losses=lambda self, logprobs_T: logprobs_T),
    _fault("sft", "sum of means", "loss", "sum over micro-batches",
           reduced=_mean_of(lambda self, batch: 1 / self.setup.ranks)),
    _fault("sft", "mean of rows", "loss", "mean over sequences", uses={"reduction": "sequence mean"}),
    _fault("sft", "first labels counted", "denominator", "one extra token per sequence",
           count=_counted(_first_labels)),
    _fault("sft", "not divided by accumulation", "loss", "not divided by the number of micro-batches", **_ACCUMULATED),
    _fault("sft", "divided by ranks twice", "loss", "number of ranks once more",
           count=_divide(lambda self: 1 / self.setup.ranks)),
    _fault("sft", "sum", "loss", "divided by nothing", count=_counted(_undivided)),
    _fault("sft", "last micro-batch alone", "loss", "last micro-batch alone", count=_counted(lambda self: None),
           reduced=_mean_of(lambda self, batch: float(batch is self.last))),
    _fault("sft", "each parameter clipped", "clipped_gradients", "by its own norm", clipped=_each_clipped),
    _fault("sft", "norm after clipping", "grad_norm", "after clipping",
           noted=lambda self, norm, gradients, clipped: self.norm(clipped)),
    _fault("sft", "sum of norms", "grad_norm", "sum of the parameters' norms",
           noted=lambda self, norm, gradients, clipped: sum(each.norm() for each in gradients.values())),
    _fault("sft", "rate one step late", "learning_rate", "one step late",
           rate=lambda self, number: PlainTrainer.rate(self, number - 1)),
    _fault("sft", "L2", "weights_after", "L2", adamw=_adam_with(l2=True)),
    _fault("sft", "bias correction ahead", "weights_after", "one update ahead", adamw=_ahead),
    _fault("dpo", "prompt in the sums", "logprob_sums", "prompt is counted", policy_sums=_prompt_in_sums),
    _fault("dpo", "mean in place of sums", "logprob_sums", "mean over a response", policy_sums=_means),
    _fault("dpo", "reference left out", "pair_losses", "reference is left out",
           dpo_losses=_sums(reference_S=lambda own: 0 * own.reference_S)),
    _fault("dpo", "reference added", "pair_losses", "reference is added",
           dpo_losses=_sums(reference_S=lambda own: -own.reference_S)),
    _fault("dpo", "pairs swapped", "pair_losses", "swapped", dpo_losses=_SWAPPED),
    _fault("dpo", "beta left out", "pair_losses", "beta is left out", uses={"beta": 1.0}),
    _fault("dpo", "other averaging", "pair_losses", "means over tokens", dpo_losses=_mean_ratios),
    _fault("dpo", "ipo for sigmoid", "pair_losses", "IPO's, on sums", dpo_losses=_ipo_on_sums),
    _fault("dpo", "not divided by accumulation", "loss", "not divided by the number of micro-batches", **_ACCUMULATED),
    _fault("dpo", "mean of micro-batches", "loss", "mean over micro-batches", mean_of=_mean_of_pairs),
    _fault("dpo", "gamma left out", "pair_losses", "gamma is left out", settings=_pairs("simpo", simpo_gamma=0.6),
           uses={"simpo_gamma": 0.0}),
    _fault("dpo", "sums for means", "pair_losses", "sums over tokens", settings=_pairs("simpo", simpo_gamma=0.6),
           dpo_losses=_sums(**_ONE_TOKEN)),
    _fault("dpo", "likelihood left out", "pair_losses", "likelihood is left out",
           settings=_pairs("cpo", cpo_alpha=0.7), uses={"cpo_alpha": 0.0}),
    _fault("dpo", "apo_zero for apo_down", "pair_losses", "the loss is apo_zero", settings=_pairs("apo_down"),
           uses=_pairs("apo_zero")),
    _fault("dpo", "no smoothing", "pair_losses", "smoothing is left out",
           settings=_pairs("robust", label_smoothing=0.2), uses={"label_smoothing": 0.0}),
    _fault("dpo", "weights left out", "pair_losses", "weights of the terms",
           settings={"preference_terms": "sigmoid:0.8,sft:0.2"}, dpo_losses=_unweighted),
    _fault("dpo", "swapped pairs", "pair_losses", "swapped", settings=_pairs("hinge"), dpo_losses=_SWAPPED),
    _fault("marked", "point of micro-batches", "reference_point", "each micro-batch",
           point=_points(of_micro_batches=True)),
    _fault("marked", "point of the first rank", "reference_point", "first rank alone",
           point=lambda self, ranks: PlainTrainer.point(self, ranks[:1])),
    _fault("marked", "point of own responses", "reference_point", "own responses", point=_points(of_ratios=True)),
    _fault("marked", "no point", "loss", "reference point is left out", point_of_loss=lambda self: 0.0),
    _fault("marked", "marks swapped", "loss", "swapped",
           marked_losses=lambda self, own, good_S: PlainTrainer.marked_losses(self, own, ~good_S)),
    _fault("marked", "equal weights", "loss", "have equal weights",
           uses={"desirable_weight": 1.0, "undesirable_weight": 1.0}),
    _fault("reward", "pairs swapped", "pair_losses", "swapped",
           reward_losses=lambda self, one, other, margins_Q: PlainTrainer.reward_losses(self, other, one, margins_Q)),
    _fault("reward", "margin left out", "pair_losses", "margin is left out", uses={"margin_scale": 0.0}),
    _fault("reward", "margin added, smoothed", "pair_losses", "margin is added", settings={"label_smoothing": 0.1},
           uses={"margin_scale": -1.0}),
    _fault("reward", "smoothing left out", "pair_losses", "smoothing is left out", settings={"label_smoothing": 0.1},
           uses={"label_smoothing": 0.0}),
    _fault("reward", "sum", "loss", "divided by nothing", count=_counted(_undivided)),
    _fault("sft", "temperature left out of a model's", "logprobs", "temperature is left out", **_MODEL,
           uses={"temperature": 1.0}),
    _fault("sft", "packed rows as one", "logprobs", "see each other: they are one sequence", packed=True, **_MODEL,
           **_JOINED),
    _fault("sft", "packed rows, places again", "logprobs", "see each other, though their positions restart",
           packed=True, same=_all_seen, **_MODEL),
    _fault("sft", "gradient by ranks twice", "gradients", "divided by the number of ranks once more", **_MODEL,
           over_ranks=_scaled(lambda setup: 1 / setup.ranks)),
    _fault("sft", "summed over ranks", "gradients", "multiplied by the number of ranks", **_MODEL,
           over_ranks=_scaled(lambda setup: setup.ranks)),
    _fault("sft", "divided by micro", "gradients", "divided by the number of micro-batches", **_MODEL,
           over_ranks=_scaled(lambda setup: 1 / setup.micro_batches)),
    _fault("sft", "multiplied by micro", "gradients", "multiplied by the number of micro-batches", **_MODEL,
           over_ranks=_scaled(lambda setup: setup.micro_batches)),
    _fault("sft", "last, partial accumulation", "gradients", "last, partial one", keeps="model",
           settings={"accumulation_steps": 5}, over_ranks=_scaled(lambda setup: setup.micro_batches / 5)),
    _fault("sft", "sign", "gradients", "sign", **_MODEL, over_ranks=_scaled(lambda setup: -1.0)),
    _fault("sft", "first micro-batch dropped", "gradients", "first micro-batch's gradient is left out", **_MODEL,
           backward=_dropped(lambda self: self.place == 0)),
    _fault("sft", "last micro-batch dropped", "gradients", "last micro-batch's gradient is left out", **_MODEL,
           backward=_dropped(lambda self: self.place == self.setup.micro_batches - 1)),
    _fault("sft", "first rank alone", "gradients", "first rank alone", **_MODEL,
           backward=_dropped(lambda self: self.rank > 0)),
    _fault("sft", "gradient of micro-batch means", "gradients", "mean over micro-batches of their means", **_MODEL,
           backward=_own_means),
    _fault("sft", "gradient without temperature", "gradients", "temperature is left out", **_MODEL,
           backward=_without_temperature),
    _fault("ppo", "k3 in the reward", "rollout_rewards", "estimator is k3", uses={"kl_estimator": "k3"}),
    _fault("ppo", "KL maximised", "rollout_rewards", "maximized", uses={"kl_coef": -0.1}),
    _fault("ppo", "KL of sampling logprobs", "rollout_rewards", "sampling",
           rolled_out=lambda self, text: self.sampling[text.number]),
    _fault("ppo", "bootstrap everywhere", "rollout_advantages", "after every response",
           last_value=lambda self, text: self.values[text.number][-1]),
    _fault("ppo", "gamma left out", "rollout_advantages", "gamma is 1", uses={"gamma": 1.0}),
    _fault("ppo", "not whitened", "rollout_advantages", "not whitened", uses={"whiten": False}),
    _fault("ppo", "whitened by rank", "rollout_advantages", "each rank alone", whitened=_white_by_rank),
    _fault("ppo", "whitened without shift", "rollout_advantages", "keep their mean", whitened=_unmoved),
    _fault("ppo", "whitened ddof 0", "rollout_advantages", "denominator n",
           whitened=lambda self, advantages: PolicyTrainer.whitened(self, advantages, 0)),
    _fault("ppo", "returns of whitened", "rollout_returns", "whitened advantages", whitened=_white_returns),
    _fault("grpo", "std of the rank", "rollout_advantages", "deviation is over each rank's batch",
           std=lambda self, x: _of_ranks(self, x, lambda own: own.std(1))),
    _fault("grpo", "no std", "rollout_advantages", "nothing is divided", uses={"norm_by": "none"}),
    _fault("grpo", "another epsilon", "rollout_advantages", "epsilon is 1e-8", settings={"std_epsilon": 1e-2},
           uses={"std_epsilon": 1e-8}),
    _fault("grpo", "baseline of the rank", "rollout_advantages", "mean of each rank's batch",
           baseline=lambda self, x: _of_ranks(self, x, lambda own: own.mean(1))),
    _fault("grpo", "mean of all", "rollout_advantages", "whole group", settings={**_ROLLED, "advantage": "rloo"},
           uses={"advantage": "grpo"}),
    _fault("grpo", "advantages of the next response", "advantages", "next response.s numbers",
           handed=_handed("advantages", _of_next)),
    _fault("grpo", "old logprobs one token late", "old_logprobs", "one token late",
           handed=_handed("old", lambda self, found_T, batch: batch.moved(found_T, 1) * batch.data_T)),
    _fault("grpo", "sampling logprobs for old", "old_logprobs", "sampling log-probabilities",
           handed=_handed("old", lambda self, found_T, batch: batch.spread(self.sampling))),
    _fault("ppo", "not clipped ratio", "policy_loss", "not clipped", uses={"clip_low": 1e9, "clip_high": 1e9}),
    _fault("grpo", "clip bounds swapped", "policy_loss", "swapped", uses={"clip_low": 0.2, "clip_high": 0.1}),
    _fault("grpo", "ratio upside down", "policy_loss", "upside down",
           policy_losses=_surrogate(lambda self, new_T, old_T, own_T: (old_T, new_T, own_T))),
    _fault("grpo", "ratio to the sampler", "policy_loss", "sampling",
           policy_losses=_surrogate(lambda self, new_T, old_T, own_T: (new_T, self.now.spread(self.sampling), own_T))),
    _fault("grpo", "ratio to the reference", "policy_loss", "reference",
           policy_losses=_surrogate(lambda self, new_T, old_T, own_T: (new_T, self.now.spread(self.ref), own_T))),
    _fault("grpo", "ratio of sequences", "policy_loss", "per sequence", uses={"policy_loss": "gspo"}),
    _fault("grpo", "advantage sign", "policy_loss", "sign of the advantages",
           settings={**_ROLLED, "advantage": "rloo"},
           policy_losses=_surrogate(lambda self, new_T, old_T, own_T: (new_T, old_T, -own_T))),
    _fault("grpo", "loss sign", "policy_loss", "sign of the loss", settings={**_ROLLED, "advantage": "rloo"},
           side=lambda self, free_T, held_T: torch.minimum(free_T, held_T)),
    _fault("grpo", "empty rows counted", "policy_loss", "no token counts", leaves_out=True,
           settings={"reduction": "sequence mean"}, count=_counted(_empty_rows)),
    _fault("grpo", "mean of rows", "policy_loss", "mean over sequences", uses={"reduction": "sequence mean"}),
    _fault("grpo", "local denominators", "policy_loss", "local", leaves_out=True, **_LOCAL),
    _fault("grpo", "k2 for k3", "kl_loss", "estimator is k2", uses={"kl_estimator": "k2"}),
    _fault("grpo", "KL reversed", "kl_loss", "reference to the policy",
           kl_losses=lambda self, new_T, old_T, ref_T: self.kl(ref_T, new_T)),
    _fault("grpo", "KL of the old policy", "kl_loss", "old policy",
           kl_losses=lambda self, new_T, old_T, ref_T: self.kl(old_T, ref_T)),
    _fault("grpo", "KL left out of the loss", "loss", "left out", uses={"kl_coef": 0.0}),
    _fault("grpo", "no discount", "rollout_advantages", "gamma is 1", settings=_REINFORCE, uses={"gamma": 1.0}),
    _fault("grpo", "outcomes for rewards to go", "rollout_advantages", "sum of all rewards",
           settings={**_REINFORCE, "kl_in": "reward"},
           to_go=lambda self, text: self.rewards[text.number].sum().expand(text.drawn)),
    _fault("grpo", "whitened by rank", "rollout_advantages", "each rank alone", settings=_REINFORCE,
           whitened=_white_by_rank),
    _fault("grpo", "no greedy score", "rollout_advantages", "greedy response is left out",
           settings={**_ROLLED, "advantage": "remax"}, of_greedy=lambda self, text: 0.0),
    _fault("grpo", "lengths left out", "rollout_advantages", "mean of the whole group",
           settings={**_ROLLED, "advantage": "opo"}, uses={"advantage": "grpo"}),
    _fault("grpo", "no std of the best", "rollout_advantages", "nothing is divided",
           settings={"advantage": "grpo_passk"}, uses={"norm_by": "none"}),
    _fault("grpo", "taus swapped", "policy_loss", "temperatures are swapped", settings={"policy_loss": "sapo"},
           uses={"sapo_tau_pos": 1.05, "sapo_tau_neg": 1.0}),
    _fault("grpo", "weight not clipped", "policy_loss", "not clipped", settings={"policy_loss": "cispo"},
           uses={"clip_low": 1.0, "clip_high": 1e9}),
    _fault("grpo", "ppo in its place", "policy_loss", "the loss is ppo", settings={"policy_loss": "gspo"},
           uses={"policy_loss": "ppo"}),
    _fault("grpo", "selected tokens trained", "policy_loss", "no token is selected",
           settings={"policy_loss": "clip_cov"}, policy_losses=_none_selected),
    _fault("ppo", "value not clipped", "value_loss", "not clipped", uses={"clip_value": 1e9}),
    _fault("ppo", "value without half", "value_loss", "1/2",
           value_losses=lambda self, *given: 2 * PolicyTrainer.value_losses(self, *given)),
    _fault("ppo", "smaller of the errors", "value_loss", "smaller of the errors", value_losses=_least_error),
    _fault("ppo", "value one late", "new_values", "each value is read at the token itself, not at the place before it",
           new_values=_one_late),
    _fault("ppo", "value gradient by ranks twice", "critic_gradients", "divided by the number of ranks once more",
           learn_values=_learns_of_ranks),
)  # fmt: skip
