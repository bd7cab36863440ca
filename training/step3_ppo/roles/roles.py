"""The models of step 3, as the loop holds them: actor and critic are trained, reference and reward model only read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.utils.contracts.guests import Guests
from training.utils.engine.whole_model import WholeModel
from training.utils.models.tensors.adapters import adapters_off

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.contracts.rollout_engine import ExpertRecord
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.frozen import FrozenModel
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.target_head import Readout, TokenLogprobs


@dataclass(frozen=True)
class Reference:
    """The policy at the start: a frozen copy, or the actor with its adapters off."""

    frozen: FrozenModel | None
    actor: TrainingEngine

    @property
    def model(self) -> PreTrainedModel | None:
        """The transformers model inside the frozen copy."""
        return None if self.frozen is None else self.frozen.model

    def __call__(self, rows: TokenRows, readout: Readout) -> TokenLogprobs:
        if self.frozen is not None:
            return self.frozen(rows, readout)
        training, rows = self.actor.module.training, rows.of_free_experts()
        self.actor.eval()
        try:
            with torch.no_grad(), adapters_off(self.actor.module):
                return self.actor(rows, readout)
        finally:
            if training:
                self.actor.train()


class SavedBeside(NamedTuple):
    """Saved beside the models' weights: tokenizers, by the engines' names, and files that are saved as they are."""

    tokenizers: Mapping[str, PreTrainedTokenizerBase | None] = {}
    processor: Sequence[Path] = ()


@dataclass(frozen=True)
class Roles:
    """critic: None if advantages need no values. reference: None without a KL. reward_model: None if only functions
    reward.
    packs: documents may share rows of every model.
    experts: of the actor, a mixture of experts, where rollouts record them.
    actor_guests, critic_guests: what trains beside them, or adds to their losses.
    """

    actor: TrainingEngine
    critic: TrainingEngine | None
    reference: Reference | None
    reward_model: FrozenModel | None
    saved: SavedBeside = SavedBeside()
    packs: bool = False
    actor_guests: Guests = Guests()
    critic_guests: Guests = Guests()
    experts: ExpertRecord | None = None

    @property
    def actor_model(self) -> PreTrainedModel:
        """The transformers model inside the actor."""
        return self.actor.module.model  # type: ignore[return-value]

    @property
    def critic_model(self) -> PreTrainedModel | None:
        """The transformers model inside the critic."""
        return None if self.critic is None else self.critic.module.model  # type: ignore[return-value]

    @property
    def trained_models(self) -> dict[str, PreTrainedModel]:
        """The transformers models that learn, by role."""
        critic = self.critic_model
        return {"actor": self.actor_model, **({} if critic is None else {"critic": critic})}

    @property
    def scorer(self) -> PreTrainedModel | None:
        """The transformers model inside the reward model."""
        return None if self.reward_model is None else self.reward_model.model

    @property
    def readers(self) -> dict[str, tuple[PreTrainedModel, Callable[[TokenRows], torch.Tensor]]]:
        """Each model that is loaded and its forward of rows, by the model's name in messages."""
        found: dict[str, tuple[PreTrainedModel, Callable[[TokenRows], torch.Tensor]]]
        found = {"actor": (self.actor_model, lambda rows: self.actor(rows).logprobs_M)}
        if self.reward_model is not None:
            found["reward model"] = (self.reward_model.model, self.reward_model)
        if self.critic is not None and self.critic_model is not None:
            found["critic"] = (self.critic_model, self.critic)
        frozen = None if self.reference is None else self.reference.frozen
        if frozen is not None:
            found["reference"] = (frozen.model, lambda rows: frozen(rows).logprobs_M)
        return found

    @functools.cached_property
    def whole_actor(self) -> WholeModel:
        """Lends the actor's whole weights to a rollout."""
        return WholeModel(self.actor, self.actor_model)

    @property
    def trained(self) -> dict[str, TrainingEngine]:
        """The engines that a checkpoint holds, by its names for them."""
        critic = {} if self.critic is None else {"critic": self.critic}
        return {"actor": self.actor, **critic, **self.actor_guests.engines, **self.critic_guests.engines}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Put actor and critic in eval mode inside, in train mode after."""
        trained = [engine for engine in (self.actor, self.critic) if engine is not None]
        for engine in trained:
            engine.eval()
        try:
            yield
        finally:
            for engine in trained:
                engine.train()


class Tokenizers(NamedTuple):
    """One vocabulary; only the pad tokens may differ. critic: None if neither critic nor reward model is loaded."""

    actor: PreTrainedTokenizerBase
    critic: PreTrainedTokenizerBase | None

    def saved_with(self, shares_trunk: bool) -> dict[str, PreTrainedTokenizerBase | None]:
        """Return tokenizers by engine: a critic on the actor's trunk is saved with the actor's."""
        return {"actor": self.actor, "critic": self.actor if shares_trunk else self.critic}
