"""An explanation as one HTML page: what happened in words and tables, then every token, coloured by any column.

Columns go into the page as compressed numbers, and are unpacked by its script when they are first needed: tokens are
written out as they come into view, so that 512 sequences of 4,096 tokens open at once.
"""

from __future__ import annotations

import base64
import gzip
import math
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.explain.table import COLUMNS
from threestep.plugins.explain.text import change, number, summary
from threestep.plugins.explain.turns import parts_of
from threestep.plugins.report.figures.sample_media import MEDIA_STYLE
from threestep.plugins.report.pages.document import document, scrolled, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threestep.plugins.explain.explanation import Explanation, NamedLesson

SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
_FIRST_LESSONS, _MOST_LESSONS, _LESSON_TEXT = 12, 100, 300
_NOT_COLOURED = ("sequence", "place", "token_id", "text", "role", "speaker", "turn")
_OWN_STYLE = """
.controls { position: sticky; top: 0; z-index: 2; background: var(--back); padding: 8px 0; display: flex;
  flex-wrap: wrap; gap: 6px 14px; align-items: center; border-bottom: 1px solid var(--edge); font-size: 14px; }
.controls select { font: inherit; font-size: 14px; max-width: 16em; color: var(--text); background: var(--card);
  border: 1px solid var(--edge); border-radius: 6px; min-height: 28px; }
.scale { display: inline-flex; align-items: center; gap: 6px; font-size: 13px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.scale i { width: 120px; height: 12px; border-radius: 3px; border: 1px solid var(--edge); }
#told { flex-basis: 100%; min-height: 3em; font-size: 13px; font-variant-numeric: tabular-nums; margin: 0; }
#told b { font-weight: 600; }
.beside { display: grid; gap: 14px; grid-template-columns: repeat(3, minmax(0, 1fr)); }
.beside.even { grid-template-columns: repeat(2, minmax(0, 1fr)); }
#sequences > div + div, .sequence + .sequence { margin-top: 14px; } .beside .sequence + .sequence { margin-top: 0; }
.sequence { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 10px 12px;
  min-width: 0; }
.sequence h3 { font-weight: 550; } .sequence .soft { margin-bottom: 4px; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; line-height: 1.75; font-size: 14px;
  max-height: 30em; overflow-y: auto;
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.tokens hr { border: 0; border-top: 1px dashed var(--edge); margin: 6px 0; }
.tokens span { border-radius: 3px; } .tokens .still { color: var(--soft); }
.tokens .said, .tokens .heard { grid-template-columns: 112px 1fr; }
.tokens .who { color: var(--soft); font: 400 13px/1.5 system-ui, sans-serif; white-space: pre-line; }
.tokens .faded { opacity: .3; } .tokens .at { outline: 2px solid var(--text); }
.lesson b { font-weight: 600; font-variant-numeric: tabular-nums; }
.lesson .text { margin: 4px 0 0; font-size: 13px; white-space: pre-line; overflow-wrap: anywhere; }
@media (max-width: 760px) { .beside, .beside.even { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 560px) { .controls label { flex: 1 1 28%; font-size: 12px; min-width: 0; }
  .controls select { display: block; width: 100%; } }
.said-lines { padding-left: 32px; } header + main > ul { margin: 16px 0 0; }
.parts { display: flex; height: 14px; border-radius: 4px; overflow: hidden; margin: 8px 0; }
"""


def page(found: Explanation) -> str:
    """Return the whole page."""
    title = found.table.title
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary(found))
    notes = "".join(f'<p class="warning">{escape(note)}</p>' for note in found.table.notes)
    body = (
        f"<header><h1>What one step did, token by token</h1><p>{escape(title)}: along its update, the loss on the "
        f"step's own batch {change(found)} (slope times update).</p>{notes}</header><main>"
        f'<ul class="card said-lines">{lines}</ul>{_rules(found)}{_held_out(found)}{_lessons(found)}'
        "<h2>Every token</h2><p>A share is a token's part of the change in the loss along the update. The shares add "
        "up to the whole change. Blue (below 0): the token made the loss fall; orange: it made the loss rise. Point at "
        'a token, or use the arrow keys in a sequence, to see its numbers; <a href="#columns">what they mean</a>.'
        '</p><div class="controls" id="controls"></div><div '
        f'id="sequences"></div><h2 id="columns">Columns</h2>{_legend(found)}</main><footer>Written by threestep audit '
        "explain.</footer>"
    )
    data, late = _data(found)
    return document(f"Explained: {title}", body, _OWN_STYLE + MEDIA_STYLE, [SCRIPT], data=data, late=late)


def _rules(found: Explanation) -> str:
    if not found.rules:
        return ""
    held = found.held_out
    turned = f"tokens turned, of {len(found.rules[0].turned_T):,}"
    head = ["rule", "cosine of the updates", "ratio of lengths", "cosine of the gradients", turned]
    head += ["held-out, nats"] if held else []
    said = (
        "Each rule's update compared with the real one: their cosine, the ratio of their lengths, the cosine of the "
        "gradients, and the tokens that the loss pushes the other "
        f"way{'; then what it would have done to all held-out responses, to first order' if held else ''}."
    )
    rows = [
        [
            each.rule.name,
            number(each.cosine),
            number(each.size),
            number(each.gradient_cosine),
            f"{int(each.turned_T.sum()):,}",
            *([number(float(held.by_rule[place].sum()))] if held else []),
        ]
        for place, each in enumerate(found.rules)
    ]
    if held:
        rows.insert(0, ["the real step", "1", "1", "1", "0", number(float(held.change.first_order.sum()))])
    found_rules = scrolled(table(head, rows, range(1, len(head))), "rules")
    return f"<h2>The same step under another rule</h2><p>{said}</p>{found_rules}"


