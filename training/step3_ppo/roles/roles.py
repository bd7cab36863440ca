"""The models of step 3: actor and critic are trained, reference and reward model only read. All but the actor are
loaded only if something needs them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from training.step3_ppo.flags.roles_arguments import critic_on_trunk
from training.utils.base.user_files import named_object
from training.utils.contracts.guests import Guests
from training.utils.engine.training_engine import FrozenModel, TrainingEngine
from training.utils.engine.whole_model import WholeModel
from training.utils.flags.added import NO_FLAGS, AddedFlags
from training.utils.loading.configurations import set_score_scale
from training.utils.loading.models import load_causal_lm, load_scalar_model, prepared
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.models.weights import adapters_off
from training.utils.setup.media import check_read_alike, processor_of
from training.utils.setup.setup import load_under

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.utils.contracts.guests import ExpertRecord
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.models.settings import ModelSettings
    from training.utils.models.token_model import Readout, TokenLogprobs


@dataclass(frozen=True)
class Reference:
    """The policy at the start: a frozen copy, or the actor with its adapters off."""

    frozen: FrozenModel | None
    actor: TrainingEngine

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

    def trained_with(self, role: str) -> tuple[PreTrainedModel | None, Guests]:
        """Return the transformers model inside the actor or the critic, None if there is none, and its guests."""
        if role == "actor":
            return self.actor_model, self.actor_guests
        return self.critic_model, self.critic_guests

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


class RolesNeeded(NamedTuple):
    """Selects the models that there are besides the actor. added: flags of plugins, which may change all of them."""

    critic: bool = True
    reference: bool = True
    reward_model: bool = True
    added: AddedFlags = NO_FLAGS


def load_roles(
    flags: RolesArguments,
    tokenizers: Tokenizers,
    ranks: Ranks,
    total_steps: int,
    *,
    warmup_steps: int = 0,
    longest_tokens: int = 0,
    needed: RolesNeeded,
    media: RunMedia | None = None,
) -> Roles:
    """Load the models.

    total_steps: optimizer steps of the whole run, which the LR schedules span. warmup_steps: those at the start that
        train the critic alone.
    longest_tokens: of the sequences that the models will read; 0 if unknown.
    media: of the prompts, if some have some.
    """
    if media is not None and tokenizers.critic is not None:
        paths = (flags.actor_model_name_or_path, flags.critic_model_name_or_path)
        check_read_alike(paths, flags.trust_remote_code, tokenizers)
    actor_settings, critic_settings = (flags.model(role, needed.added) for role in ("actor", "critic"))
    load = partial(_loaded, ranks=ranks, longest_tokens=longest_tokens)
    reading: Any = {"longest_tokens": longest_tokens, "device": ranks.device, "media": media}

    def language_model(model: ModelSettings) -> PreTrainedModel:
        size = len(tokenizers.actor)
        return load(flags.engine("actor"), loaded=lambda dtype: load_causal_lm(model, dtype, size, **reading))

    def scalar_model(model: ModelSettings) -> PreTrainedModel:
        tokenizer = tokenizers.critic
        assert tokenizer is not None  # loaded wherever a scalar model is
        return load(
            flags.engine("critic"),
            loaded=lambda dtype: load_scalar_model(model, dtype, tokenizer, must_have_head=True, **reading),
        )

    reward_model = frozen_actor = critic_model = critic = None
    if needed.reward_model:
        scorer = ScalarModel(scalar_model(critic_settings.as_it_is()), sharing=ranks.sharing)
        reward_model = FrozenModel(scorer, flags.frozen_engine("critic"), ranks)
    if needed.reference and not actor_settings.is_own_reference:
        plain = PolicyModel(language_model(actor_settings.as_it_is()), flags.head_chunk_mb, sharing=ranks.sharing)
        frozen_actor = FrozenModel(plain, flags.frozen_engine("actor"), ranks)

    maker = critic_on_trunk(needed.added)
    if maker:
        # The shared weights are loaded once, from the actor's name_or_path; the critic's is not read.
        trunk = language_model(actor_settings.as_it_is())
        critic_model = named_object(maker)(
            trunk,
            replace(critic_settings, name_or_path=actor_settings.name_or_path),
            tokenizers.actor.pad_token_id,
            longest_tokens,
            media=media,
        )
        actor_model = prepared(trunk, actor_settings)
    else:
        actor_model = language_model(actor_settings)
    if needed.critic and critic_model is None:
        critic_model = scalar_model(critic_settings)
        set_score_scale(critic_model.config, None)  # its values are on the scale of returns
    policy = PolicyModel(actor_model, flags.head_chunk_mb, sharing=ranks.sharing)
    actor = TrainingEngine(policy, flags.engine("actor"), ranks, total_steps - warmup_steps)
    if critic_model is not None:
        critic = TrainingEngine(
            ScalarModel(critic_model, sharing=ranks.sharing), flags.engine("critic"), ranks, total_steps
        )
    processor = processor_of(flags.actor_model_name_or_path, actor_model)
    return Roles(
        actor=actor,
        critic=critic,
        reference=Reference(frozen_actor, actor) if needed.reference else None,
        reward_model=reward_model,
        saved=SavedBeside(tokenizers.saved_with(bool(maker)), processor),
    )


def _loaded(
    engine: EngineSettings, ranks: Ranks, longest_tokens: int, *, loaded: Callable[[torch.dtype], PreTrainedModel]
) -> PreTrainedModel:
    """A model whose rows the ranks can share, where they do."""
    model: PreTrainedModel = load_under(engine, ranks, loaded)
    ranks.sharing.check_model(model, longest_tokens)
    return model
