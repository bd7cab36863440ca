"""Model folders made on the spot, of one tokenizer."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.saved_models import save_model
from threestep.plugins.evaluation.model import ChatModel, load_chat_model
from training.utils.data.arguments import DataArguments

__all__ = ["asked", "judge_of", "save_model"]
CPU = torch.device("cpu")


def judge_of(tmp_path, server, name="judge.yaml", **changes) -> str:
    """The reward of a judge at a server."""
    settings = {"model": "tiny", "base_url": f"{server.url}/v1", "rubric": "Longer is better.", "pause": 0.001}
    (tmp_path / name).write_text(json.dumps({**settings, **changes}))
    return f"judge:{tmp_path / name}"


@pytest.fixture
def asked(save_model) -> ChatModel:
    return load_chat_model(save_model("model"), None, DataArguments(), CPU)
