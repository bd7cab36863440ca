"""Answers as an HTML page: one file, no network, light and dark."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 72rem; margin: 0 auto; padding: 1rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .1rem 1rem .1rem 0; vertical-align: top; }
article { border-top: 1px solid #8886; padding: .8rem 0; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: .8rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; font: inherit; }
.answers > div { border: 1px solid #8886; border-radius: .4rem; padding: .5rem .7rem; }
.answers > .best { border-color: #2a9d5c; box-shadow: inset 3px 0 #2a9d5c; }
small { opacity: .75; }
"""


def page(title: str, figures: Mapping[str, Any], models: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> str:
    """samples: each with a `prompt`, `answers` and `scores` (one per model), and a `ground_truth` or None. An answer
    that alone has the highest score is highlighted."""
    table = "".join(f"<tr><th>{_safe(name)}</th><td>{_safe(value)}</td></tr>" for name, value in figures.items())
    names = "".join(f"<tr><th>{'AB'[place]}</th><td>{_safe(name)}</td></tr>" for place, name in enumerate(models))
    body = "".join(_article(place, sample) for place, sample in enumerate(samples, start=1))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{_safe(title)}</title>'
        f"<style>{_STYLE}</style><h1>{_safe(title)}</h1><table>{names}{table}</table>{body}</html>\n"
    )


def _article(place: int, sample: Mapping[str, Any]) -> str:
    scores = sample["scores"]
    best = max(scores)
    marked = len(scores) > 1 and scores.count(best) == 1
    boxes = "".join(
        f'<div class="{"best" if marked and score == best else ""}"><small>{"AB"[number]}, score {score:.3f}</small>'
        f"<pre>{_safe(answer)}</pre></div>"
        for number, (answer, score) in enumerate(zip(sample["answers"], scores, strict=True))
    )
    truth = sample.get("ground_truth")
    wanted = "" if truth is None else f"<small>ground truth: {_safe(truth)}</small>"
    prompt = f"<small>{place}</small><pre>{_safe(sample['prompt'])}</pre>"
    return f'<article>{prompt}{wanted}<div class="answers">{boxes}</div></article>'


def _safe(text: Any) -> str:
    return html.escape(str(text).strip())
