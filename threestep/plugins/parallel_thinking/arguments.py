"""The flags of parallel thinking, of programs that read rows, that draw rollouts, and that draw answers. Cheap to
import: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag, flag_of

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

PARALLEL_TAGS = ("<Parallel>", "<Path>", "</Path>", "</Parallel>")
MALFORMED_PARALLEL = ("error", "drop", "causal")
DEFAULT_PATHS = 2  # of a block, as in Parallel-R1


@dataclass
class ParallelTagArguments:
    """Blocks of parallel paths in responses."""

    topic: ClassVar[str] = "chat"

    parallel_thinking: bool = flag(
        False,
        "Train and generate responses with blocks of parallel paths that cannot see each other "
        "(docs/reference/layout.md): steps 1 and 2 only train on them; step 3 also generates them.",
    )
    parallel_tags: list[str] = flag(
        list(PARALLEL_TAGS),
        "Four tags, each a single token, to open a block, open a path, close a path and close a block, in that "
        "order. Missing ones are added to the tokenizer and the model. The default is Parallel-R1's.",
        "tag",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        if not self.parallel_thinking:
            return
        tags = self.parallel_tags
        mistakes.require(
            len(tags) == len(set(tags)) == 4 and all(tag and not tag.isspace() for tag in tags),
            "--parallel_tags expects four different tags (to open a block, open a path, close a path and close a "
            f"block), got {len(tags)}: {' '.join(tags)}",
        )


class PathFlags:
    """The flags of drawing paths, of a group that has them."""

    parallel_thinking: bool
    parallel_paths: int | None
    max_path_tokens: int | None

    @property
    def paths_of_a_block(self) -> int:
        """With --parallel_thinking."""
        return DEFAULT_PATHS if self.parallel_paths is None else self.parallel_paths

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        super().validate(mistakes)  # type: ignore[misc]
        for name in ("parallel_paths", "max_path_tokens"):
            value = getattr(self, name)
            mistakes.require(
                self.parallel_thinking or value is None,
                f"--{name} {value} applies to the paths of --parallel_thinking, which is off; add "
                f"--parallel_thinking, or remove --{name}",
            )


@dataclass
class ParallelArguments(ParallelTagArguments):
    """The same in rows of datasets, which may have mistakes."""

    malformed_parallel: str = flag(
        "error",
        "What to do with a response whose tags do not match: 'error' stops and names the row, 'drop' drops it, "
        "'causal' keeps it as ordinary text.",
        choices=MALFORMED_PARALLEL,
    )


@dataclass
class ParallelRolloutArguments(PathFlags, ParallelArguments):
    """The same, of a step that draws responses."""

    parallel_paths: int | None = flag(
        None,
        f"With --parallel_thinking: number of paths in each block that a response opens; default: {DEFAULT_PATHS}.",
        "paths >= 1",
        topic="rollout",
    )
    max_path_tokens: int | None = flag(
        None,
        "With --parallel_thinking: maximum length of a path, including its tags; default: the rest of "
        "--max_answer_seq_len, which counts only the longest path of each block.",
        "tokens >= 2",
        topic="length",
    )


_OF_ANSWERS = {
    "parallel_paths": (
        f"With --parallel_thinking: number of paths in each block that a response opens; default: {DEFAULT_PATHS}."
    ),
    "max_path_tokens": (
        "With --parallel_thinking: maximum length of a path, including its tags; default: the rest of "
        "--max_new_tokens, which counts only the longest path of each block."
    ),
}


@dataclass
class ParallelAnswerArguments(PathFlags, ParallelArguments):
    """The same, of a program that asks finished models about rows."""

    parallel_paths: int | None = flag_of(ParallelRolloutArguments, _OF_ANSWERS["parallel_paths"])
    max_path_tokens: int | None = flag_of(ParallelRolloutArguments, _OF_ANSWERS["max_path_tokens"])


@dataclass
class ParallelChatArguments(PathFlags, ParallelTagArguments):
    """The same, of a chat."""

    parallel_thinking: bool = flag_of(
        ParallelTagArguments,
        "Generate the paths of each block side by side, as step 3 does; requires a model trained with this flag.",
        topic="task",
    )
    parallel_tags: list[str] = flag_of(
        ParallelTagArguments,
        "The four tags used when the model was trained with --parallel_thinking.",
        topic="task",
    )
    parallel_paths: int | None = flag_of(ParallelRolloutArguments, _OF_ANSWERS["parallel_paths"])
    max_path_tokens: int | None = flag_of(ParallelRolloutArguments, _OF_ANSWERS["max_path_tokens"])
