"""Tokenizers from a folder or a hub name; users' mistakes fail before anything is trained.

transformers 5.19 takes only the vocabulary and the merges from a tokenizer.json, and splits texts by the rules of a
class: the one in tokenizer_config.json, or for a few families the one that it registers. Where a model was trained with
other rules, its ids change: LlamaTokenizerFast over a byte-level file loses every space, GPT2Tokenizer cuts the numbers
and line breaks of Granite, OLMo 2 and Phi-4 into other tokens. `read_tokenizer` compares both, and takes the file.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.storage import sha256_of_object
from training.utils.loading.configurations import errors_explained
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.loading.weight_files import model_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
# By this key of tokenizer_config.json, every class takes the whole tokenizer.json (transformers 5.19,
# tokenization_utils_tokenizers.py: convert_to_native_format). It runs no code: AutoTokenizer reads its argument alone.
_WHOLE_FILE = "trust_remote_code"
# Of a BPE model, where its file leaves them out.
_DEFAULTS: dict[str, Any] = {
    "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "dropout": None,
    "continuing_subword_prefix": None, "end_of_word_suffix": None,
}  # fmt: skip
_MOST_WORDS = 4096  # tokens of the vocabulary that are compared as texts

PROBES = (
    "add 9 and 6\n\nso 15",
    " a",
    "12345",
    "IT'S",
    "Human: What is 2 + 3? \n\tAssistant: 2 + 3 is 5, naïve 🍐.",
    "  two,   three,    four ",
    " \n \n\n  \r\n\r\n\t\tend\n",
    "0 12 345 6789 12345678 3.14159 1,234,567 2026-11-29 0x1F ١٢٣ ²³",
    "don't I'LL we've THEY'RE it's IT'S he'd HE'D I'm 'tis o'clock ’s",
    "def f(x):\n    return x**2  # comment\n\n\n\nfor (int i = 0; i < n; ++i) { a[i] += \"s\"; }\n",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "你好，世界。こんにちは、世界。안녕하세요 세계 ｆｕｌｌ　ｗｉｄｔｈ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇳 ☺️ 𝒳 \U0010ffff",
    "e\u0301 \u00e9 n\u0303 \u0915\u094d\u0937 \u1100\u1161\u11a8 \uff76\uff9e \ufb01 \u212b",
    "a\u00a0b\u2009c\u200bd\u3000e\ufefff\u0000g",
    "CamelCase snake_case kebab-case UPPER lower MiXeD iPhone15 http://a.b/c?d=e&f=%20 <|x|> [INST] </s> <0x0A> ▁",
)  # fmt: skip


def read_tokenizer(
    name_or_path: str | Path, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, str | None]:
    """Return the tokenizer of a folder or hub name, and a sentence where transformers alone makes other ids of texts
    than tokenizer.json. A class that comes with the model's own code is kept.

    Raises ThreestepError where there is only a tokenizer.model, and transformers makes other ids than SentencePiece.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # With mistral-common installed (some servers need it), a tekken.json would be read instead of the other files.
    built = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, mistral_format=False)
    kind = type(built)
    if not kind.__module__.startswith("transformers."):
        return built, None
    files = [_cached(name_or_path, name) for name in (_FILE, _CONFIG)]
    if files[0] is None:
        _check_sentencepiece(built, name_or_path)
        return built, None
    asks = files[1] is not None and _read(files[1]).get(_WHOLE_FILE) is True
    if kind is PreTrainedTokenizerFast or (not asks and _has_its_rules(built, _read(files[0]))):
        return built, None
    in_file = PreTrainedTokenizerFast.from_pretrained(name_or_path)
    _take_special_tokens(in_file, built)
    difference = _difference(built, in_file)
    if difference is None and not asks:
        return built, None
    if _would_be_built_again(in_file):
        named = dict.fromkeys(in_file.SPECIAL_TOKENS_ATTRIBUTES)  # None: the class adds none of its own
        in_file.init_kwargs.update({**named, **in_file.special_tokens_map, _WHOLE_FILE: True})
    if difference is None:
        return in_file, None
    return in_file, (
        f"using the {_FILE} of '{name_or_path}' as its tokenizer; transformers' {kind.__name__} would {difference}"
    )


