"""Scores of the actor's responses to held-out prompts: before, during and after training, and a run's summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from training.step3_ppo.experience.scoring import draw_responses, start_functions, start_scoring
from training.utils.base.console import log
from training.utils.base.seeds import derived_seed
from training.utils.contracts.rows import MEDIA_COLUMN
from training.utils.contracts.run import EvaluationObserver
from training.utils.data.rows.documents import collate_prompts
from training.utils.engine.ranks.collectives import gathered
from training.utils.rewards.figures import by_source, of_each_prompt, several_of, value_names
from training.utils.setup.media import keep_media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.step3_ppo.contracts.settings import PpoSettings
    from training.step3_ppo.flags.arguments import PpoArguments
    from training.step3_ppo.parts.inputs import Inputs
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.media import SeenMedia
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine, Sampling
    from training.utils.contracts.rows import PromptRow
    from training.utils.rewards.calling import Rule
    from training.utils.run.metrics import MetricsWriter
    from training.utils.run.run_folder import RunFolder


class HeldOut(NamedTuple):
    """Prompts to evaluate. seen: the media of the prompts; None where no prompt has any. samples_per_prompt: of the
    sampled ones. with_greedy: also evaluates greedy responses, one a prompt. shown: number of samples to print.
    checker: the flag. are_replayed: the responses to them are of another run, whose weights drew them."""

    prompts: Sequence[PromptRow]
    prompts_per_batch: int
    seen: SeenMedia | None = None
    samples_per_prompt: int = 1
    with_greedy: bool = False
    shown: int = 0
    checker: str | None = None
    are_replayed: bool = False

    @classmethod
    def of_run(cls, inputs: Inputs, ppo: PpoArguments, are_replayed: bool) -> HeldOut:
        """Return the held-out prompts of a run with the evaluation settings of its flags."""
        return cls(
            inputs.eval,
            ppo.per_device_eval_batch_size,
            inputs.seen,
            samples_per_prompt=ppo.val_samples,
            with_greedy=ppo.val_greedy,
            shown=ppo.show_samples,
            checker=ppo.checker,
            are_replayed=are_replayed,
        )


@dataclass(frozen=True)
class Evaluator:
    """Sample responses to each held-out prompt, each with its own seed, which is the same in every evaluation."""

    roles: Roles
    rollout_engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    checker: Rule | None
    settings: PpoSettings
    held_out: HeldOut
    metrics: MetricsWriter
    folder: RunFolder
    observer: EvaluationObserver = EvaluationObserver()

    def evaluate(self, step: int) -> PpoEvaluation | None:
        """Return the mean score and check of each prompt's sampled responses; record every sample and the figures over
        all prompts and per data source. None, and nothing recorded of them, without held-out prompts, and where the
        responses to them are another run's."""
        if not len(self.held_out.prompts):
            return None
        if self.held_out.are_replayed:
            self._pass_over()
            self.metrics.write_beside(step, self.observer.figures(step))
            return None
        keep_media(self.folder, self.held_out.seen, self.held_out.prompts)
        sampled = self._samples_of_all_ranks(step, self.settings.drawing.sampling, self.held_out.samples_per_prompt)
        figures = evaluation_figures(sampled, "eval", self.settings.seed)
        if self.held_out.with_greedy:
            greedy = self._samples_of_all_ranks(step, replace(self.settings.drawing.sampling, temperature=0.0), 1)
            figures |= evaluation_figures(greedy, "eval_greedy", self.settings.seed)
            self.folder.append_samples([{**sample, "greedy": True} for sample in greedy])
        self.metrics.write(step, figures)
        self.metrics.write_beside(step, self.observer.figures(step))
        log(f"{self.settings.method}: {evaluation_line(step, figures)}", self.roles.actor.ranks.is_main)
        self.metrics.write_samples(step, sampled)
        self.folder.append_samples(sampled)
        self.observer.samples(step, sampled)
        for sample in sampled[: self.held_out.shown]:
            log(f"sample: {sample_line(sample)}", self.roles.actor.ranks.is_main)
        return PpoEvaluation(
            scores=[_mean(values) for values in of_each_prompt(sampled, "reward")],
            checks=[_mean(values) for values in of_each_prompt(sampled, "check")] if self.checker else None,
        )

    def _pass_over(self) -> None:
        """Take the other run's responses of this evaluation: rollouts are numbered in the order of drawing."""
        sampled, held_out = self.settings.drawing.sampling, self.held_out
        greedy = [(replace(sampled, temperature=0.0), 1)] if held_out.with_greedy else []
        with self.roles.reading(), torch.no_grad():
            for sampling, each in [(sampled, held_out.samples_per_prompt), *greedy]:
                for prompts in self._batches():
                    self._drawn(prompts, sampling, each)

    def _batches(self) -> list[list[int]]:
        """This rank's prompts. Ranks may differ by one: those with fewer repeat their last and drop the copy, so that
        all run the same number of batches."""
        ranks, count, size = self.roles.actor.ranks, len(self.held_out.prompts), self.held_out.prompts_per_batch
        mine = list(range(ranks.rank, count, ranks.world_size))
        per_rank = -(-count // ranks.world_size)
        padded = mine + [mine[-1] if mine else 0] * (per_rank - len(mine))
        return [padded[start : start + size] for start in range(0, per_rank, size)]

    def _drawn(self, prompts: Sequence[int], sampling: Sampling, each: int) -> Rollout:
        own = [self.held_out.prompts[index] for index in prompts]
        batch = collate_prompts(own, self.settings.drawing.sampling.pad_token_id)
        # The first sample has the seed that it has where it is the only one.
        places = [(index, sample) for index in prompts for sample in range(each)]
        seeds = [derived_seed(self.settings.seed, "evaluation", *place[: 1 + bool(place[1])]) for place in places]
        layout = self.settings.experience.layout
        return draw_responses(self.rollout_engine, self.roles, batch, sampling, seeds=seeds, layout=layout)

    def _samples_of_all_ranks(self, step: int, sampling: Sampling, each: int) -> list[dict[str, Any]]:
        """Return all ranks' samples, in the order of the prompts, `each` a prompt."""
        samples: dict[tuple[int, int], dict[str, Any]] = {}
        for prompts in self._batches():
            for sample in self._samples(prompts, sampling, each):
                samples[sample["prompt_index"], sample["sample"]] = sample
        found = {index: sample for part in gathered(samples) for index, sample in part.items()}
        return [{"step": step, **found[index]} for index in sorted(found)]

    def _samples(self, prompts: Sequence[int], sampling: Sampling, each: int) -> list[dict[str, Any]]:
        own = [self.held_out.prompts[index] for index in prompts]
        indices = [(index, sample) for index in prompts for sample in range(each)]
        rows = [self.held_out.prompts[index] for index, _ in indices]
        with self.roles.reading(), torch.no_grad():
            rollout = self._drawn(prompts, sampling, each)
            scored = start_scoring(own, rollout, self.roles, self.settings.experience).scored
        ends = self.settings.drawing.sampling.end_token_ids
        responses = rollout.texts(self.tokenizer.decode, ends)
        columns: dict[str, Sequence[Any]] = {
            "prompt_index": [index for index, _ in indices],
            "sample": [sample for _, sample in indices],
            "uid": [row.uid for row in rows],
            "prompt": [row.prompt_text for row in rows],
            "response": responses,
            "reward": scored.scores_B.tolist(),
            "response_tokens": rollout.response_lengths_B.tolist(),
            "ended": rollout.ended_B.tolist(),
            "ground_truth": [row.reference for row in rows],
            "columns": [row.columns for row in rows],
            **{f"reward/{name}": part_B.tolist() for name, part_B in scored.parts.items()},
        }
        if rollout.media is not None:
            columns[MEDIA_COLUMN] = [list(row.media_digests) for row in rows]
        if rollout.conversations is not None:
            columns |= conversation_columns(rollout, self.tokenizer.decode, ends)
        if self.checker is not None:
            rules, rewards = {"--checker": self.checker}, self.settings.experience.scoring.rewards
            wait = start_functions(rules, own, responses, rollout, rewards=rewards, are_complete=True)
            checks, values = wait()["--checker"]
            columns |= {"check": checks, **{f"check/{name}": own for name, own in values.items()}}
        samples = [dict(zip(columns, entries, strict=True)) for entries in zip(*columns.values(), strict=True)]
        # A reward that does not apply to a response is not in its sample.
        return [
            {name: value for name, value in sample.items() if not (isinstance(value, float) and math.isnan(value))}
            for sample in samples
        ]


def conversation_columns(
    rollout: Rollout, decode: Callable[[torch.Tensor], Any], end_token_ids: Collection[int]
) -> dict[str, Sequence[Any]]:
    """Return the columns of samples of conversations: prompts and responses as the model had them, with calls and their
    answers, and the role of each part; the last turn, which rewards read; numbers of turns and forks, the limit that
    cut them, and the environments' figures."""
    assert rollout.conversations is not None
    count = range(len(rollout.conversations.records))
    return {
        "prompt": [str(decode(rollout.prompt_of(index))) for index in count],
        "response": rollout.whole_texts(decode, end_token_ids),
        "parts": rollout.part_texts(decode, end_token_ids),
        "last_turn": rollout.texts(decode, end_token_ids),
        "turns": [record.turns for record in rollout.conversations.records],
        "forks": [record.forks for record in rollout.conversations.records],
        "cut_by": [record.cut for record in rollout.conversations.records],
        "environment_figures": [dict(record.figures) for record in rollout.conversations.records],
    }


def evaluation_line(step: int, figures: Mapping[str, float]) -> str:
    """Return the main figures of an evaluation as one line. step: rollouts done."""
    cut_share = 1.0 - figures["eval/ended_share"]
    parts = [f"reward {figures['eval/reward']:.3f}"]
    if "eval/check" in figures:
        parts.append(f"checker {figures['eval/check']:.3f}")
    parts.append(f"{figures['eval/response_tokens']:.1f} tokens a response")
    if cut_share > 0:
        parts.append(f"{cut_share:.0%} cut {'by a limit' if 'eval/turns' in figures else 'at the length limit'}")
    return f"evaluation {f'after rollout {step:,}' if step else 'before training'}: {', '.join(parts)}"


def sample_line(sample: dict[str, Any], characters: int = 100) -> str:
    """Return a sample as one line: the end of its prompt, the beginning of its response."""
    prompt, response = (" ".join(str(sample[name]).split()) for name in ("prompt", "response"))
    if len(prompt) > characters:
        prompt = "..." + prompt[-characters:]
    if len(response) > characters:
        response = response[:characters] + "..."
    when = f"after rollout {sample['step']}" if sample["step"] else "before training"
    return f"{when}: {prompt} -> {response} (reward {sample['reward']:.3f})"


def evaluation_figures(samples: Sequence[dict[str, Any]], group: str, seed: int) -> dict[str, float]:
    """Return means as `group`/NAME; with several data sources, also those of each, as `group`_SOURCE/NAME; and with
    several samples of a prompt, their `several_figures`, with the ends of their 95 % intervals."""
    figures = _means(samples, group, seed)
    for name, own in by_source(samples).items():
        figures |= _means(own, f"{group}_{name}", seed)
    return figures


def _means(samples: Sequence[Mapping[str, Any]], group: str, seed: int) -> dict[str, float]:
    def mean(name: str) -> float:
        return _mean([float(sample[name]) for sample in samples if name in sample])

    figures = {
        f"{group}/reward": mean("reward"),
        f"{group}/response_tokens": mean("response_tokens"),
        f"{group}/ended_share": mean("ended"),
    }
    if "turns" in samples[0]:
        figures[f"{group}/turns"] = mean("turns")
    # The mean of a value is over the samples that have it.
    own = value_names(samples)
    figures |= {f"{group}/{name}": mean(name) for name in own}
    for name in ["reward", *own]:
        figures |= {
            f"{group}/{name}_{key}{end}": value
            for key, got in several_of(samples, name, seed).items()
            for end, value in (("", got.value), ("_low", got.low), ("_high", got.high))
            if end or not key.startswith("mean@")  # it is the figure without a suffix
        }
    return figures


@dataclass(frozen=True)
class PpoEvaluation:
    """One evaluation: a number for each held-out prompt, in the prompts' order. checks: of --checker, or None."""

    scores: list[float]
    checks: list[float] | None


@dataclass(frozen=True)
class PpoResult:
    """The evaluations before training (None without one) and after it (None without held-out prompts).

    signs: that the run has diverged, to be put behind the last line; "" for none
    """

    before: PpoEvaluation | None
    after: PpoEvaluation | None
    seconds: float
    signs: str = ""

    def summary(self) -> dict[str, Any]:
        """Return summary.json; without a checker its figures are absent, without held-out prompts all but the time."""
        before, after = self.before, self.after
        if after is None:
            return {"held_out_prompts": 0, "seconds": self.seconds}
        summary: dict[str, Any] = {"reward_after": _mean(after.scores)}
        if after.checks is not None:
            summary["checker_after"] = _mean(after.checks)
        if before is not None:
            summary["reward_before"] = _mean(before.scores)
            summary["reward_standard_error"] = standard_error_of_gain(before.scores, after.scores)
        if before is not None and before.checks is not None and after.checks is not None:
            summary["checker_before"] = _mean(before.checks)
            summary["checker_standard_error"] = standard_error_of_gain(before.checks, after.checks)
        return {**summary, "held_out_prompts": len(after.scores), "seconds": self.seconds}


def standard_error_of_gain(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the standard error of mean(after - before), both on the same prompts in the same order."""
    gains = [new - old for old, new in zip(before, after, strict=True)]
    mean = _mean(gains)
    variance = sum((gain - mean) ** 2 for gain in gains) / max(len(gains) - 1, 1)
    return (variance / len(gains)) ** 0.5


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def closing_sentence(summary: dict[str, Any], folder: RunFolder, val_only: bool) -> str:
    """Sum up the run in one line."""
    seconds = summary["seconds"]
    if not summary["held_out_prompts"]:
        return f"step 3: trained in {seconds:.0f} s, without an evaluation; the model is in {folder.model}"
    after = f"{summary['reward_after']:.3f}"
    if val_only:
        return f"step 3: mean reward on {summary['held_out_prompts']} held-out prompts {after}; nothing was trained"
    gain = after
    if "reward_before" in summary:
        error = summary["reward_standard_error"]
        gain = f"{summary['reward_before']:.3f} -> {after} (standard error of the gain {error:.3f})"
    return f"step 3: mean reward on held-out prompts {gain} in {seconds:.0f} s; the model is in {folder.model}"
