"""Flags that do not go with --replay_routers are refused, each by a sentence."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from training.step3_ppo.flags.checks import checked_components
from training.step3_ppo.parts.assembly import deciding_settings
from training.utils.base.errors import ThreestepError
from training.utils.generation.partners import Partners


def flags_of(**given):
    names = {"actor_model_name_or_path": "a", "reward": "gsm8k", "num_samples_per_prompt": 2, "advantage": "grpo"}
    return ppo_flags(**{**names, "replay_routers": "follow", **given})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not record them; give hf"),
        ({"parallel_thinking": True}, "--parallel_thinking draws paths side by side, which record no experts"),
        ({"speculate": "1", "speculate_by": "ngram"}, "--speculate 1 verifies several tokens at once"),
    ],
)
def test_what_does_not_go_with_it(given, why):
    with pytest.raises(ThreestepError) as raised:
        checked_components(flags_of(**given))
    assert "--replay_routers follow" in str(raised.value) and why in str(raised.value)


def test_a_dump_says_whether_it_has_experts():
    assert deciding_settings(flags_of(), Partners()) == {"experts": True}
    assert deciding_settings(flags_of(replay_routers="none"), Partners()) == {}
    checked_components(flags_of())
