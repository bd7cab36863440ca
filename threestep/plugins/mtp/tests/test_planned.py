"""A head in a dry run."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import tiny_causal_lm, tiny_config
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.planned import plan_head
from threestep.plugins.mtp.settings import MtpSettings
from training.utils.base.machine import PlannedDevice
from training.utils.engine.config.arguments import EngineSettings


@pytest.mark.parametrize("final_norm", [True, False])
def test_a_head_of_no_weights_counts_those_of_a_head(final_norm):
    """Float32 under ZeRO-0: 4 bytes a weight and 4 a gradient, 8 of Adam's moments."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    settings, device = EngineSettings(dtype="fp32", zero_stage=0, learning_rate=1e-3), PlannedDevice(is_cuda=False)
    [sentence], held, [stepping] = plan_head(model, MtpSettings(2, final_norm=final_norm), settings, 1, device=device)
    head = new_head(tiny_causal_lm("llama"), 2, seed=1, final_norm=final_norm)
    weights = sum(weight.numel() for weight in head.parameters())
    assert sentence == f"multi-token prediction: a head of 2, {weights:,} weights"
    assert [line.device_bytes for line in held[:3]] == [4 * weights, 4 * weights, 8 * weights]
    assert held[0].name == "mtp: weights"
    assert stepping.doing == "in the head's optimizer step" and stepping.lines[0].name.startswith("mtp: ")
    assert plan_head(model, MtpSettings(), settings, 1, device=device) == ([], [], [])
