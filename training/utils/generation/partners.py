"""Those who answer the model while it draws, turn by turn, so that responses become conversations: in the core none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from training.utils.base.errors import ThreestepError
from training.utils.plugins.registry import hooks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.utils.base.errors import Mistakes
    from training.utils.contracts.rollout_engine import Drawing, RolloutEngine
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.data.rows.dataset import CachedSplit
    from training.utils.flags.added import AddedFlags


class Partner(Protocol):
    """The other speaker of one conversation. figures: by name, summed over its turns."""

    @property
    def figures(self) -> Mapping[str, float]: ...

    def reset(self) -> Future[Any]:
        """Begin. The result is what the conversation begins with: messages, and tools or None."""

    def step(self, message: Any) -> Future[Any]:
        """Answer a turn of the model. The result has `messages`, `reward` and `done`."""

    def close(self) -> None: ...


class Partners:
    """Those who answer the model in a program: here nobody does. A plugin's hook `partners` returns a subclass.

    flag: what asks for them, in messages.
    is_there: somebody answers.
    gives_rewards: they pay for turns, and the sum of that is a reward of a response.
    columns: of the row that opens a conversation outside of training.
    """

    flag: str = ""
    is_there: bool = False
    gives_rewards: bool = False
    columns: Mapping[str, Any] = {}

    @property
    def drawing(self) -> Drawing:
        """Return what an engine then draws besides responses in one piece."""
        from training.utils.contracts.rollout_engine import IN_ONE_PIECE  # torch, which --help does without

        return IN_ONE_PIECE

    @property
    def engine_flags(self) -> dict[str, Any]:
        """Return the flags that a rollout engine has to support, with their values, as `checked_engine` takes them."""
        return {}

    @property
    def decides(self) -> dict[str, Any]:
        """Return the settings on which their answers depend, by name, as JSON holds them."""
        return {}

    def check(self, mistakes: Mistakes) -> None:
        """Note settings that do not go together; also where nobody answers."""

    def load(self, mistakes: Mistakes) -> None:
        """Load what answers; note what is wrong with it. Not called where nobody is asked, as in a replay."""

    def check_rows(self, rows: CachedSplit) -> None:
        """ThreestepError for a row that nobody can open a conversation with."""

    def acting(
        self,
        engine: RolloutEngine,
        chat: ChatArguments,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_token_ids: Sequence[int],
        prompt_tokens: int,
        partner_of: Callable[[Any, int], Partner | None] | None = None,
    ) -> RolloutEngine:
        """Return what draws conversations by `engine`. end_token_ids: each ends a turn. prompt_tokens: with which one
        may begin. partner_of: who answers for a row of a request and a seed; by default as the row says."""
        return engine

    def partner(self, row: Mapping[str, Any], seed: int) -> Partner | None:
        """Return who answers in the conversation of a row with `messages`; None: nobody."""
        return None

    def remembered(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message of theirs as one of a history that opens a later conversation."""
        return dict(message)

    def close(self) -> None:
        """Release what answers; once, at the end of the program."""


def all_partners(flags: AddedFlags) -> list[Partners]:
    """Return what plugins know of who may answer, with a program's flags."""
    return [make(flags) for make in hooks("partners")]


def partners_of(flags: AddedFlags) -> Partners:
    """Return who answers the model, not loaded yet. ThreestepError if two plugins would."""
    there = [each for each in all_partners(flags) if each.is_there]
    if len(there) > 1:
        raise ThreestepError(f"{there[0].flag} and {there[1].flag} both reply to the model; remove one of them")
    return there[0] if there else Partners()
