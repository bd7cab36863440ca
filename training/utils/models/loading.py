"""Tokenizers and models from a folder or a hub name, with the user's mistakes said before anything is trained.

Weights are safetensors; pickled weights and remote code are refused. Knows no engine: sharding at birth is the
caller's context (`training.utils.engine.startup.born_sharded`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.models.attention import SDPA
from training.utils.models.lora import add_lora
from training.utils.models.settings import ModelSettings, check_model_folder
from training.utils.run.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# The names under which transformers' model families keep their dropout rates.
_DROPOUT_NAMES = (
    "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
)  # fmt: skip


def load_tokenizer(
    name_or_path: str, pad_token: str | None = None, end_may_pad: bool = False, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer kept with a model. ThreestepError where it lacks an end or a pad token.

    end_may_pad: pad with the end token where there is no pad token, which is enough where nothing is trained or saved;
    a folder of a tokenizer without a model is then enough too.
    """
    from transformers import AutoTokenizer

    if not (end_may_pad and (Path(name_or_path) / "tokenizer_config.json").is_file()):
        check_model_folder(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as problem:  # transformers raises many kinds; every one means that this name gives no tokenizer
        _refuse_remote_code(name_or_path, problem)
        raise ThreestepError(f"no tokenizer could be loaded from '{name_or_path}': {_first_line(problem)}") from problem
    if pad_token is not None:
        unknown = tokenizer.convert_tokens_to_ids(pad_token) in (None, tokenizer.unk_token_id)
        if unknown and pad_token != tokenizer.unk_token:
            raise ThreestepError(f"--pad_token '{pad_token}' is no token of the tokenizer in '{name_or_path}'")
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
            f"for instance --pad_token '{tokenizer.eos_token}'"
        )
    tokenizer.padding_side = "right"
    return tokenizer


def with_pad_apart(tokenizer: PreTrainedTokenizerBase, end_token: str | None) -> PreTrainedTokenizerBase:
    """Return `tokenizer` with a pad token that never ends a response.

    Plain transformers reads a score at the last token that is not the pad token. Where pad is the token that ends
    a response, it would read the token before: such a tokenizer gets a pad token of its own, `<|pad|>`.
    """
    if tokenizer.pad_token == (end_token or tokenizer.eos_token):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    return tokenizer


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> int:
    """Make each of `tokens` one token of `tokenizer`; return how many ids it gained.

    They are ordinary tokens, not special ones: decoding without special tokens keeps them in the text.
    """
    from tokenizers import AddedToken

    before = len(tokenizer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return len(tokenizer) - before


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """True where both turn every text into the same ids: pad tokens may differ, they carry no text."""

    def text_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        return {token: index for token, index in tokenizer.get_vocab().items() if token != tokenizer.pad_token}

    ours, theirs = text_tokens(one), text_tokens(other)
    for pads in (one, other):  # a pad token of one may be an ordinary token of the other, at the same id
        ours.pop(pads.pad_token, None)
        theirs.pop(pads.pad_token, None)
    return ours == theirs and one.eos_token_id == other.eos_token_id


def load_causal_lm(settings: ModelSettings, dtype: Any, tokenizer_size: int, added_tokens: int = 0) -> PreTrainedModel:
    """Return an `AutoModelForCausalLM` in `dtype` (a torch dtype).

    added_tokens: ids that the model's own tokenizer has just gained (`add_tokens`). The embeddings grow to them where
    they have no spare rows, and train, beside LoRA too.
    """
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, settings, dtype)
    _check_vocabulary(model, settings, tokenizer_size - added_tokens)
    if added_tokens:
        _grow_embeddings(model, tokenizer_size)
    return prepared(model, settings, embeddings_train=added_tokens > 0)


def _grow_embeddings(model: PreTrainedModel, tokens: int, pad_to_multiple_of: int | None = None) -> None:
    """Give input and output embeddings `tokens` rows where they have fewer. Born-sharded models grow whole.

    New rows are drawn closely around the mean of the old ones (transformers' default; Hewitt 2021, "Initializing New
    Word Embeddings for Pretrained Language Models"): a new token is then never likelier than the old ones are on
    average, where a row near zero can take nearly all probability. A language model gets no row beyond the
    tokenizer's: it could be sampled.
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

    Its configuration takes the tokenizer's pad token: plain transformers reads the score at the last token that
    is not it. must_have_head: refuse a folder whose scalar head would be made up (a language model's, say); where
    it may be made up, the embeddings grow to a tokenizer that has gained a pad token, or `added_tokens` that carry
    text, with which they train, beside LoRA too.
    """
    from transformers import AutoModelForSequenceClassification

    config = load_config(settings.name_or_path, settings.trust_remote_code)
    if must_have_head:
        architectures = getattr(config, "architectures", None) or []
        if not any("SequenceClassification" in name for name in architectures):
            raise ThreestepError(
                f"'{settings.name_or_path}' holds {', '.join(architectures) or 'no architecture'}, and a model for "
                "sequence classification was expected: train one with step 2 and give its model folder"
            )
        if config.num_labels != 1:
            raise ThreestepError(
                f"'{settings.name_or_path}' scores {config.num_labels} labels, and a reward model scores one: train "
                "one with step 2 and give its model folder"
            )
    # A pad token that the tokenizer has just gained lies outside the embeddings until they grow below, where
    # transformers refuses it; left at the model's own, which may be eos, the embedding of eos would not train.
    inside = tokenizer.pad_token_id < config.get_text_config().vocab_size
    pad_token_id = tokenizer.pad_token_id if inside else None
    model = _load(AutoModelForSequenceClassification, settings, dtype, num_labels=1, pad_token_id=pad_token_id)
    if not hasattr(model, "score"):
        raise ThreestepError(
            f"{type(model).__name__} keeps its scalar head elsewhere than in 'score'; use another family"
        )
    if not must_have_head:
        _grow_embeddings(model, len(tokenizer), pad_to_multiple_of=8)
    _check_vocabulary(model, settings, len(tokenizer))
    model.config.pad_token_id = tokenizer.pad_token_id
    return prepared(model, settings, embeddings_train=added_tokens > 0)


