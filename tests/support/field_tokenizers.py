"""Tokenizers for published chat templates: tiny ones, trained on the spot, that know the tokens a template writes.

A template's control tokens are read from its source and from what it renders. Its family says at which tokens a model
stops at inference, by the vendors' `generation_config.json`, model cards and templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

BYTES, PREFIXED, SPACED = KINDS = ("bytes", "prefixed", "spaced")


@dataclass(frozen=True)
class Family:
    """marks: strings that its templates hold, all of them. stops: tokens at which a model stops at inference.
    past: what the template writes in their place in earlier turns. kinds: of its tokenizers."""

    name: str
    marks: tuple[str, ...]
    eos: str
    stops: tuple[str, ...]
    bos: str | None = None
    past: tuple[str, ...] = ()
    kinds: tuple[str, ...] = (BYTES,)


_DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# The first family whose marks a template holds is the template's.
FAMILIES = (
    # https://huggingface.co/openai/gpt-oss-20b: eos_token_id 200002, 199999, 200012
    Family("gpt-oss", ("<|start|>", "<|channel|>"), "<|return|>", ("<|return|>", "<|call|>"), past=("<|end|>",)),
    Family("muse", ("<|start|>", "<|message|>", "<|eot|>"), "<|eot|>", ("<|eot|>", "<|call|>", "<|return|>")),
    Family("llama 4", ("<|header_start|>",), "<|eot|>", ("<|eot|>", "<|eom|>"), bos="<|begin_of_text|>"),
    Family(
        "llama 3",
        ("<|start_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        ("<|eot_id|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
    ),
    # The token that opens a tool's answer ends a call: the template writes it also behind a call that ends the row.
    Family("gemma 4", ("<|turn>",), "<turn|>", ("<turn|>", "<|tool_response>"), bos="<bos>", kinds=(SPACED,)),
    Family(
        "gemma",
        ("<start_of_turn>",),
        "<end_of_turn>",
        ("<end_of_turn>", "<start_function_response>"),
        "<bos>",
        kinds=(SPACED,),
    ),
    # https://huggingface.co/zai-org/GLM-4.5: eos_token_id 151329, 151336, 151338
    Family("glm", ("<|observation|>", "<|user|>"), "<|endoftext|>", ("<|user|>", "<|observation|>", "<|endoftext|>")),
    Family(
        "deepseek", ("<\uff5cUser\uff5c>",), _DEEPSEEK, (_DEEPSEEK,), bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    ),
    Family(
        "cohere", ("<|END_OF_TURN_TOKEN|>",), "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), bos="<BOS_TOKEN>"
    ),
    Family("granite", ("<|start_of_role|>",), "<|end_of_text|>", ("<|end_of_text|>",)),
    Family("kimi", ("<|im_middle|>",), "<|im_end|>", ("<|im_end|>",), bos="[BOS]"),
    Family("exaone", ("[|endofturn|]",), "[|endofturn|]", ("[|endofturn|]",), bos="[BOS]"),
    Family("minimax", ("[e~[",), "[e~[", ("[e~[",)),
    Family("phi 4", ("<|im_sep|>",), "<|im_end|>", ("<|im_end|>",)),
    Family("chatml", ("<|im_start|>", "<|im_end|>"), "<|im_end|>", ("<|im_end|>",), bos="<|startoftext|>"),
    # A tool's answer stands in the same turn, behind the token that closes the calls.
    Family(
        "apertus", ("<|assistant_end|>",), "<|assistant_end|>", ("<|assistant_end|>", "<|tools_suffix|>"), bos="<s>"
    ),
    Family("seed", ("<seed:eos>",), "<seed:eos>", ("<seed:eos>",), bos="<seed:bos>"),
    Family("ernie", ("<|begin_of_sentence|>",), "</s>", ("<|end_of_sentence|>", "</s>"), bos="<s>"),
    Family("longcat", ("</longcat_s>",), "</longcat_s>", ("</longcat_s>",), bos="<longcat_s>"),
    Family("jamba", ("<|bom|>",), "<|endoftext|>", ("<|eom|>", "<|endoftext|>"), bos="<|startoftext|>"),
    Family("minimax text", ("<end_of_sentence>",), "<end_of_sentence>", ("<end_of_sentence>",)),
    Family("nemotron nano", ("<SPECIAL_12>",), "<SPECIAL_12>", ("<SPECIAL_12>",), bos="<s>"),
    Family("openchat", ("<|end_of_turn|>",), "<|end_of_turn|>", ("<|end_of_turn|>",), bos="<s>", kinds=(PREFIXED,)),
    Family("end of text", ("<|EOT|>",), "<|EOT|>", ("<|EOT|>",), bos="<|startoftext|>"),
    Family("hunyuan", ("<|extra_4|>",), "<|eos|>", ("<|eos|>",), bos="<|startoftext|>"),
    Family("idefics", ("<end_of_utterance>",), "<end_of_utterance>", ("<end_of_utterance>",), bos="<s>"),
    Family("mistral", ("[INST]",), "</s>", ("</s>",), bos="<s>", kinds=(PREFIXED, BYTES)),
    Family(
        "phi 3", ("<|end|>", "<|user|>"), "<|endoftext|>", ("<|end|>", "<|endoftext|>"), bos="<s>", kinds=(PREFIXED,)
    ),
    Family("phi 3", ("<|end|>", "'<|' +"), "<|endoftext|>", ("<|end|>", "<|endoftext|>"), bos="<s>", kinds=(PREFIXED,)),
)
# Any other template: its turns end with the tokenizer's eos, in SentencePiece's and in byte-level vocabularies.
OTHER = Family("other", (), "</s>", ("</s>",), bos="<s>", kinds=(PREFIXED, BYTES))

CONTROL = re.compile(
    r"<\|[^|<>\s'{}%]{1,40}\|?>|<[a-z_]{2,30}\|>|<\|\"\|>|<\uff5c[^\uff5c\s]{1,40}\uff5c>|\[/?[A-Z_]{3,24}\]|\[\|[a-z]+\|\]"
    r"|</?s>|<bos>|<eos>|<sop>|\[gMASK\]|<(?:BOS|EOS|PAD)_TOKEN>|</?(?:start|end)_[a-z_]{4,30}>|<seed:[a-z]+>"
    r"|<extra_id_\d+>|</?longcat_\w+>|<SPECIAL_\d+>|\]~!?b[\[\]]|\[e~\[|<\w+_of_sentence>|<escape>"
)
# Added tokens that are not special, as in Qwen's and GLM's tokenizers.
_TAGS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
_ROLES = ("system", "user", "assistant", "tool", "developer")


def family_of(template: str) -> Family:
    return next((family for family in FAMILIES if all(mark in template for mark in family.marks)), OTHER)


def derived_family(render: Callable[[list[dict[str, str]]], str | None]) -> Family:
    """Return the family of a template that none in the table fits: the first control token between an answer and the
    next question is what stops the model. render: messages to text, or None."""
    asked, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"}
    text = render([asked, answer, {**asked, "content": "another"}]) or ""
    _, _, rest = text.partition("reply")
    between = CONTROL.findall(rest.partition("another")[0])
    if not between:
        return OTHER
    return replace(OTHER, name="derived", stops=(between[0], OTHER.eos))


def control_tokens(template: str, renderings: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return the special tokens and the other added tokens that a template writes. renderings: of conversations that
    hold no such token themselves."""
    texts = [template, *renderings]
    special = {token for text in texts for token in CONTROL.findall(text)}
    if "'<|' +" in template or '"<|" +' in template:
        special |= {f"<|{role}|>" for role in _ROLES}
    return sorted(special), sorted({tag for text in texts for tag in _TAGS.findall(text)})


