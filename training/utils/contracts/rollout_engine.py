"""The contract of rollout engines. An engine is one file with one subclass of RolloutEngine.

B prompts, each with n adjacent responses: B * n sequences. P prompt tokens, R response tokens.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.guessers import BY_HEAD
from training.utils.flags.flags import AUTO

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.paths import ParallelTags
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.turns import Turns
    from training.utils.images.prompts import PromptImages

# Token ids -> text, as samples and rewards see it. Engines need it only for stop strings.
Decode = Callable[[Sequence[int]], str]
# Lends a head for multi-token prediction (`mtp.head.MtpHead`) with whole weights; every rank must enter together.
LentHead = Callable[[], AbstractContextManager[Any]]


class Lender(Protocol):
    """A trained model, whose whole weights are lent to rollouts. Every rank must call its methods together.

    model: has shards in place of weights where `is_sharded`. updates: optimizer steps so far.
    """

    model: PreTrainedModel
    is_sharded: bool

    @property
    def updates(self) -> int: ...

    def lent(self) -> AbstractContextManager[PreTrainedModel]:
        """The model with whole weights."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight, whole, by its name."""


# Each further guess is right less often.
_MOST_GUESSES = 8


@dataclass(frozen=True)
class PathSampling:
    """Blocks of parallel paths, drawn side by side.

    count: paths of each block. most_tokens: of a path with its tags, 2 or more; None: what is left of the response.
    """

    tags: ParallelTags
    count: int
    most_tokens: int | None = None


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. A model's own generation settings are not read.

    temperature: 0 picks the most likely token.
    top_k, min_p: 0 keeps all tokens. top_p: 1 keeps all.
    more_end_token_ids: end a response as end_token_id does; such as the tokens at which a served model stops.
    bad_words: token sequences that are never completed.
    stop: texts; a response ends with the token that completes one of them.
    paths: None draws responses in one piece. Otherwise `max_new_tokens` counts the longest path of each block alone.
    end_check_tokens: tokens that each sequence draws between two looks at which have ended, of engines that look; None
        leaves it to them. What is drawn beyond an end is cut off, so that no result depends on it.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    end_token_id: int
    pad_token_id: int
    min_p: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    paths: PathSampling | None = None
    end_check_tokens: int | None = None
    more_end_token_ids: tuple[int, ...] = ()

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Each of them ends a response, and is its last token."""
        return frozenset((self.end_token_id, *self.more_end_token_ids))


@dataclass(frozen=True)
class Speculation:
    """Tokens are guessed, and several verified at once.

    guesses: tokens guessed ahead, 1 or more. is_auto: only where that is faster. by: one of GUESSERS.
    by_vllm: vLLM drafts and verifies, of tokens that it draws by itself.
    """

    guesses: int
    is_auto: bool = False
    by: str = BY_HEAD
    by_vllm: bool = False

    @classmethod
    def of_flag(cls, given: str, by: str = BY_HEAD) -> Speculation | None:
        """Return what --speculate asks for; None for 0. ThreestepError for anything else than a number or auto."""
        if given == AUTO:
            return cls(1, is_auto=True, by=by)
        if not (given.isdecimal() and int(given) <= _MOST_GUESSES):
            raise ThreestepError(
                f"--speculate expects the number of tokens to guess, 0 to {_MOST_GUESSES}, or {AUTO}, got '{given}'"
            )
        return cls(int(given), by=by) if int(given) else None

    @property
    def name(self) -> str:
        return "--vllm_speculate" if self.by_vllm else "--speculate"

    @property
    def flag(self) -> str:
        return f"{self.name} {AUTO if self.is_auto else self.guesses}"


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts, and how many responses to draw for each.

    prompt_ids_BP: int64, left-padded; prompt_mask_BP: bool.
    seeds: one for each of the B * samples_per_prompt sequences.
    rows: those of a dataset that the prompts are of, where an engine may ask for more than their tokens.
    media: the images of the prompts; None where no prompt has one. Of engines with `supports_images`.
    """

    prompt_ids_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    sampling: Sampling
    seeds: Sequence[int]
    samples_per_prompt: int = 1
    rows: Sequence[Any] | None = None
    media: PromptImages | None = None

    @property
    def images(self) -> PromptImages | None:
        """`media`, for engines that users wrote when it had this name."""
        return self.media

    @classmethod
    def of_prompt(cls, prompt_ids_P: torch.Tensor, sampling: Sampling, seed: int) -> RolloutRequest:
        """One response to one prompt."""
        ids_1P = prompt_ids_P.unsqueeze(0)
        return cls(ids_1P, torch.ones_like(ids_1P).bool(), sampling, [seed])

    def repeated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask with one row per sample of each prompt."""
        n = self.samples_per_prompt
        return self.prompt_ids_BP.repeat_interleave(n, dim=0), self.prompt_mask_BP.repeat_interleave(n, dim=0)


class RolloutEngine(ABC):
    """Draws responses from a model's current weights. What an engine can do is stated in its class fields.

    supports_min_p, supports_bad_words, supports_stop: whether those of Sampling are honoured.
    supports_parallel_thinking: whether `paths` of Sampling are.
    supports_speculate, supports_vllm_speculate: whether `speculate` may be called, with which kind.
    supports_images: whether it reads the images of prompts.
    supports_environment: whether it draws the turns of conversations, by `turns_of` or by `roll_out`: without other
        ranks, behind prompts that grow by what is drawn.
    logprobs_are_trained_models: sampled log-probabilities come from the trained model's own forward; False if another
        implementation computes them, whose rounding differs.
    for_training_only: chat and evaluation cannot use it.
    frees_gpu_memory: with --vllm_sleep it gives its memory on the GPU back between rollouts, from a pool of its own.
    longest_tokens: of a prompt with its response; None if only the model's positions bound it.
    """

    supports_min_p: ClassVar[bool] = True
    supports_bad_words: ClassVar[bool] = True
    supports_stop: ClassVar[bool] = True
    supports_parallel_thinking: ClassVar[bool] = False
    supports_speculate: ClassVar[bool] = False
    supports_vllm_speculate: ClassVar[bool] = False
    supports_images: ClassVar[bool] = False
    supports_environment: ClassVar[bool] = True
    logprobs_are_trained_models: ClassVar[bool] = True
    for_training_only: ClassVar[bool] = False
    frees_gpu_memory: ClassVar[bool] = False
    longest_tokens: int | None = None

    def __init__(self, decode: Decode | None = None) -> None:
        """decode: required if Sampling has stop strings."""
        self._decode = decode

    @classmethod  # noqa: B027 (most need no further package)
    def check_installed(cls) -> None:
        """Raise ThreestepError if a package that the engine needs is missing; imports none."""

    @classmethod
    def create(cls, decode: Decode | None, longest_tokens: int, vllm: Any) -> RolloutEngine:
        """Return an engine for prompts with responses of at most `longest_tokens` together."""
        return cls(decode)

    @abstractmethod
    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        """Return the responses, those of one prompt adjacent. Each depends only on its prompt and its seed, not on the
        rest of the batch. `model` comes from `lent`, or is any model with whole (unsharded) weights in eval mode."""

    def stream(self, model: PreTrainedModel, request: RolloutRequest, more_ends: Collection[int]) -> Iterator[int]:
        """Yield the tokens of one response, if possible as they are drawn, up to `max_new_tokens` or an end token
        (`sampling.end_token_ids` or one of `more_ends`), which is yielded too. Bad words and stop strings are
        ignored."""
        for token in self.roll_out(model, request).response_of(0).tolist():
            yield token
            if token in more_ends:
                return

    @contextlib.contextmanager
    def lent(self, actor: Lender) -> Iterator[PreTrainedModel]:
        """Inside, the engine draws from the trained model's current weights. Every rank must enter together."""
        with actor.lent() as model:
            yield model

    def speculate(self, how: Speculation, lent_head: LentHead | None, tell: Callable[[str], None]) -> None:
        """Before `check`, of engines that support it: draw from now on by guesses. The tokens stay those that the
        engine draws without; of vLLM the greedy ones, and the distribution of others. lent_head: None
        where guesses need no head. tell: prints a sentence."""
        raise NotImplementedError(f"{type(self).__name__} has no speculative rollouts")

    def check(self, lent: AbstractContextManager[PreTrainedModel], own: Any) -> list[str]:
        """Before the first rollout: choose how to draw from a model, so that its log-probabilities are its own; return
        sentences on what that costs. ThreestepError if there is no way.

        lent: gives the model, or the copy that rollouts are lent. Not entered where another program draws.
        own: what the model computed when it was loaded, a `models.own_forward.OwnForward`.
        """
        return []

    def check_paths(self, lent: AbstractContextManager[PreTrainedModel]) -> None:  # noqa: B027 (most draw none)
        """After `check`, where paths are asked for: ThreestepError if they cannot be drawn from a model."""

    def expect_turns(self) -> None:  # noqa: B027 (most draw them as any response)
        """Before `check`: the turns of conversations will be drawn."""

    def turns_of(self, model: PreTrainedModel, sampling: Sampling) -> Turns | None:
        """Return what draws the turns of one rollout and keeps what it has computed of a conversation; None where each
        turn is drawn by `roll_out`, behind the conversation so far."""
        return None

    def keep(self, model: PreTrainedModel) -> None:  # noqa: B027 (most hold no weights)
        """Draw from the weights of `model`, which no longer change, from now on."""

    def figures(self) -> dict[str, float]:
        """Metrics of the rollouts since the last call."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state that rollouts change, as JSON holds it; empty if there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most have none)
        """Restore what `state_dict` returned, on another number of ranks that of any; empty if there was none."""


# A field of a Rollout by its name, its type, and its dimensions.
_COLUMNS = {
    "prompt_ids_BP": (torch.int64, "BP"),
    "prompt_mask_BP": (torch.bool, "BP"),
    "response_ids_BR": (torch.int64, "BR"),
    "response_lengths_B": (torch.int64, "B"),
    "sampled_logprobs_BR": (torch.float32, "BR"),
    "ended_B": (torch.bool, "B"),
}


def rolled_out(engine: RolloutEngine, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
    """Return what the engine draws, with the images of its prompts, every column checked: an engine may be a user's. It
    is handed copies of the rows, and its columns are copied, as it may use their memory for its next rollout.

    Raises ThreestepError for a column that is missing, of another type, or ragged: not one row for each sequence, not
    as wide as the others, or a response that is empty or longer than its row.
    """
    if request.rows is not None:
        request = replace(request, rows=[deepcopy(row) for row in request.rows])
    rollout, kind = engine.roll_out(model, request), type(engine).__name__
    count, prompt = len(request.prompt_ids_BP) * request.samples_per_prompt, request.prompt_ids_BP.shape[1]
    ids = getattr(rollout, "response_ids_BR", None)
    width = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else "R"
    if getattr(rollout, "conversations", None) is not None:  # environments began them with prompts of their own
        prompt = rollout.prompt_ids_BP.shape[1]
    sizes = {"B": count, "P": prompt, "R": width}
    for name, (dtype, dimensions) in _COLUMNS.items():
        column, wanted = getattr(rollout, name, None), [sizes[letter] for letter in dimensions]
        got = type(column).__name__
        if isinstance(column, torch.Tensor):
            got = f"{str(column.dtype).removeprefix('torch.')} {list(column.shape)}"
        expected = f"{str(dtype).removeprefix('torch.')} [{', '.join(map(str, wanted))}]"
        if got != expected:
            raise ThreestepError(
                f"--rollout_engine: {kind} expects to return {name} as {expected}, one row for each of {count} "
                f"sequences, got {got}; mend its roll_out"
            )
    lengths = rollout.response_lengths_B.tolist()
    for row, length in enumerate(lengths):
        if not 1 <= length <= int(width):
            raise ThreestepError(
                f"--rollout_engine: {kind} expects to return response_lengths_B from 1 to the {width} columns of "
                f"response_ids_BR, got {length} for sequence {row}; mend its roll_out"
            )
    rollout = replace(rollout, **{name: getattr(rollout, name).clone() for name in _COLUMNS})
    if request.media is None:
        return rollout
    return replace(rollout, media=request.media.repeated(request.samples_per_prompt))
