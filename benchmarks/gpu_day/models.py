"""Random models, made on the spot: Llama shapes with as many weights as those that people train."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from training.utils.contracts.documents import Document, TokenSequence, plain, shared_prompt

# hidden, layers, heads, heads of keys, intermediate, vocabulary
SHAPES = {
    "tiny": (64, 2, 4, 2, 128, 512),
    "1300m": (2048, 24, 16, 16, 5632, 32000),  # 1.35 billion weights
    "1300m_shared_keys": (2048, 24, 16, 4, 5632, 32000),
    "7b": (4096, 32, 32, 32, 11008, 32000),  # Llama 2 7B
    "8b": (4096, 32, 32, 8, 14336, 128256),  # Llama 3.1 8B
    "14b": (5120, 48, 40, 8, 13824, 152064),  # Qwen2.5 14B
    "32b": (5120, 64, 40, 8, 27648, 152064),  # Qwen2.5 32B
}
FIRST_TOKEN = 3  # those before it are special


def config_of(shape: str, positions: int = 32768) -> Any:
    from transformers import LlamaConfig

    hidden, layers, heads, shared, intermediate, vocabulary = SHAPES[shape]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=intermediate,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )


def random_model(shape: str, dtype: torch.dtype, device: torch.device | None, attention: str = "sdpa") -> Any:
    """Return the model with random weights in eval mode, drawn on `device`; None: where the library puts them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with contextlib.nullcontext() if device is None else device:
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype, attn_implementation=attention)
    return model.eval()


def sequence(tokens: int, vocabulary: int, seed: int, targets: bool = True) -> TokenSequence:
    """Random tokens, of which all but the first are to be predicted, or none."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_TOKEN, vocabulary, (tokens,), generator=generator)
    is_target = torch.full((tokens,), targets)
    is_target[:1] = False
    return TokenSequence(ids, is_target)


def plain_rows(rows: int, width: int, documents: int, vocabulary: int, seed: int = 0) -> list[list[Document]]:
    """Rows of so many documents each, of equal lengths, that fill them."""
    size = width // documents
    return [
        [plain(sequence(size, vocabulary, seed + 1000 * row + each)) for each in range(documents)]
        for row in range(rows)
    ]


def shared_rows(rows: int, width: int, documents: int, vocabulary: int, seed: int = 0) -> list[list[Document]]:
    """Rows of prompts with four responses each, the prompt as long as a response."""
    size = width // documents // 5
    made = []
    for row in range(rows):
        made.append([_shared(size, vocabulary, seed + 1000 * row + 10 * each) for each in range(documents)])
    return made


def _shared(size: int, vocabulary: int, seed: int) -> Document:
    prompt = sequence(size, vocabulary, seed, targets=False)
    responses = [sequence(size, vocabulary, seed + 1 + each) for each in range(4)]
    return shared_prompt(prompt, responses)
