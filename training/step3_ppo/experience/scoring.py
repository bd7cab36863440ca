"""Parts 2 and 3 of the loop, in training and in evaluations: responses to a batch of prompts, and their scores.

A response's score is the weighted sum of its rewards. Functions run in threads meanwhile. A reward model reads equal
responses to a prompt once. A prompt's samples whose outcomes are all alike (`ALIKE` of `advantages.inputs`) have one.

B sequences of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from training.step3_ppo.advantages.inputs import alike, missing_eos_punishment, overlong_punishment, settled
from training.step3_ppo.contracts.records import Samples, Scored
from training.step3_ppo.experience.sequences import read_balanced
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.base.transfer import moved
from training.utils.contracts.documents import first_alike
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling, rolled_out
from training.utils.engine.ranks.collectives import gathered, largest
from training.utils.engine.training_engine import memory_explained
from training.utils.rewards.arguments import SUM
from training.utils.rewards.calling import SHOWN_CHARACTERS, start_rules
from training.utils.rewards.weighted import ENVIRONMENT, Rewards, combined, reads_ids, reads_model

if TYPE_CHECKING:
    from training.step3_ppo.contracts.settings import ExperienceSettings, LengthSettings
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.contracts.rows import PromptRow
    from training.utils.data.rows.documents import PromptBatch
    from training.utils.layout.trie import SequenceLayout
    from training.utils.rewards.calling import Rule, RuleAnswer


def draw_responses(
    engine: RolloutEngine,
    roles: Roles,
    prompts: PromptBatch,
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    layout: SequenceLayout,
) -> Rollout:
    """Return a response for each seed, as many to each prompt, adjacent, by the actor's weights. A collective."""
    request, ranks = request_for(prompts, sampling, seeds, layout, device=roles.actor.ranks.device), roles.actor.ranks
    rows, width = prompts.prompt_ids_BP.shape
    shape = f"{rows} prompts of at most {width} tokens, each with {request.samples_per_prompt} responses of at most "
    most = f"{sampling.max_new_tokens} tokens"
    with memory_explained("a rollout", ranks.rank, lambda: shape + most), engine.lent(roles.whole_actor) as model:
        return rolled_out(engine, model, request)


def request_for(
    prompts: PromptBatch, sampling: Sampling, seeds: Sequence[int], layout: SequenceLayout, *, device: torch.device
) -> RolloutRequest:
    """Return the request to an engine: one response per seed, with equally many, adjacent responses to each prompt."""
    ids_BP, mask_BP = prompts.prompt_ids_BP.to(device), prompts.prompt_mask_BP.to(device)
    count = len(seeds) // len(prompts.rows)
    return RolloutRequest(ids_BP, mask_BP, sampling, seeds, count, prompts.rows, layout.media_of(prompts.rows))


SHOWN_IDS = 24  # of a response, in an error


