"""Model folders made on the spot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model


@pytest.fixture
def save_folder(tmp_path: Path, tiny_tokenizer) -> Callable[..., str]:
    """Save a tiny model (a language model, or a scalar model) with a tokenizer; returns the folder."""

    def save(name: str = "model", scalar: bool = False, tokenizer: Any = tiny_tokenizer, **changes: Any) -> str:
        family = changes.pop("family", "llama")
        changes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **changes}
        make = tiny_scalar_model if scalar else tiny_causal_lm
        make(family, **changes).save_pretrained(tmp_path / name)
        saved = copy.deepcopy(tokenizer)
        saved.backend_tokenizer.no_padding()  # a test before may have padded with it, and a loaded one pads by that
        saved.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save
