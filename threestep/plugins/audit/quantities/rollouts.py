"""The rollout of step 3: rewards of tokens, advantages, returns. B responses, R their drawn tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.audit.quantities.quantity import Cause, Quantity
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.references import corrections, kl, rewards
from threestep.plugins.audit.references.estimators import best, lengths, returns, token_baseline
from threestep.plugins.audit.references.estimators import groups as advantages

if TYPE_CHECKING:
    from collections.abc import Callable

_POLICY = ("policy",)

# --- rewards


def estimated_kl(step: AuditedStep, logprobs_T: np.ndarray, ref_T: np.ndarray, name: str | None = None) -> np.ndarray:
    """The KL of tokens by the settings' estimator, or the one of this name."""
    own = str(step.setting("kl_estimator")) if name is None else name
    values_T = kl.ESTIMATORS[own](logprobs_T, ref_T)
    bound = step.settings.get("kl_bound")
    return np.minimum(values_T, float(bound)) if own == "k3" and bound is not None else values_T


def _kl(step: AuditedStep, name: str | None = None, old: str = "rollout_old_logprobs", sign: float = 1.0) -> np.ndarray:
    old_R, ref_R = step.tensor(old), step.tensor("rollout_ref_logprobs")
    return estimated_kl(step, *((old_R, ref_R) if sign > 0 else (ref_R, old_R)), name=name)


def _shaped(step: AuditedStep, kl_R: np.ndarray | float, back: int = 0, times: float = 1.0) -> np.ndarray:
    lengths_B = step.tensor("rollout_lengths")
    scores_R = rewards.at_ends(step.tensor("rollout_scores"), lengths_B, back)
    return times * scores_R - (float(step.setting("kl_coef")) * kl_R if np.any(kl_R) else 0.0)


def _right_kl(step: AuditedStep) -> np.ndarray | float:
    where = step.setting("kl_in")
    if where == "reward":
        return _kl(step)
    return 0.0


def _rewards(step: AuditedStep) -> np.ndarray:
    return _shaped(step, _right_kl(step))


def _reward_rounding(step: AuditedStep, right: np.ndarray) -> np.ndarray:
    """Float32's, and that of the log-probabilities of which the KL is the difference."""
    nats = float(step.settings.get("logprob_rounding", 1e-5))
    if step.setting("kl_in") != "reward":
        return 1e-6 * (1.0 + np.abs(right))
    apart_R = np.abs(step.tensor("rollout_old_logprobs") - step.tensor("rollout_ref_logprobs"))
    steepness_R = 1.0 + np.minimum(apart_R, 20.0)
    return 1e-6 * (1.0 + np.abs(right)) + 2.0 * float(step.setting("kl_coef")) * nats * steepness_R


def _score_everywhere(step: AuditedStep) -> np.ndarray:
    return step.tensor("rollout_scores")[step.response_R] - _coefficient(step) * _right_kl(step)


def _coefficient(step: AuditedStep) -> float:
    return float(step.settings.get("kl_coef", 0.0))


def _kl_at_the_end(step: AuditedStep) -> np.ndarray:
    """The KL of a whole response at its last token."""
    lengths_B = step.tensor("rollout_lengths")
    sums_B = step.response_sums(np.broadcast_to(_right_kl(step), step.response_R.shape))
    return rewards.at_ends(step.tensor("rollout_scores") - _coefficient(step) * sums_B, lengths_B)


_REWARDS = Quantity(
    "rollout_rewards",
    _POLICY,
    _rewards,
    (
        Cause(
            "the KL is in the reward and in the loss", lambda step: _shaped(step, _kl(step) if _in_loss(step) else 0.0)
        ),
        Cause("the KL is left out of the reward", lambda step: _shaped(step, 0.0)),
        Cause("the KL is added, not subtracted: it is maximized", lambda step: _shaped(step, -_right_kl(step))),
        *(
            Cause(f"the KL's estimator is {name}", lambda step, name=name: _shaped(step, _kl(step, name)))  # type: ignore[misc]
            for name in kl.ESTIMATORS
        ),
        Cause("the KL runs from the reference to the policy", lambda step: _shaped(step, _kl(step, sign=-1.0))),
        Cause(
            "the KL is computed from the sampling log-probabilities",
            lambda step: _shaped(step, _kl(step, old="rollout_sampling_logprobs")),
        ),
        Cause("the KL has no coefficient", lambda step: _shaped(step, _right_kl(step) / _coefficient(step))),
        Cause("the KL of a whole response is placed at its last token", _kl_at_the_end),
        Cause("the score is placed one token before the last", lambda step: _shaped(step, _right_kl(step), back=1)),
        Cause("the score is placed on the first token", lambda step: _shaped(step, _right_kl(step), back=1 << 30)),
        Cause("the score is placed on every token", _score_everywhere),
        Cause("the score is left out", lambda step: _shaped(step, _right_kl(step), times=0.0)),
        Cause("the score is counted twice", lambda step: _shaped(step, _right_kl(step), times=2.0)),
    ),
    _reward_rounding,
    axis="R",
)


