"""Tokenizers from a folder or a hub name; users' mistakes fail before anything is trained."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import sha256_of_object
from training.utils.loading.adapter_folders import model_of
from training.utils.loading.configurations import errors_explained
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.models.families.tokenizer_files import read_tokenizer, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
            f"the tokenizer in '{name_or_path}' has no pad token; name one of its tokens with --pad_token, "
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
    has_own = (Path(name_or_path) / "tokenizer_config.json").is_file()
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
