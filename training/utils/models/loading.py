"""Tokenizers and models from a folder or a hub name; users' mistakes fail before anything is trained.

Weights are safetensors; pickled weights and remote code are refused. Knows no engine: a caller that wants sharded
weights provides the context (`training.utils.engine.startup.born_sharded`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.models.attention import SDPA
from training.utils.models.lora import add_lora
from training.utils.models.settings import ModelSettings, check_model_folder
from training.utils.run.errors import ThreestepError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The names of dropout rates in transformers' model families.
_DROPOUT_NAMES = (
    "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
)  # fmt: skip


def load_tokenizer(
    name_or_path: str, pad_token: str | None = None, end_may_pad: bool = False, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer. ThreestepError if it lacks an end or a pad token.

    end_may_pad: pad with the end token if there is no pad token, as long as nothing is trained or saved; a folder with
    a tokenizer and no model is then enough.
    """
    from transformers import AutoTokenizer

    if not (end_may_pad and (Path(name_or_path) / "tokenizer_config.json").is_file()):
        check_model_folder(name_or_path)
    with _errors_explained("tokenizer", name_or_path, Exception):  # transformers raises many kinds
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    if pad_token is not None:
        unknown = tokenizer.convert_tokens_to_ids(pad_token) in (None, tokenizer.unk_token_id)
        if unknown and pad_token != tokenizer.unk_token:
            raise ThreestepError(f"--pad_token expects a token of the tokenizer in '{name_or_path}', got '{pad_token}'")
        tokenizer.pad_token = pad_token
    if tokenizer.eos_token_id is None:
        raise ThreestepError(
            f"the tokenizer in '{name_or_path}' has no end-of-sequence token; set eos_token in its files"
        )
    if tokenizer.pad_token_id is None and end_may_pad:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ThreestepError(
            f"the tokenizer in '{name_or_path}' has no pad token; name one of its tokens with --pad_token, "
            f"e.g. --pad_token '{tokenizer.eos_token}'"
        )
    tokenizer.padding_side = "right"
    return tokenizer


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
    return ours == theirs and one.eos_token_id == other.eos_token_id


def load_causal_lm(settings: ModelSettings, dtype: Any, tokenizer_size: int, added_tokens: int = 0) -> PreTrainedModel:
    """Return an `AutoModelForCausalLM` in `dtype` (a torch dtype).

    added_tokens: what `add_tokens` returned for its tokenizer. The embeddings grow to hold them, and train, also with
    LoRA.
    """
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, settings, dtype)
    _check_vocabulary(model, settings, tokenizer_size - added_tokens)
    if added_tokens:
        _grow_embeddings(model, tokenizer_size)
    return prepared(model, settings, embeddings_train=added_tokens > 0)


def _grow_embeddings(model: PreTrainedModel, tokens: int, pad_to_multiple_of: int | None = None) -> None:
    """Grow input and output embeddings to `tokens` rows, if they have fewer. ZeRO-3 models are gathered for it.

    New rows are drawn close to the mean of the old ones (transformers' default; Hewitt 2021, "Initializing New Word
    Embeddings for Pretrained Language Models"): a new token is then never likelier than the average old one, while a
    row near zero can take nearly all probability. A language model gets no rows beyond the tokenizer's: they could be
    sampled.
    """
    if tokens > model.config.get_text_config().vocab_size:
        model.resize_token_embeddings(tokens, pad_to_multiple_of=pad_to_multiple_of)