def _in_loss(step: AuditedStep) -> bool:
    return bool(step.setting("kl_in") == "loss")


# --- advantages


def _outcomes(step: AuditedStep) -> np.ndarray:
    return step.response_sums(step.tensor("rollout_rewards"))


def _groups(step: AuditedStep) -> np.ndarray:
    """Groups, which no two ranks share."""
    return step.tensor("rollout_groups")


def _batches(step: AuditedStep) -> np.ndarray:
    """Return [B], equal for the responses whose statistics are taken together."""
    return step.tensor("rollout_batches") if step.has("rollout_batches") else np.zeros(len(_groups(step)), dtype=int)


def _whiten(step: AuditedStep, raw_R: np.ndarray, counts_R: np.ndarray | None = None, ddof: float = 1.0) -> np.ndarray:
    """Each batch's advantages whitened, over tokens that count."""
    counts_R = step.counts_R if counts_R is None else counts_R
    batch_R = _batches(step)[step.response_R]
    parts = [
        advantages.whitened(raw_R, counts_R & (batch_R == batch), ddof=ddof) for batch in np.unique(_batches(step))
    ]
    return np.sum(parts, axis=0)


def _std(step: AuditedStep, over: str, values_B: np.ndarray, ddof: float) -> np.ndarray | float:
    group_B = _groups(step) if over == "group" else _batches(step)
    return advantages.group_std(values_B, group_B, ddof)


