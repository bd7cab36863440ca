"""Checks of step 3's flags, before a model loads: what vLLM's own do not go with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.vllm.arguments import VllmArguments
from threestep.plugins.vllm.draft_arguments import VllmDraftArguments
from threestep.plugins.vllm.drafting import may_draft
from training.utils.base.errors import ThreestepError
from training.utils.generation.table import engine_class
from training.utils.loading.configurations import load_config

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note what does not go together (`Hooks.check`). flags: of a step; one that draws nothing has none of vLLM."""
    if not hasattr(flags, "engines"):
        return
    drafts = flags.added.of(VllmDraftArguments).vllm_speculate
    if drafts:
        _check_drafts(flags, drafts, mistakes)
    how = flags.settings.get("replay_routers", "none")  # of a plugin, which may not be there
    if how != "none":
        _check_replayed_routers(flags, how, drafts, mistakes=mistakes)


def _check_drafts(flags: Any, drafts: int, mistakes: Mistakes) -> None:
    """Note an engine that drafts nothing, what vLLM cannot do while it drafts, and a model beside which it runs no
    head."""
    given, parallel = f"--vllm_speculate {drafts}", flags.engines.of(VllmArguments).vllm_tensor_parallel_size
    mistakes.require(
        _may_draft(flags.ppo.rollout_engine),
        f"--rollout_engine {flags.ppo.rollout_engine} does not support --vllm_speculate {drafts}; remove "
        "--vllm_speculate, or use another engine",
    )
    mistakes.require(
        not flags.ppo.min_p,
        f"{given} cannot be combined with --min_p {flags.ppo.min_p:g}, because vLLM 0.32 verifies drafts without "
        "min-p; leave one of them out",
    )
    mistakes.require(
        parallel == 1,
        f"{given} sends the head's weights unsharded, but --vllm_tensor_parallel_size is {parallel}; leave one of "
        "them out",
    )
    if flags.guests.lends_guesser and flags.roles.actor_model_name_or_path:
        mistakes.note(_check_form, flags, given)


def _may_draft(engine: str) -> bool:
    """False for an engine that drafts nothing. An unknown one has been noted."""
    try:
        return may_draft(engine_class(engine))
    except ThreestepError:
        return True


def _check_form(flags: Any, given: str) -> None:
    from threestep.plugins.vllm.head_folder import check_form

    actor = flags.model("actor")
    config = load_config(actor.name_or_path, actor.trust_remote_code)
    final_norm = flags.settings.get("mtp_final_norm", True)  # of a plugin, which may not be there
    check_form(config.to_dict(), final_norm, given)


def _check_replayed_routers(flags: Any, how: str, drafts: int, *, mistakes: Mistakes) -> None:
    """Note flags by which vLLM does not know the experts of every token, which --replay_routers needs."""
    own = flags.engines.of(VllmArguments)
    for name, given, why in (
        (f"vllm_speculate {drafts}", drafts, "drafts tokens, some of which are rejected"),
        (
            f"vllm_tensor_parallel_size {own.vllm_tensor_parallel_size}",
            own.vllm_tensor_parallel_size > 1,
            "generates on several ranks together, and only one of them knows the experts",
        ),
        (
            "vllm_prefix_caching false",
            not own.vllm_prefix_caching,
            "removes the cache in which vLLM keeps the experts of a prompt",
        ),
    ):
        mistakes.require(not given, f"--replay_routers {how}: --{name} {why}; remove one of them")