def start_scoring(rows: Sequence[PromptRow], rollout: Rollout, roles: Roles, settings: ExperienceSettings) -> Samples:
    """Start the reward functions, score with the reward model, and return the samples; reading `scored` waits for the
    functions. A collective, and so is the reading. rows: the prompts, each with the same number of adjacent
    responses."""
    rewards, device = settings.scoring.rewards, rollout.response_lengths_B.device
    rules = {reward.name: reward.rule for reward in rewards.named if reward.rule is not None}
    texts = rewards.texts_of(rollout) if rewards.texts_of is not None else []
    wait = start_functions(rules, rows, texts, rollout, rewards=rewards)
    model = score(rollout, roles, settings) if reads_model(rewards.named) else None

    def collect() -> Scored:
        if model is not None:
            _check_finite(model, rows, partial(_diverged, rows, rollout))
        answers = wait()
        nothing_B = torch.zeros(len(rollout.response_lengths_B), device=device)
        summands, parts = list[torch.Tensor](), dict[str, torch.Tensor]()
        for reward in rewards.named:
            if reward.rule is None:
                found = _of_environments(rollout) if reward.name == ENVIRONMENT else model
                assert found is not None
                parts[reward.name] = found
            else:
                own, values = answers[reward.name]
                parts[reward.name] = torch.tensor(own, device=device)
                parts |= {f"{reward.name}/{key}": torch.tensor(each, device=device) for key, each in values.items()}
            summands.append(reward.weight * parts[reward.name].where(~parts[reward.name].isnan(), 0.0))
        scores_B = sum(summands, nothing_B)
        if rewards.combination.kind != SUM:
            members = [each.weight != 0 for each in rewards.named]
            applies_BK = torch.stack([~parts[each.name].isnan() for each in rewards.named], dim=1)
            applies_BK = applies_BK & torch.tensor(members, device=device)
            scores_B = combined(torch.stack(summands, dim=1), applies_BK, rewards.combination)
        _warn_of_none(rewards, rows, answers)
        outcomes_B = outcome_scores(rollout, scores_B, settings.scoring.length)
        _check_finite(outcomes_B, rows, partial(_overflowing, rewards, parts))
        group_B = torch.arange(len(scores_B), device=device) // max(len(scores_B) // len(rows), 1)
        return Scored(scores_B, settled(outcomes_B, group_B), parts)

    return Samples(tuple(rows), rollout, collect)


def start_functions(
    rules: dict[str, Rule],
    rows: Sequence[PromptRow],
    texts: Sequence[str],
    rollout: Rollout,
    *,
    rewards: Rewards,
    are_complete: bool = False,
) -> Callable[[], dict[str, RuleAnswer]]:
    """Start functions of the responses, as `start_rules`, with the columns that no row holds, one entry for each
    response: `drawn_turns`, of conversations, the texts of its turns; the tokens, for a server that reads them; and
    those of the media of its prompt, where prompts have some."""
    device, more = rollout.response_lengths_B.device, dict[str, list[Any]]()
    if rollout.conversations is not None and rewards.turns_of is not None:
        more["drawn_turns"] = list(rewards.turns_of(rollout))
    whole = rollout.conversations is None and rollout.formed is None and rollout.media is None
    if reads_ids(rewards.named) and whole:
        count = range(len(rollout.response_lengths_B))
        more["prompt_ids"] = [rollout.prompt_of(index).tolist() for index in count]
        more["response_ids"] = [rollout.response_of(index).tolist() for index in count]
    if rewards.media_of is not None:
        each = len(rollout.response_lengths_B) // len(rows)
        columns = [media for row in rows for media in [rewards.media_of(row)] * each]
        more |= {name: [of_one[name] for of_one in columns] for name in columns[0]}
    limits: Any = {"timeout_seconds": rewards.timeout_seconds, "are_complete": are_complete}
    return start_rules(rules, rows, texts, rewards.columns, device=device, more=more, **limits)


def _of_environments(rollout: Rollout) -> torch.Tensor:
    """float32 [B], the sum of environments' rewards over each response's turns."""
    if rollout.conversations is None:  # no row has an environment
        return torch.zeros(len(rollout.response_lengths_B), device=rollout.response_lengths_B.device)
    return rollout.conversations.turn_rewards_BR.sum(dim=1)


def outcome_scores(rollout: Rollout, scores_B: torch.Tensor, length: LengthSettings) -> torch.Tensor:
    """Return the scores minus the penalties for the responses' ends and lengths."""
    punishment_B = overlong_punishment(rollout.spans_B, length.max_tokens, length.overlong_buffer_tokens)
    ending_B = missing_eos_punishment(rollout.ended_B, length.missing_eos_penalty)
    return scores_B + ending_B + length.overlong_penalty * punishment_B


