"""Flags that do not go with --replay_routers are refused, each by a sentence."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from training.step3_ppo.flags.checks import checked_components
from training.step3_ppo.parts.acting import deciding_flags
from training.utils.base.errors import ThreestepError


def flags_of(**given):
    names = {"actor_model_name_or_path": "a", "reward": "gsm8k", "num_samples_per_prompt": 2, "advantage": "grpo"}
    return ppo_flags(**{**names, "replay_routers": "follow", **given})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not record them; give hf, vllm or vllm_server"),
        ({"tools": "a.py:B"}, "--environment, --tools draw turn by turn, and turns record no experts"),
        ({"parallel_thinking": True}, "--parallel_thinking draws paths side by side, which record no experts"),
        ({"speculate": "1", "speculate_by": "ngram"}, "--speculate 1 verifies several tokens at once"),
        ({"vllm_speculate": 2}, "--vllm_speculate 2 drafts tokens, some of them wrong"),
        ({"vllm_tensor_parallel_size": 2}, "--vllm_tensor_parallel_size 2 has several ranks draw"),
        ({"vllm_prefix_caching": False}, "--vllm_prefix_caching false takes away the cache"),
    ],
)
def test_what_does_not_go_with_it(given, why):
    with pytest.raises(ThreestepError) as raised:
        checked_components(flags_of(**given))
    assert "--replay_routers follow" in str(raised.value) and why in str(raised.value)


def test_a_dump_says_whether_it_has_experts():
    assert deciding_flags(flags_of()) == {"experts": True}
    assert deciding_flags(flags_of(replay_routers="none")) == {}
    checked_components(flags_of())
    checked_components(flags_of(rollout_engine="vllm_server", vllm_servers="http://127.0.0.1:8000"))
