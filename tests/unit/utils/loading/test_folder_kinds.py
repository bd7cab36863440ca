"""Folders that hold no model."""

from __future__ import annotations

import pytest
import torch

from training.utils.loading.models import load_causal_lm
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.models.settings import ModelSettings
from training.utils.run.errors import ThreestepError


@pytest.mark.parametrize(
    "load", [load_tokenizer, lambda path: load_causal_lm(ModelSettings(path), torch.float32, 1)], ids=["tok", "model"]
)
def test_folders_that_are_none(load, tmp_path):
    with pytest.raises(ThreestepError, match="the model folder '.*nowhere' does not exist"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ThreestepError, match=r"the model folder '\./nowhere' does not exist"):
        load("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ThreestepError, match="holds no config.json, so it is not a model folder"):
        load(str(tmp_path / "empty"))
