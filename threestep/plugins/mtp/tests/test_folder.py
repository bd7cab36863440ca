"""A head's folder inside a model's."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.mtp.folder import FOLDER, layers_in, read_head, save_head
from threestep.plugins.mtp.head import new_head
from training.utils.base.errors import ThreestepError


def test_a_head_comes_back_and_transformers_does_not_see_it(tmp_path, capfd):
    from transformers import AutoModelForCausalLM

    model = tiny_causal_lm("llama")
    model.save_pretrained(tmp_path)
    head, other = new_head(model, 2, seed=1), new_head(model, 2, seed=2)
    save_head(tmp_path, 2, dict(head.state_dict()))
    assert layers_in(tmp_path) == 2
    read_head(tmp_path, other)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), other.parameters(), strict=True))
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]


def test_a_smaller_head_takes_the_first_modules(tmp_path):
    model = tiny_causal_lm("llama")
    head, one = new_head(model, 2, seed=1), new_head(model, 1, seed=2)
    save_head(tmp_path, 2, dict(head.state_dict()))
    read_head(tmp_path, one)
    assert torch.equal(one.depths[0].eh_proj.weight, head.depths[0].eh_proj.weight)


def test_no_head_is_none(tmp_path):
    assert layers_in(tmp_path) == 0
    assert layers_in("a-name/on-a-hub") == 0


@pytest.mark.parametrize("text", ["{", '{"format": 1}', '{"format": 2, "num_layers": 1}', "[]"])
def test_a_damaged_description_is_said(tmp_path, text):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "config.json").write_text(text)
    with pytest.raises(ThreestepError, match="expected the description of a head"):
        layers_in(tmp_path)


def test_the_head_of_another_model_is_said(tmp_path):
    save_head(tmp_path, 1, dict(new_head(tiny_causal_lm("llama", hidden_size=48), 1, seed=1).state_dict()))
    with pytest.raises(ThreestepError, match="it is the head of another model"):
        read_head(tmp_path, new_head(tiny_causal_lm("llama"), 1, seed=1))
