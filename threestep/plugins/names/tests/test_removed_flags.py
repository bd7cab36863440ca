"""Flags that are gone: their defaults in the configuration of an earlier run ask for nothing, other values are refused
with what to use instead."""

from __future__ import annotations

import pytest

from threestep.plugins.names.removed_flags import REMOVED_FLAGS
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.step import known_steps

BEGUN = "init_lr_ratio: 0.0\nnum_cycles: 0.5\nzero3_prefetch_parameters: null\nlogging_steps: 1\nseed: 7\n"


@pytest.mark.parametrize("step", ["step1_sft", "step2_reward", "step2_dpo", "step3_ppo"])
def test_a_run_of_before_resumes_with_its_configuration(step, tmp_path):
    (tmp_path / "config.yaml").write_text(BEGUN)
    its = known_steps()[step]
    path = "--actor_model_name_or_path" if step == "step3_ppo" else "--model_name_or_path"
    words = ["--config", str(tmp_path / "config.yaml"), path, "m", "--data_path", "embedded"]
    assert parse_arguments(its.groups, words, "", its.old_flags)[0].seed == 7


@pytest.mark.parametrize("flag", REMOVED_FLAGS)
def test_another_value_is_refused(flag):
    its = known_steps()["step1_sft"]
    with pytest.raises(ThreestepError, match=f"{flag} is gone: "):
        parse_arguments(its.groups, [flag, "0.3"], "", its.old_flags)
