"""A teacher in a dry run."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import tiny_causal_lm, tiny_config
from threestep.plugins.distillation.planned import plan_teacher
from threestep.plugins.distillation.settings import TeacherSettings
from training.utils.base.machine import PlannedDevice
from training.utils.engine.config.arguments import EngineSettings


@pytest.mark.parametrize("stage", [2, 3])
def test_its_weights_are_counted(tmp_path, stage: int):
    """Whole below ZeRO-3, 4 bytes each; half of them on each of two ranks under it."""
    teacher = tiny_causal_lm("llama")
    teacher.save_pretrained(tmp_path)
    weights = sum(weight.numel() for weight in teacher.parameters())
    with torch.device("meta"):
        student = AutoModelForCausalLM.from_config(tiny_config("llama"))
    settings, device = EngineSettings(dtype="fp32", zero_stage=0), PlannedDevice(is_cuda=False)
    asked = TeacherSettings(str(tmp_path), zero_stage=stage)
    [sentence], held, moments = plan_teacher(student, asked, settings, 2, device=device)
    assert sentence == f"teacher: {tmp_path}, {weights:,} weights"
    assert held[0].device_bytes == 4 * (weights if stage < 3 else -(-weights // 2))
    assert held[0].name.startswith("teacher: weights") and held[-1].device_bytes > 4 * 64 * 32
    assert [moment.doing for moment in moments] == ([] if stage < 3 else ["in a forward of the teacher"])
    assert plan_teacher(student, TeacherSettings(), settings, 2, device=device) == ([], [], [])
