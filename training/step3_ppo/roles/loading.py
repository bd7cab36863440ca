"""Loads the models of step 3; all but the actor only if something needs them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from training.step3_ppo.flags.roles_arguments import critic_on_trunk
from training.step3_ppo.roles.roles import Reference, Roles, SavedBeside, Tokenizers
from training.utils.base.user_files import named_object
from training.utils.engine.frozen import FrozenModel
from training.utils.engine.training_engine import TrainingEngine
from training.utils.flags.added import NO_FLAGS, AddedFlags
from training.utils.loading.models import load_causal_lm, load_scalar_model, prepared
from training.utils.loading.score_scale import set_score_scale
from training.utils.models.token_model import PolicyModel, ScalarModel
from training.utils.setup.media import check_read_alike, processor_of
from training.utils.setup.setup import load_under

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedModel

    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.utils.contracts.media import RunMedia
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.models.settings import ModelSettings


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
    needed: RolesNeeded | None = None,
    media: RunMedia | None = None,
) -> Roles:
    """Load the models.

    total_steps: optimizer steps of the whole run, which the LR schedules span. warmup_steps: those at the start that
        train the critic alone.
    longest_tokens: of the sequences that the models will read; 0 if unknown.
    needed: all by default.
    media: of the prompts, if some have some.
    """
    needed = needed or RolesNeeded()
    if media is not None:
        if tokenizers.critic is not None:
            check_read_alike(
                (flags.actor_model_name_or_path, flags.critic_model_name_or_path), flags.trust_remote_code, tokenizers
            )
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
