"""The flags of unsupervised text and of its loss. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class TextArguments:
    """Text without prompts, for step 3 and for programs that read such text."""

    topic: ClassVar[str] = "data"

    unsupervised_dataset_name: str | None = flag(
        None,
        "Text for step 3's pretraining loss: a hub name, a saved folder, or files as jsonl:PATH, csv:PATH, "
        "parquet:PATH, ... (see --data_path).",
        "data",
    )
    unsupervised_dataset_config_name: str | None = flag(
        None, "Configuration of --unsupervised_dataset_name on the hub.", "name"
    )
    unsupervised_text_column: str = flag("text", "Column of --unsupervised_dataset_name that holds the text.", "column")

    def validate(self, mistakes: Mistakes) -> None:
        """Note an address that cannot be right."""
        from training.utils.data.files.readers import check_stored, split_reader

        files = split_reader(self.unsupervised_dataset_name or "")
        if files is not None:
            mistakes.note(check_stored, *files, "unsupervised_dataset_name")


@dataclass
class PretrainingArguments:
    """The loss on the text, in step 3."""

    topic: ClassVar[str] = "policy"

    unsup_coef: float = flag(
        27.8,
        "Weight of the pretraining loss on --unsupervised_dataset_name; 0 only logs the loss.",
        "factor >= 0",
    )