def load_config(name_or_path: str, trust_remote_code: bool = False) -> Any:
    """Return a model's configuration; ThreestepError where there is none, or where it is code that nobody trusts."""
    from transformers import AutoConfig

    check_model_folder(name_or_path)
    try:
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as problem:
        _refuse_remote_code(name_or_path, problem)
        raise ThreestepError(f"no model could be loaded from '{name_or_path}': {_first_line(problem)}") from problem


def _load(auto_class: Any, settings: ModelSettings, dtype: Any, **config: Any) -> PreTrainedModel:
    import torch

    check_model_folder(settings.name_or_path)
    _check_attention(settings.attn_implementation)
    if settings.torch_compile:
        from training.utils.models.compiled import check_compiler

        check_compiler()
    # sdpa is transformers' own choice; asked for by name, a family that lacks it would be refused, and falls back here.
    if settings.attn_implementation != SDPA:
        config["attn_implementation"] = settings.attn_implementation
    # Left out, transformers would ask at the terminal.
    config["trust_remote_code"] = settings.trust_remote_code
    # transformers reports a new scalar head as a table of missing keys; a new head is what step 2 asks for.
    report = logging.getLogger("transformers.modeling_utils")
    level = report.level
    report.setLevel(logging.ERROR)
    try:
        model = auto_class.from_pretrained(settings.name_or_path, dtype=dtype, use_safetensors=True, **config)
    except (OSError, ValueError, ImportError) as problem:
        _refuse_remote_code(settings.name_or_path, problem)
        raise ThreestepError(
            f"no model could be loaded from '{settings.name_or_path}': {_first_line(problem)}"
        ) from problem
    finally:
        report.setLevel(level)
    # Compiled blocks would be compiled anew for every row's runs.
    if settings.attn_implementation == SDPA and not settings.torch_compile and not torch.cuda.is_available():
        from training.utils.models.document_attention import use_document_attention

        use_document_attention(model)
    return model


def _check_attention(implementation: str) -> None:
    import torch

    if implementation != SDPA and not torch.cuda.is_available():
        raise ThreestepError(
            f"--attn_implementation {implementation} trains on CUDA alone, and there is no CUDA device here; use sdpa"
        )


def _check_vocabulary(model: PreTrainedModel, settings: ModelSettings, tokenizer_size: int) -> None:
    rows = model.config.get_text_config().vocab_size
    if tokenizer_size > rows:
        raise ThreestepError(
            f"the tokenizer of '{settings.name_or_path}' has {tokenizer_size} tokens and its model embeds {rows}; "
            "resize the model's embeddings or give the tokenizer that belongs to it"
        )


def check_positions(settings: ModelSettings, longest_tokens: int, flags: str) -> None:
    """ThreestepError where `longest_tokens`, what `flags` allow, is more than the model has positions for, by its
    configuration: no weight is read."""
    config = load_config(settings.name_or_path, settings.trust_remote_code)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest_tokens > positions:
        raise ThreestepError(
            f"{flags} allow sequences of {longest_tokens} tokens and the model '{settings.name_or_path}' has "
            f"{positions} positions; lower them or use a model with more positions"
        )


def _refuse_remote_code(name_or_path: str, problem: BaseException) -> None:
    """ThreestepError where what failed is that the model comes with code of its own, which was not asked for."""
    if "trust_remote_code" in str(problem):
        raise ThreestepError(
            f"'{name_or_path}' comes with Python code of its own, which is not run unless asked for: read it, and give "
            "--trust_remote_code true, or use a model of an architecture that transformers has"
        ) from problem


def prepared(model: PreTrainedModel, settings: ModelSettings, embeddings_train: bool = False) -> PreTrainedModel:
    """Make `model` what `settings` say besides its weights: dropout, recomputation, adapters; in place."""
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


def model_files(name_or_path: str) -> list[str]:
    """The files that decide what a model that has been loaded computes: its configuration and its safetensors."""
    from transformers.utils import cached_file

    folder = Path(name_or_path)
    if not folder.is_dir():  # a hub name: where its snapshot was put when it was loaded
        folder = Path(str(cached_file(name_or_path, "config.json", local_files_only=True))).parent
    return [str(folder / "config.json"), *sorted(str(path) for path in folder.glob("*.safetensors"))]


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
