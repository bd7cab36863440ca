"""The models of step 3, as the loop holds them: actor and critic are trained, reference and reward model only read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from training.utils.models.adapters.lora import adapters_off
from training.utils.mtp.training import MultiTokenPrediction
from training.utils.routers.step_loss import RouterLoss

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.frozen import FrozenModel
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.engine.weight_average import WeightAverage
    from training.utils.engine.whole_model import WholeModel
    from training.utils.models.token_model import TokenLogprobs


@dataclass(frozen=True)
class Reference:
    """The policy at the start: a frozen copy, `model`, or the actor with its LoRA adapters off."""

    frozen: FrozenModel | None
    actor: TrainingEngine
    actor_model: PreTrainedModel
    model: PreTrainedModel | None = None

    def __call__(self, rows: TokenRows, temperature: float, with_logits: bool = False) -> TokenLogprobs:
        if self.frozen is not None:
            return self.frozen(rows, temperature, with_logits=with_logits)
        training = self.actor.module.training
        self.actor.eval()
        try:
            with torch.no_grad(), adapters_off(self.actor_model):
                return self.actor(rows, temperature, with_logits=with_logits)
        finally:
            if training:
                self.actor.train()


@dataclass(frozen=True)
class Roles:
    """actor_model, critic_model, scorer (the reward model's): the transformers models inside.
    critic: None if advantages need no values. reference: None without a KL. reward_model: None if only functions
    reward. whole_actor: lends the actor's whole weights to a rollout. average: of the actor's weights, if asked for.
    shares_trunk: the critic's trunk is the actor's.
    actor_routers, critic_routers: the balancing loss of a mixture of experts.
    packs: documents may share rows of every model.
    mtp: trains a head for multi-token prediction beside the actor, if one is asked for.
    processor: files of the models' image processor, which are saved with them.
    """

    actor: TrainingEngine
    actor_model: PreTrainedModel
    critic: TrainingEngine | None
    critic_model: PreTrainedModel | None
    reference: Reference | None
    reward_model: FrozenModel | None
    scorer: PreTrainedModel | None
    whole_actor: WholeModel
    average: WeightAverage | None = None
    shares_trunk: bool = False
    packs: bool = False
    actor_routers: RouterLoss = field(default_factory=RouterLoss)
    critic_routers: RouterLoss = field(default_factory=RouterLoss)
    mtp: MultiTokenPrediction = field(default_factory=MultiTokenPrediction)
    processor: Sequence[Path] = ()

    @property
    def trained(self) -> dict[str, TrainingEngine]:
        """The engines that a checkpoint holds, by its names for them."""
        return {"actor": self.actor, **({} if self.critic is None else {"critic": self.critic}), **self.mtp.engines}

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

    def saved_with(self, share_trunk: bool) -> dict[str, PreTrainedTokenizerBase | None]:
        """Return tokenizers by engine: a critic on the actor's trunk is saved with the actor's."""
        return {"actor": self.actor, "critic": self.actor if share_trunk else self.critic}
