"""Model folders made on the spot, of one tokenizer."""

from __future__ import annotations

import pytest
import torch

from tests.support.saved_models import save_model
from threestep.plugins.evaluation.model import ChatModel, load_chat_model
from training.utils.data.arguments import DataArguments

__all__ = ["asked", "save_model"]
CPU = torch.device("cpu")


@pytest.fixture
def asked(save_model) -> ChatModel:
    return load_chat_model(save_model("model"), None, DataArguments(), CPU)
