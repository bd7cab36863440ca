"""Makes a new model: a byte-level BPE tokenizer trained on raw datasets, and a Llama with random weights.

    python -m training.new_model --data_path embedded --vocab_size 512 --out runs/new_model

The folder holds safetensors, configuration and tokenizer; plain transformers loads it, and step 1 starts from it.
The tokenizer's alphabet is every byte, so no text is unknown to it, and each digit is a token of its own, so that
numbers are read digit by digit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.data.arguments import DataArguments
from training.utils.run.arguments import parse_arguments
from training.utils.run.errors import Mistakes, ThreestepError
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"  # noqa: S105 (a token of text)
PAD_TOKEN = "<|pad|>"  # noqa: S105 (a token of text)
_BYTES = 256
# Words with the space before them, digits one by one (the first with the space before the number), other signs,
# white space: as GPT-2 cuts text, except for the digits.
_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass
class NewModelArguments:
    """The new model's folder and shape."""

    out: str = field(default="", metadata={"help": "Folder to write; a model that is in it is replaced."})
    seed: int = field(
        default=RunArguments.seed, metadata={"help": "Of the weights, and of datasets that are made from a seed."}
    )
    vocab_size: int = field(
        default=512, metadata={"help": "Most tokens of the tokenizer; fewer where the texts have no more to merge."}
    )
    hidden_size: int = field(default=256, metadata={"help": "Width of the model."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers."})
    num_attention_heads: int = field(default=4, metadata={"help": "Attention heads; they divide the width."})
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width inside the feed-forward layers; default: 8/3 of hidden_size, a "
                                "multiple of 32."}
    )  # fmt: skip
    max_position_embeddings: int = field(default=512, metadata={"help": "Most tokens of prompt and response together."})
    rope_theta: float = field(
        default=10000.0, metadata={"help": "Base of the rotary positions; a small one tells near places apart."}
    )
    initializer_range: float = field(default=0.02, metadata={"help": "Standard deviation of the random weights."})
    pad_is_eos: bool = field(default=False, metadata={"help": "Pad with the eos token instead of a token of its own."})

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(bool(self.out), "--out expects the folder to write the new model to, got nothing")
        mistakes.require(self.seed >= 0, f"--seed expects a number from 0 up, got {self.seed}")
        specials = len(_special_tokens(self.pad_is_eos))
        mistakes.require(
            self.vocab_size >= _BYTES + specials,
            f"--vocab_size expects at least {_BYTES + specials} ({_BYTES} bytes and {specials} special "
            f"token{'s' * (specials > 1)}), got {self.vocab_size}",
        )
        for flag in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            got = getattr(self, flag)
            mistakes.require(got >= 1, f"--{flag} expects a whole number from 1 up, got {got}")
        got = self.intermediate_size
        mistakes.require(got is None or got >= 1, f"--intermediate_size expects a whole number from 1 up, got {got}")
        for flag in ("rope_theta", "initializer_range"):
            got = getattr(self, flag)
            mistakes.require(got > 0, f"--{flag} expects more than 0, got {got}")
        heads = self.num_attention_heads
        if self.hidden_size >= 1 and heads >= 1:
            mistakes.require(
                self.hidden_size % (2 * heads) == 0,
                f"--hidden_size {self.hidden_size} does not divide into --num_attention_heads {heads} of an even "
                f"width; choose a multiple of {2 * heads}",
            )


GROUPS = (DataArguments, NewModelArguments)


def main(argv: Sequence[str]) -> None:
    """Parse, train the tokenizer, make the model, save both."""
    data, new = parse_arguments(GROUPS, argv, __doc__ or "")
    folder = Path(new.out).expanduser()
    _check_replaceable(folder)

    from transformers.utils import logging as transformers_logging

    from training.utils.models.saving import save_model

    transformers_logging.disable_progress_bar()
    tokenizer = train_tokenizer(
        dataset_texts(data, new.seed), new.vocab_size, new.max_position_embeddings, new.pad_is_eos
    )
    model = make_model(model_config(new, tokenizer), new.seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_model(folder, model, model.state_dict(), tokenizer)
    print(f"new model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary, in {folder}")


def dataset_texts(data: DataArguments, seed: int) -> Iterator[str]:
    """Yield the prompts and responses of the training rows; ThreestepError where they hold no text at all."""
    from training.utils.data.registry import create_raw_dataset

    found = False
    for name in [*data.data_path, *data.sft_only_data_path]:
        raw_dataset = create_raw_dataset(name, data, seed)
        for sample in raw_dataset.get_train_data():
            for get_text in (raw_dataset.get_prompt, raw_dataset.get_chosen, raw_dataset.get_rejected):
                text = get_text(sample)
                if text:
                    found = True
                    yield text
    if not found:
        raise ThreestepError(
            f"data_path: the training rows of {', '.join(data.data_path)} hold no text to train a tokenizer on"
        )


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, pad_is_eos: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most `vocab_size` tokens, the special ones among them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_special_tokens(pad_is_eos),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN if pad_is_eos else PAD_TOKEN,
        padding_side="right",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def model_config(new: NewModelArguments, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Return the shape of the new model, with the tokenizer's vocabulary and special tokens."""
    from transformers import LlamaConfig

    width = new.intermediate_size
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=new.hidden_size,
        num_hidden_layers=new.num_hidden_layers,
        num_attention_heads=new.num_attention_heads,
        intermediate_size=-(-8 * new.hidden_size // 3 // 32) * 32 if width is None else width,
        max_position_embeddings=new.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": new.rope_theta},
        initializer_range=new.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Return a model with random weights in float32: the same for the same seed, whatever was drawn before."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _special_tokens(pad_is_eos: bool) -> list[str]:
    return [EOS_TOKEN] if pad_is_eos else [EOS_TOKEN, PAD_TOKEN]


def _check_replaceable(folder: Path) -> None:
    """Raise where writing the model would remove files that are no model."""
    if folder.exists() and not folder.is_dir():
        raise ThreestepError(f"--out expects a folder to write the new model to, but '{folder}' is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ThreestepError(
            f"--out '{folder}' holds files that are no model, and would be replaced; name a new or empty folder"
        )


if __name__ == "__main__":
    # transformers loads deepspeed where it is installed, which then looks for a device; nothing here runs on one.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run_program(main)
