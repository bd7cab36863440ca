"""Answers many prompts in batches, and scores the answers by --reward: a reward model, rules, or a weighted sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.evaluation.model import Answer, ChatModel, check_room
from threestep.plugins.evaluation.sharing import ALONE, Sharers
from training.utils.base.console import note
from training.utils.base.seeds import derived_seed
from training.utils.contracts.rollout_engine import RolloutRequest, rolled_out
from training.utils.data.rows.documents import collate_prompts
from training.utils.loading.tokenizers import same_tokenizer
from training.utils.rewards.arguments import SUM
from training.utils.rewards.calling import start_rules
from training.utils.rewards.functions import check_columns
from training.utils.rewards.weighted import combined, comparing, reads_ids
from training.utils.run.progress import progress_bar

if TYPE_CHECKING:
    from threestep.plugins.evaluation.scorer import Scorer
    from training.utils.contracts.rollout_engine import Sampling
    from training.utils.contracts.rows import PromptRow
    from training.utils.generation.arguments import SamplingArguments
    from training.utils.rewards.arguments import Combination, ScoringArguments
    from training.utils.rewards.calling import Rule
    from training.utils.rewards.weighted import Reward


@dataclass(frozen=True)
class Scores:
    """One number for each answer. total: the weighted sum of the rewards that apply, or their --reward_combine. parts:
    each by its name, NaN where it does not apply, and its function's further values as NAME/KEY."""

    total: list[float]
    parts: dict[str, list[float]]


def answers_to(
    chat_model: ChatModel,
    rows: Sequence[PromptRow],
    flags: SamplingArguments,
    seed: int,
    *,
    rows_per_batch: int,
    shared: tuple[Sharers, str] = (ALONE, ""),
    samples: int = 1,
) -> list[Answer]:
    """`samples` adjacent answers to each prompt, with the seeds of step 3's evaluation: equal flags give the samples
    that it wrote.

    shared: processes that take batches in turns, and this call's name among them. The batches are those of one process,
        and so are the answers; ranks other than the first get none.
    """
    longest = chat_model.data.rows.max_prompt_seq_len + flags.max_new_tokens
    check_room(chat_model, longest, "--max_prompt_seq_len and --max_new_tokens")
    sampling, batches = chat_model.sampling(flags), batches_of(len(rows), rows_per_batch)
    sharers, name = shared
    mine = sum(len(batches[piece]) for piece in sharers.pieces(len(batches)))
    with progress_bar(mine, f"answers from {chat_model.name}", sharers.is_main, "prompt", on_terminal_only=True) as bar:

        def answered(piece: int) -> list[dict[str, Any]]:
            drawn = drawn_batch(chat_model, rows, batches[piece], sampling, seed=seed, samples=samples)
            bar.update(len(batches[piece]))
            return [vars(answer) for answer in drawn]

        found = sharers.results(name, len(batches), answered)
    return [
        Answer(**{**given, "token_ids": tuple(given["token_ids"]), "paths": tuple(given["paths"])})
        for batch in found
        for given in batch
    ]


def batches_of(count: int, rows_per_batch: int) -> list[range]:
    """The places of `count` rows, batch by batch."""
    return [range(first, min(first + rows_per_batch, count)) for first in range(0, count, rows_per_batch)]


def drawn_batch(
    chat_model: ChatModel, rows: Sequence[PromptRow], places: range, sampling: Sampling, *, seed: int, samples: int
) -> list[Answer]:
    """`samples` adjacent answers to each of the rows at `places`. The seed of each depends on its place in all rows."""
    own, device = [rows[place] for place in places], chat_model.model.device
    batch = collate_prompts(own, sampling.pad_token_id)
    # The first sample has the seed that it has where it is the only one.
    indices = [(place, sample) for place in places for sample in range(samples)]
    seeds = [derived_seed(seed, "evaluation", *index[: 1 + bool(index[1])]) for index in indices]
    ids_BP, mask_BP = batch.prompt_ids_BP.to(device), batch.prompt_mask_BP.to(device)
    request = RolloutRequest(ids_BP, mask_BP, sampling, seeds, samples, media=chat_model.media_of(own))
    rollout = rolled_out(chat_model.engine, chat_model.model, request)
    return chat_model.answers_of(rollout, sampling.end_token_ids)


def check_rewards(rewards: Sequence[Reward], rows: Sequence[PromptRow]) -> None:
    """ThreestepError for a reward that names columns which the rows lack, or can read no row's reference."""
    rules = {reward.name: reward.rule for reward in rewards if reward.rule is not None}
    check_columns(rules, sorted({name for row in rows for name in row.columns}), (rows,), note)


