"""Terms and noise that may be added to step 1's loss and inputs (`sft_regularizers` of plugins). Cheap to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added, one_at_most

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.flags.added import AddedFlags
    from training.utils.models.token_model import TokenLogprobs


class AddedLoss(NamedTuple):
    """weight: of the term in the loss. term: this micro-batch's part of it, the figure train/NAME."""

    weight: float
    term: torch.Tensor


class Regularizer:
    """This one adds nothing.

    why_not_shared: a clause on why no two rows may share tokens; "" where they may.
    draws_noise: training has `noise`.
    losses: names of the terms.
    recorded: settings by their names in records of steps.
    """

    why_not_shared = ""
    draws_noise = False
    losses: Sequence[str] = ()
    recorded: Mapping[str, float] = {}

    def noise(self, rows: TokenRows, seeds_B: Sequence[int], width: int) -> torch.Tensor | None:
        """Return what is added to the input embeddings in training, [N, T, width]. seeds_B: of the sequences."""
        return None

    def added(self, read: TokenLogprobs, tokens_in_step: float) -> dict[str, AddedLoss]:
        """Return the terms of a micro-batch, by `losses`. tokens_in_step: targets of the step, on all ranks."""
        return {}


def regularizer_of(flags: AddedFlags) -> Regularizer:
    """Return that of a run. ThreestepError where two plugins would add to the loss."""
    made = ((name, named_object(place)(flags)) for name, place in added("sft_regularizers", ()).items())
    found = ((name, each) for name, each in made if each is not None)
    return one_at_most(found, "the loss can have only one regularizer", "each add one") or Regularizer()
