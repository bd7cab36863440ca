"""Flags of DeepSpeed's launcher, where there is no launcher or they contradict something."""

from __future__ import annotations

import pytest

from training.step1_sft import STEP
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments
from training.utils.run.launch import as_variables


def test_all_mistakes_are_told_at_once():
    flags = "--num_gpus 2 --include localhost:0 --num_nodes 4 --master_port --seed 1".split()
    with pytest.raises(ThreestepError) as told:
        as_variables(flags, {"THREESTEP_RANKS": "1"})
    assert [line.strip() for line in str(told.value).splitlines()[1:]] == [
        "- --num_gpus 2 and THREESTEP_RANKS=1 contradict each other; leave one out",
        "- --include chooses hosts and GPUs for `deepspeed`; here CUDA_VISIBLE_DEVICES=0,1 chooses GPUs, and "
        "THREESTEP_HOSTFILE hosts",
        "- --num_nodes expects 1, got 4: several hosts are the lines of a file named by THREESTEP_HOSTFILE or "
        "--hostfile",
        "- --master_port expects a value after it, got none",
    ]


def test_what_agrees_with_the_environment_is_taken():
    assert as_variables(["--num_gpus", "2"], {"THREESTEP_RANKS": "2"})[1] == {"THREESTEP_RANKS": "2"}


def test_a_steps_own_program_says_where_they_belong():
    with pytest.raises(ThreestepError, match="^--num_gpus is the launcher's.*; give it to scripts/step"):
        parse_arguments(STEP.groups, "--model_name_or_path m --num_gpus 1".split(), "", STEP.old_flags)
