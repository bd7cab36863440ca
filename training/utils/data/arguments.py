"""The data flags that all steps share; those on how text becomes tokens are in `rows.arguments`.

Cheap to import: `--help` reads it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.data.rows.arguments import ChatArguments, RowArguments
from training.utils.flags.added import AddedFlags, added_flags
from training.utils.flags.flags import AUTO, flag
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.drawing import OpenedForm, TextForm

    RowFlags = AddedFlags
    RolloutRowFlags = AddedFlags
    AnswerRowFlags = AddedFlags
else:
    RowFlags, RolloutRowFlags, AnswerRowFlags = map(added_flags, ("rows", "rollouts", "answers"))

SPLITS = ("train", "eval")
PHASES = ("1", "2", "3")
SHARED_SPLIT = "2,4,4"  # of steps that run together on the same data
# Flags that only rows of phase 1, and only prompts of phase 3, depend on.
SENTENCE_FLAGS = ("sft_only_data_path", "text_column", "train_turns", "loss_on")
PROMPT_FLAGS = ("reference_column", "max_prompt_seq_len", "prompt_truncation", "return_columns")
NO_DATA = (
    "--data_path expects at least one dataset, got none; pass files (jsonl:PATH, json:PATH, csv:PATH, parquet:PATH, "
    "arrow:PATH), a hub dataset (hub:OWNER/NAME, or a registered name such as Dahoas/rm-static), the name of your own "
    "class (with --dataset_module), or embedded (a generated task)"
)


@dataclass
class SourceArguments:
    """The data: datasets by name, files and their columns."""

    topic: ClassVar[str] = "columns"

    needs_data: ClassVar[bool] = True  # a command line without any is a mistake

    data_path: list[str] = flag(
        [],
        "Datasets (required), separated by spaces: files such as pairs.csv or jsonl:PATH, hub:OWNER/NAME, or the "
        "generated task 'embedded'. Files are jsonl:PATH, json:PATH, csv:PATH, parquet:PATH or arrow:PATH, where PATH "
        "is a file, a folder, a pattern such as 'part-*.csv', or a URL such as s3://...; a file whose extension "
        "shows its format needs no prefix. Hub datasets are "
        "hub:OWNER/NAME[,config=...][,split=...][,eval_split=...][,revision=...], or a registered name such as "
        "Dahoas/rm-static.",
        "data",
        topic="data",
    )
    sft_only_data_path: list[str] = flag([], "Datasets whose rows are used only in step 1.", "data", topic="data")
    dataset_module: list[str] = flag(
        [], "Python files that register your own datasets with @register_dataset.", "file.py", topic="data"
    )
    data_format: str | None = flag(
        None,
        "Format of the files in data_path: preference, prompt_completion, prompt_only, messages, sharegpt, alpaca, "
        "question_answer, ranked or text (docs/reference/formats.md); default: detected from their columns.",
        "name",
    )
    prompt_column: str | None = flag(
        None,
        "Files: column of the prompt (text or messages); default: the format's own, usually 'prompt'. In any column "
        "name, a dot reaches into an object, as in extra_info.question.",
        "column",
    )
    chosen_column: str | None = flag(
        None,
        "Files: column of the response (in pairs, the better one), as text or messages; default: the format's own, "
        "such as 'chosen' or 'completion'.",
        "column",
    )
    rejected_column: str | None = flag(
        None, "Files: column of the worse response, as text or messages; default: 'rejected'.", "column"
    )
    responses_column: str | None = flag(
        None, "Files: column with a list of two or more responses as text, best first.", "column"
    )
    messages_column: str | None = flag(
        None,
        "Files: column of conversations, OpenAI's (role, content) or ShareGPT's (from, value); default: "
        "'messages' or 'conversations'.",
        "column",
    )
    text_column: str | None = flag(
        None, "Files: column of plain text, for step 1 without a prompt; default: 'text'.", "column"
    )
    tools_column: str | None = flag(None, "Files: column of a conversation's tools; default: 'tools'.", "column")
    reference_column: str | None = flag(
        None,
        "Files: column of the reference answer, for rule-based rewards; default: reward_model.ground_truth, if a "
        "file has it.",
        "column",
    )
    margin_column: str | None = flag(
        None,
        "Files: column of the margin, the number by which chosen should beat rejected in step 2 (see --margin_scale); "
        "default: no margins.",
        "column",
    )
    label_column: str | None = flag(
        None,
        "Files: column that marks each response as good or bad (true or false, 1 or 0, desirable or undesirable); "
        "default: 'kto_tag' or 'label', if a file has one; none ignores both.",
        "column",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake that can be found without loading data; loads the dataset modules for their names."""
        from training.utils.data.formats.formats import check_format
        from training.utils.data.registry import find_dataset, load_dataset_module

        mistakes.note(check_format, self.data_format)
        for path in self.dataset_module:
            mistakes.note(load_dataset_module, path)
        mistakes.require(bool(self.data_path or self.sft_only_data_path) or not self.needs_data, NO_DATA)
        for name in [*self.data_path, *self.sft_only_data_path]:
            mistakes.note(find_dataset, name)


@dataclass
class OptionalSourceArguments(SourceArguments):
    """The same, of programs that can do without."""

    needs_data: ClassVar[bool] = False


def whole_split(phase: int) -> str:
    """The --data_split that gives a phase all rows."""
    return ",".join("1" if phase == int(other) else "0" for other in PHASES)


