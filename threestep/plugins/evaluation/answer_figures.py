"""Figures of scored answers: of one model's, or of two models' to the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.utils.rewards.figures import Figure, Sample, by_source, mean, of_each_prompt, several_of, value_names

if TYPE_CHECKING:
    from threestep.plugins.evaluation.answers import Scores
    from threestep.plugins.evaluation.model import Answer
    from training.utils.contracts.rows import PromptRow

_Z = 1.959963984540054  # normal quantile of 95 %


def answer_samples(rows: Sequence[PromptRow], answers: Sequence[Answer], scores: Scores) -> list[Sample]:
    """Return each answer as `sample_figures` takes it; as many adjacent ones to each prompt."""
    each = len(answers) // len(rows)
    samples: list[Sample] = []
    for place, answer in enumerate(answers):
        index, sample = divmod(place, each)
        row = rows[index]
        samples.append(
            {
                "prompt_index": index,
                "sample": sample,
                "uid": row.uid,
                "prompt": row.prompt_text,
                "ground_truth": row.reference,
                "columns": row.columns,
                "response": answer.text,
                "answer_tokens": len(answer.token_ids),
                "ended": answer.ended,
                **({} if answer.positions is None else {"positions": answer.positions, "paths": list(answer.paths)}),
                "reward": scores.total[place],
                **{
                    f"reward/{name}": numbers[place]
                    for name, numbers in scores.parts.items()
                    if not math.isnan(numbers[place])  # it applies
                },
            }
        )
    return samples


def answer_figures(sides: Sequence[Sequence[Sample]], seed: int) -> dict[str, Any]:
    """Return the figures of one model's samples, or of two models'. Several answers to a prompt count as their mean;
    intervals are over prompts. Rewards of 0 and 1, one a prompt, are shares."""
    figures: dict[str, Any] = {"prompts": len(of_each_prompt(sides[0], "reward"))}
    if len(sides) == 2:
        figures |= _compared([of_each_prompt(side, "reward") for side in sides], seed)
    for prefix, samples in zip(("", "baseline_"), sides, strict=False):
        figures |= _of_side(samples, prefix, seed)
        figures[f"{prefix}answer_tokens"] = sum(sample["answer_tokens"] for sample in samples) / len(samples)
        figures[f"{prefix}ended_share"] = sum(sample["ended"] for sample in samples) / len(samples)
        if "paths" in samples[0]:  # they were drawn side by side
            figures[f"{prefix}answer_positions"] = sum(sample["positions"] for sample in samples) / len(samples)
            figures[f"{prefix}with_paths"] = sum(bool(sample["paths"]) for sample in samples) / len(samples)
        for source, of_source in by_source(samples).items():
            figures[f"{prefix}{source}/prompts"] = len(of_each_prompt(of_source, "reward"))
            figures |= _of_side(of_source, f"{prefix}{source}/", seed)
    return figures


def _compared(rewards: Sequence[Sequence[Sequence[float]]], seed: int) -> dict[str, Any]:
    """Figures that compare the i-th answers of two models to each prompt."""
    gains = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(*rewards, strict=True)]
    every = [gain for of_prompt in gains for gain in of_prompt]
    wins, losses = sum(gain > 0 for gain in every), sum(gain < 0 for gain in every)
    ties = len(every) - wins - losses
    won = [sum((gain > 0) + 0.5 * (gain == 0) for gain in of_prompt) / len(of_prompt) for of_prompt in gains]
    win_rate = share(sum(won), len(won)) if len(every) == len(won) else mean(won, seed)
    gain = mean([sum(of_prompt) / len(of_prompt) for of_prompt in gains], seed)
    return {"win_rate": win_rate, "wins": wins, "ties": ties, "losses": losses, "reward_gain": gain}


def _of_side(samples: Sequence[Sample], prefix: str, seed: int) -> dict[str, Figure]:
    names = value_names(samples)
    # One reward that returns nothing else is the sum.
    figures: dict[str, Figure] = {}
    for name in ["reward", *(names if len(names) > 1 else ())]:
        by_prompt = of_each_prompt([sample for sample in samples if name in sample], name)
        means = [sum(values) / len(values) for values in by_prompt]
        is_share = all(len(values) == 1 for values in by_prompt) and set(means) <= {0.0, 1.0}
        figures[f"{prefix}{name}"] = share(sum(means), len(means)) if is_share else mean(means, seed)
        several = several_of(samples, name, seed).items()
        figures |= {f"{prefix}{name}_{key}": found for key, found in several if not key.startswith("mean@")}
    return figures


def share(successes: float, count: int) -> Figure:
    """successes / count with Wilson's interval (Wilson 1927; Brown, Cai and DasGupta 2001), which stays in [0, 1] and
    has a width even if all or none succeed. Counting a tie as half a success makes it wider than necessary."""
    p = successes / count
    scale = 1.0 + _Z**2 / count
    center = (p + _Z**2 / (2 * count)) / scale
    half = _Z / scale * math.sqrt(p * (1.0 - p) / count + _Z**2 / (4 * count**2))
    return Figure(p, center - half, center + half)
