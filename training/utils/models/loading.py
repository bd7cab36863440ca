"""Tokenizers and models from a folder or a hub name, with the user's mistakes said before anything is trained.

Weights are safetensors; pickled weights and remote code are refused. Knows no engine: sharding at birth is the
caller's context (`training.utils.engine.startup.born_sharded`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.run.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The names under which transformers' model families keep their dropout rates.
_DROPOUT_NAMES = (
    "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSettings:
    """name_or_path: folder or hub name. dropout: every dropout rate of the model, None keeps the model's own.
    lora: see training.utils.models.lora. gradient_checkpointing: recompute activations in backward."""

    name_or_path: str
    dropout: float | None = None
    gradient_checkpointing: bool = False
    lora_dim: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_module_name: str = "all-linear"
    only_optimize_lora: bool = True


def load_tokenizer(name_or_path: str, pad_token: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer kept with a model. ThreestepError where it lacks an end or a pad token."""
    from transformers import AutoTokenizer

    _check_folder(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except Exception as problem:  # transformers raises many kinds; every one means that this name gives no tokenizer
        raise ThreestepError(f"no tokenizer could be loaded from '{name_or_path}': {_first_line(problem)}") from problem
    if pad_token is not None:
        if tokenizer.convert_tokens_to_ids(pad_token) in (None, tokenizer.unk_token_id):
            raise ThreestepError(f"--pad_token '{pad_token}' is no token of the tokenizer in '{name_or_path}'")
        tokenizer.pad_token = pad_token
    if tokenizer.eos_token_id is None:
        raise ThreestepError(f"the tokenizer in '{name_or_path}' has no end-of-sequence token; set eos_token in its files")
    if tokenizer.pad_token_id is None:
        raise ThreestepError(
            f"the tokenizer in '{name_or_path}' has no pad token; name one of its tokens with --pad_token, "
            f"for instance --pad_token '{tokenizer.eos_token}'"
        )
    tokenizer.padding_side = "right"
    return tokenizer


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True where both turn every text into the same ids: pad tokens may differ, they carry no text."""

    def text_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        return {token: index for token, index in tokenizer.get_vocab().items() if token != tokenizer.pad_token}

    ours, theirs = text_tokens(one), text_tokens(other)
    for pads in (one, other):  # a pad token of one may be an ordinary token of the other, at the same id
        ours.pop(pads.pad_token, None)
        theirs.pop(pads.pad_token, None)
    return ours == theirs and one.eos_token_id == other.eos_token_id


def load_causal_lm(settings: ModelSettings, dtype: Any, tokenizer_size: int) -> PreTrainedModel:
    """Return an `AutoModelForCausalLM` in `dtype` (a torch dtype)."""
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, settings, dtype)
    return _prepared(model, settings, tokenizer_size)


def load_scalar_model(
    settings: ModelSettings, dtype: Any, tokenizer_size: int, pad_token_id: int, must_have_head: bool
) -> PreTrainedModel:
    """Return an `AutoModelForSequenceClassification` with one label: a reward model or a critic.

    must_have_head: refuse a folder whose scalar head would be made up (a language model's, say).
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    _check_folder(settings.name_or_path)
    if must_have_head:
        architectures = getattr(AutoConfig.from_pretrained(settings.name_or_path), "architectures", None) or []
        if not any("SequenceClassification" in name for name in architectures):
            raise ThreestepError(
                f"'{settings.name_or_path}' holds {', '.join(architectures) or 'no architecture'}, and a model for "
                "sequence classification was expected: train one with step 2 and give its model folder"
            )
    model = _load(AutoModelForSequenceClassification, settings, dtype, num_labels=1, pad_token_id=pad_token_id)
    if not hasattr(model, "score"):
        raise ThreestepError(f"{type(model).__name__} keeps its scalar head elsewhere than in 'score'; use another family")
    return _prepared(model, settings, tokenizer_size)


def _load(auto_class: Any, settings: ModelSettings, dtype: Any, **config: Any) -> PreTrainedModel:
    _check_folder(settings.name_or_path)
    # transformers reports a new scalar head as a table of missing keys; a new head is what step 2 asks for.
    report = logging.getLogger("transformers.modeling_utils")
    level = report.level
    report.setLevel(logging.ERROR)
    try:
        return auto_class.from_pretrained(settings.name_or_path, dtype=dtype, use_safetensors=True, **config)
    except (OSError, ValueError) as problem:
        raise ThreestepError(f"no model could be loaded from '{settings.name_or_path}': {_first_line(problem)}") from problem
    finally:
        report.setLevel(level)


def _prepared(model: PreTrainedModel, settings: ModelSettings, tokenizer_size: int) -> PreTrainedModel:
    if settings.dropout is not None:
        set_dropout(model, settings.dropout)
    rows = model.config.get_text_config().vocab_size
    if tokenizer_size > rows:
        raise ThreestepError(
            f"the tokenizer of '{settings.name_or_path}' has {tokenizer_size} tokens and its model embeds {rows}; "
            "resize the model's embeddings or give the tokenizer that belongs to it"
        )
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def set_dropout(model: PreTrainedModel, rate: float) -> None:
    """Set every dropout rate, in the configuration and in the modules that have read it already."""
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


def _check_folder(name_or_path: str) -> None:
    path = Path(name_or_path)
    looks_local = path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1
    if looks_local and not path.is_dir():
        raise ThreestepError(f"the model folder '{name_or_path}' does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ThreestepError(f"the folder '{name_or_path}' holds no config.json, so it is no model folder")


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
