"""A tokenized row for people to read: as one JSON object, or as text with the tokens that carry loss marked.

The code that lays out rows for training lays them out here too (`documents`, `layout.rows`). Prints nothing; the caller
passes the decoder.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
import torch

from training.utils.contracts.documents import Document, TokenSequence, plain
from training.utils.contracts.rows import MEDIA_COLUMN, PromptRow, ResponsesRow, Row, SentenceRow
from training.utils.data.rows.documents import responses_document, sentence_document
from training.utils.layout.rows import packed_rows

Decode = Callable[[Sequence[int]], str]
GoOn = Callable[[Sequence[int], Sequence[int], Decode], str]
COLOUR, COLOUR_END = "\033[32m", "\033[0m"
BRACKETS = ("\u27e6", "\u27e7")  # white square brackets, rare in texts
_NARROWEST_COLUMN = 16
SHOWN_TOKENS = 4096  # of a piece for people: of a longer one, the first and the last half of these
SHOWN_CHARACTERS = 16_384  # likewise of a value beside a prompt
_BEFORE_TOKENS = 32  # that decide how a text goes on


def document_of(row: Row) -> Document:
    """The row as training lays it out when it is alone in a batch. The targets: all responses of a pair (as in DPO),
    all but the first token of unsupervised text, nothing of a prompt of phase 3."""
    if isinstance(row, SentenceRow):
        return sentence_document(row)
    if isinstance(row, ResponsesRow):
        return responses_document(row, are_targets=True)
    ids = row.flipped_prompt_ids[::-1] if isinstance(row, PromptRow) else row.input_ids
    is_target = torch.full((len(ids),), not isinstance(row, PromptRow))
    is_target[0] = False
    media = row.media if isinstance(row, PromptRow) else ()
    return plain(TokenSequence(torch.tensor(ids.copy(), dtype=torch.int64), is_target, media))


def layout_of(document: Document) -> dict[str, list]:
    """A document alone in a row. One number per token: `input_ids`, `loss_mask` (1 if the token is to be predicted),
    `position_ids`, `segment_ids`; where media count by their sides also `position_axes`, along time, height and width.
    Per pair of segments: `visible`, 1 if the segment of the line sees that of the
    column. Per sequence: `sequence_ends`, the index of its last token."""
    rows = packed_rows([[document]], pad_token_id=0)  # as wide as the document: there is no padding
    count = len(document.segments)
    visible_SS = torch.ones(1, 1) if rows.segments is None else rows.segments.visible_NSS[0, :count, :count]
    axes_3NT = None if rows.media is None else rows.media.axes_3NT
    loss_mask_T = torch.cat([segment.tokens.is_target for segment in document.segments])
    return {
        "input_ids": rows.input_ids_NT[0].tolist(),
        "loss_mask": loss_mask_T.int().tolist(),
        "position_ids": rows.position_ids_NT[0].tolist(),
        **({} if axes_3NT is None else {"position_axes": axes_3NT[:, 0].tolist()}),
        "segment_ids": rows.segment_ids_NT[0].tolist(),
        "visible": visible_SS.int().tolist(),
        "sequence_ends": rows.end_B.tolist(),
    }


def row_as_data(row: Row, decode: Decode) -> dict[str, Any]:
    """The row's layout and texts as JSON values. Phase 2 has `prompt`, `responses` (best first), and the best and the
    worst again as `chosen` and `rejected`. Other phases have `text`, and `loss_texts`: the runs that carry loss."""
    document = document_of(row)
    data: dict[str, Any] = {"row_id": row.row_id, "tokens": row.length_tokens, **layout_of(document)}
    if media := [asdict(medium) for segment in document.segments for medium in segment.tokens.media]:
        data[MEDIA_COLUMN] = media
    if isinstance(row, ResponsesRow):
        prompt, responses = response_texts(row, decode)
        margins = None if row.margins is None else row.margins.tolist()
        return {**data, "prompt": prompt, "chosen": responses[0], "rejected": responses[-1], "responses": responses,
                "margins": margins}  # fmt: skip
    runs = runs_of(data["input_ids"], data["loss_mask"], decode)
    data["text"] = decode(data["input_ids"])
    data["loss_texts"] = [text for text, carries_loss in runs if carries_loss]
    if isinstance(row, PromptRow):
        data |= {name: getattr(row, name) for name in ("prompt_text", "reference", "columns", "uid")}
    return data


def source_of(row_id: int, described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row's dataset, its part (training or evaluation), and its index there. described: the manifest's `sources`."""
    for source in described:
        index = row_id - source["first_row_id"]
        for part, rows in (("training", source["training_rows"]), ("evaluation", source["own_evaluation_rows"])):
            if 0 <= index < rows:
                return {"source": source["name"], "source_part": part, "index": index}
            index -= rows
    raise AssertionError(f"row id {row_id} is not in any source")


