"""The tokenizer in a GGUF file's metadata.

transformers builds it too, but ignores `tokenizer.ggml.pre` and splits every text as GPT-2 does: two spaces before a
number become tokens that SmolLM2 was not trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _WORDS.replace("NUMBER", r"\p{N}{1,3}")
_QWEN2 = _WORDS.replace("NUMBER", r"\p{N}")
# The patterns that split a text, one after the other, by the names that llama.cpp gives them (llama-vocab.cpp). They
# are those of the models' own tokenizer.json.
_PATTERNS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "trillion", "phi-2", "exaone4"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGIT, _GPT2)
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
}
# Those that take a word of the vocabulary whole before they merge; those whose own tokenizer composes letters (NFC).
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_COMPOSES = ("qwen2", "deepseek-r1-qwen", "megrez")
_CONTROL, _USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type
ORIGINAL = "pass the model folder that the file was made from"


def tokenizer_of(metadata: dict[str, Any], file: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a file's metadata describes, with its chat template. ThreestepError if there is none,
    or of a kind that is not read here."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def value(name: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}")

    words, kind, pre = value("tokens"), value("model"), value("pre")
    if not words:
        raise ThreestepError(f"'{file}' holds no tokenizer; {ORIGINAL}")
    if kind != "gpt2" or pre not in _PATTERNS or not value("merges"):
        raise ThreestepError(
            f"'{file}' contains a tokenizer of the kind '{kind}' that splits words as '{pre}', but only 'gpt2' with "
            f"{', '.join(_PATTERNS)} is supported; {ORIGINAL}"
        )
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [tuple(merge.split(" ", 1)) for merge in value("merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSES:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    for word, its_kind in zip(words, value("token_type") or [], strict=False):
        if its_kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(word, normalized=False, special=its_kind == _CONTROL)
            tokenizer.add_special_tokens([added]) if its_kind == _CONTROL else tokenizer.add_tokens([added])
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {
        f"{ours}_token": words[number]
        for name, ours in names.items()
        if (number := value(f"{name}_token_id")) is not None
    }
    begins = value("add_bos_token")
    if (pre in _WHOLE_WORDS if begins is None else begins) and "bos_token" in special:  # llama.cpp's default
        begin = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, value("bos_token_id"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )
