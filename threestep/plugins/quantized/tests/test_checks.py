"""What rounded base weights cannot go with is told before a model loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.one_model_flags import one_model_flags
from tests.support.ppo_flags import ppo_flags
from threestep.plugins.quantized import checks
from threestep.plugins.quantized.checks import check
from training.step1_sft import STEP
from training.step3_ppo.flags.checks import checked_components
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.setup.flags import OneModelFlags

LORA = {"actor_lora_dim": 4, "critic_lora_dim": 4}
WHOLE = "as rounded weights are whole on every rank; leave one of the two out"
MODELS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}


@pytest.fixture(autouse=True)
def bitsandbytes(monkeypatch):
    """The package is there, by its name."""
    monkeypatch.setattr(checks, "find_spec", lambda name: SimpleNamespace(name=name))


def mistakes_of(flags: Any) -> list[str]:
    mistakes = Mistakes()
    check(flags, mistakes)
    return mistakes.sentences


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ("", []),
        ("--load_in_8bit --lora_dim 4 --zero_stage 2", []),
        (
            "--load_in_4bit",
            [
                "--load_in_4bit freezes the weights that it rounds, and --lora_dim is 0; give --lora_dim a rank, such "
                "as 16, so that adapters train"
            ],
        ),
        (
            "--load_in_8bit --lora_dim 4 --only_optimize_lora false",
            [
                "--load_in_8bit freezes the weights that it rounds, and --only_optimize_lora false trains them; leave "
                "one of them out"
            ],
        ),
        (
            "--load_in_8bit --load_in_4bit --lora_dim 4",
            ["--load_in_4bit and --load_in_8bit both say how many bits a weight takes; leave one of them out"],
        ),
        (
            "--load_in_8bit --lora_dim 4 --bnb_4bit_quant_type fp4",
            ["--bnb_4bit_quant_type fp4 is for --load_in_4bit, which is off; leave it out or give both"],
        ),
        (
            "--lora_dim 4 --bnb_4bit_use_double_quant",
            ["--bnb_4bit_use_double_quant is for --load_in_4bit, which is off; leave it out or give both"],
        ),
        (
            "--load_in_8bit --lora_dim 4 --use_dora",
            [
                "--load_in_8bit cannot go with --use_dora, whose magnitudes start as norms of the weights that it "
                "rounds; leave one of the two out"
            ],
        ),
        ("--load_in_8bit --lora_dim 4 --zero_stage 3", [f"--load_in_8bit cannot go with --zero_stage 3, {WHOLE}"]),
    ],
)
def test_mistakes_of_a_step_of_one_model(words, sentences):
    assert mistakes_of(one_model_flags(STEP, words)) == sentences


@pytest.mark.parametrize(
    ("given", "sentences"),
    [
        (LORA, []),
        (
            {"critic_lora_dim": 4},
            [
                "--load_in_8bit freezes the weights that it rounds, and --actor_lora_dim is 0; give --actor_lora_dim a "
                "rank, such as 16, so that adapters train"
            ],
        ),
        (
            {"actor_lora_dim": 4},
            [
                "--load_in_8bit freezes the weights that it rounds, and --critic_lora_dim is 0; give --critic_lora_dim "
                "a rank, such as 16, so that adapters train"
            ],
        ),
        ({"actor_lora_dim": 4, "advantage": "grpo"}, []),
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
def test_mistakes_of_step_3(given, sentences):
    assert mistakes_of(ppo_flags(**MODELS, load_in_8bit=True, **given)) == sentences


def test_a_step_asks():
    with pytest.raises(ThreestepError, match="it rounds, and --critic_lora_dim is 0; give --critic_lora_dim a rank"):
        checked_components(ppo_flags(**MODELS, load_in_8bit=True, actor_lora_dim=4))


def test_a_guest_that_needs_exact_weights_is_named(monkeypatch):
    guests = SimpleNamespace(exact_weights=lambda: {"--head 2": "which copies a layer"})
    monkeypatch.setattr(OneModelFlags, "guests", guests)
    assert mistakes_of(one_model_flags(STEP, "--load_in_8bit --lora_dim 4")) == [
        "--load_in_8bit cannot go with --head 2, which copies a layer; leave one of the two out"
    ]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    [sentence] = mistakes_of(ppo_flags(**MODELS, load_in_4bit=True, **LORA))
    assert sentence.startswith("--load_in_4bit needs the package bitsandbytes, ") and "; run: pip install" in sentence
