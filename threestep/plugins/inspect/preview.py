"""Shows a step's rows as the model sees them: decoded, with the tokens that carry loss marked.

    threestep inspect preview --phase 1 --data_path jsonl:chats.jsonl --tokenizer DIR

Rows are built by the training code, in the same cache; with a run's settings and seed, they are the rows of
that run. `--json` prints only one object per row to standard output; `--html FILE` writes a page.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from threestep.plugins.pretraining_loss.arguments import TextArguments
from training.utils.base.console import note
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.arguments import PHASES, DataArguments, OptionalDataArguments, ShownArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import flag, flag_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.models.arguments import ModelArguments
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import check_place

if TYPE_CHECKING:
    from training.utils.contracts.media import MediaReader, SeenMedia, ShownMedium
    from training.utils.data.chat.style import PromptStyle
    from training.utils.data.rows.dataset import CachedSplit

UNSUPERVISED = "unsupervised"


@dataclass
class PreviewArguments:
    """The rows to show, and the form of the output."""

    topic: ClassVar[str] = "task"

    tokenizer: str = flag("", "Tokenizer or model: a folder or hub name (required).", "tokenizer")
    phase: str = flag_of(
        ShownArguments,
        "1 (SFT), 2 (reward model or DPO), 3 (PPO's prompts) or unsupervised (PPO's text blocks).",
        choices=(*PHASES, UNSUPERVISED),
    )
    split: str = flag_of(ShownArguments)
    rows: int = flag_of(ShownArguments, "Rows to show; 0 shows all.")
    first: int = flag(0, "Index of the first row to show, counted from 0 in the split.", "index >= 0")
    show_layout: bool = flag(False, "Also show segments, positions and attention visibility.")
    json: bool = flag_of(ShownArguments, "Print only JSON, one object per row, with the layout.")
    html: str = flag_of(
        ShownArguments, "Write the rows to this HTML file instead, with the tokens that carry loss highlighted."
    )
    seed: int = flag_of(RunArguments, "The run's seed, which decides the split.")
    pad_token: str | None = flag_of(ModelArguments, "As in training; not needed here.")
    max_answer_seq_len: int = flag_of(
        SamplingArguments,
        "For unsupervised: a block has max_prompt_seq_len + max_answer_seq_len tokens, as in step 3.",
        name="max_new_tokens",
        aliases=(),
    )

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(bool(self.tokenizer), "--tokenizer expects a folder or hub name, got nothing")
        mistakes.require(
            not (self.html and (self.json or self.show_layout)),
            f"--html {self.html} writes only text and masks; remove --json and --show_layout",
        )
        mistakes.require(
            self.phase != UNSUPERVISED or self.split == "train",
            "--split eval: unsupervised text has only training rows; remove --split",
        )


GROUPS = (PreviewArguments, OptionalDataArguments, TextArguments)


@dataclass(frozen=True)
class Shown:
    """report: counts of the raw rows. sources: of the manifest; none for text blocks. reader: of media; None
    where the tokenizer's folder has no model that reads them. seen: the media of the rows; None without any."""

    split: CachedSplit
    report: str
    sources: list[dict[str, Any]]
    reader: MediaReader | None = None
    seen: SeenMedia | None = None

    def media(self, place: int) -> list[ShownMedium]:
        """The media of a row."""
        return [] if self.seen is None else list(self.seen.shown(self.split[place].media))


def main(argv: Sequence[str]) -> None:
    """Parse, build the rows as training does, show some."""
    # Keeps what a dataset's code or a library prints out of the rows.
    with redirect_stdout(sys.stdout if {"-h", "--help"} & set(argv) else sys.stderr):
        preview, data, texts = parse_arguments(GROUPS, argv, __doc__ or "")
        if preview.html:
            check_place("--html", preview.html)
        tokenizer, style = load(preview, data)
        shown = open_split(preview, data, texts, tokenizer, style=style)
        places = shown_places(preview, len(shown.split))
    decode: Any = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if shown.reader is not None and not preview.json:
        decode = shown.reader.counting(decode)
    if preview.html:
        return write_page(preview, shown, places, decode)
    (print_json if preview.json else print_text)(preview, shown, places, decode)


def load(preview: PreviewArguments, data: DataArguments) -> tuple[Any, PromptStyle]:
    """The tokenizer with training's chat template and added tokens, and the style, which rows may decide."""
    from training.utils.data.chat.style import adopt_style
    from training.utils.loading.tokenizers import add_tokens, load_tokenizer

    tokenizer = load_tokenizer(preview.tokenizer, preview.pad_token, end_may_pad=True)
    add_tokens(tokenizer, data.tokens_in_need)
    style = adopt_style(tokenizer, data.chat)
    if not style.is_open or preview.phase == UNSUPERVISED:
        note(style.sentence)
    return tokenizer, style


