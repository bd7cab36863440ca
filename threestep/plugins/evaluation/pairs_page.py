"""Answers as an HTML page in the form of the report: one file, no network, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from threestep.plugins.report.figures.sample_media import media_shown, sample_media
from threestep.plugins.report.pages.document import direction, document, table, tiles
from training.utils.contracts.rows import MEDIA_COLUMN

_MOST_BYTES = 2**22  # of media on a page

_ABOUT = "Figures on these prompts; 95%: the confidence interval."
_STYLE = """
.answer.best { border-left-color: var(--good); }
.answer.best .soft::after { content: " · higher score"; color: var(--good); }
"""


def page(
    title: str,
    figures: Mapping[str, Any],
    models: Sequence[str],
    samples: Sequence[Mapping[str, Any]],
    *,
    folder: Path,
    settings: Mapping[str, Any],
) -> str:
    """samples: each with a `prompt`, `answers` and `scores` (one per model), and a `ground_truth` or None. An answer
    that alone has the highest score is highlighted. folder: of the media of samples. settings: how the answers
    were drawn and scored."""
    several = len(models) > 1
    boxes = tiles([(_label(name, figures), str(value).replace("95 % from", "95%:")) for name, value in figures.items()])
    names = [
        (f"{'AB'[place]}{', the baseline' if place else ''}" if several else "model", name)
        for place, name in enumerate(models)
    ]
    of_run = [(name.replace("_", " "), str(value)) for name, value in settings.items() if value is not None]
    said = _label(title, {})
    said = escape(said[0].upper() + said[1:])
    media = _media(folder, samples)
    body = "".join(_sample(place, *both) for place, both in enumerate(zip(samples, media, strict=True), start=1))
    return document(
        title,
        f'<header><h1>{said}</h1></header><main><div class="card">{table([], [*names, *of_run])}</div>'
        f'<p class="soft above">{_ABOUT}</p>{boxes}'
        f"<section><h2>Responses</h2>{body}</section></main>"
        "<footer>Written by threestep evaluate.</footer>",
        _STYLE,
    )


def _label(name: str, figures: Mapping[str, Any]) -> str:
    """A figure's name in words, and whose it is where both models have it."""
    words = name.replace("_", " ")
    if name.startswith("baseline_"):
        return f"{words.removeprefix('baseline ')} (B)"
    return f"{words} (A)" if f"baseline_{name}" in figures else words


def _media(folder: Path, samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """HTML of each sample's media, until the page has `_MOST_BYTES` of them."""
    size = 0
    for sample in samples:
        uris = sample_media(folder, sample) if size < _MOST_BYTES else (None,) * len(sample.get(MEDIA_COLUMN, ()))
        size += sum(len(uri) for uri in uris if uri is not None)
        yield media_shown(uris)


def _sample(place: int, sample: Mapping[str, Any], media: str) -> str:
    scores = sample["scores"]
    best = max(scores)
    marked = len(scores) > 1 and scores.count(best) == 1
    answers = "".join(
        f'<div class="answer{" best" if marked and score == best else ""}">'
        f'<p class="soft">{"AB"[number]}, score {score:.3f}</p>'
        f'<div class="text" dir="{direction(str(answer))}" tabindex="0">{_safe(answer) or "(empty)"}</div></div>'
        for number, (answer, score) in enumerate(zip(sample["answers"], scores, strict=True))
    )
    truth = sample.get("ground_truth")
    wanted = "" if truth is None else f'<p class="soft">expected: {_safe(truth)}</p>'
    return (
        f'<div class="card sample"><p class="soft">prompt {place}</p>'
        f'<div class="text prompt" dir="auto" tabindex="0">{_safe(sample["prompt"])}</div>{media}{wanted}'
        f'<div class="answers">{answers}</div></div>'
    )


def _safe(text: Any) -> str:
    return escape(str(text).strip())
