"""Shows what a model is fed: the rows of a phase, decoded, with the tokens that carry loss marked.

    python -m training.preview --phase 1 --data_path jsonl:chats.jsonl --tokenizer DIR --prompt_style chat_template

The rows are built and laid out by the code that training runs, into the same cache; with the settings and the seed of
a run these are its rows. `--json` prints one object a row, and nothing else, on standard output.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training.step3_ppo.arguments import PpoArguments
from training.utils.data.arguments import DataArguments
from training.utils.run.arguments import parse_arguments
from training.utils.run.errors import Mistakes, ThreestepError
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from training.utils.data.dataset import CachedSplit

UNSUPERVISED = "unsupervised"
PHASES = ("1", "2", "3", UNSUPERVISED)
SPLITS = ("train", "eval")


@dataclass
class PreviewArguments:
    """What is shown, and how."""

    tokenizer: str = field(default="", metadata={"help": "Folder or hub name of the tokenizer, or of its model."})
    phase: str = field(
        default="1",
        metadata={"help": "1 (SFT), 2 (reward model or DPO), 3 (PPO's prompts) or unsupervised (PPO's text blocks)."},
    )
    split: str = field(default="train", metadata={"help": "'train' or 'eval'."})
    rows: int = field(default=5, metadata={"help": "How many rows to show; 0 for all."})
    first: int = field(default=0, metadata={"help": "The place in the split of the first row to show, from 0."})
    show_layout: bool = field(default=False, metadata={"help": "Show segments, positions and who sees whom."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object a row, with the layout, and no more."})
    seed: int = field(default=RunArguments.seed, metadata={"help": "The seed of the run: it shares out the rows."})
    pad_token: str | None = field(default=None, metadata={"help": "As in training; the preview can do without."})
    max_answer_seq_len: int = field(
        default=PpoArguments.max_answer_seq_len,
        metadata={"help": "Unsupervised: a block has max_prompt_seq_len + max_answer_seq_len tokens, as in step 3."},
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(bool(self.tokenizer), "--tokenizer expects a folder or hub name, got nothing")
        for flag, choices in (("phase", PHASES), ("split", SPLITS)):
            mistakes.require_one_of(f"--{flag}", getattr(self, flag), choices)
        mistakes.require(
            self.phase != UNSUPERVISED or self.split == "train",
            "--split eval: unsupervised text has training rows alone; leave --split out",
        )
        for flag, least in (("rows", 0), ("first", 0), ("seed", 0), ("max_answer_seq_len", 1)):
            got = getattr(self, flag)
            mistakes.require(got >= least, f"--{flag} expects a whole number from {least} up, got {got}")


GROUPS = (PreviewArguments, DataArguments)


@dataclass(frozen=True)
class Shown:
    """The split that is shown, what became of the raw rows, and the manifest's sources (none of text blocks)."""

    split: CachedSplit
    report: str
    sources: list[dict[str, Any]]


def main(argv: Sequence[str]) -> None:
    """Parse, build the rows as training does, show some of them."""
    # What a dataset's own code or a library prints must not get between the rows.
    with redirect_stdout(sys.stdout if {"-h", "--help"} & set(argv) else sys.stderr):
        preview, data = parse_arguments(GROUPS, argv, __doc__ or "")
        tokenizer = load(preview, data)
        shown = open_split(preview, data, tokenizer)
        places = chosen_places(preview, len(shown.split))

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    try:
        (print_json if preview.json else print_text)(preview, shown, places, decode)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more when it closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load(preview: PreviewArguments, data: DataArguments) -> Any:
    """The tokenizer with the chat template and the tokens that training would give it."""
    from training.utils.data.chat import use_chat_template
    from training.utils.models.loading import add_tokens, load_tokenizer

    tokenizer = load_tokenizer(preview.tokenizer, preview.pad_token, end_may_pad=True)
    if tokenizer.pad_token == tokenizer.eos_token and preview.pad_token is None:
        _say(f"the pad token is the end token, {tokenizer.eos_token}; a tokenizer without one trains with --pad_token")
    tokenizer = use_chat_template(tokenizer, data)
    add_tokens(tokenizer, data.tokens_in_need)
    return tokenizer


def open_split(preview: PreviewArguments, data: DataArguments, tokenizer: Any) -> Shown:
    """Build the phase, or open it in the cache."""
    from training.utils.data.build import build_phase
    from training.utils.data.reports import SplitReport, split_sentence
    from training.utils.data.unsupervised import build_unsupervised

    if preview.phase == UNSUPERVISED:
        block_length = data.max_prompt_seq_len + preview.max_answer_seq_len
        split = build_unsupervised(data, tokenizer, block_length, preview.seed, log=_say)
        counted = split.manifest["splits"]["train"]
        report = SplitReport(counted["rows"], counted["tokens"], counted["truncated"], counted["dropped"])
        left_over = f", {counted['tokens_left_over']:,} tokens left over behind the last block"
        return Shown(split, split_sentence("train", report) + left_over, [])
    phase = build_phase(int(preview.phase), data, tokenizer, preview.seed, log=_say)
    split = getattr(phase, preview.split)
    return Shown(split, phase.report.sentence, split.manifest["sources"])


def chosen_places(preview: PreviewArguments, rows: int) -> range:
    """The places in the split to show. ThreestepError where --first is behind its end."""
    if rows and preview.first >= rows:
        raise ThreestepError(
            f"--first {preview.first}: the {preview.split} split has {rows} rows, numbered from 0; give a smaller "
            "number"
        )
    return range(preview.first, rows if preview.rows == 0 else min(rows, preview.first + preview.rows))


def print_json(preview: PreviewArguments, shown: Shown, places: range, decode: Any) -> None:
    """One object a row; the report goes to standard error with the rest of the log."""
    from training.utils.data.views import row_as_data, source_of

    for place in places:
        row = shown.split[place]
        source = source_of(row.row_id, shown.sources) if shown.sources else {"index": row.row_id}
        start = {"phase": preview.phase, "split": preview.split, "place": place, **source}
        print(json.dumps({**start, **row_as_data(row, decode)}))


def print_text(preview: PreviewArguments, shown: Shown, places: range, decode: Any) -> None:
    """Each row under a line that says where it is from, then what became of all rows and how long they are."""
    from training.utils.data.views import document_of, histogram, row_as_text, source_of, terminal_style

    style = terminal_style(sys.stdout.isatty(), shutil.get_terminal_size((120, 24)).columns)
    for place in places:
        row = shown.split[place]
        document = document_of(row)
        targets = sum(int(segment.tokens.is_target.sum()) for segment in document.segments)
        origin = ""
        if shown.sources:
            source = source_of(row.row_id, shown.sources)
            origin = f" ({source['source']}, {source['source_part']} row {source['index']})"
        print(f"== {preview.split} row {place}{origin}: {row.length_tokens:,} tokens, {targets:,} to predict")
        print(row_as_text(row, decode, style, preview.show_layout), end="\n\n")
    print(f"{len(places):,} of {len(shown.split):,} rows of the {preview.split} split shown")
    print(shown.report)
    for line in histogram(shown.split.lengths):
        print(line)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # transformers loads deepspeed where it is installed, which then looks for a device; nothing here runs on one.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run_program(main)
