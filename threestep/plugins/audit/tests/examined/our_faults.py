"""Faults that are planted into our programs: a function of ours replaced before a run starts."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from threestep.plugins.audit.tests.examined.fault import OurFault

_Change = Callable[[Callable[..., Any]], Callable[..., Any]]


def _replacing(address: str, change: _Change) -> Callable[[], None]:
    """A plant: MODULE:NAME becomes what `change` makes of it."""

    def plant() -> None:
        module, _, name = address.partition(":")
        owner: Any = importlib.import_module(module)
        *parts, last = name.split(".")
        for part in parts:
            owner = getattr(owner, part)
        setattr(owner, last, change(getattr(owner, last)))

    return plant


# ---- step 1


def _all_targets(right: Any) -> Any:
    def sentence(row: Any) -> Any:
        found = right(row)
        is_target = found.is_target.clone()
        is_target[:] = True
        is_target[0] = False
        return dataclasses.replace(found, is_target=is_target)

    return sentence


def _end_is_no_target(right: Any) -> Any:
    def sentence(row: Any) -> Any:
        found = right(row)
        is_target = found.is_target.clone()
        is_target[-1] = False
        return dataclasses.replace(found, is_target=is_target)

    return sentence


def _row_without_end(right: Any) -> Any:
    def make(self: Any, *given: Any) -> Any:
        row = right(self, *given)
        mask = row.loss_mask.copy()
        mask[-1] = False
        return dataclasses.replace(row, loss_mask=mask)

    return make


def _own_count(right: Any) -> Any:
    def prepared(self: Any, taken: Any) -> Any:
        step = right(self, taken)
        return dataclasses.replace(step, targets=sum(part.rows.target_ids_M.numel() for part in step.micro_batches))

    return prepared


def _one_step_late(right: Any) -> Any:
    def scheduler(*given: Any) -> Any:
        made = right(*given)
        made.lr_lambdas = [lambda done, rate=rate: rate(max(done - 1, 0)) for rate in made.lr_lambdas]
        return made

    return scheduler


def _usual_betas(right: Any) -> Any:
    def optimizer(module: Any, settings: Any, device: Any) -> Any:
        return right(module, dataclasses.replace(settings, adam_beta1=0.9, adam_beta2=0.999), device)

    return optimizer


def _averaged_twice(right: Any) -> Any:
    return lambda self, loss: self.engine.backward(loss, scale_wrt_gas=False)


def _system_prompt(right: Any) -> Any:
    """Qwen's template writes one where a conversation has none."""

    def template(self: Any, text: str, variables: Any) -> None:
        right(self, "system: You are a helpful assistant." + "{{ eos_token }}" + text, variables)

    return template


# ---- step 2


def _without_reference(right: Any) -> Any:
    return lambda logprobs_B, reference_B, tokens_B, loss: right(logprobs_B, 0.0 * reference_B, tokens_B, loss)


def _means_of_tokens(right: Any) -> Any:
    def ratios(logprobs_B: Any, reference_B: Any, tokens_B: Any, loss: Any) -> Any:
        return right(logprobs_B, reference_B, tokens_B, loss) / tokens_B

    return ratios


def _prompts_in_responses(right: Any) -> Any:
    """Of rows with one response each."""

    def documents(document: Any) -> Any:
        found = []
        for alone in right(document):
            [segment] = alone.segments
            is_target = segment.tokens.is_target.clone()
            is_target[1:] = is_target.any()
            tokens = dataclasses.replace(segment.tokens, is_target=is_target)
            found.append(dataclasses.replace(alone, segments=(dataclasses.replace(segment, tokens=tokens),)))
        return found

    return documents


def _of_own_prompts(right: Any) -> Any:
    """Divided by the prompts of the micro-batch: each adds its own mean."""

    def loss(responses: Any, prompts_in_step: float, objective: Any) -> Any:
        return right(responses, float(responses.is_best_B.sum()), objective)

    return loss


def _smoothed_all(right: Any) -> Any:
    """Label smoothing on the wrong side: the share that is taken for right is e."""

    def loss(*given: Any, options: Any, **named: Any) -> Any:
        turned = dataclasses.replace(options, label_smoothing=1.0 - options.label_smoothing)
        return right(*given, options=turned, **named)

    return loss


