"""The data flags that all steps share, and what can be found wrong with them before any data is read.

Cheap to import: `--help` reaches this module.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

from training.utils.run.errors import Mistakes, nearest_names

TRUNCATIONS = ("right", "left", "middle", "error", "drop")
LOSS_PLACES = ("response", "conversation")
PROMPT_STYLES = ("human_assistant", "chat_template")
TRAIN_TURNS = ("all", "last")
BAD_CONVERSATIONS = ("error", "drop")
ROW_PICKS = ("random", "first")
MALFORMED_PARALLEL = ("error", "drop", "causal")


@dataclass
class DataArguments:
    """Which data, how it is shared between the phases, and how it becomes tokens."""

    data_path: list[str] = field(
        default_factory=lambda: ["embedded"],
        metadata={
            "help": "Datasets, separated by spaces: a registered name, a path that ends in one, or files as "
            "jsonl:PATH (one JSON object a line), json:PATH (one JSON list of objects), csv:PATH, parquet:PATH or "
            "arrow:PATH, where PATH is a file, a folder, a pattern such as 'part-*.csv' or an address such as s3://..."
        },
    )
    data_split: str = field(
        default="2,4,4",
        metadata={
            "help": "Three weights: how each dataset's training rows are shared between phases 1 (SFT), "
            "2 (reward model or DPO) and 3 (PPO). Use the same value and the same seed in all three steps."
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
    data_format: str | None = field(
        default=None,
        metadata={
            "help": "Format of the files in data_path: preference, prompt_completion, prompt_only, messages, sharegpt, "
            "alpaca, question_answer, ranked or text (see docs/data.md); default: recognised from their columns."
        },
    )
    prompt_column: str | None = field(
        default=None,
        metadata={
            "help": "Files: column of the prompt, text or messages; default: the format's own, mostly 'prompt'. In "
            "this and the other names of columns a dot reaches into an object, as in extra_info.question."
        },
    )
    chosen_column: str | None = field(
        default=None,
        metadata={
            "help": "Files: column of the response, of the better one in phase 2, text or messages; default: the "
            "format's own, such as 'chosen' or 'completion'."
        },
    )
    rejected_column: str | None = field(
        default=None,
        metadata={"help": "Files: column of the worse response, text or messages; default: 'rejected'."},
    )
    responses_column: str | None = field(
        default=None, metadata={"help": "Files: column of a list of two or more responses as text, best first."}
    )
    messages_column: str | None = field(
        default=None,
        metadata={
            "help": "Files: column of conversations, OpenAI's (role, content) or ShareGPT's (from, value); default: "
            "'messages' or 'conversations'."
        },
    )
    text_column: str | None = field(
        default=None, metadata={"help": "Files: column of plain text, for phase 1 without a prompt; default: 'text'."}
    )
    tools_column: str | None = field(
        default=None, metadata={"help": "Files: column of the tools of a conversation; default: 'tools'."}
    )
    reference_column: str | None = field(
        default=None,
        metadata={
            "help": "Files: column of what a rule-based reward checks a response against; default: "
            "reward_model.ground_truth, where a file has it."
        },
    )
    margin_column: str | None = field(
        default=None,
        metadata={
            "help": "Files: column of a number: by how much chosen is to beat rejected in step 2 "
            "(see --margin_scale there); default: rows have no margin."
        },
    )
    end_of_conversation_token: str | None = field(
        default=None,
        metadata={
            "help": "One token that ends every response, the same in all phases; default: the "
            "tokenizer's eos, or the token that the chat template ends a turn with."
        },
    )
    add_end_of_conversation_token: bool = field(
        default=False,
        metadata={
            "help": "Steps 1 and 2: where tokenizer and model lack end_of_conversation_token, they gain it. Step 3 "
            "expects it in the tokenizers that those left."
        },
    )
    prompt_style: str = field(
        default="human_assistant",
        metadata={
            "help": "How prompts and responses become text: 'human_assistant' (DeepSpeed-Chat's "
            "\"Human: ... Assistant:\", as the datasets give it) or 'chat_template'."
        },
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "File of a Jinja chat template; default: the tokenizer's own."}
    )
    chat_template_kwargs: str | None = field(
        default=None, metadata={"help": "What the chat template is given besides the messages, as a JSON object."}
    )
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Given to the chat template as enable_thinking, where set."}
    )
    train_turns: str = field(
        default="all",
        metadata={"help": "Phase 1 with a chat template: loss on 'all' turns of the assistant's or on the 'last'."},
    )
    bad_conversations: str = field(
        default="error",
        metadata={
            "help": "A row that the chat template refuses, or whose assistant's turns cannot be told for sure: "
            "'error' stops and names it, 'drop' leaves it out and counts it."
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
        default=None,
        metadata={
            "help": "Keep at most so many training rows in a phase, chosen before any is dropped for its length.",
            "aliases": ["--max_samples", "--train_max_samples"],  # verl's names
        },
    )
    max_eval_rows: int | None = field(
        default=None,
        metadata={"help": "Keep at most so many evaluation rows in a phase.", "aliases": ["--val_max_samples"]},
    )
    pick_rows: str = field(
        default="random",
        metadata={"help": "Which rows --max_train_rows and --max_eval_rows keep: 'random' by the seed, or 'first'."},
    )
    return_raw_ids: bool = field(
        default=False,
        metadata={"help": "Phase 3: give rewards and samples the prompt's ids (cut, not padded) as raw_prompt_ids."},
    )
    return_raw_chat: bool = field(
        default=False,
        metadata={"help": "Phase 3: give rewards and samples the prompt's messages as raw_prompt."},
    )
    return_full_prompt: bool = field(
        default=False,
        metadata={"help": "Phase 3: give rewards and samples the text that was tokenized, uncut, as full_prompts."},
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
            "help": "Text for the pretraining loss of step 3: a hub name, a saved folder, or files as jsonl:PATH, "
            "csv:PATH, parquet:PATH, ... (see data_path)."
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
    def template_kwargs(self) -> dict[str, Any]:
        """What every row gives the chat template: `chat_template_kwargs`, and `enable_thinking` where set."""
        kwargs = json.loads(self.chat_template_kwargs) if self.chat_template_kwargs else {}
        return kwargs if self.enable_thinking is None else {**kwargs, "enable_thinking": self.enable_thinking}

    @property
    def tokens_in_need(self) -> list[str]:
        """Tokens that the tokenizer must have: it gains those that it lacks."""
        end = [self.end_of_conversation_token] if self.add_end_of_conversation_token else []
        return [*(self.parallel_tags if self.parallel_thinking else []), *(token for token in end if token)]

    @property
    def needs_segments(self) -> str | None:
        """The flag by which a sentence has segments that do not see each other; None where none asks for it."""
        return "--parallel_thinking" if self.parallel_thinking else None

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake that shows without loading data; loads the dataset modules to know the names."""
        from training.utils.data.addresses import check_address
        from training.utils.data.formats import check_format
        from training.utils.data.readers import split_reader
        from training.utils.data.registry import find_dataset, load_dataset_module
        from training.utils.data.splits import parse_data_split

        mistakes.note(parse_data_split, self.data_split)
        mistakes.note(check_format, self.data_format)
        for path in self.dataset_module:
            mistakes.note(load_dataset_module, path)
        mistakes.require(
            bool(self.data_path or self.sft_only_data_path),
            "data_path: expected at least one dataset, got none; for the built-in task write --data_path embedded",
        )
        for name in [*self.data_path, *self.sft_only_data_path]:
            mistakes.note(find_dataset, name)
        files = split_reader(self.unsupervised_dataset_name or "")
        if files is not None:
            mistakes.note(check_address, files[1], "unsupervised_dataset_name")
        if self.dataset_dir is not None and not os.path.isdir(self.dataset_dir):
            mistakes.add(f"dataset_dir: there is no folder '{self.dataset_dir}'")

        for flag, choices in (
            ("truncation", TRUNCATIONS),
            ("prompt_truncation", TRUNCATIONS),
            ("loss_on", LOSS_PLACES),
            ("prompt_style", PROMPT_STYLES),
            ("train_turns", TRAIN_TURNS),
            ("bad_conversations", BAD_CONVERSATIONS),
            ("pick_rows", ROW_PICKS),
            ("malformed_parallel", MALFORMED_PARALLEL),
        ):
            got = getattr(self, flag)
            mistakes.require(
                got in choices,
                f"{flag}: expected one of {', '.join(choices)}, got '{got}'{nearest_names(str(got), choices)}",
            )
        mistakes.require(
            bool(self.end_of_conversation_token) or not self.add_end_of_conversation_token,
            "add_end_of_conversation_token: expected end_of_conversation_token beside it, got none; name the token",
        )
        self._validate_chat(mistakes)
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

    def _validate_chat(self, mistakes: Mistakes) -> None:
        given = {flag: getattr(self, flag) for flag in ("chat_template", "chat_template_kwargs", "enable_thinking")}
        set_flags = [flag for flag, value in given.items() if value is not None]
        mistakes.require(
            self.prompt_style != "human_assistant" or not set_flags,
            f"{', '.join(set_flags)}: of use with prompt_style chat_template alone, and prompt_style is "
            "human_assistant; set it, or leave these out",
        )
        if self.chat_template is not None and not os.path.isfile(self.chat_template):
            mistakes.add(f"chat_template: there is no file '{self.chat_template}'")
        try:
            kwargs = json.loads(self.chat_template_kwargs or "{}")
        except ValueError as error:
            kwargs = error
        if not isinstance(kwargs, dict):
            mistakes.add(
                f"chat_template_kwargs: expected a JSON object such as '{{\"enable_thinking\": false}}', got "
                f"'{self.chat_template_kwargs}'"
            )
            return
        own = sorted(set(kwargs) & {"messages", "tools", "add_generation_prompt"})
        mistakes.require(not own, f"chat_template_kwargs: {', '.join(own)} come from the data; leave them out")
        both = self.enable_thinking is not None and kwargs.get("enable_thinking", self.enable_thinking)
        mistakes.require(
            self.enable_thinking is None or both == self.enable_thinking,
            "enable_thinking and chat_template_kwargs say different things of enable_thinking; leave one out",
        )

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