@cache
def _trained(kind: str) -> str:
    """A small vocabulary as tokenizer.json's text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    from tests.support.field_conversations import CONVERSATIONS

    texts = [json.dumps(each.row, ensure_ascii=False) for each in CONVERSATIONS]
    if kind == BYTES:
        made = Tokenizer(models.BPE())
        # Splits as in Llama 3 and Qwen: digits apart from words, line breaks together.
        words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator(texts, trainer)
        return made.to_str()
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=1100, special_tokens=bytes_of, show_progress=False)
    made.train_from_iterator([*texts, "\n\n", "\n"], trainer)
    # As tokenizer.json has it for Llama 2 and Mistral (a space before every text), and for Gemma (none).
    spaces: list[Any] = [normalizers.Replace(" ", "\u2581")]
    before = [normalizers.Prepend("\u2581")] if kind == PREFIXED else []
    made.normalizer = normalizers.Sequence([*before, *spaces])
    made.pre_tokenizer = None
    strip = [decoders.Strip(" ", 1, 0)] if kind == PREFIXED else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    stored = json.loads(made.to_str())
    stored["added_tokens"] = []  # bytes are ordinary tokens
    return json.dumps(stored)


def save_tokenizer(folder: Path, kind: str, template: str, family: Family, renderings: Iterable[str] = ()) -> None:
    """Write a tokenizer with this template, and the stop tokens of its family in `generation_config.json`."""
    from tokenizers import AddedToken, Tokenizer

    special, tags = control_tokens(template, renderings)
    special = list(
        dict.fromkeys([*([family.bos] if family.bos else []), family.eos, "<|pad|>", *family.stops, *special])
    )
    made = Tokenizer.from_str(_trained(kind))
    # Phi 3's special tokens take the blanks behind them along: https://huggingface.co/microsoft/Phi-3-mini-4k-instruct
    takes_blanks = family.name == "phi 3"
    made.add_special_tokens(
        [AddedToken(each, special=True, normalized=False, rstrip=takes_blanks and each[:2] == "<|") for each in special]
    )
    made.add_tokens([AddedToken(each, special=False, normalized=False) for each in tags if each not in special])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "pad_token": "<|pad|>",
        "model_max_length": 1 << 17, "clean_up_tokenization_spaces": False, "chat_template": template,
    }  # fmt: skip
    if family.bos:
        settings["bos_token"] = family.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stops = [made.token_to_id(each) for each in family.stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
