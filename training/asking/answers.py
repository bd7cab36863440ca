"""Answers many prompts in batches, and scores the answers by --reward: a reward model, rules, or a weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

from training.asking.model import Answer, AskedModel, check_room
from training.asking.scorer import Scorer
from training.asking.sharing import ALONE, Sharers
from training.utils.data.rows.collate import collate_prompts
from training.utils.data.rows.phases import PromptRow
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.base import RolloutRequest, rolled_out
from training.utils.loading.tokenizers import same_tokenizer
from training.utils.rewards.running import start_rules
from training.utils.rewards.weighted import Reward
from training.utils.run.console import progress_bar
from training.utils.run.seeds import derived_seed


def answers_to(
    asked: AskedModel,
    rows: Sequence[PromptRow],
    flags: SamplingArguments,
    seed: int,
    rows_per_batch: int,
    shared: tuple[Sharers, str] = (ALONE, ""),
) -> list[Answer]:
    """One answer per prompt, with the seeds of step 3's evaluation: equal flags give the samples that it wrote.

    shared: processes that take batches in turns, and this call's name among them. The batches are those of one process,
        and so are the answers; ranks other than the first get none.
    """
    longest = asked.data.rows.max_prompt_seq_len + flags.max_new_tokens
    check_room(asked, longest, "--max_prompt_seq_len and --max_new_tokens")
    sampling, device = asked.sampling(flags), asked.model.device
    sharers, name = shared
    batches = [range(first, min(first + rows_per_batch, len(rows))) for first in range(0, len(rows), rows_per_batch)]
    own = sum(len(batches[piece]) for piece in sharers.pieces(len(batches)))
    with progress_bar(own, f"answers of {asked.name}", sharers.is_main, "prompt", on_terminal_only=True) as bar:

        def answered(piece: int) -> list[tuple[str, list[int], bool]]:
            places = batches[piece]
            batch = collate_prompts([rows[place] for place in places], sampling.pad_token_id)
            seeds = [derived_seed(seed, "evaluation", place) for place in places]
            request = RolloutRequest(batch.prompt_ids_BP.to(device), batch.prompt_mask_BP.to(device), sampling, seeds)
            rollout = rolled_out(asked.engine, asked.model, request)
            texts = rollout.texts(asked.tokenizer.decode, sampling.end_token_ids)
            bar.update(len(places))
            return [
                (texts[index], rollout.response_of(index).tolist(), bool(rollout.ended_B[index]))
                for index in range(len(places))
            ]

        found = sharers.results(name, len(batches), answered)
    return [Answer(text, tuple(token_ids), ended) for batch in found for text, token_ids, ended in batch]


def scores_of(
    asked: AskedModel,
    rows: Sequence[PromptRow],
    answers: Sequence[Answer],
    rewards: Sequence[Reward],
    scorer: Scorer | None,
    timeout_seconds: float,
) -> list[float]:
    """The weighted sum of the rewards for each answer. scorer: required if one of the rewards is the model."""
    texts = [answer.text for answer in answers]
    rules = {reward.name: reward.rule for reward in rewards if reward.rule is not None}
    columns = sorted({name for row in rows for name in row.columns})
    found = start_rules(rules, rows, texts, columns, timeout_seconds, asked.model.device)()
    parts = {name: own for name, (own, _) in found.items()}
    for reward in rewards:
        if reward.rule is None:
            assert scorer is not None
            parts[reward.name] = _model_scores(asked, rows, answers, scorer)
    return [sum(reward.weight * parts[reward.name][place] for reward in rewards) for place in range(len(answers))]


def _model_scores(
    asked: AskedModel, rows: Sequence[PromptRow], answers: Sequence[Answer], scorer: Scorer
) -> list[float]:
    if same_tokenizer(asked.tokenizer, scorer.tokenizer):
        prompts = [row.flipped_prompt_ids[::-1].tolist() for row in rows]
        return scorer.score_ids(prompts, [list(answer.token_ids) for answer in answers])
    pairs = [scorer.ids_of_text(row.prompt_text, answer.text) for row, answer in zip(rows, answers, strict=True)]
    return scorer.score_ids([prompt for prompt, _ in pairs], [response for _, response in pairs])
