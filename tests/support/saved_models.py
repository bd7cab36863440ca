"""The fixture of model folders made on the spot, of one tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model


@pytest.fixture
def save_model(tmp_path: Path, tiny_tokenizer) -> Callable[..., str]:
    """Save a tiny Llama, or a reward model, with its tokenizer; returns the folder."""

    def save(name: str, scalar: bool = False, tokenizer: Any = tiny_tokenizer, **changes: Any) -> str:
        ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        make = tiny_scalar_model if scalar else tiny_causal_lm
        make("llama", **ids, pad_token_id=tokenizer.pad_token_id, **changes).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save
