"""The flags of one trained engine."""

from __future__ import annotations

import dataclasses

import pytest

from training.utils.base.errors import Mistakes
from training.utils.engine.config.arguments import EngineArguments, EngineSettings
from training.utils.flags.flags import note_mistakes


def mistakes_of(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(EngineArguments(**given), mistakes)
    return mistakes.sentences


def test_the_defaults_are_sound():
    assert mistakes_of() == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"per_device_train_batch_size": 0}, "--per_device_train_batch_size expects 1 or more, got 0"),
        ({"per_device_eval_batch_size": -1}, "--per_device_eval_batch_size expects 1 or more, got -1"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps expects 1 or more, got 0"),
        ({"num_train_epochs": 0}, "--num_train_epochs expects more than 0, got 0"),
        ({"max_train_steps": 0}, "--max_train_steps expects 1 or more, got 0"),
        ({"max_tokens_per_micro_batch": 0}, "--max_tokens_per_micro_batch expects 1 or more, got 0"),
        ({"eval_interval": -1}, "--eval_interval expects 0 or more, got -1"),
        ({"num_warmup_steps": -1}, "--num_warmup_steps expects 0 or more, got -1"),
        ({"weight_decay": -0.1}, "--weight_decay expects 0 or more, got -0.1"),
        ({"max_grad_norm": -1.0}, "--max_grad_norm expects 0 or more, got -1.0"),
        ({"dtype": "float32"}, "--dtype expects one of fp32, bf16, fp16, got 'float32'; did you mean 'fp32'?"),
        (
            {"dtype": "fp16"},
            "--dtype fp16 expects --zero_stage 1, 2 or 3, got 0, at which DeepSpeed does not scale the loss; 1 "
            "computes the same, on one GPU too",
        ),
        (
            {"bf16_optimizer_states": True, "dtype": "fp16", "zero_stage": 1},
            "--bf16_optimizer_states expects --dtype bf16, got fp16",
        ),
        (
            {"bf16_optimizer_states": True},
            "--bf16_optimizer_states expects --zero_stage 1, 2 or 3, got 0, which has none",
        ),
        (
            {"bf16_optimizer_states": True, "zero_stage": 2, "offload": True},
            "--bf16_optimizer_states cannot go with --offload, for which DeepSpeed has a compiled optimizer alone; "
            "leave one of them out",
        ),
        ({"zero_stage": 4}, "--zero_stage expects a number from 0 to 3, got 4"),
        ({"share_beginnings": -1}, "--share_beginnings expects 0 or more, got -1"),
        (
            {"share_beginnings": 64, "padded": True},
            "--share_beginnings 64 needs packed rows, and --padded has one sequence in each; leave one of them out",
        ),
        (
            {"zero3_live_parameters": 7},
            "--zero3_live_parameters 7 limits what ZeRO-3 gathers, and no model is under it; leave it out or give "
            "--zero_stage 3",
        ),
        (
            {"num_warmup_steps": 3, "warmup_ratio": 0.1},
            "--num_warmup_steps 3 and --warmup_ratio 0.1 both say how long the warm-up is; leave one of them out",
        ),
        (
            {"num_train_epochs": float("inf")},
            "--num_train_epochs inf expects --max_train_steps, which ends the run; give the steps",
        ),
        ({"offload": True}, "--offload expects --zero_stage 1, 2 or 3, got 0: stage 0 has nothing to offload"),
    ],
)
def test_mistakes(given, sentence):
    assert mistakes_of(**given) == [sentence]


def test_every_setting_is_passed_on():
    given = {
        "dtype": "fp32", "zero_stage": 2, "offload": True, "weight_decay": 0.1,
        "lr_scheduler_type": "wsd", "num_warmup_steps": 3, "max_grad_norm": 2.0,
        "min_lr_ratio": 0.2, "stable_ratio": 0.5,
        "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "warmup_ratio": 0.0,
        "zero3_live_parameters": 5,
    }  # fmt: skip
    expected = dataclasses.asdict(EngineSettings(learning_rate=0.5, **given))
    assert dataclasses.asdict(EngineArguments(**given).settings(learning_rate=0.5)) == expected


def test_an_unknown_schedule_is_named_with_its_neighbours_before_a_model_loads():
    mistakes = Mistakes()
    note_mistakes(EngineArguments(lr_scheduler_type="cosin"), mistakes)
    assert len(mistakes.sentences) == 1
    assert "got 'cosin'; did you mean 'cosine'" in mistakes.sentences[0]
