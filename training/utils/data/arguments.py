"""The data flags that all steps share, and what can be found wrong with them before any data is read.

Cheap to import: `--help` reaches this module.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from training.utils.run.errors import Mistakes, ThreestepError, nearest_names

TRUNCATIONS = ("right", "left", "middle", "error", "drop")
LOSS_PLACES = ("response", "conversation")
MALFORMED_PARALLEL = ("error", "drop", "causal")


@dataclass
class DataArguments:
    """Which data, how it is shared between the phases, and how it becomes tokens."""

    data_path: list[str] = field(
        default_factory=lambda: ["embedded"],
        metadata={
            "help": "Datasets, separated by spaces: a registered name, a path that ends in one, "
            "jsonl:PATH (one JSON object a line) or json:PATH (one JSON list of objects)."
        },
    )
    data_split: str = field(
        default="2,4,4",
        metadata={
            "help": "Three weights: how each dataset's training rows are shared between phases 1 (SFT), "
            "2 (reward model) and 3 (PPO). Use the same value and the same seed in all three steps."
        },
    )
    sft_only_data_path: list[str] = field(
        default_factory=list,
        metadata={"help": "Datasets that go whole into phase 1 and into no other phase."},
    )
    data_output_path: str = field(
        default=os.path.join("~", ".cache", "threestep"),
        metadata={"help": "Folder of the cache of tokenized data; may be shared by runs, ranks and nodes."},
    )
    dataset_module: list[str] = field(
        default_factory=list,
        metadata={"help": "Python files that register datasets of your own with @register_dataset."},
    )
    dataset_dir: str | None = field(
        default=None,
        metadata={"help": "Folder that dataset classes which read local files find as self.dataset_dir."},
    )
    prompt_column: str = field(
        default="prompt", metadata={"help": "Column of the prompt in jsonl: and json: files."}
    )
    chosen_column: str = field(
        default="chosen", metadata={"help": "Column of the preferred response in jsonl: and json: files."}
    )
    rejected_column: str = field(
        default="rejected", metadata={"help": "Column of the other response in jsonl: and json: files."}
    )
    margin_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of a number in jsonl: and json: files: by how much chosen is to beat rejected in step 2 "
            "(see --margin_scale there); default: rows have no margin."
        },
    )
    end_of_conversation_token: str | None = field(
        default=None,
        metadata={
            "help": "One token that ends every response, the same in all phases; default: the "
            "tokenizer's eos."
        },
    )
    max_seq_len: int = field(
        default=512, metadata={"help": "Phases 1 and 2: most tokens of prompt and response together."}
    )
    max_prompt_seq_len: int = field(default=256, metadata={"help": "Phase 3: most tokens of a prompt."})
    truncation: str = field(
        default="right",
        metadata={
            "help": "Phases 1 and 2, a sentence longer than max_seq_len: 'right' cuts the response's "
            "end, 'left' the prompt's beginning, 'middle' the prompt's middle, 'drop' leaves the row out, "
            "'error' stops."
        },
    )
    prompt_truncation: str = field(
        default="drop",
        metadata={
            "help": "Phase 3, a prompt longer than max_prompt_seq_len: 'drop' leaves it out, 'left', "
            "'right' and 'middle' cut it there, 'error' stops."
        },
    )
    loss_on: str = field(
        default="response",
        metadata={"help": "Phase 1: where the loss falls: 'response', or 'conversation' (the prompt too)."},
    )
    parallel_thinking: bool = field(
        default=False,
        metadata={
            "help": "Phases 1 and 2: lay out blocks of parallel paths in responses so that the paths of a "
            "block do not see each other (docs/layout.md)."
        },
    )
    parallel_tags: list[str] = field(
        default_factory=lambda: ["<Parallel>", "<Path>", "</Path>", "</Parallel>"],
        metadata={
            "help": "The four tags that open a block, open and close a path, and close the block, each one "
            "token; added to the tokenizer and the model where absent. The default is Parallel-R1's."
        },
    )
    malformed_parallel: str = field(
        default="error",
        metadata={
            "help": "A response whose tags do not match: 'error' stops and names the row, 'drop' leaves it "
            "out, 'causal' keeps it in one piece, as without parallel thinking."
        },
    )
    eval_fraction: float = field(
        default=0.1,
        metadata={
            "help": "Share of a dataset held out from all phases for evaluation, where it has no evaluation "
            "rows of its own."
        },
    )
    max_train_rows: int | None = field(
        default=None, metadata={"help": "Keep at most so many training rows in a phase."}
    )
    max_eval_rows: int | None = field(
        default=None, metadata={"help": "Keep at most so many evaluation rows in a phase."}
    )
    num_workers: int | None = field(
        default=None,
        metadata={
            "help": "Processes that tokenize; default: one for each core that this process may use, and one "
            "for each 1,000 rows at most. The result is the same for any number."
        },
    )
    rebuild_cache: bool = field(
        default=False, metadata={"help": "Build the tokenized data again even where the cache has it."}
    )
    unsupervised_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Text for the pretraining loss of step 3: a hub name, a saved folder, or jsonl:PATH."
        },
    )
    unsupervised_dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of unsupervised_dataset_name on the hub."}
    )
    unsupervised_text_column: str = field(
        default="text", metadata={"help": "Column of unsupervised_dataset_name that holds the text."}
    )

    @property
    def cache_dir(self) -> str:
        """`data_output_path` with ~ resolved."""
        return os.path.abspath(os.path.expanduser(self.data_output_path))

    @property
    def tokens_in_need(self) -> list[str]:
        """Tokens that the tokenizer must have: it gains those that it lacks."""
        return list(self.parallel_tags) if self.parallel_thinking else []

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake that shows without loading data; loads the dataset modules to know the names."""
        from training.utils.data.registry import find_dataset, load_dataset_module
        from training.utils.data.splits import parse_data_split

        def note(check, *arguments) -> None:
            try:
                check(*arguments)
            except ThreestepError as error:
                mistakes.add(str(error))

        note(parse_data_split, self.data_split)
        for path in self.dataset_module:
            note(load_dataset_module, path)
        mistakes.require(
            bool(self.data_path or self.sft_only_data_path),
            "data_path: expected at least one dataset, got none; for the built-in task write "
            "--data_path embedded",
        )
        for name in [*self.data_path, *self.sft_only_data_path]:
            note(find_dataset, name)
        reader, _, path = (self.unsupervised_dataset_name or "").partition(":")
        if reader == "jsonl" and not os.path.isfile(path):
            mistakes.add(f"unsupervised_dataset_name: there is no file '{path}'")
        if self.dataset_dir is not None and not os.path.isdir(self.dataset_dir):
            mistakes.add(f"dataset_dir: there is no folder '{self.dataset_dir}'")

        for flag, choices in (
            ("truncation", TRUNCATIONS),
            ("prompt_truncation", TRUNCATIONS),
            ("loss_on", LOSS_PLACES),
            ("malformed_parallel", MALFORMED_PARALLEL),
        ):
            got = getattr(self, flag)
            mistakes.require(
                got in choices,
                f"{flag}: expected one of {', '.join(choices)}, got "
                f"'{got}'{nearest_names(str(got), choices)}",
            )
        self._validate_parallel(mistakes)
        for flag, least in (("max_seq_len", 2), ("max_prompt_seq_len", 1)):
            got = getattr(self, flag)
            mistakes.require(got >= least, f"{flag}: expected at least {least} tokens, got {got}")
        mistakes.require(
            0.0 <= self.eval_fraction < 1.0,
            f"eval_fraction: expected a share from 0 up to, not including, 1, got {self.eval_fraction}",
        )
        for flag, unit in (("max_train_rows", "row"), ("max_eval_rows", "row"), ("num_workers", "process")):
            got = getattr(self, flag)
            mistakes.require(got is None or got >= 1, f"{flag}: expected at least 1 {unit}, got {got}")

    def _validate_parallel(self, mistakes: Mistakes) -> None:
        if not self.parallel_thinking:
            return
        tags = self.parallel_tags
        mistakes.require(
            len(tags) == len(set(tags)) == 4 and all(tag and not tag.isspace() for tag in tags),
            "parallel_tags: expected four different tags (a block opens, a path opens, a path closes, the block "
            f"closes), got {len(tags)}: {' '.join(tags)}",
        )
        mistakes.require(
            self.loss_on != "conversation",
            "parallel_thinking: a tag counts where the loss falls, for a prompt may quote the tags; use it "
            "with loss_on response",
        )
