"""Features that have guests (`contracts.guests`) in a run: what a run asks of them before it has any. Cheap to import.

A plugin's `Hooks.guests` returns a GuestFeature of a step's flags, which has guests or has none by these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from training.utils.base.errors import Mistakes
    from training.utils.contracts.guests import Guest
    from training.utils.contracts.rollout_engine import ExpertRecord


class GuestFeature:
    """This one has no guests; each overrides what it needs. The first model is the one to train, in step 3 the actor.

    place: guests act in the order of their features' places, which is part of a run's results; those of one place in
        the order of the plugins' names. Of this project: the balancing loss of routers 100, the head for multi-token
        prediction 200, the teacher 300, the moving average 400.
    needs_segments: the flag for which the first model must take a mask of segments; None without one.
    trains_alone: its loss trains the first model without the trainer's own.
    lends_guesser: a guest of the first model lends rollouts a head (`Guest.lent_guesser`).
    records_experts: rollouts of the first model have `experts`.
    """

    place = 1000
    needs_segments: str | None = None
    trains_alone = False
    lends_guesser = False
    records_experts = False

    def exact_weights(self) -> Mapping[str, str]:
        """Return the flags that are set and need the first model's weights as they are stored, and why."""
        return {}

    def reuse_obstacle(self) -> tuple[str, str] | None:
        """Return why forwards of the first model that read cannot be learned from, a sentence after a flag's name, and
        what to do; None if they can. What is known once models are loaded says `Guest.why_not_ahead`."""
        return None

    def check_words(self, tokenizer: Any) -> None:
        """ThreestepError if another model would read other words than this tokenizer writes; before models load."""

    def check_media(self, mistakes: Mistakes) -> None:
        """Note what does not go with rows, in step 3 prompts, that have media."""

    def inside(self, path: str, model: Any, zero_stage: int, seed: int, *, ranks: Any) -> Mapping[str, nn.Module]:
        """Return the modules that train with `model`, the first, by one loss, for its PolicyModel. A collective, before
        the model is under DeepSpeed. path: of the model. ranks: a `Ranks`."""
        return {}

    def open(self, models: Sequence[tuple[Any, Any]], path: str, total_steps: int, seed: int) -> Sequence[Guest | None]:
        """Return the guest of each model, from the first on; None for one without. A collective.

        models: (TrainingEngine, transformers model). path: of the first. total_steps: of its optimizer.

        Raises ThreestepError for a guest that a model cannot have.
        """
        return ()

    def reads_twice(self, model: Any) -> bool:
        """True if a step of several forwards first reads each of them once more. model: the first, perhaps on meta."""
        return False

    def recorded_experts(self, model: Any, read: Callable[[Any], torch.Tensor], ranks: Any) -> ExpertRecord | None:
        """Return the record of the experts of the first model; None without one. A collective. read: the numbers of
        TokenRows, in eval mode."""
        return None

    def planned(
        self, model: Any, settings: Any, ranks: int, device: Any
    ) -> tuple[Sequence[str], Sequence[Any], Sequence[Any]]:
        """Return sentences on what trains beside `model` (the first, on the meta device), what that holds of one rank
        besides its activations (MemoryLine), and its moments (Moment).

        settings: the EngineSettings of the model. device: a PlannedDevice (`base.memory`).
        """
        return (), (), ()