def _held_out(found: Explanation) -> str:
    held = found.held_out
    if held is None:
        return ""
    head = ["response", "before", "to first order", "actual"]
    said = "Log-probabilities before the step, and their change in the step, in nats."
    rows = [
        [
            name,
            *(
                number(float(values[place]))
                for values in (held.change.before, held.change.first_order, held.change.real)
            ),
        ]
        for place, name in enumerate(held.rows.names)
    ]
    return f"<h2>Held-out responses</h2><p>{said}</p>{scrolled(table(head, rows, range(1, 4)), 'held-out responses')}"


def _lessons(found: Explanation) -> str:
    if found.taught is None:
        return ""
    told = (
        "An effect is what leaving the sequence out would remove, to first order; a share is its part of the change. "
        f"The change of all held-out responses together: {number(found.taught.told)} nats from these sequences, "
        f"{number(found.taught.first_order)} from everything that moved the weights in these steps, "
        f"{number(found.taught.real)} actually."
    )
    short, lessons = _without_folders([each.place for each in found.named_lessons]), found.named_lessons
    cards = [_lesson(each, place) for each, place in zip(lessons, short, strict=True)]
    below = [card for card, each in zip(cards, lessons, strict=True) if each.effect < 0.0]
    parts = [
        (f"the next {len(cards[_FIRST_LESSONS:_MOST_LESSONS]):,}", cards[_FIRST_LESSONS:_MOST_LESSONS]),
        ("those that taught the opposite most", below[: -_FIRST_LESSONS - 1 : -1]),
    ]
    more = "".join(
        f"<details><summary>{escape(words)}</summary>{''.join(own)}</details>" for words, own in parts if own
    )
    return f"<h2>What taught it</h2><p>{escape(told)}</p>{''.join(cards[:_FIRST_LESSONS])}{more}"


def _lesson(lesson: NamedLesson, place: str) -> str:
    parts = [lesson.name, place, f"step {lesson.step:,}", f"share {number(lesson.share)}"]
    facts, text = escape(" · ".join(filter(None, parts))), escape(lesson.text[:_LESSON_TEXT])
    effect = f'<b>{number(lesson.effect)} nats</b> <span class="soft">{facts}</span>'
    return f'<article class="card lesson"><p class="paths">{effect}</p><p class="text">{text}</p></article>'


def _without_folders(places: Sequence[str]) -> list[str]:
    """Places by their files' names alone, where no two files have the same."""
    files = {place.rpartition(", ")[0] for place in places}
    if len({file.rpartition("/")[2] for file in files}) < len(files):
        return list(places)
    return [place.rpartition("/")[2] for place in places]


def _legend(found: Explanation) -> str:
    rows = [[name, words] for name, words in COLUMNS.items() if name in found.table.tokens]
    return scrolled(table(["column", "meaning"], rows, numbers=()), "columns")


def _data(found: Explanation) -> tuple[dict[str, Any], dict[str, str]]:
    """The data that the page opens with, and the other columns."""
    tokens, sequences = found.table.tokens, found.table.sequences
    texts, text_T = np.unique(tokens["text"].astype(str), return_inverse=True)
    roles, role_T = np.unique(tokens["role"].astype(str), return_inverse=True)
    columns = {name: tokens[name] for name in tokens if name not in _NOT_COLOURED}
    for place, rule in enumerate(found.rules):
        own = rule.slopes.logprobs_T
        if own is not None:
            columns[f"slope under rule {place + 1}: {rule.rule.name}"] = own
    largest = {name: float(np.nanmax(np.abs(values), initial=0.0)) or 1.0 for name, values in columns.items()}
    if "from" in sequences:
        places = np.array(_without_folders(list(map(str, sequences["from"]))), dtype=object)
        sequences = {**sequences, "from": places}
    whole: dict[str, Any] = {
        "texts": list(map(str, texts)),
        "roles": list(map(str, roles)),
        "columns": list(columns),
        "largest": list(largest.values()),
        "ranges": [_range(values) for values in columns.values()],
        "sequences": [
            {name: _plain(values[place]) for name, values in sequences.items()}
            | _parts(found, place)
            | ({"media": found.media[place]} if found.media else {})
            for place in range(len(sequences["tokens"]))
        ],
    }
    # An element each, which nobody reads before it is needed. Three digits are shown, and half precision has them.
    parts = {
        f"column_{place}": _packed((columns[name] / largest[name]).astype("<f2")) for place, name in enumerate(columns)
    }
    texts_and_roles = {
        "text": _packed(text_T.astype("<i4" if len(texts) > 65536 else "<u2")),
        "role": _packed(role_T.astype("<u1")),
    }
    first = f"column_{list(columns).index('share')}"
    return {"explained": whole, **texts_and_roles, first: parts.pop(first)}, parts


def _parts(found: Explanation, sequence: int) -> dict[str, Any]:
    """The parts of a conversation; nothing for a sequence in which the model speaks once."""
    tokens, sequences = found.table.tokens, found.table.sequences
    if "turns" not in sequences or sequences["turns"][sequence] < 2:
        return {}
    first, last = np.searchsorted(tokens["sequence"], [sequence, sequence + 1])
    return {"parts": parts_of(tokens["speaker"][first:last], tokens["share"][first:last])}


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(gzip.compress(values.tobytes(), 6)).decode()


def _range(values: np.ndarray) -> list[float]:
    """The least and the largest colour: the 1st and the 99th percentile of what is not 0."""
    known = values.astype(np.float64)
    known = known[np.isfinite(known) & (known != 0.0)]
    return [0.0, 0.0] if not len(known) else [float(np.percentile(known, 1)), float(np.percentile(known, 99))]


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
