"""The flags that name data and its columns; cheap to import: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

NO_DATA = (
    "--data_path expects at least one dataset, got none; name files (jsonl:PATH, json:PATH, csv:PATH, parquet:PATH, "
    "arrow:PATH), a dataset on the hub (hub:OWNER/NAME, or a registered name such as Dahoas/rm-static), a class of "
    "yours (--dataset_module), or embedded, a task made by code"
)


@dataclass
class SourceArguments:
    """The data: datasets by name, files and their columns."""

    topic: ClassVar[str] = "columns"

    needs_data: ClassVar[bool] = True  # a command line without any is a mistake

    data_path: list[str] = flag(
        [],
        "Datasets, separated by spaces: files such as pairs.csv or jsonl:PATH, hub:OWNER/NAME, or embedded, a "
        "task made by code (required). Files are jsonl:PATH, json:PATH, csv:PATH, parquet:PATH or arrow:PATH, where "
        "PATH is a file, a folder, a pattern such as 'part-*.csv', or an address such as s3://...; a file whose "
        "name says its format needs no prefix. Datasets of the hub are "
        "hub:OWNER/NAME[,config=...][,split=...][,eval_split=...][,revision=...], or a registered name such as "
        "Dahoas/rm-static.",
        "data",
        topic="data",
    )
    sft_only_data_path: list[str] = flag(
        [], "Datasets whose rows all go to step 1 and to no other step.", "data", topic="data"
    )
    dataset_module: list[str] = flag(
        [], "Python files that register datasets of your own with @register_dataset.", "file.py", topic="data"
    )
    data_format: str | None = flag(
        None,
        "Format of the files in data_path: preference, prompt_completion, prompt_only, messages, "
        "sharegpt, alpaca, question_answer, ranked or text (see docs/data.md); default: recognised by their "
        "columns.",
        "name",
    )
    prompt_column: str | None = flag(
        None,
        "Files: column of the prompt, text or messages; default: the format's own, mostly 'prompt'. In "
        "the name of any column a dot reaches into an object, as in extra_info.question.",
        "column",
    )
    chosen_column: str | None = flag(
        None,
        "Files: column of the response (in pairs: the better one), text or messages; default: the format's own, "
        "such as 'chosen' or 'completion'.",
        "column",
    )
    rejected_column: str | None = flag(
        None, "Files: column of the worse response, text or messages; default: 'rejected'.", "column"
    )
    responses_column: str | None = flag(
        None, "Files: column of a list of two or more responses as text, best first.", "column"
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
    tools_column: str | None = flag(None, "Files: column of the tools of a conversation; default: 'tools'.", "column")
    reference_column: str | None = flag(
        None,
        "Files: column of the reference answer, for rule-based rewards; default: reward_model.ground_truth, if a "
        "file has it.",
        "column",
    )
    margin_column: str | None = flag(
        None,
        "Files: column of a number: the margin by which chosen should beat rejected in step 2 (see --margin_scale"
        " there); default: no margins.",
        "column",
    )
    label_column: str | None = flag(
        None,
        "Files: column that marks each single response as good or bad (true or false, 1 or 0, desirable or "
        "undesirable); default: 'kto_tag' or 'label', if a file has one; none: ignore both.",
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