def load_scalar_model(
    settings: ModelSettings,
    dtype: Any,
    tokenizer: PreTrainedTokenizerBase,
    must_have_head: bool,
    added_tokens: int = 0,
) -> PreTrainedModel:
    """Return an `AutoModelForSequenceClassification` with one label: a reward model or a critic.

    Its configuration gets the tokenizer's pad token: plain transformers reads the score at the last other token.

    must_have_head: refuse a folder without a scalar head, such as a language model's. Otherwise a new head is made, and
        the embeddings grow to the tokenizer.
    added_tokens: see `load_causal_lm`.
    """
    from transformers import AutoModelForSequenceClassification

    config = load_config(settings.name_or_path, settings.trust_remote_code)
    if must_have_head:
        architectures = getattr(config, "architectures", None) or []
        if not any("SequenceClassification" in name for name in architectures):
            raise ThreestepError(
                f"'{settings.name_or_path}': expected a model for sequence classification, got "
                f"{', '.join(architectures) or 'no architecture'}; train one with step 2 and give its model folder"
            )
        if config.num_labels != 1:
            raise ThreestepError(
                f"'{settings.name_or_path}': expected a reward model with one label, got {config.num_labels} labels; "
                "train one with step 2 and give its model folder"
            )
    # transformers refuses a pad token outside of the embeddings, which grow below. The model's own is no substitute: it
    # may be eos, whose embedding would then not train.
    inside = tokenizer.pad_token_id < config.get_text_config().vocab_size
    pad_token_id = tokenizer.pad_token_id if inside else None
    model = _load(AutoModelForSequenceClassification, settings, dtype, num_labels=1, pad_token_id=pad_token_id)
    if not hasattr(model, "score"):
        raise ThreestepError(f"{type(model).__name__} has no scalar head called 'score'; use another family")
    if not must_have_head:
        _grow_embeddings(model, len(tokenizer), pad_to_multiple_of=8)
    _check_vocabulary(model, settings, len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    return prepared(model, settings, embeddings_train=added_tokens > 0)


def load_config(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """Return a model's configuration; ThreestepError if there is none, or if it is untrusted code."""
    from transformers import AutoConfig

    check_model_folder(name_or_path)
    with _errors_explained("model", name_or_path, OSError, ValueError):
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    return config


def _load(auto_class: Any, settings: ModelSettings, dtype: Any, **config: Any) -> PreTrainedModel:
    import torch

    check_model_folder(settings.name_or_path)
    implementation, has_cuda = settings.attn_implementation, torch.cuda.is_available()
    # sdpa is transformers' default. Given explicitly, it would fail for families that lack it; the default falls back.
    if implementation != SDPA:
        config["attn_implementation"] = implementation
        if not has_cuda:
            raise ThreestepError(
                f"--attn_implementation {implementation} needs a CUDA device, and there is none here; use sdpa"
            )
    if settings.torch_compile:
        from training.utils.models.compiled import check_compiler

        check_compiler()
    # Without it, transformers asks at the terminal.
    config["trust_remote_code"] = settings.trust_remote_code
    # transformers prints a table of missing keys for a new scalar head, which step 2 wants.
    report = logging.getLogger("transformers.modeling_utils")
    level = report.level
    report.setLevel(logging.ERROR)
    try:
        with _errors_explained("model", settings.name_or_path, OSError, ValueError, ImportError):
            model = auto_class.from_pretrained(settings.name_or_path, dtype=dtype, use_safetensors=True, **config)
    finally:
        report.setLevel(level)
    # Compiled blocks would be recompiled for the runs of every row.
    if implementation == SDPA and not settings.torch_compile and not has_cuda:
        from training.utils.models.document_attention import use_document_attention

        use_document_attention(model)
    return model


def _check_vocabulary(model: PreTrainedModel, settings: ModelSettings, tokenizer_size: int) -> None:
    rows = model.config.get_text_config().vocab_size
    if tokenizer_size > rows:
        raise ThreestepError(
            f"the tokenizer of '{settings.name_or_path}' has {tokenizer_size} tokens and its model embeds {rows}; "
            "resize the model's embeddings or give the model's own tokenizer"
        )


def positions_of(config: Any) -> int | None:
    """The longest sequence that a model has positions for; None if unbounded."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_positions(settings: ModelSettings, longest_tokens: int, flags: str) -> None:
    """ThreestepError if `longest_tokens`, which `flags` allow, exceeds the positions in the model's configuration."""
    positions = positions_of(load_config(settings.name_or_path, settings.trust_remote_code))
    if positions is not None and longest_tokens > positions:
        raise ThreestepError(
            f"{flags} allow sequences of {longest_tokens} tokens and the model '{settings.name_or_path}' has "
            f"{positions} positions; lower them or use a model with more positions"
        )


@contextlib.contextmanager
def _errors_explained(what: str, name_or_path: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn `errors` of transformers inside into a ThreestepError."""
    try:
        yield
    except errors as problem:
        if "trust_remote_code" in str(problem):
            raise ThreestepError(
                f"'{name_or_path}' comes with Python code of its own, which is not run by default: read it, then give "
                "--trust_remote_code true, or use an architecture that transformers has"
            ) from problem
        raise ThreestepError(f"no {what} could be loaded from '{name_or_path}': {first_line(problem)}") from problem


def prepared(model: PreTrainedModel, settings: ModelSettings, embeddings_train: bool = False) -> PreTrainedModel:
    """Apply `settings` to a loaded model, in place: dropout, recomputation, adapters, compilation."""
    if settings.dropout is not None:
        set_dropout(model, settings.dropout)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = add_lora(model, settings)
    if embeddings_train:
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
            if embeddings is not None:
                embeddings.requires_grad_(True)
    if settings.torch_compile:
        from training.utils.models.compiled import compile_blocks

        compile_blocks(model)
    return model


def set_dropout(model: PreTrainedModel, rate: float) -> None:
    """Set every dropout rate, in the configuration and in the modules."""
    import torch

    for name in _DROPOUT_NAMES:
        if hasattr(model.config, name):
            setattr(model.config, name, rate)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)


def model_files(name_or_path: str) -> list[str]:
    """Return the files that decide what a loaded model computes: its configuration and safetensors."""
    from transformers.utils import cached_file

    folder = Path(name_or_path)
    if not folder.is_dir():  # a hub name: its local snapshot
        folder = Path(str(cached_file(name_or_path, "config.json", local_files_only=True))).parent
    return [str(folder / "config.json"), *sorted(str(path) for path in folder.glob("*.safetensors"))]
