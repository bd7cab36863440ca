"""How good the actor's responses to held-out prompts are: before, during and after training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from training.step3_ppo.experience import ExperienceSettings
from training.step3_ppo.rewards.calling import Rule
from training.step3_ppo.roles import Roles
from training.step3_ppo.rollout.base import RolloutEngine, Sampling
from training.step3_ppo.scoring import start_rules, start_scoring
from training.utils.data.collate import collate_prompts
from training.utils.data.phases import PromptRow
from training.utils.engine.collectives import gathered
from training.utils.run.metrics import MetricsWriter, say
from training.utils.run.run_folder import RunFolder
from training.utils.run.seeds import derived_seed


@dataclass(frozen=True)
class Evaluation:
    """One number a held-out prompt, in the prompts' order. checks: of the rule, None where there is no rule."""

    scores: list[float]
    checks: list[float] | None

    @property
    def reward(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def check(self) -> float | None:
        return None if self.checks is None else sum(self.checks) / len(self.checks)


@dataclass(frozen=True)
class Evaluator:
    """Samples one response a held-out prompt, each from a seed of its own that stays the same in every evaluation."""

    roles: Roles
    rollout_engine: RolloutEngine
    prompts: Sequence[PromptRow]
    tokenizer: PreTrainedTokenizerBase
    checker: Rule | None
    sampling: Sampling
    experience: ExperienceSettings
    prompts_per_batch: int
    seed: int
    metrics: MetricsWriter
    folder: RunFolder
    columns: Sequence[str] = ()  # that any of the prompts carries
    with_greedy: bool = False
    shown: int = 0  # samples that are printed too

    def evaluate(self, step: int) -> Evaluation:
        """Return every prompt's score and check, of sampled responses; record their means, over all prompts and of each
        data source, and every sample. with_greedy: the same of greedy responses is recorded too."""
        sampled = self._everyones(step, self.sampling)
        figures = described(sampled, "eval")
        if self.with_greedy:
            greedy = self._everyones(step, replace(self.sampling, temperature=0.0))
            figures |= described(greedy, "eval_greedy")
            self.folder.append_samples([{**sample, "greedy": True} for sample in greedy])
        self.metrics.write(step, figures)
        self.metrics.write_samples(step, sampled)
        self.folder.append_samples(sampled)
        for sample in sampled[: self.shown]:
            say(f"sample: {told(sample)}", self.roles.actor.ranks.is_main)
        return Evaluation(
            scores=[sample["reward"] for sample in sampled],
            checks=[sample["check"] for sample in sampled] if self.checker else None,
        )

    def _everyones(self, step: int, sampling: Sampling) -> list[dict[str, Any]]:
        """All ranks' samples, in the order of the prompts."""
        ranks = self.roles.actor.ranks
        mine = list(range(ranks.rank, len(self.prompts), ranks.world_size))
        # Ranks may differ by one prompt: the shorter ones repeat their last and drop the copy, so that all ranks
        # run the same number of batches.
        per_rank = -(-len(self.prompts) // ranks.world_size)
        padded = mine + [mine[-1] if mine else 0] * (per_rank - len(mine))
        samples: dict[int, dict[str, Any]] = {}
        for start in range(0, per_rank, self.prompts_per_batch):
            for sample in self._samples(padded[start : start + self.prompts_per_batch], sampling):
                samples[sample["prompt_index"]] = sample
        everyone = {index: sample for part in gathered(samples) for index, sample in part.items()}
        return [{"step": step, **everyone[index]} for index in sorted(everyone)]

    def _samples(self, indices: Sequence[int], sampling: Sampling) -> list[dict[str, Any]]:
        rows = [self.prompts[index] for index in indices]
        batch = collate_prompts(rows, self.sampling.pad_token_id)
        device = self.roles.actor.ranks.device
        seeds = [derived_seed(self.seed, "evaluation", index) for index in indices]
        with self.roles.reading(), torch.no_grad():
            with self.rollout_engine.lent(self.roles.whole_actor) as model:
                rollout = self.rollout_engine.roll_out(
                    model, batch.prompt_ids_BP.to(device), batch.prompt_mask_BP.to(device), sampling, seeds
                )
            scored = start_scoring(rows, rollout, self.roles, self.experience).scored
        responses = rollout.texts(self.tokenizer.decode, self.sampling.end_token_id)
        samples = [
            {
                "prompt_index": index,
                "uid": row.uid,
                "prompt": row.prompt_text,
                "response": response,
                "reward": reward,
                "response_tokens": int(tokens),
                "ended": bool(ended),
                "ground_truth": row.reference,
                "columns": row.columns,
            }
            for index, row, response, reward, tokens, ended in zip(
                indices,
                rows,
                responses,
                scored.scores_B.tolist(),
                rollout.response_lengths_B,
                rollout.ended_B,
                strict=True,
            )
        ]
        for name, part_B in scored.parts.items():
            for sample, value in zip(samples, part_B.tolist(), strict=True):
                sample[f"reward/{name}"] = value
        if self.checker is not None:
            seconds = self.experience.rewards.timeout_seconds
            wait = start_rules({"--checker": self.checker}, rows, responses, self.columns, seconds, device)
            checks, values = wait()["--checker"]
            for place, sample in enumerate(samples):
                sample["check"] = checks[place]
                sample |= {f"check/{name}": own[place] for name, own in values.items()}
        return samples


def told(sample: dict[str, Any], characters: int = 100) -> str:
    """A sample in one line: the end of its prompt, the beginning of its response."""
    prompt, response = (" ".join(str(sample[name]).split()) for name in ("prompt", "response"))
    if len(prompt) > characters:
        prompt = "..." + prompt[-characters:]
    if len(response) > characters:
        response = response[:characters] + "..."
    return f"after {sample['step']} rollouts: {prompt} -> {response} (reward {sample['reward']:.3f})"


def described(samples: Sequence[dict[str, Any]], group: str) -> dict[str, float]:
    """Return means as `group`/NAME; where prompts come from several data sources, those of each too, as
    `group`_SOURCE/NAME."""
    figures = _means(samples, group)
    by_source: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_source.setdefault(str(sample["columns"].get("data_source", "")), []).append(sample)
    if len(by_source) > 1:
        for name, own in zip(_short_names(list(by_source)), by_source.values(), strict=True):
            figures |= _means(own, f"{group}_{name}")
    return figures


def _short_names(sources: Sequence[str]) -> list[str]:
    """What metrics call them: the last part of a path, the whole where two end alike."""
    short = [re.sub(r"[^\w.-]", "_", source.rsplit("/", 1)[-1]) for source in sources]
    whole = [re.sub(r"[^\w.-]", "_", source) for source in sources]
    return short if len(set(short)) == len(short) else whole


def _means(samples: Sequence[dict[str, Any]], group: str) -> dict[str, float]:
    def mean(name: str) -> float:
        values = [float(sample[name]) for sample in samples if name in sample]
        return sum(values) / len(values)

    figures = {
        f"{group}/reward": mean("reward"),
        f"{group}/response_tokens": mean("response_tokens"),
        f"{group}/ended_share": mean("ended"),
    }
    # A value that a function gives with some batches only has a mean over those.
    named = dict.fromkeys(name for sample in samples for name in sample)
    told = [name for name in named if name == "check" or name.startswith(("check/", "reward/"))]
    return figures | {f"{group}/{name}": mean(name) for name in told}


def standard_error_of_gain(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the standard error of mean(after - before), both on the same prompts in the same order."""
    gains = [new - old for old, new in zip(before, after, strict=True)]
    mean = sum(gains) / len(gains)
    variance = sum((gain - mean) ** 2 for gain in gains) / max(len(gains) - 1, 1)
    return (variance / len(gains)) ** 0.5