def open_split(
    preview: PreviewArguments, data: DataArguments, texts: TextArguments, tokenizer: Any, *, style: PromptStyle
) -> Shown:
    """Build the phase, or open it in the cache."""
    from threestep.plugins.pretraining_loss.blocks import build_unsupervised
    from training.utils.data.build.build import build_phase, settle_style
    from training.utils.data.cache.shards import SplitReport, split_sentence
    from training.utils.setup.media import reader_of_folder, why_unread

    if preview.phase == UNSUPERVISED:
        block_length = data.rows.max_prompt_seq_len + preview.max_answer_seq_len
        split = build_unsupervised(texts, data, tokenizer, block_length, seed=preview.seed, log=note)
        counted = split.manifest["splits"]["train"]
        left_over = f"; {counted['tokens_left_over']:,} tokens left over after the last block"
        return Shown(split, split_sentence("train", SplitReport.of(counted)) + left_over, [])
    reader = reader_of_folder(preview.tokenizer, tokenizer)
    unread = why_unread(preview.tokenizer)
    phase = build_phase(int(preview.phase), data, tokenizer, preview.seed, log=note, media=reader, unread=unread)
    settle_style(style, phase.train, tokenizer, note, most_tokens=data.rows.max_seq_len)
    split = getattr(phase, preview.split)
    return Shown(split, phase.report.sentence, split.manifest["sources"], reader, phase.seen)


def shown_places(preview: PreviewArguments, rows: int) -> range:
    """The places in the split to show; ThreestepError if --first is past its end."""
    if rows and preview.first >= rows:
        raise ThreestepError(
            f"--first must be less than {rows}, the number of rows in the {preview.split} split, got {preview.first}; "
            "lower it"
        )
    return range(preview.first, rows if preview.rows == 0 else min(rows, preview.first + preview.rows))


def print_json(preview: PreviewArguments, shown: Shown, places: range, decode: Any) -> None:
    """Print one object per row."""
    from threestep.plugins.inspect.views import row_as_data, source_of

    for place in places:
        row = shown.split[place]
        source = source_of(row.row_id, shown.sources) if shown.sources else {"index": row.row_id}
        start = {"phase": preview.phase, "split": preview.split, "place": place, **source}
        print(json.dumps({**start, **row_as_data(row, decode)}))


def write_page(preview: PreviewArguments, shown: Shown, places: range, decode: Any) -> None:
    """Write the rows as a page, and print its path. ThreestepError if the file cannot be written."""
    from threestep.plugins.inspect.views import length_bars, marked_runs, values_beside
    from threestep.plugins.report.pages.rows_page import PageRow, rows_page

    rows = []
    for place in places:
        row = shown.split[place]
        media = [(medium.kind, medium.words, medium.uri()) for medium in shown.media(place)]
        rows.append(PageRow(title_of(preview, shown, place), marked_runs(row, decode), values_beside(row), media))
    seen = f"{len(places):,} of {len(shown.split):,} rows of the {preview.split} split shown"
    text = rows_page(f"phase {preview.phase}", [seen, shown.report], rows, length_bars(shown.split.lengths))
    try:
        Path(preview.html).write_text(text, encoding="utf-8", errors="replace")
    except OSError as problem:
        raise ThreestepError(f"--html {preview.html}: {problem.strerror}; use another file") from problem
    note(f"written: {preview.html}")


def title_of(preview: PreviewArguments, shown: Shown, place: int) -> str:
    """A row's place, origin and length."""
    from threestep.plugins.inspect.views import document_of, source_of

    row = shown.split[place]
    origin = ""
    if shown.sources:
        source = source_of(row.row_id, shown.sources)
        origin = f" ({source['source']}, {source['source_part']} row {source['index']})"
    targets = document_of(row).targets
    return f"{preview.split} row {place}{origin}: {row.length_tokens:,} tokens, {targets:,} to predict"


def print_text(preview: PreviewArguments, shown: Shown, places: range, decode: Any) -> None:
    """Print each row below a line with its origin, then counts of all rows, and a histogram of lengths."""
    from threestep.plugins.inspect.views import histogram, row_as_text, terminal_style

    style = terminal_style(sys.stdout.isatty(), shutil.get_terminal_size((120, 24)).columns)
    for place in places:
        row = shown.split[place]
        print(f"== {title_of(preview, shown, place)}")
        print(row_as_text(row, decode, style, preview.show_layout))
        for number, medium in enumerate(shown.media(place), start=1):
            print(f"{medium.kind} {number}: {medium.words}")
        print()
    print(f"{len(places):,} of {len(shown.split):,} rows of the {preview.split} split shown")
    print(shown.report)
    for line in histogram(shown.split.lengths):
        print(line)


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
