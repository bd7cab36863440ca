"""Makes a new model: a byte-level BPE tokenizer trained on raw datasets, and a Llama with random weights.

    python -m training.new_model --data_path embedded --vocab_size 512 --out runs/new_model

The folder contains safetensors, configuration and tokenizer; plain transformers loads it, and step 1 starts from it.
The tokenizer's alphabet is all bytes, so no text is unknown, and each digit is a separate token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from training.utils.data.build.arguments import DataArguments
from training.utils.run.arguments import parse_arguments
from training.utils.run.errors import Mistakes, ThreestepError
from training.utils.run.flags import flag
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS_TOKEN = "<|endoftext|>"  # noqa: S105 (a token of text)
PAD_TOKEN = "<|pad|>"  # noqa: S105 (a token of text)
_BYTES = 256
# As GPT-2 splits text, except that digits are separate: words with their leading space, digits (the first with the
# number's leading space), other signs, white space.
_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass
class NewModelArguments:
    """Folder and shape of the new model."""

    topic: ClassVar[str] = "task"

    out: str = flag("", "Folder to write; a model in it is replaced (required).", unit="folder")
    seed: int = flag(
        RunArguments.seed, "Seed of the weights, and of datasets that are made from a seed.", least=0, unit="seed"
    )
    vocab_size: int = flag(
        512, "Size of the vocabulary at most; smaller if the texts have too few merges.", unit="tokens"
    )
    hidden_size: int = flag(256, "Width of the model.", least=1, unit="units")
    num_hidden_layers: int = flag(4, "Number of layers.", least=1, unit="layers")
    num_attention_heads: int = flag(
        4, "Number of attention heads; the width must be a multiple of it.", least=1, unit="heads"
    )
    intermediate_size: int | None = flag(None, "Width inside the feed-forward layers; default: 8/3 of hidden_size, a "
                                "multiple of 32.", least=1, unit="units")  # fmt: skip
    max_position_embeddings: int = flag(512, "Maximum length of a prompt with its response.", least=1, unit="tokens")
    rope_theta: float = flag(
        10000.0, "Base of the rotary embedding; a small one separates nearby positions better.", above=0, unit="number"
    )
    initializer_range: float = flag(0.02, "Standard deviation of the random weights.", above=0, unit="number")
    pad_is_eos: bool = flag(False, "Pad with the eos token instead of a token of its own.")

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(bool(self.out), "--out expects the folder to write the new model to, got nothing")
        specials = len(_special_tokens(self.pad_is_eos))
        mistakes.require(
            self.vocab_size >= _BYTES + specials,
            f"--vocab_size expects at least {_BYTES + specials} ({_BYTES} bytes and {specials} special "
            f"token{'s' * (specials > 1)}), got {self.vocab_size}",
        )
        heads = self.num_attention_heads
        if self.hidden_size >= 1 and heads >= 1:
            mistakes.require(
                self.hidden_size % (2 * heads) == 0,
                f"--hidden_size {self.hidden_size} does not divide into --num_attention_heads {heads} of an even "
                f"width; give a multiple of {2 * heads}",
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
    """Yield the prompts and responses of the training rows; ThreestepError if they contain no text at all."""
    from training.utils.data.sources.create import create_raw_dataset

    found = False
    for name in [*data.source.data_path, *data.source.sft_only_data_path]:
        raw_dataset = create_raw_dataset(name, data.source, data.cache.cache_dir, seed)
        for sample in raw_dataset.get_train_data():
            for get_text in (raw_dataset.get_prompt, raw_dataset.get_chosen, raw_dataset.get_rejected):
                text = get_text(sample)
                if text:
                    found = True
                    yield text
    if not found:
        raise ThreestepError(
            f"the training rows of {', '.join(data.source.data_path)} contain no text to train a tokenizer on"
        )


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, pad_is_eos: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most `vocab_size` tokens, special ones included."""
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
    """Return the new model's configuration, with the tokenizer's vocabulary and special tokens."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=new.hidden_size,
        num_hidden_layers=new.num_hidden_layers,
        num_attention_heads=new.num_attention_heads,
        intermediate_size=new.intermediate_size or -(-8 * new.hidden_size // 3 // 32) * 32,
        max_position_embeddings=new.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": new.rope_theta},
        initializer_range=new.initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Return a model with random float32 weights that depend only on the seed."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _special_tokens(pad_is_eos: bool) -> list[str]:
    return [EOS_TOKEN] if pad_is_eos else [EOS_TOKEN, PAD_TOKEN]


def _check_replaceable(folder: Path) -> None:
    """Raise if writing the model would remove files that are not a model."""
    if folder.exists() and not folder.is_dir():
        raise ThreestepError(
            f"--out expects a folder to write the new model to, got the file '{folder}'; name a folder"
        )
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ThreestepError(
            f"--out '{folder}' contains files that are not a model and would be removed; name a new or empty folder"
        )


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
