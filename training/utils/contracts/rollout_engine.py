"""The contract of rollout engines. An engine is one file with one subclass of RolloutEngine.

B prompts, each with n adjacent responses: B * n sequences. P prompt tokens, R response tokens.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.drawing import OpenedForm, TextForm, TurnDrawing, Turns
    from training.utils.contracts.guests import ExpertRecord
    from training.utils.contracts.lending import Lender, Tensors
    from training.utils.contracts.media import PromptMedia
    from training.utils.contracts.rollout import Rollout

# Token ids -> text, as samples and rewards see it. Engines need it only for stop strings.
Decode = Callable[[Sequence[int]], str]
# Bytes of a rank by name: while responses are drawn, and at all times.
PlannedMemory = tuple[dict[str, int], dict[str, int]]


@dataclass(frozen=True)
class Ends:
    """Ends of a response besides its end token.

    texts: a response ends with the token that completes one of them.
    token_ids: end a response as the end token does; such as the tokens at which a served model stops.
    check_tokens: tokens that each sequence draws between two looks at which have ended, of engines that look; None
        leaves it to them. What is drawn beyond an end is cut off, so that no result depends on it.
    """

    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    check_tokens: int | None = None


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. A model's generation settings are not read.

    temperature: 0 picks the most likely token.
    top_k, min_p: 0 keeps all tokens. top_p: 1 keeps all.
    bad_words: token sequences that are never completed.
    ends: what else ends a response.
    form: None draws responses in one piece. Otherwise `max_new_tokens` counts positions (`FormedResponses`).
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    end_token_id: int
    pad_token_id: int
    min_p: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    ends: Ends = Ends()
    form: OpenedForm | None = None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Each of them ends a response, and is its last token."""
        return frozenset((self.end_token_id, *self.ends.token_ids))

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a response."""
        return self.ends.texts


@dataclass(frozen=True)
class RolloutRequest:
    """Prompts, and how many responses to draw for each.

    prompt_ids_BP: int64, left-padded; prompt_mask_BP: bool.
    seeds: one for each of the B * samples_per_prompt sequences.
    rows: those of a dataset that the prompts are of, where an engine may ask for more than their tokens.
    media: of the prompts; None where no prompt has any. Of engines with `supports_media`.
    """

    prompt_ids_BP: torch.Tensor
    prompt_mask_BP: torch.Tensor
    sampling: Sampling
    seeds: Sequence[int]
    samples_per_prompt: int = 1
    rows: Sequence[Any] | None = None
    media: PromptMedia | None = None

    @property
    def images(self) -> PromptMedia | None:
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


@dataclass(frozen=True)
class RolloutSettings:
    """The settings of an engine.

    longest_tokens: of a prompt with its response.
    own: the engine's own flags, an instance of `RolloutEngine.arguments`; None if it has none.
    beside_training: it shares the devices with the models that are trained; False where a finished model is asked.
    processes: that share the prompts of a finished model, each with an engine.
    """

    longest_tokens: int
    own: Any = None
    beside_training: bool = True
    processes: int = 1


class ServerShare(NamedTuple):
    """The share of a rollout server in what is drawn: responses (of conversations turns), the seconds of all of them,
    each by itself from its request to its answer, and those of the slowest. Requests that it failed have seconds too,
    and no response."""

    responses: int
    seconds: float
    slowest: float


def joined_shares(parts: Iterable[Mapping[str, ServerShare]]) -> dict[str, ServerShare]:
    """Return the shares of servers, by address, of what was drawn in several parts."""
    found: dict[str, ServerShare] = {}
    for part in parts:
        for address, own in part.items():
            other = found.get(address, ServerShare(0, 0.0, 0.0))
            responses, seconds = other.responses + own.responses, other.seconds + own.seconds
            found[address] = ServerShare(responses, seconds, max(other.slowest, own.slowest))
    return found


@dataclass(frozen=True)
class Drawing:
    """More than responses in one piece that an engine will draw. turns: of conversations; how a model in this process
    draws them. form: of responses. None: without."""

    turns: TurnDrawing | None = None
    form: TextForm | None = None


IN_ONE_PIECE = Drawing()


@dataclass(frozen=True)
class PlannedActor:
    """The model to draw from, in a plan of a rank's memory. sent_bytes: of weights that are whole at a time while they
    are sent; 0 where it has whole weights. gpu_bytes: of a GPU's memory; None if that is unknown, and on a CPU."""

    weights_bytes: int
    sent_bytes: int
    is_on_gpu: bool
    gpu_bytes: int | None