def scores_of(
    chat_model: ChatModel,
    rows: Sequence[PromptRow],
    answers: Sequence[Answer],
    rewards: Sequence[Reward],
    *,
    scorer: Scorer | None,
    flags: ScoringArguments,
) -> Scores:
    """The rewards of each answer, as many adjacent ones to each prompt. scorer: required if one of the rewards is the
    model."""
    texts = [answer.text for answer in answers]
    rules = {reward.name: reward.rule for reward in rewards if reward.rule is not None}
    columns = sorted({name for row in rows for name in row.columns})
    each, device = len(answers) // len(rows), chat_model.model.device
    more = drawn_tokens(rows, answers) if reads_ids(rewards) else None
    timeout_seconds = flags.reward_timeout
    found = start_rules(rules, rows, texts, columns, timeout_seconds=timeout_seconds, device=device, more=more)()
    parts: dict[str, list[float]] = {}
    for reward in rewards:
        if reward.rule is None:
            assert scorer is not None
            parts[reward.name] = _model_scores(chat_model, [row for row in rows for _ in range(each)], answers, scorer)
        else:
            own, values = found[reward.name]
            parts |= {reward.name: own, **{f"{reward.name}/{key}": given for key, given in values.items()}}
    return Scores(_totals(parts, rewards, flags), parts)


def _totals(parts: Mapping[str, list[float]], rewards: Sequence[Reward], flags: ScoringArguments) -> list[float]:
    """Return the score of each answer by its parts. Rewards that are not among them wait for the other model's."""
    there = [reward for reward in rewards if reward.name in parts]
    count = len(next(iter(parts.values()), []))
    if flags.reward_combine != SUM:
        return combined_values([parts[each.name] for each in there], [each.weight for each in there], flags.combination)
    return [
        sum((each.weight * value for each in there if not math.isnan(value := parts[each.name][place])), 0.0)
        for place in range(count)
    ]


def combined_values(
    values_KB: Sequence[Sequence[float]], weights_K: Sequence[float], combination: Combination
) -> list[float]:
    """Return the score of each of B responses in double precision. values_KB: NaN where a reward does not apply. Of
    weight 0 is what is only shown: it is no member."""
    values_BK = torch.tensor(values_KB, dtype=torch.float64).reshape(len(values_KB), -1).T
    weights = torch.tensor(weights_K, dtype=torch.float64)
    return combined(values_BK * weights, ~values_BK.isnan() & (weights != 0), combination).tolist()


def with_comparisons(
    parts: Sequence[Mapping[str, list[float]]],
    rewards: Sequence[Reward],
    rows: Sequence[PromptRow],
    answers: Sequence[Sequence[Answer]],
    *,
    device: torch.device,
    flags: ScoringArguments,
) -> list[Scores]:
    """Return the scores of two models with those of judges that compare their answers, the i-th of one with the i-th of
    the other: each model's share of wins, which sum to 1. parts: of each model, by the other rewards."""
    texts, others = ([answer.text for answer in side] for side in answers)
    rules: dict[str, Rule] = {reward.name: judge.compare for reward, judge in comparing(rewards)}
    columns = sorted({name for row in rows for name in row.columns})
    more, timeout_seconds = {"others": others}, flags.reward_timeout
    found = start_rules(rules, rows, texts, columns, timeout_seconds=timeout_seconds, device=device, more=more)()
    own = {name: shares for name, (shares, _) in found.items()}
    other = {name: [1.0 - share for share in shares] for name, shares in own.items()}
    of_both = [{**given, **side} for given, side in zip(parts, (own, other), strict=True)]
    return [Scores(_totals(each, rewards, flags), each) for each in of_both]


def drawn_tokens(rows: Sequence[PromptRow], answers: Sequence[Answer]) -> dict[str, list[Any]] | None:
    """Return columns with the tokens of prompts and answers; None where they are not all of a sequence: some have media
    or paths."""
    if any(row.media for row in rows) or any(answer.positions is not None for answer in answers):
        return None
    each = len(answers) // len(rows)
    return {
        "prompt_ids": [row.flipped_prompt_ids[::-1].tolist() for row in rows for _ in range(each)],
        "response_ids": [list(answer.token_ids) for answer in answers],
    }


def _model_scores(
    chat_model: ChatModel, rows: Sequence[PromptRow], answers: Sequence[Answer], scorer: Scorer
) -> list[float]:
    if same_tokenizer(chat_model.tokenizer, scorer.tokenizer):
        prompts = [row.flipped_prompt_ids[::-1].tolist() for row in rows]
        responses = [list(answer.token_ids) for answer in answers]
        return scorer.score_ids(prompts, responses, [row.media for row in rows], chat_model.media)
    pairs = [scorer.ids_of_text(row.prompt_text, answer.text) for row, answer in zip(rows, answers, strict=True)]
    return scorer.score_ids([prompt for prompt, _ in pairs], [response for _, response in pairs])
