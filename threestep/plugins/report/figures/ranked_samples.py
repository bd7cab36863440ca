"""Ranked responses in a run's samples: the rows that a report shows, and their scores. Plain text, not yet escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threestep.plugins.report.figures.reading import StepRun, finite
from threestep.plugins.report.figures.sample_media import sample_media
from threestep.plugins.report.figures.tables import FIRST, clipped, text_of

_WORST, _FIRST = 6, 4  # rows to show


@dataclass(frozen=True)
class Change:
    """A number of one run before and after training; None: unknown, or not finite."""

    run: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class RankedSample:
    """A prompt and its ranked responses. why: the heading that it is shown under; responses: (label, text, score in
    each run), best first; media: see `sample_media`."""

    why: str
    prompt: str
    responses: tuple[tuple[str, str, tuple[Change, ...]], ...]
    margins: tuple[Change, ...]
    media: tuple[str | None, ...]


def has_ranked_samples(step: StepRun) -> bool:
    """True if its samples are ranked responses."""
    return any("responses" in sample for _, samples in step.samples for sample in samples[:1])


def ranked_samples(steps: Sequence[StepRun]) -> list[RankedSample]:
    """Rows of the first run with every run's scores: those with the lowest margins at its last evaluation, then the
    first; rows that every run has, if there are any."""
    groups = [[{_key(sample): sample for sample in samples} for _, samples in step.samples] for step in steps]
    last = groups[0][-1]
    keys = [key for key in last if all(key in of_run[-1] for of_run in groups)] or list(last)
    margins = {key: finite(last[key].get("margin")) for key in keys}
    ordered = sorted((margin, key) for key, margin in margins.items() if margin is not None)
    when = "after training" if len(groups[0]) > 1 else "before training"
    picked = {key: f"Judged worst {when}" for _, key in ordered[:_WORST]}
    picked |= {key: FIRST for key in [key for key in keys if key not in picked][:_FIRST]}
    return [_row(why, key, steps, groups) for key, why in picked.items()]


def margins_along(step: StepRun) -> list[tuple[str, tuple[str | None, ...], list[tuple[str, float | None]]]]:
    """(prompt, its media, its margin at each evaluation) of the first rows."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for sample in step.first_prompts:
        by_prompt.setdefault(_key(sample), []).append(sample)
    return [
        (
            clipped(text_of(ranked[0].get("prompt"))),
            sample_media(step.path, ranked[0]),
            [(f"step {sample.get('step')}", finite(sample.get("margin"))) for sample in ranked],
        )
        for ranked in by_prompt.values()
    ]


def _row(
    why: str, key: str, steps: Sequence[StepRun], groups: Sequence[Sequence[Mapping[str, Mapping[str, Any]]]]
) -> RankedSample:
    sample = groups[0][-1][key]
    texts = _listed(sample.get("responses"))

    def changes(read: Any) -> tuple[Change, ...]:
        values = [[finite(read(group.get(key, {}))) for group in two] for two in groups]
        return tuple(
            Change(step.run, two[0], two[1] if len(two) > 1 else None) for step, two in zip(steps, values, strict=True)
        )

    def score(place: int) -> Any:
        return lambda found: dict(enumerate(_listed(found.get("scores")))).get(place)

    labels = ("chosen", "rejected") if len(texts) == 2 else [f"ranked {place}" for place in range(1, len(texts) + 1)]
    responses = tuple(
        (label, clipped(text_of(text)), changes(score(place)))
        for place, (label, text) in enumerate(zip(labels, texts, strict=True))
    )
    return RankedSample(
        why,
        clipped(text_of(sample.get("prompt"))),
        responses,
        changes(lambda found: found.get("margin")),
        sample_media(steps[0].path, sample),
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _key(sample: Mapping[str, Any]) -> str:
    return f"{sample.get('uid', '')}|{sample.get('prompt')}"
