"""New models of the embedded task: a tokenizer of its texts, and a Llama with random weights."""

from __future__ import annotations

from pathlib import Path

from tests.support.data_flags import data_flags
from tests.support.tiny_tokenizers import train_tokenizer
from training.utils.data.file_dataset import create_raw_dataset

# Words with their leading space, and digits one by one, so that numbers can be learned.
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def save_new_model(
    folder: Path,
    *,
    vocab_size: int = 300,
    hidden_size: int = 32,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 2,
    rope_theta: float = 100.0,
) -> Path:
    """Write the model and its tokenizer to `folder`, and return it. vocab_size: tokens at most"""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = create_raw_dataset("embedded", data_flags().source, str(folder / "cache"), 1)
    texts = [
        text
        for row in rows.get_train_data()
        for text in (rows.get_prompt(row), rows.get_chosen(row), rows.get_rejected(row))
        if text
    ]
    tokenizer = train_tokenizer(texts, vocab_size, pieces=_PIECES)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
