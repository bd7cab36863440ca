"""Model folders made on the spot: a tiny model with the tokenizer that it is asked by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model


def save_pair(folder: Path, tokenizer: Any, make: Callable[..., Any] = tiny_causal_lm, **changes: Any) -> str:
    """Save a tiny Llama of `make` that has the tokenizer's tokens, and the tokenizer; returns the folder."""
    ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    make("llama", vocab_size=len(tokenizer), **ids, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def save_model(tmp_path: Path, tiny_tokenizer) -> Callable[..., str]:
    """Save a tiny Llama, or a reward model, with its tokenizer; returns the folder."""

    def save(name: str, scalar: bool = False, tokenizer: Any = tiny_tokenizer, **changes: Any) -> str:
        return save_pair(tmp_path / name, tokenizer, tiny_scalar_model if scalar else tiny_causal_lm, **changes)

    return save
