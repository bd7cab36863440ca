"""Tokenizers that are trained on the spot."""

from __future__ import annotations

SENTENCES = [
    "Human: What is 2 + 3? Assistant: 2 + 3 is 5.",
    "Human: Sort these words: pear apple fig. Assistant: apple fig pear",
    "Human: Copy this line in capitals: hello there. Assistant: HELLO THERE",
    "The quick brown fox jumps over the lazy dog, 0123456789 times!",
]


def train_tokenizer(sentences: list[str], vocab_size: int = 384, pad_is_eos: bool = False, pieces: str | None = None):
    """Return a byte-level BPE tokenizer trained on `sentences`; eos is <|endoftext|>, pad <|pad|> or eos. pieces: an
    expression of what texts are split into; by default as GPT-2 splits."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    eos, pad = "<|endoftext|>", "<|endoftext|>" if pad_is_eos else "<|pad|>"
    tokenizer = Tokenizer(models.BPE())
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pieces is None)
    split = [] if pieces is None else [pre_tokenizers.Split(Regex(pieces), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, in_bytes]) if split else in_bytes
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(dict.fromkeys([eos, pad])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad)
