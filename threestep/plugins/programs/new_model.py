"""Makes a new model: a byte-level BPE tokenizer trained on raw datasets, and a Llama with random weights.

    threestep new-model --data_path embedded --vocab_size 512 --out runs/new_model

The folder contains safetensors, configuration and tokenizer; plain transformers loads it, and step 1 starts from it.
The tokenizer covers all bytes, so no text is unknown, and each digit is a separate token.

With --vision it is a Qwen2-VL, with that family's special tokens, chat template and image processor (Pillow's, so
that nothing needs torchvision).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.user_files import call_user
from training.utils.data.arguments import PROMPT_FLAGS, DataArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.flags import flag, flag_of, without_flags
from training.utils.run.program import run_program
from training.utils.run.run_arguments import RunArguments
from training.utils.run.run_folder import check_place

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from training.utils.data.raw_dataset import PromptRawDataset

EOS_TOKEN = "<|endoftext|>"  # noqa: S105 (a token of text)
PAD_TOKEN = "<|pad|>"  # noqa: S105 (a token of text)
# Of a model with --vision, by Qwen2-VL's names. A turn ends with IM_END, which is its eos token.
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"  # noqa: S105 (tokens of text)
_PATCH_PIXELS, _MERGED_PATCHES = 14, 2  # sides of a patch, and of the square of patches that becomes one token
_TOKEN_PIXELS = (_PATCH_PIXELS * _MERGED_PATCHES) ** 2
_BYTES = 256
# As GPT-2 splits text, except that digits are separate: words with their leading space, digits (the first with the
# number's leading space), other signs, white space.
_PIECES = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Qwen2-VL's, without its default system message and the numbers of pictures.
VISION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class NewModelArguments:
    """Folder and shape of the new model."""

    topic: ClassVar[str] = "task"

    out: str = flag("", "Output folder; an existing model in it is replaced (required).", "folder")
    seed: int = flag_of(RunArguments, "Seed for the weights and for generated datasets.")
    vocab_size: int = flag(
        512, "Maximum vocabulary size; the actual size is smaller if the text yields too few merges.", "tokens"
    )
    hidden_size: int = flag(256, "Hidden size of the model.", "units >= 1")
    num_hidden_layers: int = flag(4, "Number of layers.", "layers >= 1")
    num_attention_heads: int = flag(4, "Number of attention heads; must divide the hidden size.", "heads >= 1")
    intermediate_size: int | None = flag(
        None, "Size of the feed-forward layers; default: 8/3 of hidden_size, rounded to a multiple of 32.", "units >= 1"
    )
    max_position_embeddings: int = flag(512, "Maximum length of prompt plus response.", "tokens >= 1")
    rope_theta: float = flag(
        10000.0, "Base of the rotary embedding; a smaller base separates nearby positions better.", "number > 0"
    )
    initializer_range: float = flag(0.02, "Standard deviation of the random initial weights.", "number > 0")
    pad_is_eos: bool = flag(False, "Pad with the eos token instead of a separate pad token.")
    vision: bool = flag(False,
        "Create an image-text model: a Qwen2-VL with an image processor and a chat template; its vision tower has "
        "two layers and the width of the language model.")  # fmt: skip
    max_image_tokens: int = flag(
        16,
        "With --vision: maximum tokens per image (28 x 28 pixels each); larger images are scaled down.",
        "tokens >= 1",
    )

    def validate(self, mistakes: Mistakes) -> None:
        mistakes.require(bool(self.out), "--out expects the folder to write the new model to, got nothing")
        specials = len(_special_tokens(self.pad_is_eos, self.vision))
        mistakes.require(
            self.vocab_size >= _BYTES + specials,
            f"--vocab_size expects at least {_BYTES + specials} ({_BYTES} bytes and {specials} special "
            f"token{'s' * (specials > 1)}), got {self.vocab_size}",
        )
        heads = self.num_attention_heads
        width, what = (8, "a width divisible by 8") if self.vision else (2, "an even width")
        if self.hidden_size >= 1 and heads >= 1:
            mistakes.require(
                self.hidden_size % (width * heads) == 0,
                f"--hidden_size {self.hidden_size} cannot be split into --num_attention_heads {heads} of {what}; use "
                f"a multiple of {width * heads}",
            )


UNREAD = [f"--{name}" for name in PROMPT_FLAGS]  # of step 3: set aside, so that data flags can be shared
GROUPS = (without_flags(DataArguments, PROMPT_FLAGS), NewModelArguments)
# What a first run needs, in the order of `--help`.
FIRST_FLAGS = (
    *("data_path", "out", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "vision", "seed", "config"),
)


def main(argv: Sequence[str]) -> None:
    """Parse, train the tokenizer, make the model, save both."""
    data, new = parse_arguments(GROUPS, argv, __doc__ or "", first_flags=FIRST_FLAGS, unread=UNREAD)
    folder = Path(new.out).expanduser()
    _check_replaceable(folder)

    from transformers.utils import logging as transformers_logging

    from training.utils.loading.saving import save_model

    transformers_logging.disable_progress_bar()
    texts, length = dataset_texts(data, new.seed, new.vision), new.max_position_embeddings
    tokenizer = train_tokenizer(texts, new.vocab_size, length, new.pad_is_eos, vision=new.vision)
    model = make_model((vision_config if new.vision else model_config)(new, tokenizer), new.seed)
    processor = image_processor(new.max_image_tokens) if new.vision else None
    save_model(folder, model, model.state_dict(), tokenizer, write_more=processor and processor.save_pretrained)
    print(f"new model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary, in {folder}")


def dataset_texts(data: DataArguments, seed: int, vision: bool = False) -> Iterator[str]:
    """Yield the prompts and responses of the training rows; ThreestepError if they contain no text at all.

    vision: rows may have images; the texts of their messages are taken.
    """
    from training.utils.data.file_dataset import create_raw_dataset

    any_text = False
    for name in [*data.source.data_path, *data.source.sft_only_data_path]:
        raw_dataset = create_raw_dataset(name, data.source, data.cache.cache_dir, seed)
        raw_dataset.reads_images = vision
        for sample in call_user(raw_dataset.get_train_data):
            for text in filter(None, _texts_of(raw_dataset, sample)):
                any_text = True
                yield text
    if not any_text:
        raise ThreestepError(
            f"the training rows of {', '.join(data.source.data_path)} contain no text to train a tokenizer on"
        )


def _texts_of(raw: PromptRawDataset, sample: Any) -> Iterator[str | None]:
    messages = raw.get_messages(sample) if raw.reads_images else None
    if messages is None:
        yield from (raw.get_prompt(sample), raw.get_chosen(sample), raw.get_rejected(sample))
    for content in (message.get("content") for message in messages or ()):
        yield from (part.get("text") for part in content) if isinstance(content, list) else (content,)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, pad_is_eos: bool = False, *, vision: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most `vocab_size` tokens, special ones included.

    vision: with Qwen2-VL's special tokens and `VISION_TEMPLATE`.
    """
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
        special_tokens=_special_tokens(pad_is_eos, vision),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    eos_token = IM_END if vision else EOS_TOKEN
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        pad_token=eos_token if pad_is_eos else PAD_TOKEN,
        padding_side="right",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **({"chat_template": VISION_TEMPLATE} if vision else {}),
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


