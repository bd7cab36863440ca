"""Refusals of --replay_routers: what draws tokens without their experts, or computes them by its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.base.tables import either
from training.utils.generation.partners import partners_of
from training.utils.generation.table import recording_experts
from training.utils.generation.vllm.arguments import VllmArguments

if TYPE_CHECKING:
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.rollout_engine import RolloutEngine


def check_replayed_routers(flags: PpoFlags, engine: type[RolloutEngine] | None, mistakes: Mistakes) -> None:
    """Note every flag that does not go with --replay_routers. engine: None where its name is unknown."""
    how, ppo = flags.mismatch.replay_routers, flags.ppo
    if how == "none" or engine is None:
        return
    mistakes.require(
        engine.records_experts or ppo.rollout_replay is not None,
        f"--replay_routers {how} needs the experts of each token of a rollout, and --rollout_engine "
        f"{ppo.rollout_engine} does not record them; give {either(recording_experts())}",
    )
    of_vllm, partners = flags.engines.of(VllmArguments), partners_of(flags.added)
    for name, given, why in (
        (partners.flag.removeprefix("--"), partners.is_there, "draw turn by turn, and turns record no experts"),
        ("parallel_thinking", flags.data.chat.parallel_thinking, "draws paths side by side, which record no experts"),
        (f"speculate {ppo.speculate}", ppo.speculate != "0", "verifies several tokens at once, some of them wrong"),
        (f"vllm_speculate {ppo.vllm_speculate}", ppo.vllm_speculate, "drafts tokens, some of them wrong"),
        (
            f"vllm_tensor_parallel_size {of_vllm.vllm_tensor_parallel_size}",
            of_vllm.vllm_tensor_parallel_size > 1,
            "has several ranks draw, of which one alone knows the experts",
        ),
        (
            "vllm_prefix_caching false",
            not of_vllm.vllm_prefix_caching,
            "takes away the cache in which vLLM keeps the experts of a prompt",
        ),
    ):
        mistakes.require(not given, f"--replay_routers {how}: --{name} {why}; leave one of them out")