def parse_data_split(data_split: str) -> tuple[Fraction, Fraction, Fraction]:
    """Read "2,4,4": the weights of phases 1, 2, 3. Decimals are allowed; at least one is above 0."""
    parts = [part.strip() for part in str(data_split).strip().strip("[]").split(",")]
    try:
        weights = tuple(Fraction(part) for part in parts)
    except (ValueError, ZeroDivisionError):
        weights = ()
    if len(parts) != 3 or len(weights) != 3 or min(weights) < 0:
        raise ThreestepError(
            "--data_split expects three numbers of 0 or more, the shares of steps 1, 2 and 3, such as 2,4,4; got "
            f"'{data_split}'"
        )
    if sum(weights) == 0:
        raise ThreestepError(
            f"--data_split expects at least one share above 0, got '{data_split}', which leaves every step without rows"
        )
    return weights  # type: ignore[return-value]


@dataclass
class SplitArguments:
    """The rows of each phase, and those that are held out."""

    topic: ClassVar[str] = "split"

    data_split: str = flag(
        AUTO,
        "Shares of the rows for steps 1, 2 and 3, such as 2,4,4; with auto, a step that runs alone "
        "gets all rows. The shares divide each dataset's training rows among SFT, the reward model (or DPO) and PPO. "
        f"Use the same value and the same seed in all steps. `threestep all` defaults to {SHARED_SPLIT}.",
        "a,b,c",
    )
    eval_fraction: float = flag(
        0.1, "Share of a dataset held out for evaluation, if it has no evaluation rows of its own.", "0 <= share < 1"
    )
    max_train_rows: int | None = flag(
        None,
        "Maximum training rows, chosen by the seed before overlong rows are dropped; default: all.",
        "rows >= 1",
        aliases=["--max_samples", "--train_max_samples"],
    )
    max_eval_rows: int | None = flag(
        None, "Maximum evaluation rows; default: all.", "rows >= 1", aliases=["--val_max_samples"]
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        if self.data_split != AUTO:
            mistakes.note(parse_data_split, self.data_split)

    def of_phase(self, phase: int, whole_run: bool = False) -> SplitArguments:
        """The same with the shares that 'auto' stands for. whole_run: the other steps run on the same data."""
        if self.data_split != AUTO:
            return self
        return replace(self, data_split=SHARED_SPLIT if whole_run else whole_split(phase))


@dataclass
class CacheArguments:
    """The cache of tokenized data, and its build."""

    topic: ClassVar[str] = "cache"
    may_change: ClassVar[bool] = True

    data_output_path: str = flag(
        os.path.join("~", ".cache", "threestep"),
        "Cache folder for tokenized data; runs, ranks and nodes can share it.",
        "folder",
    )
    num_workers: int | None = flag(
        None,
        "Number of tokenizing processes; default: one per core, but at most one per 1,000 rows. It does not affect "
        "the result.",
        "processes >= 1",
    )
    rebuild_cache: bool = flag(False, "Tokenize the data again even if it is cached.")

    @property
    def cache_dir(self) -> str:
        """`data_output_path` with ~ resolved."""
        return os.path.abspath(os.path.expanduser(self.data_output_path))


@dataclass
class ShownArguments:
    """The rows that a program shows, and their form. Programs may override the help texts."""

    phase: str = flag("1", "Training step: 1 (SFT), 2 (reward model or DPO) or 3 (PPO's prompts).", choices=PHASES)
    split: str = flag("train", "'train' or 'eval'.", choices=SPLITS)
    rows: int = flag(5, "Rows to show.", "rows >= 0")
    json: bool = flag(False, "Print only JSON.")
    html: str = flag("", "HTML file to write, with the tokens that carry loss highlighted.", "file")


@dataclass
class DataArguments:
    """The data, its division among the steps, and its tokenization. forms: flags that plugins add."""

    source: SourceArguments = field(default_factory=SourceArguments)
    chat: ChatArguments = field(default_factory=ChatArguments)
    forms: RowFlags = field(default_factory=RowFlags)
    rows: RowArguments = field(default_factory=RowArguments)
    split: SplitArguments = field(default_factory=SplitArguments)
    cache: CacheArguments = field(default_factory=CacheArguments)

    def validate(self, mistakes: Mistakes) -> None:
        """Note flags that exclude each other."""
        forms = self._asked_forms()
        mistakes.require(
            len(forms) < 2,
            f"{' and '.join(form.flag for form in forms)} each set the form of the responses; keep only one of them",
        )
        for form in forms:
            form.check(self, mistakes)

    @property
    def form(self) -> TextForm | None:
        """The form of responses that flags ask for; None: one run of tokens."""
        return next(iter(self._asked_forms()), None)

    def _asked_forms(self) -> list[TextForm]:
        asked = (named_object(entry.asked)(self.forms) for entry in added("row_forms", ()).values())
        return [form for form in asked if form is not None]

    def opened_form(self, tokenizer: Any) -> OpenedForm | None:
        """Return the form in a tokenizer's tokens; None: one run of tokens. ThreestepError if it cannot write it."""
        form = self.form
        return None if form is None else form.opened(tokenizer)

    @property
    def tokens_in_need(self) -> list[str]:
        """Tokens that the tokenizer must have; those that it lacks are added."""
        return [*(() if self.form is None else self.form.tokens), *self.chat.tokens_in_need]

    @property
    def needs_segments(self) -> str | None:
        """The flag that asks for segments that do not see each other; None where none does."""
        return None if self.form is None else self.form.flag


@dataclass
class OptionalDataArguments(DataArguments):
    """The same, of programs that can do without: what reads these rows asks for --data_path when it builds them."""

    source: OptionalSourceArguments = field(default_factory=OptionalSourceArguments)


@dataclass
class RolloutDataArguments(DataArguments):
    """The same, of a step that draws responses."""

    forms: RolloutRowFlags = field(default_factory=RolloutRowFlags)


@dataclass
class AnswerDataArguments(OptionalDataArguments):
    """The same, of a program that asks finished models."""

    forms: AnswerRowFlags = field(default_factory=AnswerRowFlags)