def _without_margin(right: Any) -> Any:
    def loss(better_Q: Any, worse_Q: Any, margin_Q: Any, weight_Q: Any, **named: Any) -> Any:
        return right(better_Q, worse_Q, 0.0 * margin_Q, weight_Q, **named)

    return loss


# ---- step 3


def _denominator_n(right: Any) -> Any:
    def std(values_B: Any, group_B: Any) -> Any:
        from training.step3_ppo.advantages.inputs import group_sizes

        sizes_B = group_sizes(group_B)
        return right(values_B, group_B) * ((sizes_B - 1) / sizes_B).sqrt()

    return std


def _of_the_batch(right: Any) -> Any:
    def scaled(advantages_B: Any, values_B: Any, inputs: Any, settings: Any, **named: Any) -> Any:
        return right(advantages_B, values_B, inputs, dataclasses.replace(settings, norm_over="batch"), **named)

    return scaled


def _with_padding(right: Any) -> Any:
    def whiten(advantages: Any, inside: Any, total_moments: Any) -> Any:
        from training.step3_ppo.advantages.whiten import moments

        everywhere = inside | True
        return right(advantages, inside, moments(advantages, everywhere))

    return whiten


def _lambda_left_out(right: Any) -> Any:
    return lambda inputs, settings: right(inputs, dataclasses.replace(settings, lam=1.0))


def _whole_group(right: Any) -> Any:
    def rloo(inputs: Any, settings: Any) -> Any:
        from training.step3_ppo.advantages.inputs import group_centred

        return inputs.on_tokens(group_centred(inputs.outcomes_B, inputs.group_B)), None

    return rloo


def _added_to_white(right: Any) -> Any:
    """The critic learns values + whitened advantages."""

    def experience(*given: Any, **named: Any) -> Any:
        found = right(*given, **named)
        returns_BR = (found.advantages_BR + found.read.values_BR) * found.rollout.drawn.mask_BR
        return dataclasses.replace(found, returns_BR=returns_BR)

    return experience


def _on_first_token(right: Any) -> Any:
    def rewards(scores_B: Any, kl_BR: Any, response_lengths_B: Any, kl_coef: float, **named: Any) -> Any:
        found_BR = right(0.0 * scores_B, kl_BR, response_lengths_B, kl_coef, **named)
        found_BR[:, 0] += scores_B
        return found_BR

    return rewards


def _turned(right: Any) -> Any:
    return lambda logprobs, ref_logprobs: right(ref_logprobs, logprobs)


def _bounds_swapped(right: Any) -> Any:
    def loss(tokens: Any, settings: Any) -> Any:
        turned = {"clip_low": settings.clip_high, "clip_high": settings.clip_low}
        return right(tokens, dataclasses.replace(settings, **turned))

    return loss


def _unclipped(right: Any) -> Any:
    return lambda tokens, settings: right(tokens, dataclasses.replace(settings, clip_low=1.0, clip_high=1e9))


def _maximised(right: Any) -> Any:
    def loss(tokens: Any, settings: Any) -> Any:
        found_M, clipped_M = right(dataclasses.replace(tokens, advantages_M=-tokens.advantages_M), settings)
        return found_M, clipped_M

    return loss


def _own_tokens(right: Any) -> Any:
    return lambda counted_M, sequence_M, totals: counted_M / counted_M.sum()


def _least_error(right: Any) -> Any:
    def loss(values_M: Any, old_values_M: Any, returns_M: Any, clip_range_value: float) -> Any:
        _, clipped_M = right(values_M, old_values_M, returns_M, clip_range_value)
        return 0.5 * (values_M - returns_M).square(), clipped_M

    return loss


def _of_the_next(right: Any) -> Any:
    """The minibatch is shuffled, and its advantages are not."""

    def made(self: Any, sequences: Any, device: Any) -> None:
        import torch

        right(self, sequences, device)
        if len(sequences):
            lengths = [len(each.advantages_r) for each in sequences]
            firsts = [each.advantages_r[0] for each in sequences]
            turned = [*firsts[1:], firsts[0]]
            parts = [one.expand(length) for one, length in zip(turned, lengths, strict=True)]
            self.advantages_M = torch.cat([self.advantages_M[:0], *parts])

    return made


