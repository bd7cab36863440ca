"""The models of step 3: actor and critic are trained, reference and reward model only read. All but the actor are
loaded only if something needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.utils.engine.frozen import FrozenModel
from training.utils.routers.step_loss import RouterLoss
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.training_engine import TrainingEngine
from training.utils.engine.weight_average import WeightAverage
from training.utils.engine.whole_model import WholeModel
from training.utils.images.rows.pictures import RowImages
from training.utils.layout.rows import TokenRows
from training.utils.loading.models import load_causal_lm, load_scalar_model, prepared
from training.utils.loading.score_scale import set_score_scale
from training.utils.loading.shared_trunk import scalar_model_on_trunk
from training.utils.models.adapters.lora import adapters_off
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel, ScalarModel, TokenLogprobs
from training.utils.mtp.training import MultiTokenPrediction
from training.utils.images.run.image_reader import processor_of, reader_of_model
from training.utils.opening.setup import load_under
from training.utils.base.errors import ThreestepError


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


def _check_same_pixels(flags: RolesArguments, tokenizers: Tokenizers) -> None:
    """ThreestepError if actor and critic were made with image processors of other settings: pixels are the actor's."""
    if tokenizers.critic is None:
        return
    paths, trust = (flags.actor_model_name_or_path, flags.critic_model_name_or_path), flags.trust_remote_code
    readers = [reader_of_model(path, trust, own) for path, own in zip(paths, tokenizers, strict=True)]
    actor, critic = (reader and reader.parts() for reader in readers)
    if actor is not None and critic is not None and actor != critic:
        raise ThreestepError(
            f"the image processors (preprocessor_config.json) of --actor_model_name_or_path '{paths[0]}' and "
            f"--critic_model_name_or_path '{paths[1]}' differ: the reward model would see other pixels than it was "
            "trained on; train step 2 from a model with the actor's"
        )


class RolesNeeded(NamedTuple):
    """Which models there are besides the actor."""

    critic: bool = True
    reference: bool = True
    reward_model: bool = True


def load_roles(
    flags: RolesArguments,
    tokenizers: Tokenizers,
    ranks: Ranks,
    total_steps: int,
    warmup_steps: int = 0,
    longest_tokens: int = 0,
    needed: RolesNeeded | None = None,
    images: RowImages | None = None,
) -> Roles:
    """Load the models.

    total_steps: optimizer steps of the whole run, which the LR schedules span. warmup_steps: those at the start that
        train the critic alone.
    longest_tokens: of the sequences that the models will read; 0 if unknown.
    needed: all by default.
    images: of the prompts, if some have one.
    """
    needed = needed or RolesNeeded()
    if images is not None:
        _check_same_pixels(flags, tokenizers)
    actor_settings, critic_settings = flags.model("actor"), flags.model("critic")
    reading: Any = {"longest_tokens": longest_tokens, "device": ranks.device, "images": images}

    def language_model(model: ModelSettings) -> PreTrainedModel:
        size = len(tokenizers.actor)
        return load_under(flags.engine("actor"), ranks, lambda dtype: load_causal_lm(model, dtype, size, **reading))

    def scalar_model(model: ModelSettings) -> PreTrainedModel:
        tokenizer = tokenizers.critic
        assert tokenizer is not None  # loaded wherever a scalar model is
        return load_under(
            flags.engine("critic"),
            ranks,
            lambda dtype: load_scalar_model(model, dtype, tokenizer, must_have_head=True, **reading),
        )

    scorer = reward_model = None
    if needed.reward_model:
        scorer = scalar_model(critic_settings.as_it_is())
        reward_model = FrozenModel(ScalarModel(scorer), flags.frozen_engine("critic"), ranks)
    adapter_is_all = flags.actor_lora_dim > 0 and flags.only_optimize_lora
    frozen_actor = plain = None
    if needed.reference and not adapter_is_all:
        plain = language_model(actor_settings.as_it_is())
        frozen_actor = FrozenModel(PolicyModel(plain, flags.head_chunk_mb), flags.frozen_engine("actor"), ranks)

    critic_model = critic = None
    if flags.share_trunk:
        # The shared weights are loaded once, from the actor's name_or_path; the critic's is not read.
        trunk = language_model(actor_settings.as_it_is())
        pad = tokenizers.actor.pad_token_id
        on_trunk = replace(critic_settings, name_or_path=actor_settings.name_or_path)
        critic_model = scalar_model_on_trunk(trunk, on_trunk, pad, longest_tokens, images)
        actor_model = prepared(trunk, actor_settings)
    else:
        actor_model = language_model(actor_settings)
    if needed.critic and critic_model is None:
        critic_model = scalar_model(critic_settings)
        set_score_scale(critic_model.config, None)  # its values are on the scale of returns
    policy = PolicyModel(actor_model, flags.head_chunk_mb)
    actor = TrainingEngine(policy, flags.engine("actor"), ranks, total_steps - warmup_steps)
    if critic_model is not None:
        critic = TrainingEngine(ScalarModel(critic_model), flags.engine("critic"), ranks, total_steps)
    return Roles(
        actor=actor,
        actor_model=actor_model,
        critic=critic,
        critic_model=critic_model,
        reference=Reference(frozen_actor, actor, actor_model, plain) if needed.reference else None,
        reward_model=reward_model,
        scorer=scorer,
        whole_actor=WholeModel(actor, actor_model),
        average=WeightAverage(actor, flags.ema_decay) if flags.enable_ema else None,
        shares_trunk=flags.share_trunk,
        processor=processor_of(flags.actor_model_name_or_path, actor_model),
    )
