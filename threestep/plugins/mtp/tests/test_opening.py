"""What a run's head starts from."""

from __future__ import annotations

import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.mtp.folder import save_head
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.opening import _described, _read_stored
from threestep.plugins.mtp.tests.test_public_folder import checkpoint
from threestep.plugins.mtp.tests.test_public_names import drawn_head


def test_the_folders_own_head_comes_before_a_public_one_and_a_new_one(tmp_path):
    model = tiny_causal_lm("llama")
    model.save_pretrained(tmp_path)
    head = new_head(model, 2, seed=3)
    assert _read_stored(head, str(tmp_path), model) == (0, "")
    assert _described(0, 2, "") == "a head of 2: 2 new, with the weights of the model's last block"

    public = drawn_head(model, "deepseek", 1)
    checkpoint(tmp_path, model, "deepseek", public)
    found = _read_stored(head, str(tmp_path), model)
    assert found == (1, f"{tmp_path}: model.layers.2.* (the names of DeepSeek-V3 and GLM-4.5)")
    assert torch.equal(head.depths[0].eh_proj.weight, public.depths[0].eh_proj.weight)
    assert _described(*found[:1], 2, found[1]) == (
        f"a head of 2: 1 of its modules from {tmp_path}: model.layers.2.* (the names of DeepSeek-V3 and GLM-4.5) and 1 "
        "new, with the weights of the model's last block"
    )

    own = drawn_head(model, "deepseek", 2, seed=5)
    save_head(tmp_path, 2, dict(own.state_dict()))
    assert _read_stored(head, str(tmp_path), model) == (2, f"{tmp_path}/mtp")
    assert torch.equal(head.depths[1].eh_proj.weight, own.depths[1].eh_proj.weight)
