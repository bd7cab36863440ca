"""The source of a rollout's prompts, which sees its results: the dataset's, or what a plugin chooses
(`prompt_sources` of plugins). Knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.layout.order import ShuffledStream

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import LeftOut, Samples
    from training.utils.contracts.rows import PromptRow


class PromptSource:
    """Gives the prompts of every rollout: the dataset's, in shuffled epochs or, if not `shuffled`, in its order. Only
    the position is remembered, by the trainer. States are what JSON holds, the same on every rank. Every method is
    called by all ranks.

    makes_prompts: there may be others than the dataset's.
    """

    makes_prompts = False

    def __init__(self, prompts: Sequence[PromptRow], seed: int, shuffled: bool = True) -> None:
        self.prompts = prompts
        self._stream = ShuffledStream(len(prompts), seed, shuffled)

    def take(self, first: int, count: int) -> list[PromptRow]:
        """Return the prompts at positions first .. first + count - 1 of the run, for all ranks together."""
        return [self.prompts[row] for row in self._stream.take(first, count)]

    def spare(self, seed: int, first: int, count: int) -> list[PromptRow]:
        """Return replacements: the prompts at positions first .. of all there are, in shuffled epochs by `seed`."""
        return [self.prompts[row] for row in ShuffledStream(len(self.prompts), seed).take(first, count)]

    def observe(self, samples: Samples, left_out: Sequence[LeftOut] = ()) -> None:
        """Receive the results of this rank's prompts. left_out: those that were scored and are not trained on."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `observe` and `take` change."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ThreestepError(
                f"the saved run chose its prompts by a {' and a '.join(sorted(state))}, and this one takes them in "
                "epochs; give the flags that the saved run had"
            )
