"""The data flags that all steps share, a group per room (here SplitArguments); cheap to import: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from training.utils.data.cache.arguments import CacheArguments
from training.utils.data.chat.arguments import ChatArguments
from training.utils.data.rows.arguments import RowArguments
from training.utils.data.sources.arguments import OptionalSourceArguments, SourceArguments
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

ROW_PICKS = ("random", "first")
SPLITS = ("train", "eval")
PHASES = ("1", "2", "3")


@dataclass
class SplitArguments:
    """The rows of each phase, and those that are held out."""

    topic: ClassVar[str] = "split"

    data_split: str = flag(
        "2,4,4",
        "Shares of the rows for steps 1, 2 and 3; 1,0,0 gives step 1 everything. Each dataset's training rows are"
        " shared by these three weights between SFT, the reward model (or DPO) and PPO. Use the same value and "
        "the same seed in all steps.",
        "a,b,c",
    )
    eval_fraction: float = flag(
        0.1, "Share of a dataset held out for evaluation, where it has no evaluation rows of its own.", "0 <= share < 1"
    )
    max_train_rows: int | None = flag(
        None,
        "Maximum training rows, picked before rows are dropped for their length; default: all.",
        "rows >= 1",
        aliases=["--max_samples", "--train_max_samples"],
    )
    max_eval_rows: int | None = flag(
        None, "Maximum evaluation rows; default: all.", "rows >= 1", aliases=["--val_max_samples"]
    )
    pick_rows: str = flag(
        "random",
        "Which rows --max_train_rows and --max_eval_rows keep: 'random' by the seed, or 'first'.",
        choices=ROW_PICKS,
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        from training.utils.data.build.splits import parse_data_split  # numpy, which --help does without

        mistakes.note(parse_data_split, self.data_split)


@dataclass
class ShownArguments:
    """The rows that a program shows, and their form. Each program has its texts."""

    phase: str = flag("1", "1 (SFT), 2 (reward model or DPO) or 3 (PPO's prompts).", choices=PHASES)
    split: str = flag("train", "'train' or 'eval'.", choices=SPLITS)
    rows: int = flag(5, "Rows to show.", "rows >= 0")
    json: bool = flag(False, "Print only JSON.")
    html: str = flag("", "File to write as an HTML page that colours what the loss is on.", "file")


@dataclass
class DataArguments:
    """The data, its division among the phases, and its way to tokens."""

    source: SourceArguments = field(default_factory=SourceArguments)
    chat: ChatArguments = field(default_factory=ChatArguments)
    rows: RowArguments = field(default_factory=RowArguments)
    split: SplitArguments = field(default_factory=SplitArguments)
    cache: CacheArguments = field(default_factory=CacheArguments)

    def validate(self, mistakes: Mistakes) -> None:
        """Note flags that exclude each other."""
        mistakes.require(
            not self.chat.parallel_thinking or self.rows.loss_on != "conversation",
            "--parallel_thinking expects --loss_on response, got conversation: tags count only where the loss falls, "
            "because a prompt may quote them; change one of them",
        )


@dataclass
class OptionalDataArguments(DataArguments):
    """The same, of programs that can do without: what reads these rows asks for --data_path when it builds them."""

    source: OptionalSourceArguments = field(default_factory=OptionalSourceArguments)