def text_ids(tokenizer: Any, texts: Sequence[str] = PROBES) -> list[list[int]]:
    """Return the ids of each text, without the special tokens around it; by default of texts that tell tokenizers of
    one vocabulary apart."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def _cached(name_or_path: str | Path, file: str) -> Path | None:
    from transformers.utils import cached_file

    path = cached_file(str(name_or_path), file, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _check_sentencepiece(built: Any, name_or_path: str | Path) -> None:
    """transformers 5.19 leaves out the space that Mistral's tokenizer.model puts before a text."""
    path = _cached(name_or_path, "tokenizer.model")
    if path is None or find_spec("sentencepiece") is None:
        return
    try:
        model = import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):  # a file of tiktoken
        return
    texts = [text for text in PROBES if "<" not in text]  # which may be special tokens
    for text, ours in zip(texts, text_ids(built, texts), strict=True):
        if ours != model.encode(text):
            raise ThreestepError(
                f"'{name_or_path}' has a tokenizer.model but no {_FILE}, and transformers splits {text!r} into "
                f"different tokens than SentencePiece does; add the {_FILE} that was published with the model"
            )


def _has_its_rules(built: Any, file: dict[str, Any]) -> bool:
    """True if each part of `built` is written as in the file, and it added no token. Other parts may still do the same,
    which takes longer to compare."""
    if file["model"].get("type") != "BPE":
        return False
    backend = built.backend_tokenizer
    parts = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor")}
    for name, part in parts.items():
        ours = None if part is None else json.loads(part.__getstate__())
        if _plain(name, ours) != _plain(name, file.get(name)):
            return False
    model = {**_DEFAULTS, **file["model"]}
    if any((getattr(backend.model, name, None) or None) != (model[name] or None) for name in _DEFAULTS):
        return False
    added = {token["content"] for token in file["added_tokens"]}
    known = {*file["model"]["vocab"], *added}
    kept = set(built.all_special_tokens) <= known and added <= built.get_added_vocab().keys()
    return kept and len(built) == len(known)