class RolloutEngine(ABC):
    """Draws responses from a model's current weights. What an engine can do is stated in its class fields.

    supports_min_p, supports_bad_words, supports_stop: whether those of Sampling are honoured.
    draws_forms: whether `form` of Sampling is.
    takes_loops: whether `draw_by` takes a `DecodeLoop`.
    supports_media: whether it reads the media of prompts.
    supports_environment: whether it draws the turns of conversations, by `turns_of` or by `roll_out`: without other
        ranks, behind prompts that grow by what is drawn.
    supports_rollouts_ahead: whether `roll_out` may run in a thread while training goes on, by weights that are kept.
    records_experts: whether `record_experts` may be called.
    meets_other_ranks: whether `lent` meets the other ranks by a group of its own, so that all may draw ahead.
    launched_by_host: the host launches each operator of a decoding step by itself.
    logprobs_are_trained_models: sampled log-probabilities come from the trained model's own forward; False if another
        implementation computes them, whose rounding differs.
    for_training_only: chat and evaluation cannot use it.
    arguments: the dataclass of its own flags, which `generation.table` names too; None if it has none.
    takes_weights: it draws from the weights that `take_weights` was given; False: from the model that it is lent.
    longest_tokens: of a prompt with its response; None if only the model's positions bound it.
    """

    supports_min_p: ClassVar[bool] = True
    supports_bad_words: ClassVar[bool] = True
    supports_stop: ClassVar[bool] = True
    draws_forms: ClassVar[bool] = False
    takes_loops: ClassVar[bool] = False
    supports_media: ClassVar[bool] = False
    supports_environment: ClassVar[bool] = True
    supports_rollouts_ahead: ClassVar[bool] = False
    records_experts: ClassVar[bool] = False
    meets_other_ranks: ClassVar[bool] = False
    launched_by_host: ClassVar[bool] = False
    logprobs_are_trained_models: ClassVar[bool] = True
    for_training_only: ClassVar[bool] = False
    arguments: ClassVar[type | None] = None
    takes_weights: ClassVar[bool] = False
    longest_tokens: int | None = None
    _updates: int | None = None  # of the weights that were sent

    def __init__(self, decode: Decode | None = None) -> None:
        """decode: required if Sampling has stop strings."""
        self._decode = decode

    @classmethod  # noqa: B027 (most need no further package)
    def check_installed(cls) -> None:
        """Raise ThreestepError if a package that the engine needs is missing; imports none."""

    @classmethod
    def refusals(cls, settings: RolloutSettings, drawing: Drawing) -> list[str]:
        """Sentences on what an engine of these settings cannot do."""
        return []

    @classmethod
    def frees_gpu_memory(cls, settings: RolloutSettings) -> bool:
        """Return whether it gives its memory on the GPU back between rollouts, from a pool of its own."""
        return False

    @classmethod
    def ranks_together(cls, settings: RolloutSettings) -> int:
        """Return how many neighbouring ranks draw by one engine, each with a part of its weights."""
        return 1

    @classmethod
    def planned_memory(cls, settings: RolloutSettings, actor: PlannedActor) -> PlannedMemory | None:
        """Return what it adds to a rank's memory; None if it draws by the trained model, with a cache."""
        return None

    @classmethod
    def create(cls, decode: Decode | None, settings: RolloutSettings) -> RolloutEngine:
        """Return an engine."""
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
        if not self.takes_weights:
            with actor.lent() as model:
                yield model
            return
        if self._updates != actor.updates:
            actor.send(lambda tensors: self.take_weights(actor.model, tensors))
            self._updates = actor.updates
        yield actor.model

    def take_weights(self, model: PreTrainedModel, tensors: Tensors) -> None:  # noqa: B027 (most hold no weights)
        """Draw from these weights of `model` from now on: of a trained model whenever they have changed, on the first
        rank alone; of a finished one once, on every rank."""

    def record_experts(self, record: ExpertRecord) -> None:
        """Before `check`, of engines that support it: rollouts have `experts` from now on. record: of the trained
        model."""
        raise NotImplementedError

    def draw_by(self, loop: Any) -> None:
        """Before `check`: draw from now on by what an `AskedLoop` that fits has opened (`contracts.decode_loops`). The
        tokens stay those that the engine draws without, or the greedy ones do, and the distribution of others."""
        raise NotImplementedError(f"{type(self).__name__} supports no other decoding loop")

    def check(
        self, lent: AbstractContextManager[PreTrainedModel], own: Any, drawing: Drawing = IN_ONE_PIECE
    ) -> list[str]:
        """Before the first rollout: choose how to draw from a model, so that its log-probabilities are its own; return
        sentences on what that costs. ThreestepError if there is no way.

        lent: gives the model, or the copy that rollouts are lent. Not entered where another program draws.
        own: what the model computed when it was loaded, a `models.own_forward.OwnForward`.
        """
        return []

    def turns_of(self, model: PreTrainedModel, sampling: Sampling) -> Turns | None:
        """Return what draws the turns of one rollout and keeps what it has computed of a conversation; None where each
        turn is drawn by `roll_out`, behind the conversation so far."""
        return None

    def figures(self) -> dict[str, float]:
        """Metrics of the rollouts since the last call."""
        return {}

    def shares(self) -> dict[str, ServerShare]:
        """Return what each server has drawn for this thread since its last call, by address; empty without servers."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state that rollouts change, as JSON holds it; empty if there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most have none)
        """Restore what `state_dict` returned, on another number of ranks that of any; empty if there was none."""


class EngineWrapper(RolloutEngine):
    """Another engine, whose `roll_out` a subclass changes; everything else is forwarded. A `stream` is what the
    subclass rolls out."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__()
        self._engine = engine
        for name in RolloutEngine.__annotations__:
            setattr(self, name, getattr(engine, name))

    @contextlib.contextmanager
    def lent(self, actor: Lender) -> Iterator[PreTrainedModel]:
        with self._engine.lent(actor) as model:
            yield model

    def take_weights(self, model: PreTrainedModel, tensors: Tensors) -> None:
        self._engine.take_weights(model, tensors)

    def record_experts(self, record: ExpertRecord) -> None:
        self._engine.record_experts(record)

    def draw_by(self, loop: Any) -> None:
        self._engine.draw_by(loop)

    def check(
        self, lent: AbstractContextManager[PreTrainedModel], own: Any, drawing: Drawing = IN_ONE_PIECE
    ) -> list[str]:
        return self._engine.check(lent, own, drawing)

    def turns_of(self, model: PreTrainedModel, sampling: Sampling) -> Turns | None:
        return self._engine.turns_of(model, sampling)

    def figures(self) -> dict[str, float]:
        return self._engine.figures()

    def shares(self) -> dict[str, ServerShare]:
        return self._engine.shares()

    def state_dict(self) -> dict[str, Any]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._engine.load_state_dict(state)


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
    """Return what the engine draws, with the media of its prompts, every column checked: an engine may be a user's. It
    is handed copies of the rows, and its columns are copied, as it may use their memory for its next rollout."""
    if request.rows is not None:
        request = replace(request, rows=[deepcopy(row) for row in request.rows])
    rollout = engine.roll_out(model, request)
    _check_columns(rollout, request, type(engine).__name__)
    rollout = replace(rollout, **{name: getattr(rollout, name).clone() for name in _COLUMNS})
    if request.media is None:
        return rollout
    return replace(rollout, media=request.media.repeated(request.samples_per_prompt))


def _check_columns(rollout: Rollout, request: RolloutRequest, kind: str) -> None:
    """ThreestepError for a column that is missing, of another type, or ragged: not one row for each sequence, not as
    wide as the others, or a response that is empty or longer than its row. kind: of engine."""
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
                f"--rollout_engine: {kind} must return {name} as {expected}, with one row for each of {count} "
                f"sequences, got {got}; fix its roll_out"
            )
    for row, length in enumerate(rollout.response_lengths_B.tolist()):
        if not 1 <= length <= int(width):
            raise ThreestepError(
                f"--rollout_engine: {kind} must return response_lengths_B between 1 and {width}, the columns of "
                f"response_ids_BR, got {length} for sequence {row}; fix its roll_out"
            )