def _of_responses(step: AuditedStep, name: str, values_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """The advantage of each response before a deviation divides it."""
    if name == "rloo":
        return advantages.rloo(values_B, group_B)
    if name == "opo":
        return lengths.opo(values_B, group_B, step.tensor("rollout_lengths"))
    if name == "grpo_passk":
        return best.passk(values_B, group_B)
    if name == "gpg":
        apart_B = advantages.group_std(values_B, group_B, 0.0) > 1e-6 * (1.0 + np.abs(values_B))
        batch_B, found_B = _batches(step), np.zeros(len(values_B))
        for batch in np.unique(batch_B):
            own = batch_B == batch
            found_B[own] = best.gpg(values_B[own], group_B[own], apart_B[own])
        return found_B
    if name not in ("grpo", "reinforce++_baseline"):
        raise LackingError(f"a reference for the estimator {name}")
    return advantages.grpo(values_B, group_B, 1.0, 0.0)


def _grouped(step: AuditedStep, *, outcome_B: np.ndarray | None = None, **changes: Any) -> np.ndarray:
    """Advantages of responses.

    changes: settings other than the step's; `groups` whose mean is the baseline, `spread` over which the deviation is.
    """
    own = {**step.settings, **changes}
    values_B = _outcomes(step) if outcome_B is None else outcome_B
    group_B, over = own.get("groups", _groups(step)), str(own.get("norm_by", "none"))
    found_B = _of_responses(step, str(own["advantage"]), values_B, group_B)
    if own["advantage"] == "rloo":
        values_B = found_B
    if over == "none":
        return found_B
    spread_B = own.get("spread", _groups(step) if over == "group" else _batches(step))
    std_B = advantages.group_std(values_B, spread_B, float(own.get("std_ddof", 1.0)))
    return found_B / (std_B + float(own.get("std_epsilon", 0.0)))


def _gae(step: AuditedStep, **changes: Any) -> np.ndarray:
    gamma, lam = (float(changes.get(name, step.setting(name))) for name in ("gamma", "lam"))
    last_B = changes.get("last_B")
    after = {} if last_B is None else {"last_B": np.asarray(last_B)}
    rewards_R = np.asarray(changes.get("rewards_R", step.tensor("rollout_rewards")))
    values_R = np.asarray(changes.get("values_R", step.tensor("rollout_values")))
    return advantages.gae(rewards_R, values_R, step.tensor("rollout_lengths"), gamma=gamma, lam=lam, **after)


_OF_TOKENS = ("reinforce++", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")


def raw_advantages(step: AuditedStep, **changes: Any) -> np.ndarray:
    """Return [R], before whitening."""
    name = step.setting("advantage")
    if name == "gae":
        return _gae(step, **changes)
    if name in _OF_TOKENS:
        return _of_tokens(step, **changes)
    return _grouped(step, **changes)[step.response_R]


def _of_tokens(step: AuditedStep, **changes: Any) -> np.ndarray:
    """Advantages from rewards to go."""
    name, lengths_B = step.setting("advantage"), step.tensor("rollout_lengths")
    rewards_R = np.asarray(changes.get("rewards_R", step.tensor("rollout_rewards")))
    if name == "reinforce++":
        return returns.to_go(rewards_R, lengths_B, float(changes.get("gamma", step.setting("gamma"))))
    if name == "remax":
        greedy_B = np.asarray(changes.get("greedy_B", step.tensor("rollout_greedy_scores")))
        return returns.remax(rewards_R, lengths_B, greedy_B)
    zero_tail = bool(changes.get("zero_tail", step.settings.get("zero_tail", True)))
    energy_R = np.asarray(changes.get("energy_R", _energy(step)))
    return token_baseline.optimal(rewards_R, energy_R, lengths_B, _groups(step), zero_tail=zero_tail)


def _energy(step: AuditedStep) -> np.ndarray:
    """w = 1 - 2 p + sum(p^2), at least 0, times the square of a mismatch's weight."""
    policy_R = np.exp(step.tensor("rollout_policy_logprobs"))
    energy_R = np.maximum(1.0 - 2.0 * policy_R + step.tensor("rollout_collisions"), 0.0)
    return energy_R * step.tensor("rollout_corrections") ** 2 if step.has("rollout_corrections") else energy_R


def _advantages(step: AuditedStep, whiten: bool | None = None, **changes: Any) -> np.ndarray:
    raw_R = raw_advantages(step, **changes)
    whitens = bool(step.settings.get("whiten", False)) if whiten is None else whiten
    return _whiten(step, raw_R) if whitens else raw_R


def _whitened_with_padding(step: AuditedStep) -> np.ndarray:
    """Rows of every rank are padded to the longest response, and zeros behind responses count."""
    lengths_B, rank_B = step.tensor("rollout_lengths"), step.rollout_rank_B
    widths = [int(lengths_B[rank_B == rank].max(initial=0)) for rank in range(step.ranks)]
    slots = sum(width * int((rank_B == rank).sum()) for rank, width in enumerate(widths))
    return advantages.whitened(raw_advantages(step), step.counts_R, more_zeros=float(slots - step.counts_R.sum()))


def _whitened_with_rectangle(step: AuditedStep) -> np.ndarray:
    """One rectangle of all ranks' responses, as wide as the longest of them."""
    lengths_B = step.tensor("rollout_lengths")
    slots = len(lengths_B) * int(lengths_B.max(initial=0))
    return advantages.whitened(raw_advantages(step), step.counts_R, more_zeros=float(slots - step.counts_R.sum()))


def _raw_in_rectangle(step: AuditedStep) -> np.ndarray:
    """The same, with what stands there of responses that are left out."""
    lengths_B, raw_R = step.tensor("rollout_lengths"), raw_advantages(step)
    slots = len(lengths_B) * int(lengths_B.max(initial=0))
    whole = advantages.whitened(raw_R, np.ones(len(raw_R), dtype=bool), more_zeros=float(slots - len(raw_R)))
    return np.where(step.counts_R, whole, 0.0)


def _whitened_by_rank(step: AuditedStep) -> np.ndarray:
    raw_R, rank_R = raw_advantages(step), step.rollout_rank_B[step.response_R]
    parts = [advantages.whitened(raw_R, step.counts_R & (rank_R == rank)) for rank in range(step.ranks)]
    return np.sum(parts, axis=0)


def _whitened_by_response(step: AuditedStep) -> np.ndarray:
    raw_R = raw_advantages(step)
    parts = [
        advantages.whitened(raw_R, step.counts_R & (step.response_R == response))
        for response in np.unique(step.response_R)
    ]
    return np.sum(parts, axis=0)


def _without_shift(step: AuditedStep) -> np.ndarray:
    raw_R = raw_advantages(step)
    batch_R, found_R = _batches(step)[step.response_R], np.zeros(len(raw_R))
    for batch in np.unique(batch_R):
        own_R = step.counts_R & (batch_R == batch)
        if own_R.sum() > 1:
            found_R[own_R] = raw_R[own_R] / np.sqrt(raw_R[own_R].var(ddof=1) + 1e-8)
    return found_R


def _cut_values(step: AuditedStep) -> np.ndarray:
    """The value of the last token, after each response that was cut; 0 after those that ended."""
    ends = np.cumsum(step.tensor("rollout_lengths")) - 1
    return np.where(step.tensor("rollout_ended"), 0.0, step.tensor("rollout_values")[ends])


def _all_last_values(step: AuditedStep) -> np.ndarray:
    return step.tensor("rollout_values")[np.cumsum(step.tensor("rollout_lengths")) - 1]


def _next_first_values(step: AuditedStep) -> np.ndarray:
    """The first value of the next response."""
    begins = np.cumsum(step.tensor("rollout_lengths")) - step.tensor("rollout_lengths")
    return np.append(step.tensor("rollout_values")[begins][1:], 0.0)


def _interleaved(step: AuditedStep) -> np.ndarray:
    """Groups of each rank as if its responses came prompt by prompt, sample by sample: i modulo the prompts."""
    group_B, rank_B = _groups(step), step.rollout_rank_B
    found = np.zeros(len(group_B), dtype=np.int64)
    for rank in range(step.ranks):
        own = rank_B == rank
        prompts = len(np.unique(group_B[own]))
        found[own] = rank * len(group_B) + np.arange(own.sum()) % max(prompts, 1)
    return found


def _across_ranks(step: AuditedStep) -> np.ndarray:
    """Groups as if the responses of all ranks came sample by sample: i modulo the prompts, by their numbers."""
    numbers = step.tensor("rollout_numbers") if step.has("rollout_numbers") else np.arange(len(_groups(step)))
    order_B = np.argsort(np.argsort(numbers))
    return order_B % max(len(np.unique(_groups(step))), 1)


def _in_turns(step: AuditedStep) -> np.ndarray:
    """The same of each rank in the order of the record, over all ranks."""
    return np.arange(len(_groups(step))) % max(len(np.unique(_groups(step))), 1)


def _value_behind(step: AuditedStep) -> np.ndarray:
    """The value after the last token of each response that was cut, as its last return has it: (R - r) / gamma; 0 after
    those that ended."""
    ends = np.cumsum(step.tensor("rollout_lengths")) - 1
    behind_B = step.tensor("rollout_returns")[ends] - step.tensor("rollout_rewards")[ends]
    behind_B = behind_B / float(step.setting("gamma"))
    return np.where(step.tensor("rollout_ended"), 0.0, behind_B)


def _of(estimator: str, compute: Callable[[AuditedStep], np.ndarray]) -> Callable[[AuditedStep], np.ndarray]:
    """Compute for one estimator alone, or for those that compare groups."""

    def computed(step: AuditedStep) -> np.ndarray:
        name = step.setting("advantage")
        kind = "gae" if name == "gae" else "tokens" if name in _OF_TOKENS else "groups"
        if kind != estimator:
            raise LackingError(f"an advantage by {estimator}")
        return compute(step)

    return computed


def _grouping(sentence: str, **changes: Any) -> Cause:
    return Cause(sentence, _of("groups", partial(_advantages, **changes)))  # type: ignore[arg-type]


def _of_gae(sentence: str, compute: Callable[[AuditedStep], np.ndarray]) -> Cause:
    return Cause(sentence, _of("gae", compute))


def _by_batch(sentence: str, of_rank: bool, baseline: bool = True, spread: bool = False) -> Cause:
    """The baseline, the deviation or both are of a batch: of all ranks, or of each."""

    def compute(step: AuditedStep) -> np.ndarray:
        batch_B = step.rollout_rank_B if of_rank else np.zeros(len(_groups(step)), dtype=np.int64)
        changes: dict[str, Any] = {"groups": batch_B} if baseline else {}
        changes |= {"spread": batch_B, "norm_by": "batch"} if spread else {}
        return _advantages(step, **changes)

    return Cause(sentence, _of("groups", compute))


_GROUP_CAUSES = (
    _grouping("the standard deviation uses the denominator n (ddof 0)", std_ddof=0.0),
    _grouping("the standard deviation uses the denominator n - 1 (ddof 1)", std_ddof=1.0),
    _grouping("the standard deviation is over the batch, not the group", norm_by="batch"),
    _grouping("the standard deviation is over the group, not the batch", norm_by="group"),
    _grouping("nothing is divided by a standard deviation", norm_by="none"),
    _grouping("the baseline is the mean of the others in the group", advantage="rloo"),
    _grouping("the baseline is the mean of the whole group, the response itself included", advantage="grpo"),
    _grouping("epsilon is 1e-4", std_epsilon=1e-4),
    _grouping("epsilon is 1e-6", std_epsilon=1e-6),
    _grouping("epsilon is 1e-8", std_epsilon=1e-8),
    _by_batch("the baseline is the mean of the batch, not of the group", of_rank=False),
    _by_batch("mean and deviation are over the batch, not over the group", of_rank=False, spread=True),
    _by_batch("the baseline is the mean of each rank's batch, not of the group", of_rank=True),
    _by_batch("mean and deviation are over each rank's batch, not over the group", of_rank=True, spread=True),
    _by_batch("the standard deviation is over each rank's batch", of_rank=True, baseline=False, spread=True),
    Cause(
        "responses are grouped across prompts",
        _of("groups", lambda step: _advantages(step, groups=_interleaved(step), spread=_interleaved(step))),
    ),
    Cause(
        "responses are grouped across prompts, over all ranks",
        _of("groups", lambda step: _advantages(step, groups=_across_ranks(step), spread=_across_ranks(step))),
    ),
    Cause(
        "responses are grouped across prompts, rank after rank",
        _of("groups", lambda step: _advantages(step, groups=_in_turns(step), spread=_in_turns(step))),
    ),
    Cause("outcomes have no baseline", _of("groups", lambda step: _outcomes(step)[step.response_R])),
    Cause(
        "outcomes are the scores, without the KL in the reward",
        _of("groups", lambda step: _grouped(step, outcome_B=step.tensor("rollout_scores"))[step.response_R]),
    ),
    Cause(
        "the advantage of a response is divided by its number of tokens",
        _of("groups", lambda step: _advantages(step) / step.tensor("rollout_lengths")[step.response_R]),
    ),
)
_GAE_CAUSES = (
    _of_gae(
        "the value is bootstrapped where the length limit cut a response",
        lambda step: _advantages(step, last_B=_cut_values(step)),
    ),
    _of_gae(
        "the value is bootstrapped across truncation: with the critic's value after the last token of a truncated "
        "response",
        lambda step: _advantages(step, last_B=_value_behind(step)),
    ),
    _of_gae(
        "the value is bootstrapped after every response", lambda step: _advantages(step, last_B=_all_last_values(step))
    ),
    _of_gae(
        "the next response's first value follows a response's last",
        lambda step: _advantages(step, last_B=_next_first_values(step)),
    ),
    _of_gae("gamma is 1", lambda step: _advantages(step, gamma=1.0)),
    _of_gae("lambda is 1", lambda step: _advantages(step, lam=1.0)),
    _of_gae("lambda is 0", lambda step: _advantages(step, lam=0.0)),
    _of_gae(
        "gamma and lambda are swapped",
        lambda step: _advantages(step, gamma=step.setting("lam"), lam=step.setting("gamma")),
    ),
    _of_gae(
        "the values are left out: returns in place of advantages",
        lambda step: _advantages(step, values_R=np.zeros(len(step.response_R))),
    ),
    _of_gae(
        "the values are one token early",
        lambda step: _advantages(step, values_R=_shifted_values(step)),
    ),
)


def _of_returns(sentence: str, compute: Callable[[AuditedStep], np.ndarray]) -> Cause:
    return Cause(sentence, _of("tokens", compute))


def _greedy(step: AuditedStep, change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return _advantages(step, greedy_B=change(step.tensor("rollout_greedy_scores")))


def _of_next(scores_B: np.ndarray) -> np.ndarray:
    return np.roll(scores_B, -1)


_TOKEN_CAUSES = (
    _of_returns("gamma is 1: rewards to go are not discounted", lambda step: _advantages(step, gamma=1.0)),
    _of_returns(
        "every token has the sum of all rewards, including those before it",
        lambda step: _whitened_as_set(step, _outcomes(step)[step.response_R]),
    ),
    _of_returns(
        "the score of the greedy response is left out", lambda step: _greedy(step, lambda scores_B: 0.0 * scores_B)
    ),
    _of_returns("the score of the greedy response is added", lambda step: _greedy(step, lambda scores_B: -scores_B)),
    _of_returns("the greedy response is that of the next prompt", lambda step: _greedy(step, _of_next)),
    _of_returns(
        "the baseline is the plain mean at each place",
        lambda step: _advantages(step, energy_R=np.zeros(len(step.response_R))),
    ),
    _of_returns(
        "the tail of the longest response is treated the other way",
        lambda step: _advantages(step, zero_tail=not step.settings.get("zero_tail", True)),
    ),
    _of_returns(
        "the baseline is the mean of the group's outcomes",
        lambda step: _whitened_as_set(step, advantages.grpo(_outcomes(step), _groups(step), 1.0, 0.0)[step.response_R]),
    ),
)


def _whitened_as_set(step: AuditedStep, raw_R: np.ndarray) -> np.ndarray:
    return _whiten(step, raw_R) if step.settings.get("whiten") else raw_R


def _shifted_values(step: AuditedStep) -> np.ndarray:
    from threestep.plugins.audit.references.masks import shifted

    return shifted(step.tensor("rollout_values"), -1, step.response_R)


_WHITEN_CAUSES = (
    Cause("advantages are not whitened", lambda step: _advantages(step, whiten=False)),
    Cause("advantages are whitened, though they should not be", lambda step: _advantages(step, whiten=True)),
    Cause("advantages are whitened with padding", _whitened_with_padding),
    Cause("advantages are whitened with padding, that of all ranks' responses", _whitened_with_rectangle),
    Cause("advantages are whitened with padding and with responses that are left out", _raw_in_rectangle),
    Cause(
        "advantages are whitened over all batches of the rollout together",
        lambda step: advantages.whitened(raw_advantages(step), step.counts_R),
    ),
    Cause("advantages are whitened over each rank alone", _whitened_by_rank),
    Cause("advantages are whitened over each response alone", _whitened_by_response),
    Cause("advantages are divided by the deviation but keep their mean", _without_shift),
    Cause(
        "whitening includes responses that are left out of the loss",
        lambda step: np.where(
            step.counts_R, _whiten(step, raw_advantages(step), np.ones(len(step.response_R), dtype=bool)), 0.0
        ),
    ),
    Cause(
        "the variance of whitening uses the denominator n",
        lambda step: _whiten(step, raw_advantages(step), ddof=0.0),
    ),
    Cause("the sign is wrong", lambda step: -_advantages(step)),
)


_ALIKE = 2e-5  # twice the share by which outcomes count as equal (`step3_ppo.advantages.inputs.ALIKE`)


def _advantage_rounding(step: AuditedStep, right: np.ndarray) -> np.ndarray:
    """Float32's; and where the outcomes of a group differ by rounding alone, any advantage is one of rounding."""
    plain_R = 3e-5 * (1.0 + np.abs(right))
    if step.setting("advantage") == "gae" or step.setting("advantage") in _OF_TOKENS:
        sizes = np.abs(step.tensor("rollout_rewards"))
        sizes = sizes + (np.abs(step.tensor("rollout_values")) if step.has("rollout_values") else 0.0)
        scale = float(np.std(raw_advantages(step)[step.counts_R])) if step.settings.get("whiten") else 1.0
        return plain_R + 1e-6 * float(sizes.max(initial=0.0)) * 10.0 / max(scale, 1e-6)
    group_B = _groups(step)
    nats = (
        float(step.settings.get("logprob_rounding", 0.0))
        * _coefficient(step)
        * (step.settings.get("kl_in") == "reward")
    )
    rounding_B = 1e-6 * step.response_sums(np.abs(step.tensor("rollout_rewards")))
    rounding_B = rounding_B + nats * np.sqrt(step.tensor("rollout_lengths"))
    widest_B = advantages.group_mean(rounding_B, group_B)
    over = step.settings.get("norm_by", "none")
    if over == "none":
        scale = float(np.std(raw_advantages(step)[step.counts_R])) if step.settings.get("whiten") else 1.0
        return plain_R + 2.0 * widest_B[step.response_R] / max(scale, 1e-6)
    std_B = _std(step, str(over), _outcomes(step), 1.0) + float(step.settings.get("std_epsilon", 0.0))
    least_B = np.maximum(8.0 * widest_B, _ALIKE * np.maximum(1.0, np.abs(_outcomes(step))))
    free_B = np.where(std_B <= least_B, np.inf, 4.0 * widest_B / std_B)
    return plain_R + free_B[step.response_R]


_ADVANTAGES = Quantity(
    "rollout_advantages",
    _POLICY,
    _advantages,
    (*_GROUP_CAUSES, *_GAE_CAUSES, *_TOKEN_CAUSES, *_WHITEN_CAUSES),
    _advantage_rounding,
    axis="R",
)


def _returns(step: AuditedStep) -> np.ndarray:
    return raw_advantages(step) + step.tensor("rollout_values")


_RETURNS = Quantity(
    "rollout_returns",
    _POLICY,
    _returns,
    (
        Cause(
            "whitened advantages are added to the values",
            lambda step: step.tensor("rollout_advantages") + step.tensor("rollout_values"),
        ),
        Cause("the advantages alone: the values are not added", raw_advantages),
        Cause(
            "the sums of rewards to come, without lambda",
            lambda step: _gae(step, lam=1.0) + step.tensor("rollout_values"),
        ),
        Cause(
            "the value is bootstrapped where the length limit cut a response",
            lambda step: _gae(step, last_B=_cut_values(step)) + step.tensor("rollout_values"),
        ),
        Cause(
            "the value is bootstrapped across truncation: with the critic's value after the last token of a "
            "truncated response",
            lambda step: _gae(step, last_B=_value_behind(step)) + step.tensor("rollout_values"),
        ),
    ),
    lambda step, right: 1e-5 * (1.0 + np.abs(right)),
    axis="R",
    applies=lambda step: step.has_critic,
)

# --- weights against a mismatch


def _weights(step: AuditedStep, **changes: Any) -> np.ndarray:
    """changes: of the settings."""
    own = {**step.settings, **changes}
    if "mismatch_correction" not in own:
        raise LackingError("the setting mismatch_correction")
    level, least = str(own.get("mismatch_level", "token")), own.get("mismatch_threshold_lower")
    apart_R = changes.get("apart_R", step.tensor("rollout_old_logprobs") - step.tensor("rollout_sampling_logprobs"))
    rule = corrections.Rule(str(own["mismatch_correction"]), level, float(own["mismatch_threshold"]), least)
    found_R = corrections.weights(np.asarray(apart_R), step.response_R, rule)
    if own.get("mismatch_normalize"):
        batch_R = _batches(step)[step.response_R]
        for batch in np.unique(batch_R):
            inside_R = batch_R == batch
            found_R[inside_R] = corrections.normalised(
                found_R[inside_R], step.response_R[inside_R], step.counts_R[inside_R], level
            )
    return found_R


def _apart(step: AuditedStep) -> np.ndarray:
    return step.tensor("rollout_old_logprobs") - step.tensor("rollout_sampling_logprobs")


_CORRECTIONS = Quantity(
    "rollout_corrections",
    _POLICY,
    _weights,
    (
        Cause("the ratio is upside down", lambda step: _weights(step, apart_R=-_apart(step))),
        *(
            Cause(f"the ratio is of each {name}", partial(_weights, mismatch_level=name))
            for name in ("token", "sequence")
        ),
        Cause("the ratio is a response's geometric mean", partial(_weights, mismatch_level="geometric")),
        Cause("the weights are not bounded", partial(_weights, mismatch_correction="truncate", mismatch_threshold=1e9)),
        Cause("weights beyond the bound are cut, not dropped", partial(_weights, mismatch_correction="truncate")),
        Cause("weights beyond the bound are dropped, not cut", partial(_weights, mismatch_correction="mask")),
        Cause("the weights are not normalized", partial(_weights, mismatch_normalize=False)),
        Cause("the weights are normalized, though they should not be", partial(_weights, mismatch_normalize=True)),
        Cause("every weight is 1", lambda step: np.ones(len(step.response_R))),
    ),
    lambda step, right: 1e-5 * (1.0 + np.abs(right)) * (1.0 + _longest(step)),
    axis="R",
    applies=lambda step: step.corrects,
)


def _longest(step: AuditedStep) -> float:
    return float(step.tensor("rollout_lengths").max(initial=0)) * (step.settings.get("mismatch_level") == "sequence")


QUANTITIES = (_CORRECTIONS, _REWARDS, _ADVANTAGES, _RETURNS)
