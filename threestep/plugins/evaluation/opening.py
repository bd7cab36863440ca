"""Models, engines and rows of a program that asks finished models, from its flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threestep.plugins.evaluation.model import (
    ChatFolder,
    ChatModel,
    engine_maker,
    load_chat_folder,
    open_chat_folder,
    start_alone,
)
from threestep.plugins.pretraining_loss.arguments import TextArguments
from training.utils.base.console import note
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.table import KINDS
from training.utils.generation.table import engine_class
from training.utils.loading.tokenizers import tokenizer_digest
from training.utils.rewards.table import RunPlace, open_rules
from training.utils.rewards.weighted import Reward, named_rewards, reads_model
from training.utils.setup.media import run_media, why_unread

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.evaluation.arguments import EvaluateArguments
    from threestep.plugins.evaluation.sharing import Sharers
    from training.utils.contracts.media import RunMedia, SeenMedia
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.data.arguments import DataArguments
    from training.utils.generation.arguments import SamplingArguments
    from training.utils.generation.table import RolloutEngineFlags
    from training.utils.rewards.arguments import ScoringArguments
    from training.utils.run.run_arguments import RunArguments


@dataclass(frozen=True)
class Evaluated:
    """A parsed command line."""

    task: str
    run: RunArguments
    data: DataArguments
    evaluation: EvaluateArguments
    sampling: SamplingArguments
    reward: ScoringArguments
    engines: RolloutEngineFlags
    texts: TextArguments = field(default_factory=TextArguments)


def scored_by(flags: Evaluated, mistakes: Mistakes) -> tuple[Reward, ...]:
    """Return the rewards of --reward, and note what is wrong with them."""
    rewards = named_rewards(flags.reward, mistakes)
    mistakes.require(
        flags.evaluation.reward_model is not None or not reads_model(rewards),
        "--reward includes `model`, which needs --reward_model; add it, or use a rule (--reward gsm8k)",
    )
    return rewards


def open_rewards(flags: Evaluated, rewards: Sequence[Reward], folder: ChatFolder, together: Sharers) -> None:
    """Let rewards that ask a service log in the output folder, or replay another's log."""
    digest = tokenizer_digest(folder.tokenizer)
    place = RunPlace(Path(flags.run.output_dir), together.rank, together.world_size, digest)
    open_rules([reward.rule for reward in rewards], flags.reward.reward_replay, place)


def engine_of(flags: Evaluated) -> Callable[[PreTrainedModel], RolloutEngine]:
    """See `engine_maker`."""
    longest_tokens = flags.data.rows.max_prompt_seq_len + flags.sampling.max_new_tokens
    # Perplexity draws nothing, and its texts may have any form.
    form = None if flags.task == "perplexity" else flags.data.form
    return engine_maker(flags.sampling, flags.engines, longest_tokens, form)


def folder_of(flags: Evaluated, path: str) -> ChatFolder:
    """All of a model but its weights; without its media where the engine reads text alone."""
    folder = open_chat_folder(path, flags.data)
    return folder if engine_class(flags.sampling.rollout_engine).supports_media else replace(folder, reader=None)


def load(
    flags: Evaluated,
    folder: ChatFolder,
    start_engine: Callable[[PreTrainedModel], RolloutEngine],
    media: RunMedia | None,
) -> ChatModel:
    """Load a model that answers in the prompt style of the data flags. media: of the rows; None if no row has any."""
    return load_chat_folder(folder, flags.sampling.dtype, start_alone().device, start_engine, media=media)


@dataclass(frozen=True)
class Built:
    """rows: of one kind, for one model. media, seen: of the rows; None if no row has any."""

    rows: Any
    media: RunMedia | None
    seen: SeenMedia | None


def built_rows(
    flags: Evaluated, kind: str, folder: ChatFolder, with_messages: bool = False, *, unread: str = ""
) -> Built:
    """The rows of a kind. with_messages: the prompts' messages are among their columns. unread: why media of rows are
    not read, where it is not the model's doing"""
    unread = unread or why_unread(folder.name)
    data = flags.data
    if with_messages:
        data = replace(data, rows=data.rows.with_columns("prompt_messages"))
    built = build_phase(kind, data, folder.tokenizer, flags.run.seed, log=note, media=folder.reader, unread=unread)
    rows = checked_rows(getattr(built, flags.evaluation.split), flags)
    media = run_media(rows, built.seen, KINDS[kind].document)
    return Built(rows, media, built.seen)


def checked_rows(rows: Any, flags: Evaluated) -> Any:
    if len(rows) == 0:
        raise ThreestepError(
            f"--split {flags.evaluation.split} has no rows; raise --eval_fraction (now "
            f"{flags.data.split.eval_fraction:g}), or use --split train"
        )
    return rows
