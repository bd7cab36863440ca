"""A head in a checkpoint is written into the model folder that is exported from it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.mtp.exported import write_trained_head
from threestep.plugins.mtp.folder import layers_in, read_head
from threestep.plugins.mtp.head import new_head
from training.utils.engine.checkpoint_files import write_state


@pytest.mark.parametrize("joint", [False, True], ids=["beside", "by_one_loss"])
def test_a_head_is_exported(tiny_tokenizer, tmp_path, joint):
    model = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer), dtype=torch.bfloat16)
    head, state = new_head(model, 2, seed=1), dict(model.state_dict(prefix="model."))
    if joint:
        state |= {f"mtp_head.{name}": weight for name, weight in head.float().state_dict().items()}
    else:
        (tmp_path / "mtp").mkdir()
        write_state({"module": head.float().state_dict()}, tmp_path / "mtp" / "mp_rank_00_model_states.safetensors")
    folder = tmp_path / "out"
    folder.mkdir()
    write_trained_head(tmp_path, "model", state, torch.bfloat16, out=folder)
    assert layers_in(folder) == 2
    stored = load_file(folder / "mtp" / "model.safetensors")
    assert stored.keys() == head.state_dict().keys()
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    read_head(folder, again := new_head(model, 2, seed=2))
    assert torch.equal(again.depths[1].eh_proj.weight, head.depths[1].eh_proj.weight.bfloat16())


def test_without_a_head_nothing_is_written(tmp_path):
    write_trained_head(tmp_path, "model", {"model.weight": torch.ones(1)}, torch.float32, out=tmp_path)
    assert list(tmp_path.iterdir()) == []
