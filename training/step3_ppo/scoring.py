"""Part 3 of the loop: a response's score is the weighted sum of its rewards. Functions work in threads meanwhile.

B sequences of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from training.step3_ppo.experience import ExperienceSettings, outcome_scores, score
from training.step3_ppo.records import Rollout, Samples, Scored
from training.step3_ppo.rewards.calling import SHOWN_CHARACTERS, Rule, rule_batch
from training.step3_ppo.rewards.running import RunningRule
from training.step3_ppo.roles import Roles
from training.utils.data.phases import PromptRow
from training.utils.engine.collectives import gathered, largest
from training.utils.run.errors import ThreestepError

SHOWN_IDS = 24  # of a response, in an error

Answers = dict[str, tuple[list[float], dict[str, list[float]]]]  # of each rule by name: scores and values to log


def start_scoring(rows: Sequence[PromptRow], rollout: Rollout, roles: Roles, settings: ExperienceSettings) -> Samples:
    """Start the reward functions, score with the reward model, and return the samples, whose first reader waits for
    the functions. All ranks call, and all read.

    rows: the prompts, each of which has as many adjacent responses in the rollout.
    """
    rewards, device = settings.rewards, rollout.response_lengths_B.device
    rules = {reward.name: reward.rule for reward in rewards.named if reward.rule is not None}
    texts = rewards.texts_of(rollout) if rewards.texts_of is not None else []
    wait = start_rules(rules, rows, texts, rewards.columns, rewards.timeout_seconds, device)
    model_scores_B = score(rollout, roles, settings) if rewards.with_model else None

    def collect() -> Scored:
        if model_scores_B is not None:
            _check_scores(model_scores_B, rows, rollout)
        answers = wait()
        scores_B = torch.zeros(len(rollout.response_lengths_B), device=device)
        parts: dict[str, torch.Tensor] = {}
        for reward in rewards.named:
            if reward.rule is None:
                assert model_scores_B is not None
                parts[reward.name] = model_scores_B
            else:
                own, values = answers[reward.name]
                parts[reward.name] = torch.tensor(own, device=device)
                parts |= {f"{reward.name}/{key}": torch.tensor(each, device=device) for key, each in values.items()}
            scores_B = scores_B + reward.weight * parts[reward.name]
        return Scored(scores_B, outcome_scores(rollout, scores_B, settings.length), parts)

    return Samples(tuple(rows), rollout, collect)


def _check_scores(scores_B: torch.Tensor, rows: Sequence[PromptRow], rollout: Rollout) -> None:
    """ThreestepError on every rank where the reward model's score of any rank's sample is no number. A collective."""
    strange = (~scores_B.isfinite()).nonzero().flatten().tolist()
    if not largest(len(strange), scores_B.device):
        return
    problem = None
    if strange:
        row = rows[strange[0] // (len(scores_B) // len(rows))]
        prompt = row.prompt_text[-SHOWN_CHARACTERS:]
        problem = (
            f"the reward model's score is {float(scores_B[strange[0]])} for {len(strange)} of {len(scores_B)} samples, "
            f"the first of them row {row.row_id} (uid {row.uid}), whose prompt ends {prompt!r}, with the response ids "
            f"{rollout.response_of(strange[0]).tolist()[:SHOWN_IDS]}: its weights have diverged, or overflow in this "
            "--dtype; evaluate it with training.step2_reward.evaluate, and try --dtype fp32"
        )
    raise ThreestepError(next(said for said in gathered(problem) if said is not None))


def start_rules(
    rules: dict[str, Rule],
    rows: Sequence[PromptRow],
    responses: Sequence[str],
    columns: Sequence[str],
    timeout_seconds: float,
    device: torch.device,
) -> Callable[[], Answers]:
    """Start each rule in a thread, and return what waits for all of them: a collective where there are any.

    Where one fails on any rank, every rank raises its ThreestepError, so that none is left waiting.
    """
    if not rules:
        return dict
    per_prompt = len(responses) // len(rows)
    batch = rule_batch([row for row in rows for _ in range(per_prompt)], responses, columns)
    running = [RunningRule(name, _on_device(rule, device), batch) for name, rule in rules.items()]

    def wait() -> Answers:
        answers: Answers = {}
        problem: str | None = None
        try:
            answers = {each.name: each.collect(timeout_seconds) for each in running}
        except ThreestepError as error:
            problem = str(error)
        if largest(int(problem is not None), device):
            raise ThreestepError(next(said for said in gathered(problem) if said is not None))
        return answers

    return wait


def _on_device(rule: Rule, device: torch.device) -> Rule:
    """The rule with this rank's GPU as the current one, which a new thread does not know."""
    if device.type != "cuda":
        return rule

    def placed(*texts: Sequence[str], **columns: Sequence[object]) -> object:
        torch.cuda.set_device(device)
        return rule(*texts, **columns)

    return placed
