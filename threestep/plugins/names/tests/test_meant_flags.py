"""Which flags are suggested for a name that is none."""

from __future__ import annotations

import pytest

from threestep.plugins.names.meant_flags import MEANT
from training.utils.flags.arguments import defaults_of
from training.utils.flags.flags import nearest_flags
from training.utils.flags.step import known_steps
from training.utils.plugins.registry import missing

SFT = list(defaults_of(known_steps()["step1_sft"].groups))
PPO = list(defaults_of(known_steps()["step3_ppo"].groups))


@pytest.mark.parametrize(
    ("typed", "names", "first"),
    [
        ("lr", SFT, "learning_rate"),
        ("lr", PPO, "actor_learning_rate"),
        ("epochs", SFT, "num_train_epochs"),
        ("batch_size", SFT, "per_device_train_batch_size"),
        ("batch-size", PPO, "per_device_generation_batch_size"),
        ("steps", SFT, "max_train_steps"),
        ("dataset", SFT, "data_path"),
        ("model", SFT, "model_name_or_path"),
        ("learning_rat", SFT, "learning_rate"),
        ("output-dir", SFT, "output_dir"),
        ("eval_batch_size", SFT, "per_device_eval_batch_size"),
        ("accumulation_steps", SFT, "gradient_accumulation_steps"),
        ("samples_per_prompt", PPO, "num_samples_per_prompt"),
        ("warmup", SFT, "warmup_ratio"),
        ("max_new_tokens", PPO, "max_answer_seq_len"),
        ("micro_train_batch_size", SFT, "per_device_train_batch_size"),
        ("init_kl_coef", PPO, "kl_coef"),
        ("eps_clip", PPO, "clip_range"),
        ("val_set_size", SFT, "eval_fraction"),
        ("model_id", SFT, "model_name_or_path"),
    ],
)
def test_the_right_one_comes_first(typed, names, first):
    assert nearest_flags(typed, names).startswith(f"; did you mean '{first}'")


@pytest.mark.parametrize(
    "typed",
    [
        "qqqq",
        "num_beams",
        "processing_class",
        "compute_metrics",
        "tokenizer",
    ],
)
def test_nothing_is_suggested_for_what_resembles_nothing(typed):
    assert nearest_flags(typed, [*SFT, "local_rank"]) == ""


def test_what_is_meant_stands_alone():
    """`min_lr_ratio` has the letters, and is not meant."""
    assert nearest_flags("lr", SFT) == "; did you mean 'learning_rate'?"


def test_what_people_mean_are_flags_of_some_program():
    of_plugins = missing("flags")  # that are not there
    known = {*SFT, *PPO, *defaults_of(known_steps()["step2_dpo"].groups), *of_plugins, "max_new_tokens"}
    assert all(flag in known for flags in MEANT.values() for flag in flags)
    assert not {name for name in MEANT if name in SFT and name in PPO}
