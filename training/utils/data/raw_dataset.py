"""The contract of a raw dataset: rows in, texts out. Knows nothing of tokens, splits or caches.

The methods of a subclass written for DeepSpeed-Chat work unchanged; everything new is optional. Three things differ: it
imports this base class, it is registered (`register_dataset`) instead of added to `get_raw_dataset`, and a row of which
the texts do not begin with `get_prompt` takes prompt and response from `get_prompt` and `get_chosen`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PHASES
from training.utils.data.files.columns import column_names
from training.utils.data.formats.media import ONLY_TEXT
from training.utils.data.formats.messages import response_begins

NOT_READ = "; not read: "  # before the columns, in a sentence


@dataclass(frozen=True)
class Recognition:
    """One source's format and columns.

    format: a name of `--data_format`.
    why: the columns or the flags that decided on it.
    read: column -> its role, such as "prompt"; "extra_info.answer" is a part of a column.
    texts_not_read: columns that hold text, lists or objects and are not read.
    others_not_read: all further columns, of numbers and truth values.
    notes: sentences on files, or values in them, that are passed over.
    """

    format: str
    why: str
    read: dict[str, str]
    texts_not_read: tuple[str, ...] = ()
    others_not_read: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """One line for a log. Columns of text alone are named as not read: an id or a score is no text to learn."""
        columns = ", ".join(f"{role} '{column}'" for column, role in self.read.items())
        unread = f"{NOT_READ}{column_names(self.texts_not_read)}" if self.texts_not_read else ""
        return f"read as {self.format} because of {self.why}: {columns}{unread}"

    def as_json(self) -> dict[str, Any]:
        """All fields and the sentence as JSON values."""
        lists = {name: list(getattr(self, name)) for name in ("texts_not_read", "others_not_read", "notes")}
        return {**asdict(self), **lists, "sentence": self.sentence}


class PromptRawDataset:
    """One source of prompts and responses.

    A subclass returns the rows (`get_train_data`, `get_eval_data`: any sequence with `len` and `[i]`) and their texts.
    Where a text getter returns None, the row is dropped from the phases that need the text. `raw_datasets` is loaded by
    `dataset_name` as DeepSpeed-Chat's is: from a folder of that name, otherwise from the hub. A class that reads or
    makes its rows overrides `load_raw_datasets`.

    A `--data_path` that ends in a registered name, such as data/gsm8k, is the class's `dataset_name`, and `dataset_dir`
    is that folder. `dataset_dir_remedy` ends the sentence on a missing folder: its files, and where to get them.
    """

    dataset_name: str = ""
    dataset_clean_name: str = ""
    dataset_dir_remedy: str = ""
    is_on_hub: bool = False  # by the name of the class, where no folder has it
    takes_settings: bool = False  # behind the registered name, after commas: `dataset_name` holds them
    reads_images: bool = False  # set before rows are read: whether the model that they are for reads images
    unread_images: str = ONLY_TEXT  # and why not, for the sentence on a row with some

    def __init__(self, output_path: str, seed: int, local_rank: int, dataset_name: str) -> None:
        self.output_path = output_path
        self.seed = seed
        self.local_rank = local_rank
        self.dataset_name = self._given_name = dataset_name
        self.dataset_clean_name = dataset_name.replace("/", "_")
        if type(self).load_raw_datasets is not PromptRawDataset.load_raw_datasets:
            self.raw_datasets = self.load_raw_datasets(dataset_name)

    @functools.cached_property
    def raw_datasets(self) -> Any:
        """Rows by split. They are loaded by name on first use: a class that gets its rows elsewhere asks no hub."""
        return self.load_raw_datasets(self._given_name)

    def load_raw_datasets(self, dataset_name: str) -> Any:
        """Load `raw_datasets`: a mapping from split name to rows."""
        return load_by_name(dataset_name)

    def expect_media(self, reads: bool, unread: str = ONLY_TEXT) -> None:
        """Note, before rows are read, whether the model that they are for reads media, and why not."""
        self.reads_images, self.unread_images = reads, unread

    # The rows.

    def get_train_data(self) -> Sequence[Any]:
        raise NotImplementedError(f"{type(self).__name__} has no get_train_data")

    def get_eval_data(self) -> Sequence[Any] | None:
        """Rows only for evaluation; where there are none (or None), a share of the training rows is held out."""
        return None

    # Their texts.

    def get_prompt(self, sample: Any) -> str | None:
        """The prompt, for instance "Human: ... Assistant:"."""
        return None

    def get_chosen(self, sample: Any) -> str | None:
        """The better response, for instance " ..."."""
        return None

    def get_rejected(self, sample: Any) -> str | None:
        """The worse response, None where there is none."""
        return None

    def get_prompt_and_chosen(self, sample: Any) -> str | None:
        return _joined(self.get_prompt(sample), self.get_chosen(sample))

    def get_prompt_and_rejected(self, sample: Any) -> str | None:
        return _joined(self.get_prompt(sample), self.get_rejected(sample))

    # Beyond DeepSpeed-Chat; all optional.

    def get_responses(self, sample: Any) -> list[str] | None:
        """K >= 2 responses ranked best first; None means chosen and rejected."""
        return None

    def get_margin(self, sample: Any) -> float | Sequence[float] | None:
        """The margin by which the reward model's score of a better response should exceed that of a worse one.

        One number from 0 up applies between all neighbours in the ranking (of a pair: between chosen and rejected), K -
        1 numbers to one pair of neighbours each. Margins between responses further apart are the sums. None counts as
        0. Step 2 reads it where --margin_scale is above 0.
        """
        return None

    def get_mark(self, sample: Any) -> bool | None:
        """The mark of a single response, good (True) or bad (False); None if it has none, or is one of a pair.

        Phase 1 learns no response that is marked as bad, and phase 2 no response that is marked at all.
        """
        return None

    def get_reference(self, sample: Any) -> Any:
        """The reference that a rule-based reward checks a response against: a string, or any other JSON value."""
        return None

    def get_extra(self, sample: Any) -> dict[str, Any] | None:
        """Further JSON values by name for step 3's rewards and samples: verl's `data_source`, `extra_info`, ..."""
        return None

    def get_images(self, sample: Any) -> list[Any] | None:
        """The images of the row, as bytes, paths below `images_folder` or PIL images, in the order of their places in
        its messages or texts (`<image>`, or parts {"type": "image"}; without any, before the first user's text).

        A row with images is refused where the model reads text alone.
        """
        return None

    @property
    def dataset_dir(self) -> str | None:
        """The folder that `--data_path` names; None where it is a name alone."""
        return self.dataset_name if os.path.isdir(self.dataset_name) else None

    @property
    def images_folder(self) -> str | None:
        """The folder that paths of images are relative to, and do not leave; None: no paths are read."""
        return self.dataset_dir

    # A row as chat messages in OpenAI's form: dictionaries with `role` (system, user, assistant or tool) and `content`
    # (text, or a list of typed parts), and where they apply `tool_calls`, `tool_call_id`, `name`, `reasoning_content`,
    # ... A class overrides either only `get_messages` (the response is then the last message, if it is the
    # assistant's), or the getters of the prompt's and the responses' messages. None: the row is only text.

    def get_messages(self, sample: Any) -> list[dict[str, Any]] | None:
        """The conversation that phase 1 trains on, from its first message to its last.

        It need not end with the assistant (then it is only a prompt); for a pair it is the prompt's messages and the
        chosen response's.
        """
        if type(self).get_prompt_messages is PromptRawDataset.get_prompt_messages:
            return None
        prompt = self.get_prompt_messages(sample)
        return None if prompt is None else [*prompt, *(self.get_chosen_messages(sample) or [])]

    def get_prompt_messages(self, sample: Any) -> list[dict[str, Any]] | None:
        """The messages that a response answers: shared by a pair's responses in phase 2, the prompt of phase 3."""
        messages = self.get_messages(sample)
        return None if messages is None else messages[: response_begins(messages)]

    def get_chosen_messages(self, sample: Any) -> list[dict[str, Any]] | None:
        """The better response: the messages after the prompt's, first an assistant's, mostly one; None: none."""
        if type(self).get_messages is PromptRawDataset.get_messages:
            return None
        messages = self.get_messages(sample)
        return None if messages is None else messages[response_begins(messages) :] or None

    def get_rejected_messages(self, sample: Any) -> list[dict[str, Any]] | None:
        """The worse response to the same prompt, in the same form; None where there is none."""
        return None

    def may_end_unanswered(self) -> bool:
        """True if rows may be conversations that end with a question."""
        own, base = type(self), PromptRawDataset
        return own.get_messages is not base.get_messages or own.get_prompt_messages is not base.get_prompt_messages

    def get_tools(self, sample: Any) -> list[dict[str, Any]] | None:
        """The tools that the assistant may call, as a chat template takes them: mostly a list of
        {"type": "function", "function": {"name", "description", "parameters"}}; None where there are none."""
        return None

    def get_chat_template_kwargs(self, sample: Any) -> dict[str, Any] | None:
        """Variables of the chat template for this row only (`enable_thinking`, ...), which override the flags'."""
        return None

    def get_phases(self, sample: Any) -> tuple[int, ...]:
        """The phases, out of 1, 2 and 3, that this row may serve; it goes to one of them.

        `data_split` divides rows that serve the same phases between those. Override where rows differ, for instance
        pairs for phase 2 and solutions for 1 and 3.
        """
        return PHASES

    def check_phase(self, phase: int) -> None:
        """Raise ThreestepError where this source as a whole cannot serve a phase."""

    def get_recognition(self) -> Recognition | None:
        """The recognised format, if columns or flags decided on it; None if the class decides."""
        return None

    def get_fingerprint(self) -> str | None:
        """A string that changes whenever a row or text of this dataset may change; None: the rows are hashed.

        Override it where rows come from large files: `digests.digest_files` hashes a file once.
        """
        return None


def _joined(prompt: str | None, response: str | None) -> str | None:
    return None if prompt is None or response is None else prompt + response


def load_by_name(dataset_name: str, config_name: str | None = None) -> Any:
    """A dataset from the folder of that name (by `save_to_disk`, or of data files), or the hub; else ThreestepError."""
    import datasets

    saved = (os.path.join(dataset_name, name) for name in ("dataset_dict.json", "state.json"))
    try:
        if any(map(os.path.isfile, saved)):
            return datasets.load_from_disk(dataset_name)
        return datasets.load_dataset(dataset_name, config_name)
    except Exception as error:  # the hub's client and the readers raise a dozen unrelated classes
        where = "from the folder" if os.path.exists(dataset_name) else "from the hub"
        first_line = (str(error).splitlines() or [""])[0]
        raise ThreestepError(
            f"dataset '{dataset_name}' could not be loaded {where}: {type(error).__name__}: {first_line}; "
            "check the name and the network, or pass a folder written by save_to_disk whose path ends in the "
            "dataset's name"
        ) from error
