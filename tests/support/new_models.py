"""New models of the embedded task: a tokenizer of its texts, and a Llama with random weights."""

from __future__ import annotations

from pathlib import Path

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
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.support.data_flags import data_flags
    from training.utils.data.sources.create import create_raw_dataset

    rows = create_raw_dataset("embedded", data_flags().source, str(folder / "cache"), 1)
    texts = (
        text
        for row in rows.get_train_data()
        for text in (rows.get_prompt(row), rows.get_chosen(row), rows.get_rejected(row))
        if text
    )
    whole = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    whole.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    whole.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    whole.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|endoftext|>", pad_token="<|pad|>")
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