def _temperature_left_out(right: Any) -> Any:
    """The forward of training and reading takes the logits as they are."""

    def forward(self: Any, hidden_MH: Any, target_ids_M: Any, asked: Any, *given: Any) -> Any:
        return right(self, hidden_MH, target_ids_M, asked._replace(temperature=1.0), *given)

    return forward


_STEP1, _ENGINE = "training.step1_sft.trainer", "training.utils.engine.training_engine"
_ROWS, _DPO = "training.utils.data.rows.documents", "training.step2_dpo.trainer"
_ADVANTAGES, _LOSSES = "training.step3_ppo.advantages", "training.step3_ppo.losses"
_EXPERIENCE = "training.step3_ppo.experience"


def _fault(name: str, address: str, change: _Change, words: str, *, quantity: str, **named: str) -> OurFault:
    """The run is that part of the name which stands before the colon. named: other fields of the fault."""
    run = name.split(":")[0]
    return OurFault(name, words, tuple(quantity.split("|")), run=run, plant=_replacing(address, change), **named)


OUR_FAULTS = [
    _fault(
        "sft: prompts are targets", f"{_ROWS}:_sentence", _all_targets, "the layout takes every token for a target",
        quantity="loss_mask", cause="prompts carry loss too", names="prompt carries loss|all tokens carry loss",
    ),
    _fault(
        "sft: end is no target", f"{_ROWS}:_sentence", _end_is_no_target, "the layout drops each row's last target",
        quantity="loss_mask", cause="the end token is not trained", names="end token is not trained",
    ),
    _fault(
        "sft: rows without their end", "training.utils.data.kinds.sentences:Sentences.make", _row_without_end,
        "the data's own mask lacks the end token", quantity="data_mask|loss_mask", cause="the end token is not trained",
        names="end token is not trained|no end|end.*(not|never)",
    ),
    _fault(
        "sft: sum of means", f"{_STEP1}:sft_loss", lambda right: lambda logprobs_M, tokens: -logprobs_M.mean(),
        "each micro-batch adds its mean", quantity="loss", cause="mean over micro-batches, not divided",
        names="sum over micro-batches of their means",
    ),
    _fault(
        "sft 2 ranks: own count", f"{_STEP1}:SftTrainer._prepared", _own_count, "a rank divides by its own targets",
        quantity="denominator|loss", cause="denominators are local to a rank",
        names="denominators are local|first rank alone",
    ),
    _fault(
        "sft 2 ranks: averaged twice", f"{_ENGINE}:TrainingEngine.backward", _averaged_twice,
        "DeepSpeed's mean over ranks is not undone", quantity="gradients|grad_norm",
        cause="gradients are divided by the ranks twice", names="divided by the number of ranks",
    ),
    _fault(
        "sft: learning rate late", f"{_ENGINE}:_scheduler", _one_step_late, "the schedule is a step behind",
        quantity="learning_rate", cause="the learning rate is one step late", names="one step late",
    ),
    _fault(
        "sft: usual betas", f"{_ENGINE}:_optimizer", _usual_betas, "the optimizer does not take the flags' betas",
        quantity="weights_after", cause="betas 0.9 and 0.999 in place of the configured", names="0.9 and 0.999",
    ),
    _fault(
        "sft chat: system prompt added", "training.utils.data.chat.rendering:ChatTemplate.__init__", _system_prompt,
        "the template writes a system prompt where the conversation has none", quantity="token_ids",
        cause="the template adds a system prompt", names="system prompt|template",
        said="system_prompt=of the data",
    ),
    _fault(
        "dpo: no reference", f"{_DPO}:log_ratios", _without_reference, "log-probabilities in place of log-ratios",
        quantity="pair_losses|loss", cause="the reference is left out", names="reference is left out",
    ),
    _fault(
        "dpo: means of tokens", f"{_DPO}:log_ratios", _means_of_tokens, "log-ratios are averaged over tokens",
        quantity="pair_losses|loss", cause="log-ratios are means, not sums", names="log-ratios are means",
    ),
    _fault(
        "dpo padded: prompts in responses", "training.utils.layout.ranked:unshared", _prompts_in_responses,
        "the prompt's tokens are targets", quantity="loss_mask|logprob_sums",
        cause="the prompt is counted in a response's log-probability",
        names="prompt carries loss|prompt is counted|all tokens carry loss",
    ),
    _fault(
        "dpo: own prompts", f"{_DPO}:preference_loss", _of_own_prompts, "each micro-batch adds its mean",
        quantity="loss", cause="sum of micro-batches' means", names="sum over micro-batches of their means",
    ),
    _fault(
        "dpo smoothed: no smoothing", "training.step2_dpo.losses.ranked:smoothed",
        lambda right: lambda rewards_Q, flipped: right(rewards_Q, 0.0),
        "label smoothing is not passed on", quantity="pair_losses|loss", cause="label smoothing is left out",
        names="smoothing is left out",
    ),
    _fault(
        "reward: smoothing turned", "training.step2_reward.trainer:ranking_loss", _smoothed_all,
        "e weighs the right order, 1 - e the wrong one", quantity="pair_losses|loss",
        cause="label smoothing is on the wrong side: chosen and rejected swap weights", names="smoothing.*(wrong|swap)",
    ),
    _fault(
        "reward: no margin", "training.step2_reward.trainer:ranking_loss", _without_margin,
        "the data's margins are not subtracted", quantity="pair_losses|loss", cause="the margin is left out",
        names="margin is left out",
    ),
    _fault(
        "grpo: ddof 0", f"{_ADVANTAGES}.inputs:group_std", _denominator_n, "the variance is divided by n",
        quantity="rollout_advantages", cause="standard deviation with denominator n", names="ddof 0",
    ),
    _fault(
        "grpo: deviation of the batch", f"{_ADVANTAGES}.groups:scaled", _of_the_batch, "divided by that of all",
        quantity="rollout_advantages", cause="the deviation is the batch's, not the group's",
        names="over the batch, not the group|each rank's batch",
    ),
    _fault(
        "grpo: KL turned", "training.step3_ppo.kl.estimators:k3", _turned, "policy and reference are swapped in k3",
        quantity="kl_loss", cause="the KL of the reference to the policy", names="reference to the policy",
    ),
    _fault(
        "grpo: bounds swapped", f"{_LOSSES}.policy:ppo", _bounds_swapped, "clip-higher became clip-lower",
        quantity="policy_loss", cause="lower and upper bound of the clip are swapped",
        names="bounds of the clip are swapped",
    ),
    _fault(
        "grpo: own tokens", f"{_LOSSES}.aggregation:token_mean", _own_tokens, "each micro-batch adds its mean",
        quantity="policy_loss", cause="sum of the micro-batches' means", names="sum over micro-batches of their means",
    ),
    _fault(
        "grpo: advantages of others", "training.step3_ppo.experience.sequences:TokenColumns.__init__", _of_the_next,
        "a micro-batch's advantages stand one response off", quantity="advantages",
        cause="responses have each other's advantages", names="numbers of the (next|one before)",
    ),
    _fault(
        "grpo: no temperature", "training.utils.models.target_head:TargetHead.forward", _temperature_left_out,
        "log-probabilities are read at temperature 1", quantity="rollout_old_logprobs|logprobs",
        cause="the temperature is left out of the log-probabilities", names="temperature",
    ),
    _fault(
        "rloo: whole group", f"{_ADVANTAGES}.groups:rloo", _whole_group, "the baseline is the mean of all",
        quantity="rollout_advantages", cause="the baseline includes the response itself",
        names="mean of the whole group",
    ),
    _fault(
        "rloo: maximised", f"{_LOSSES}.policy:ppo", _maximised, "the advantages' sign is turned in the loss",
        quantity="policy_loss", cause="the sign of the advantages is wrong",
        names="sign of the advantages|sign of the loss",
    ),
    _fault(
        "ppo: padding whitened", f"{_EXPERIENCE}.experience:whiten", _with_padding, "moments over the rectangle",
        quantity="rollout_advantages", cause="advantages are whitened with padding", names="whitened with padding",
    ),
    _fault(
        "ppo: score on the first token", f"{_EXPERIENCE}.experience:shaped_rewards", _on_first_token,
        "scores stand on column 0", quantity="rollout_rewards", cause="the score is on the first token",
        names="on the first token",
    ),
    _fault(
        "ppo: returns of white advantages", "training.step3_ppo.trainer:make_experience", _added_to_white,
        "values + whitened advantages", quantity="rollout_returns",
        cause="returns are made of whitened advantages", names="whitened advantages are added",
    ),
]  # fmt: skip