def _plain(name: str, part: Any) -> Any:
    """A part of a tokenizer.json without what changes no id: where offsets begin, and ByteLevel's rules of splitting
    where it only decodes."""
    if isinstance(part, list):
        return [_plain(name, each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "ByteLevel":
        splits = name == "pre_tokenizer"
        return ("ByteLevel", part["add_prefix_space"], part.get("use_regex", True)) if splits else "ByteLevel"
    return {key: _plain(name, value) for key, value in part.items()}


def _difference(built: Any, in_file: Any) -> str | None:
    """The first thing that `built` does otherwise, in words; None if there is none."""
    step = len(in_file) // _MOST_WORDS + 1
    words = in_file.batch_decode([[index] for index in range(0, len(in_file), step)])
    special = [f"a {token} b{token}c" for token in in_file.get_added_vocab()]
    texts = [text for text in dict.fromkeys([*PROBES, *special, *words]) if text]
    try:
        found = text_ids(built, texts)
    except Exception as problem:  # noqa: BLE001 (of a class over a vocabulary that it does not expect)
        return f"fail on texts ({first_line(problem)})"
    for text, theirs, ours in zip(texts, found, text_ids(in_file, texts), strict=True):
        if theirs != ours:
            return f"split {text!r} into different tokens"
    for text in PROBES:
        ids = in_file(text)["input_ids"]
        if built(text)["input_ids"] != ids:
            return f"put different tokens around {text!r}"
        if built.decode(ids) != in_file.decode(ids):
            return f"decode the tokens of {text!r} to a different text"
    return None if built.get_vocab() == in_file.get_vocab() else "have another vocabulary"


def _take_special_tokens(in_file: Any, built: Any) -> None:
    """Give `in_file` the special tokens that only the class of `built` names, if its vocabulary has them: Llama's file
    may leave out that </s> is its end."""
    for name, token in built.special_tokens_map.items():
        if isinstance(token, str) and getattr(in_file, name, None) is None and token in in_file.get_vocab():
            in_file.add_special_tokens({name: token})


def _would_be_built_again(tokenizer: Any) -> bool:
    """True if transformers rebuilds the saved tokenizer by a class of the family, as it does for Qwen 2 whatever class
    tokenizer_config.json names."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    try:
        config = AutoConfig.from_pretrained(tokenizer.name_or_path, trust_remote_code=False)
    except (OSError, ValueError):  # a tokenizer alone, or a model of its own code
        return False
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
        Path(folder, "config.json").write_text(json.dumps({"model_type": config.model_type}), encoding="utf-8")
        return type(AutoTokenizer.from_pretrained(folder)) is not PreTrainedTokenizerFast


_PROBE = "What is 2 + 3? naïve 🍐"
NEW_PAD_TOKEN = "[PAD]"  # noqa: S105 (a token of text; DeepSpeed-Chat's)


def load_tokenizer(
    name_or_path: str, pad_token: str | None = None, end_may_pad: bool = False, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer; of an adapter without one, its base's. ThreestepError if it lacks an end or a pad
    token.

    end_may_pad: pad with the end token if there is no pad token, as long as nothing is trained or saved; a folder with
    a tokenizer and no model is then enough.
    """
    tokenizer = _loaded(name_or_path, pad_token, end_may_pad, trust_remote_code)
    if tokenizer.pad_token_id is None and end_may_pad:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ThreestepError(
            f"the tokenizer in '{name_or_path}' has no pad token; choose one of its tokens with --pad_token, "
            f"e.g. --pad_token '{tokenizer.eos_token}'"
        )
    return tokenizer


def load_padding_tokenizer(
    name_or_path: str, pad_token: str | None, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase, int]:
    """As `load_tokenizer`, but add NEW_PAD_TOKEN if there is no pad token; return how many tokens that adds, 0 or 1.
    The model that is trained with it needs a row for it."""
    tokenizer = _loaded(name_or_path, pad_token, False, trust_remote_code)
    before = len(tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.add_special_tokens({"pad_token": NEW_PAD_TOKEN})
    return tokenizer, len(tokenizer) - before


def _loaded(
    name_or_path: str, pad_token: str | None, end_may_pad: bool, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer, which has an end token, and perhaps no pad token."""
    has_own = Path(name_or_path, _CONFIG).is_file()
    if not (end_may_pad and has_own):
        check_model_folder(name_or_path)
    source = name_or_path if has_own else model_of(name_or_path)
    with errors_explained("tokenizer", source, Exception):  # transformers raises many kinds
        tokenizer, sentence = read_tokenizer(source, trust_remote_code)
        tokenizer(_PROBE)  # damaged files are read, and fail when they are used
        tokenizer.convert_tokens_to_ids(_PROBE)  # no token: the answer is that for unknown ones
    if sentence is not None:
        _log_once(sentence)
    if pad_token is not None:
        index = tokenizer.convert_tokens_to_ids(pad_token)  # of a text that is no token: None, or unk's
        if index is None or tokenizer.convert_ids_to_tokens(index) != pad_token:
            raise ThreestepError(f"--pad_token expects a token of the tokenizer in '{name_or_path}', got '{pad_token}'")
        tokenizer.pad_token = pad_token
    if tokenizer.eos_token_id is None:
        raise ThreestepError(
            f"the tokenizer in '{name_or_path}' has no end-of-sequence token; set eos_token in its files"
        )
    tokenizer.padding_side = "right"
    return tokenizer


@functools.cache
def _log_once(sentence: str) -> None:
    log_on_main(sentence)  # a run reads a tokenizer in several places


def with_pad_apart(tokenizer: PreTrainedTokenizerBase, end_token: str | None) -> PreTrainedTokenizerBase:
    """Return `tokenizer` with a pad token that never ends a response: `<|pad|>`, if it would.

    Plain transformers reads a score at the last token that is not pad; if pad ended a response, that would be the token
    before the last.
    """
    if tokenizer.pad_token == (end_token or tokenizer.eos_token):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> int:
    """Add ordinary tokens, which decoding without special tokens keeps in the text; return how many are new."""
    from tokenizers import AddedToken

    before = len(tokenizer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return len(tokenizer) - before


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True if both turn every text into the same ids; pad tokens may differ."""

    def text_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        return {token: index for token, index in tokenizer.get_vocab().items() if token != tokenizer.pad_token}

    ours, theirs = text_tokens(one), text_tokens(other)
    for pads in (one, other):  # one's pad token may be an ordinary token of the other, with the same id
        ours.pop(pads.pad_token, None)
        theirs.pop(pads.pad_token, None)
    return ours == theirs and one.eos_token_id == other.eos_token_id and text_ids(one) == text_ids(other)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A text that two tokenizers share only if both turn every text into the same ids, a pad token that ends no text
    aside. Serves those who hand tokens to another program."""
    pad = None if tokenizer.pad_token == tokenizer.eos_token else tokenizer.pad_token
    vocabulary = {token: index for token, index in tokenizer.get_vocab().items() if token != pad}
    return sha256_of_object({"vocabulary": vocabulary, "end": tokenizer.eos_token_id, "texts": text_ids(tokenizer)})