# Ids -> texts.


def continuation(before: Sequence[int], ids: Sequence[int], decode: Decode) -> str:
    """The text that `ids` add after `before`. Decoded alone, they may lose the space that they begin with."""
    before = before[-_BEFORE_TOKENS:]
    start, whole = decode(before) if before else "", decode([*before, *ids])
    return whole[len(start) :] if whole.startswith(start) else decode(ids)


def shown_continuation(before: Sequence[int], ids: Sequence[int], decode: Decode) -> str:
    """`continuation`, without the middle of more than `SHOWN_TOKENS`."""
    if len(ids) <= SHOWN_TOKENS:
        return continuation(before, ids, decode)
    half = SHOWN_TOKENS // 2
    left_out = f"\n[{len(ids) - SHOWN_TOKENS:,} tokens left out]\n"
    return f"{continuation(before, ids[:half], decode)}{left_out}{continuation(ids[:-half], ids[-half:], decode)}"


def shortened(text: str) -> str:
    """The text, without the middle of more than `SHOWN_CHARACTERS`."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n[{len(text) - SHOWN_CHARACTERS:,} characters left out]\n{text[-half:]}"


def runs_of(
    ids: Sequence[int], loss_mask: Sequence[int], decode: Decode, go_on: GoOn = continuation
) -> list[tuple[str, bool]]:
    """The text in pieces, cut where loss begins and ends: (text, carries loss)."""
    runs, at = [], 0
    for carries_loss, group in groupby(loss_mask):
        end = at + sum(1 for _ in group)
        runs.append((go_on(ids[max(0, at - _BEFORE_TOKENS) : at], ids[at:end], decode), bool(carries_loss)))
        at = end
    return runs


def response_texts(row: ResponsesRow, decode: Decode, go_on: GoOn = continuation) -> tuple[str, list[str]]:
    """The prompt's text, and each response's as the prompt's continuation."""
    prompt = row.prompt_ids.tolist()
    return go_on([], prompt, decode), [go_on(prompt, ids.tolist(), decode) for ids in row.response_ids]


def marked_runs(row: Row, decode: Decode) -> list[tuple[str, list[tuple[str, bool]]]]:
    """The row's parts by name, each in pieces (text, carries loss); in phase 2 the prompt and each response. Pieces
    without their middle where they are long."""
    if isinstance(row, ResponsesRow):
        prompt, responses = response_texts(row, decode, shown_continuation)
        parts = zip(response_names(len(responses)), responses, strict=True)
        return [("prompt", [(prompt, False)]), *((name, [(text, True)]) for name, text in parts)]
    layout = layout_of(document_of(row))
    name = "prompt" if isinstance(row, PromptRow) else "text"
    return [(name, runs_of(layout["input_ids"], layout["loss_mask"], decode, shown_continuation))]


def response_names(count: int) -> list[str]:
    """Names of a row's responses, best first."""
    return ["chosen", "rejected"] if count == 2 else [f"response {n}" for n in range(1, count + 1)]


def values_beside(row: Row) -> list[tuple[str, str]]:
    """(name, value) of each thing that a prompt of phase 3 carries besides its text."""
    if not isinstance(row, PromptRow):
        return []
    reference = [] if row.reference is None else [("reference", row.reference)]
    return [(name, shortened(_as_lines(value))) for name, value in (*reference, *row.columns.items())]


def _as_lines(value: Any) -> str:
    """A JSON value for people: messages below each other with their roles, calls as JSON; other values as they are."""
    is_said = isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value)
    if not is_said:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    lines = []
    for message in value:
        content, calls = message.get("content") or "", message.get("tool_calls")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        lines.append(f"\n  {message['role']}: {text}{json.dumps(calls, ensure_ascii=False) if calls else ''}")
    return "".join(lines)


# Texts -> lines for a terminal.


@dataclass(frozen=True)
class Style:
    """coloured: text that carries loss is marked by colour, otherwise by brackets. width: cells per line."""

    coloured: bool
    width: int

    def mark(self, text: str) -> str:
        """`text` marked as carrying loss. Colour ends with each line: pagers may cut the output there."""
        if not self.coloured:
            return f"{BRACKETS[0]}{text}{BRACKETS[1]}"
        return "\n".join(f"{COLOUR}{line}{COLOUR_END}" if line else line for line in text.split("\n"))


def terminal_style(is_terminal: bool, columns: int) -> Style:
    """Colours on a terminal only, and not where NO_COLOR is set (https://no-color.org)."""
    return Style(is_terminal and not os.environ.get("NO_COLOR"), columns)


