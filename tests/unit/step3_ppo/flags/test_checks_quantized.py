"""What rounded base weights cannot go with in step 3 is told before a model loads."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.ppo_flags import ppo_flags
from training.step3_ppo.flags.checks import checked_components
from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes

LORA = {"actor_lora_dim": 4, "critic_lora_dim": 4}
WHOLE = "as rounded weights are whole on every rank; leave one of the two out"


MODELS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        (LORA, []),
        (
            {"actor_lora_dim": 0},
            [
                "--load_in_8bit freezes the weights that it rounds, and --actor_lora_dim is 0; give --actor_lora_dim a "
                "rank, such as 16, so that adapters train"
            ],
        ),
        ({**LORA, "actor_zero_stage": 3}, [f"--load_in_8bit cannot go with --actor_zero_stage 3, {WHOLE}"]),
        ({**LORA, "critic_zero_stage": 3}, [f"--load_in_8bit cannot go with --critic_zero_stage 3, {WHOLE}"]),
        (
            {**LORA, "share_trunk": True},
            [
                "--load_in_8bit cannot go with --share_trunk, which lends one model's weights to two; leave one of the "
                "two out"
            ],
        ),
    ],
)
def test_mistakes(given, sentences):
    mistakes = Mistakes()
    note_mistakes(RolesArguments(**MODELS, load_in_8bit=True, **given), mistakes)
    assert mistakes.sentences == sentences


def test_a_critic_needs_adapters_if_there_is_one():
    with pytest.raises(ThreestepError, match="it rounds, and --critic_lora_dim is 0; give --critic_lora_dim a rank"):
        checked_components(ppo_flags(**MODELS, load_in_8bit=True, actor_lora_dim=4))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ThreestepError, match="--load_in_4bit needs the package bitsandbytes, .*; run: pip install"):
        checked_components(ppo_flags(**MODELS, load_in_4bit=True, **LORA))