@torch.no_grad()
def score(rollout: Rollout, roles: Roles, settings: ExperienceSettings) -> torch.Tensor:
    """Return float32 [B], the reward model's score at each response's last real token, normalised with a score_scale,
    clipped to +- clip_reward; equal responses to a prompt are read once. Of a conversation that forks it reads the last
    part, which is all of it as the chat template writes it by then."""
    assert roles.reward_model is not None  # loaded wherever --reward has the model
    model, device, scoring = roles.reward_model, rollout.response_lengths_B.device, settings.scoring
    read_B = [replace(sequence.parts[-1], experts=None) for sequence in rollout.sequences()]  # not the actor's
    first_B = first_alike(read_B)
    once = sorted(set(first_B))
    read = read_balanced(
        [read_B[place] for place in once],
        settings.layout,
        lambda share: ({"score": model(moved(rows, device))} for _, rows in share),
        count=lambda _: 1,
        device=device,
    )
    places = {place: at for at, place in enumerate(once)}
    scores_B = read["score"][[places[first] for first in first_B]]
    if scoring.score_scale is not None:
        scores_B = (scores_B - scoring.score_scale.mean) / scoring.score_scale.std
    clipped_B = scores_B.clamp(-scoring.clip_reward, scoring.clip_reward)
    return torch.where(scores_B.isfinite(), clipped_B, scores_B)  # infinite is reported later


def beside(scored: Scored, greedy: Scored, samples_per_prompt: int) -> torch.Tensor:
    """Return the score of the greedy response to each sample's prompt: the sample's own if they are alike, as those of
    one text are that two forwards scored."""
    greedy_B = greedy.outcomes_B.repeat_interleave(samples_per_prompt)
    return torch.where(alike(scored.outcomes_B, greedy_B), scored.outcomes_B, greedy_B)


def _check_finite(values_B: torch.Tensor, rows: Sequence[PromptRow], problem_of: Callable[[int, str], str]) -> None:
    """ThreestepError on every rank if a value of any rank's sample is not finite. A collective.

    problem_of: the index of the first such sample, and in words its value, their number and its row
    """
    faulty = (~values_B.isfinite()).nonzero().flatten().tolist()
    if not largest(len(faulty), values_B.device):
        return
    problem = None
    if faulty:
        row = rows[faulty[0] // (len(values_B) // len(rows))]
        those = f"{float(values_B[faulty[0]])} for {len(faulty)} of {len(values_B)} samples, the first in row "
        problem = problem_of(faulty[0], f"{those}{row.row_id} (uid {row.uid})")
    raise ThreestepError(next(found for found in gathered(problem) if found is not None))


def _warn_of_none(rewards: Rewards, rows: Sequence[PromptRow], answers: Mapping[str, RuleAnswer]) -> None:
    """Print a warning for responses to which no reward applies; they score 0, as in TRL."""
    if len(answers) < len(rewards.named):  # the model and environments always apply
        return
    scores = [answers[reward.name][0] for reward in rewards.named]
    lacking = [place for place, own in enumerate(zip(*scores, strict=True)) if all(map(math.isnan, own))]
    if lacking:
        row, names = rows[lacking[0] // (len(scores[0]) // len(rows))], ", ".join(answers)
        log(
            f"warning: no reward applies to {len(lacking)} of {len(scores[0])} responses, so they score 0: {names} "
            f"returned None, first for row {row.row_id} (uid {row.uid})"
        )


def _overflowing(rewards: Rewards, parts: Mapping[str, torch.Tensor], index: int, those: str) -> str:
    """Return the message for a sum that overflows, of summands that do not."""
    summands = [f"{each.name} {float(each.weight * parts[each.name][index]):.3g}" for each in rewards.named]
    return (
        f"expected a score that is finite in float32, got {those}; its weighted rewards are {', '.join(summands)}: use "
        "smaller weights in --reward, or smaller rewards and penalties"
    )


def _diverged(rows: Sequence[PromptRow], rollout: Rollout, index: int, those: str) -> str:
    """Return the message for a score of the reward model."""
    prompt = rows[index // (len(rollout.response_lengths_B) // len(rows))].prompt_text[-SHOWN_CHARACTERS:]
    return (
        f"the reward model's score is {those}; the prompt ends in {prompt!r}, and the response ids begin with "
        f"{rollout.response_of(index).tolist()[:SHOWN_IDS]}: the model has diverged, or overflows in this --dtype; "
        "evaluate it alone, and try --dtype fp32"
    )