def row_as_text(row: Row, decode: Decode, style: Style, show_layout: bool = False) -> str:
    """The row's texts, with what carries loss marked; in phase 2 side by side. show_layout: a line for each segment.
    Pieces without their middle where they are long."""
    document = document_of(row)
    if isinstance(row, ResponsesRow):
        prompt, responses = response_texts(row, decode, shown_continuation)
        all_ids = zip(["prompt", *response_names(len(responses))], [row.prompt_ids, *row.response_ids], strict=True)
        titles = [f"{name}, {len(ids)} tokens" for name, ids in all_ids]
        texts = [printable(text) for text in (prompt, *responses)]
        lines = side_by_side(titles, texts, [False] + [True] * len(responses), style)
    else:
        layout = layout_of(document)
        runs = runs_of(layout["input_ids"], layout["loss_mask"], decode, shown_continuation)
        lines = ["".join(style.mark(printable(text)) if loss else printable(text) for text, loss in runs)]
    lines += [f"{name}: {printable(value)}" for name, value in values_beside(row)]
    return "\n".join([*lines, *(segment_lines(document) if show_layout else [])])


def segment_lines(document: Document) -> list[str]:
    """Each segment's tokens, positions, which other segments it sees, and how many of its tokens carry loss."""
    lines, at = [], 0
    for index, segment in enumerate(document.segments):
        length, first = len(segment.tokens), segment.first_position
        last = first + segment.tokens.positions - 1
        sees = ", ".join(str(seen) for seen in segment.sees) or "none"
        lines.append(
            f"  segment {index}: tokens {at}-{at + length - 1}, positions {first}-{last}, "
            f"sees segments: {sees}, {int(segment.tokens.is_target.sum())} to predict"
        )
        at += length
    return lines


def side_by_side(titles: Sequence[str], texts: Sequence[str], carry_loss: Sequence[bool], style: Style) -> list[str]:
    """Texts in columns of equal width, under their titles."""
    marks = 0 if style.coloured else 2
    width = max(_NARROWEST_COLUMN, (style.width - 3 * (len(texts) - 1)) // len(texts))
    columns = [
        [*wrapped(title, width), "-" * width, *wrapped(text, width - marks)]
        for title, text in zip(titles, texts, strict=True)
    ]
    heads = [len(wrapped(title, width)) + 1 for title in titles]
    lines = []
    for number, row in enumerate(zip_longest(*columns, fillvalue="")):
        cells = []
        for line, head, loss in zip(row, heads, carry_loss, strict=True):
            shown = style.mark(line) if loss and line and head <= number else line
            used = cells_of(line) + (marks if shown != line else 0)
            cells.append(shown + " " * (width - used))
        lines.append(" | ".join(cells).rstrip())
    return lines


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, cut after a space where there is one."""
    lines = []
    for line in text.split("\n"):
        while cells_of(line) > width:
            fitting = next(n for n in range(width, 0, -1) if cells_of(line[:n]) <= width or n == 1)
            cut = line.rfind(" ", 0, fitting) + 1 or fitting
            lines.append(line[:cut])
            line = line[cut:]
        lines.append(line)
    return lines


def cells_of(text: str) -> int:
    """Cells that `text` takes on a terminal: Chinese and Japanese characters take two, combining accents none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(sign) else 1 + (unicodedata.east_asian_width(sign) in "WF") for sign in text)


def printable(text: str) -> str:
    """Control characters escaped, except line breaks: a text must not control the terminal. A tab becomes a space."""
    text = text.replace("\t", " ")
    return "".join(
        f"\\x{ord(sign):02x}" if unicodedata.category(sign) == "Cc" and sign != "\n" else sign for sign in text
    )


def histogram(
    lengths: Sequence[int] | np.ndarray, most_bars: int = 10, width: int = 40, unit: str = "tokens"
) -> list[str]:
    """A histogram of rows by tokens: a line for each of at most `most_bars` ranges of equal size, the longest bar
    `width` characters. No rows give no lines."""
    lines = []
    bars = length_bars(lengths, most_bars)
    digits, most = max((len(f"{end + 1:,}") for _, end, _ in bars), default=0), max((n for _, _, n in bars), default=0)
    for begin, end, count in bars:
        bar = "#" * -(-count * width // most)  # rounded up: no row is invisible
        lines.append(f"  {begin:>{digits},} - {end:>{digits},} {unit} | {bar:<{width}} {count:,}")
    return lines


def length_bars(lengths: Sequence[int] | np.ndarray, most_bars: int = 10) -> list[tuple[int, int, int]]:
    """(from, to, rows) for each of at most `most_bars` ranges of equal size; no rows give none."""
    if len(lengths) == 0:
        return []
    values = np.asarray(lengths, np.int64)
    low, high = int(values.min()), int(values.max())
    step = -(-(high - low + 1) // most_bars)
    counts = np.bincount((values - low) // step).tolist()
    return [(low + n * step, low + (n + 1) * step - 1, count) for n, count in enumerate(counts)]
