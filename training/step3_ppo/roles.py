"""The models of step 3: actor and critic are trained, reference and reward model only read. Critic and reference are
there where something needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.step3_ppo.shared_trunk import load_on_one_trunk
from training.utils.engine.frozen import FrozenModel
from training.utils.engine.settings import EngineSettings
from training.utils.engine.setup import load_under
from training.utils.engine.startup import Ranks
from training.utils.engine.training_engine import TrainingEngine
from training.utils.engine.weight_average import WeightAverage
from training.utils.engine.whole_model import WholeModel
from training.utils.layout.rows import TokenRows
from training.utils.models.loading import load_causal_lm, load_scalar_model
from training.utils.models.lora import adapters_off
from training.utils.models.score_scale import set_score_scale
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel, ScalarModel, TokenLogprobs


class Reference:
    """The policy as it started: a frozen copy, or the actor with its LoRA adapters off."""

    def __init__(self, frozen: FrozenModel | None, actor: TrainingEngine, actor_model: PreTrainedModel) -> None:
        self._frozen = frozen
        self._actor = actor
        self._actor_model = actor_model

    def __call__(self, rows: TokenRows, temperature: float, with_logits: bool = False) -> TokenLogprobs:
        if self._frozen is not None:
            return self._frozen(rows, temperature, with_logits=with_logits)
        training = self._actor.module.training
        self._actor.eval()
        try:
            with torch.no_grad(), adapters_off(self._actor_model):
                return self._actor(rows, temperature, with_logits=with_logits)
        finally:
            if training:
                self._actor.train()


@dataclass(frozen=True)
class Roles:
    """actor_model, critic_model and scorer (the reward model's) are the transformers models inside; `whole_actor` lends
    the actor's whole weights to a rollout. critic: None where advantages need no values; reference: None where no KL is
    wanted; reward_model and scorer: None where functions alone reward; average: of the actor's weights, None where it
    is not asked for. shares_trunk: actor and critic have one trunk, the actor's."""

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

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Actor and critic in eval mode inside, in train mode after."""
        trained = [engine for engine in (self.actor, self.critic) if engine is not None]
        for engine in trained:
            engine.eval()
        try:
            yield
        finally:
            for engine in trained:
                engine.train()


class Tokenizers(NamedTuple):
    """One vocabulary; only the pad tokens may differ. critic: None where neither critic nor reward model is loaded."""

    actor: PreTrainedTokenizerBase
    critic: PreTrainedTokenizerBase | None

    def saved_with(self, share_trunk: bool) -> dict[str, PreTrainedTokenizerBase | None]:
        """By engine: a critic on the actor's trunk is saved with the actor's."""
        return {"actor": self.actor, "critic": self.actor if share_trunk else self.critic}


@dataclass(frozen=True)
class RoleSettings:
    """How each trained model is loaded and trained; its frozen twin starts from the same weights. warmup_steps:
    optimizer steps of the critic alone at the start. ema_decay: of the actor's moving average; None: there is none.
    share_trunk: the critic's trunk is the actor's."""

    actor_model: ModelSettings
    actor_engine: EngineSettings
    critic_model: ModelSettings
    critic_engine: EngineSettings
    with_critic: bool = True
    with_reference: bool = True
    with_reward_model: bool = True
    warmup_steps: int = 0
    offload_reference: bool = False
    offload_reward_model: bool = False
    ema_decay: float | None = None
    share_trunk: bool = False


def load_roles(settings: RoleSettings, tokenizers: Tokenizers, ranks: Ranks, total_steps: int) -> Roles:
    """Load those that are wanted. `total_steps`: optimizer steps of the whole run, which the LR schedules span."""

    def language_model(model: ModelSettings) -> PreTrainedModel:
        return load_under(
            settings.actor_engine, ranks, lambda dtype: load_causal_lm(model, dtype, len(tokenizers.actor))
        )

    def scalar_model(model: ModelSettings) -> PreTrainedModel:
        tokenizer = tokenizers.critic
        assert tokenizer is not None  # loaded wherever a scalar model is
        return load_under(
            settings.critic_engine,
            ranks,
            lambda dtype: load_scalar_model(model, dtype, tokenizer, must_have_head=True),
        )

    scorer = reward_model = None
    if settings.with_reward_model:
        scorer = scalar_model(settings.critic_model.as_it_is())
        offloads = settings.critic_engine.offload or settings.offload_reward_model
        reward_model = FrozenModel(ScalarModel(scorer), replace(settings.critic_engine, offload=offloads), ranks)
    adapter_is_all = settings.actor_model.lora_dim > 0 and settings.actor_model.only_optimize_lora
    frozen_actor = None
    if settings.with_reference and not adapter_is_all:
        plain = settings.actor_model.as_it_is()
        offloads = settings.actor_engine.offload or settings.offload_reference
        engine = replace(settings.actor_engine, offload=offloads)
        frozen_actor = FrozenModel(PolicyModel(language_model(plain)), engine, ranks)

    critic_model = critic = None
    if settings.share_trunk:
        actor_model, critic_model = load_on_one_trunk(
            settings.actor_model, settings.critic_model, settings.actor_engine, tokenizers.actor, ranks
        )
    else:
        actor_model = language_model(settings.actor_model)
    if settings.with_critic and critic_model is None:
        critic_model = scalar_model(settings.critic_model)
        set_score_scale(critic_model.config, None)  # its values are on the scale of returns, whatever it started from
    actor_steps = total_steps - settings.warmup_steps
    actor = TrainingEngine(PolicyModel(actor_model), settings.actor_engine, ranks, actor_steps)
    if critic_model is not None:
        critic = TrainingEngine(ScalarModel(critic_model), settings.critic_engine, ranks, total_steps)
    return Roles(
        actor=actor,
        actor_model=actor_model,
        critic=critic,
        critic_model=critic_model,
        reference=Reference(frozen_actor, actor, actor_model) if settings.with_reference else None,
        reward_model=reward_model,
        scorer=scorer,
        whole_actor=WholeModel(actor, actor_model),
        average=None if settings.ema_decay is None else WeightAverage(actor, settings.ema_decay),
        shares_trunk=settings.share_trunk,
    )
