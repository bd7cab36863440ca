"""Flags that do not go with environments are refused before a model loads, and so are those without them."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from training.step3_ppo.flags.checks import Components, checked_components
from training.utils.base.errors import ThreestepError

LOOKUP = "examples/environments/lookup.py:Lookup"


def components(critic: str = "c", **given) -> Components:
    names = {"actor_model_name_or_path": "a", "critic_model_name_or_path": critic, "num_samples_per_prompt": 2}
    return checked_components(
        ppo_flags(**{**names, "reward": "environment", "advantage": "grpo", "environment": LOOKUP, **given})
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not support --environment, got examples/env"),
        ({"rollout_engine": "vllm", "vllm_tensor_parallel_size": 2}, "--vllm_tensor_parallel_size 2 has ranks draw t"),
        ({"parallel_thinking": True}, "draw turn by turn, and --parallel_thinking draws paths side by side; leave"),
        ({"rank_timeout": 300.0}, "makes 540 seconds, and other ranks wait for --rank_timeout 300; lower the first"),
        ({"environment": None, "max_tool_calls": 3}, "--max_tool_calls 3 limits conversations, and there are none"),
        ({"environment": None}, "--reward environment is what an environment gives the turns of a conversation, and"),
        ({"replay_routers": "follow"}, "--environment, --tools draw turn by turn, and turns record no experts"),
    ],
)
def test_what_does_not_go_with_environments(given, said):
    with pytest.raises(ThreestepError, match=said):
        components(**given)


def test_environments_are_loaded_unless_a_replay_has_their_answers(tmp_path):
    found = components("")
    assert found.partners.environments.names == ("Lookup",) and not found.with_reward_model
    (tmp_path / "rollout_000000_rank0.safetensors").touch()
    replayed = components("", rollout_replay=str(tmp_path))
    assert replayed.partners.is_there and replayed.partners.environments is None
