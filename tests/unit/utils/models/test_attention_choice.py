"""Which attention a model is given on a CPU. On CUDA: `threestep/plugins/kernels/tests/test_kernels.py`."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from training.utils.loading.models import load_causal_lm
from training.utils.models.attention_choice import planned_attention
from training.utils.models.own_forward import own_forward_of
from training.utils.models.settings import ModelSettings


def test_a_dry_run_on_a_cpu_plans_sdpa():
    assert planned_attention(tiny_causal_lm("llama").to("meta"), "auto", False, None) == "sdpa"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("wanted", ["auto", "sdpa"])
def test_on_a_cpu_it_is_runs_in_turn(save_folder, wanted):
    model = load_causal_lm(ModelSettings(save_folder(), attn_implementation=wanted), torch.float32, 1)
    assert model.config._attn_implementation == "sdpa_by_document" and own_forward_of(model).notes == []