def vision_config(new: NewModelArguments, tokenizer: PreTrainedTokenizerFast) -> Qwen2VLConfig:
    """Return the configuration of a Qwen2-VL whose language model is that of `model_config`."""
    from transformers import Qwen2VLConfig

    text = model_config(new, tokenizer).to_dict()
    named = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    named += " max_position_embeddings initializer_range bos_token_id eos_token_id pad_token_id"
    ids = tokenizer.convert_tokens_to_ids([IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END])
    return Qwen2VLConfig(
        text_config={
            **{name: text[name] for name in named.split()},
            "rope_parameters": {**text["rope_parameters"], "mrope_section": mrope_section(new)},
        },
        vision_config={
            "depth": 2,
            "embed_dim": new.hidden_size,
            "num_heads": new.num_attention_heads,
            "hidden_size": new.hidden_size,
            "patch_size": _PATCH_PIXELS,
            "spatial_merge_size": _MERGED_PATCHES,
            "initializer_range": new.initializer_range,
        },
        image_token_id=ids[0],
        video_token_id=ids[1],
        vision_start_token_id=ids[2],
        vision_end_token_id=ids[3],
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def mrope_section(new: NewModelArguments) -> list[int]:
    """Return how many frequencies of a head turn by time, height and width: a quarter and the rest in halves, as
    Qwen2-VL's 16, 24 and 24 of 64."""
    frequencies = new.hidden_size // new.num_attention_heads // 2
    of_time = max(1, frequencies // 4)
    of_height = (frequencies - of_time) // 2
    return [of_time, of_height, frequencies - of_time - of_height]


def image_processor(max_tokens: int) -> Qwen2VLImageProcessorPil:
    """Return Qwen2-VL's image processor by Pillow: an image becomes whole tokens, at most `max_tokens`."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": _TOKEN_PIXELS, "longest_edge": max_tokens * _TOKEN_PIXELS},  # pixels of an image
        patch_size=_PATCH_PIXELS,
        merge_size=_MERGED_PATCHES,
    )


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model with random float32 weights that depend only on the seed.

    config: of a Llama or a Qwen2-VL.
    """
    import torch
    from transformers import LlamaForCausalLM, Qwen2VLForConditionalGeneration

    made = Qwen2VLForConditionalGeneration if config.model_type == "qwen2_vl" else LlamaForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return made(config)


def _special_tokens(pad_is_eos: bool, vision: bool) -> list[str]:
    pad = [] if pad_is_eos else [PAD_TOKEN]
    if not vision:
        return [EOS_TOKEN, *pad]
    return [IM_END, *pad, IM_START, VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN]


def _check_replaceable(folder: Path) -> None:
    """Raise if writing the model would remove files that are not a model."""
    check_place("--out", folder, is_folder=True)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ThreestepError(
            f"--out '{folder}' contains files that do not belong to a model and would be deleted; choose a new or "
            "empty folder"
        )


if __name__ == "__main__":
    run_program(main, uses_deepspeed=False)
