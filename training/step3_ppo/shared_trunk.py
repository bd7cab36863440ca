"""--share_trunk: actor, reference and critic on one trunk that stays frozen, each trained model with adapters of its
own, the critic with a scalar head. Cheap to import: the mistakes are told before a model loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.engine.settings import EngineSettings
from training.utils.models.settings import ModelSettings
from training.utils.run.errors import Mistakes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.step3_ppo.arguments import RolesArguments
    from training.utils.engine.startup import Ranks


def check_shared_trunk(roles: RolesArguments, mistakes: Mistakes) -> None:
    """Note what --share_trunk lacks, and what it does not go together with."""
    if not roles.share_trunk:
        return
    for role in ("actor", "critic"):
        dim = getattr(roles, f"{role}_lora_dim")
        mistakes.require(
            dim > 0,
            f"--share_trunk trains adapters of actor and critic on one frozen trunk, and --{role}_lora_dim is {dim}; "
            "give it 1 or more",
        )
    mistakes.require(
        roles.only_optimize_lora,
        "--share_trunk keeps the trunk frozen, and --only_optimize_lora false trains it; leave one of them out",
    )
    stages = roles.actor_zero_stage, roles.critic_zero_stage
    mistakes.require(
        (stages[0] == 3) == (stages[1] == 3),
        f"--share_trunk: ZeRO 3 shards the trunk for both, and --actor_zero_stage is {stages[0]}, --critic_zero_stage "
        f"{stages[1]}; give 3 to both or to neither",
    )


def check_needs_critic(roles: RolesArguments, advantage: str, needs_critic: bool, mistakes: Mistakes) -> None:
    """Note an advantage without a critic that could share."""
    mistakes.require(
        needs_critic or not roles.share_trunk,
        f"--share_trunk puts actor and critic on one trunk, and --advantage {advantage} has no critic; leave it out or "
        "use gae",
    )


def load_on_one_trunk(
    actor: ModelSettings,
    critic: ModelSettings,
    engine: EngineSettings,
    tokenizer: PreTrainedTokenizerBase,
    ranks: Ranks,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return (actor, critic): the weights that they share are loaded once, from the actor's name_or_path; the critic's
    is not read."""
    from training.utils.engine.setup import load_under
    from training.utils.models.loading import load_causal_lm, prepared
    from training.utils.models.shared_trunk import scalar_model_on_trunk

    model = load_under(engine, ranks, lambda dtype: load_causal_lm(actor.as_it_is(), dtype, len(tokenizer)))
    scalar = scalar_model_on_trunk(model, critic, tokenizer.pad_token_id)
    return prepared(model, actor), scalar
