"""Models from a folder or a hub name; users' mistakes fail before anything is trained.

Weights are safetensors; pickled weights and remote code are refused. Knows no engine: a caller that wants sharded
weights provides the context (`training.utils.engine.zero3.born_sharded`).
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError, first_line
from training.utils.loading import rehearsal
from training.utils.loading.configurations import config_of, errors_explained, set_pad_token
from training.utils.loading.judgement import HEAD, OUTPUT_HEADS, RequestedModel
from training.utils.loading.merged_weights import merged_when_copied
from training.utils.loading.weight_files import find_adapter, model_of, stored_form
from training.utils.models.attention import AUTO, SDPA, kernel_of
from training.utils.models.attention_choice import settle_attention
from training.utils.models.dropout import check_no_dropout, switch_dropout
from training.utils.models.families import (
    check_reads_media,
    check_reads_text,
    is_beside_language,
    is_of_projector,
    language_model_class,
    refuse_without_projector,
    scalar_model_class,
)
from training.utils.models.own_forward import own_forward_of, read_own_forward
from training.utils.models.weights import adapters_of, align_weights, count_elements, send_from_first_rank

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.contracts.media import RunMedia
    from training.utils.models.settings import ModelSettings


def load_causal_lm(
    settings: ModelSettings,
    dtype: Any,
    tokenizer_size: int,
    added_tokens: int = 0,
    *,
    longest_tokens: int = 0,
    device: torch.device | None = None,
    added_pad: int = 0,
    media: RunMedia | None = None,
) -> PreTrainedModel:
    """Return a language model in `dtype` (a torch dtype), whose own forward has been measured: an
    `AutoModelForCausalLM`, or for rows with media, and where transformers has no other class, one that reads both
    (`language_model_class`).

    added_tokens: what `add_tokens` returned for its tokenizer. The embeddings grow to hold them, and train, also with
    LoRA.
    longest_tokens: of the sequences that it will read; 0 if unknown.
    added_pad: 1 if the tokenizer's pad token is new. The embeddings grow to hold it too; as nothing reads it, it is no
    reason for them to train.
    device: where it is measured and stays; the CPU by default. A ZeRO-3 model is where DeepSpeed puts it.
    media: of the rows that it will read, if they have some.
    """
    config = config_of(settings)
    _refuse_encoder(config, settings)
    _check_reads(config, settings, media)
    auto_class = language_model_class(config, with_media=media is not None)
    wanted = RequestedModel(model_of(settings.name_or_path), config, is_scalar=False)
    model = _load(auto_class, settings, dtype, wanted, device=device)
    _check_vocabulary(model, settings, tokenizer_size - added_tokens - added_pad)
    if added_tokens or added_pad:
        _grow_embeddings(model, tokenizer_size)
    _measure(model, settings, longest_tokens, device, drew_weights=added_tokens + added_pad > 0, media=media)
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
    *,
    added_tokens: int = 0,
    longest_tokens: int = 0,
    device: torch.device | None = None,
    media: RunMedia | None = None,
) -> PreTrainedModel:
    """Return an `AutoModelForSequenceClassification` with one label, a reward model or a critic, or the like of a model
    that reads more than text (`scalar_model_class`).

    Its configuration gets the tokenizer's pad token: plain transformers reads the score at the last other token.

    must_have_head: refuse a folder without a scalar head, such as a language model's. Otherwise a new head is made, and
        the embeddings grow to the tokenizer.
    added_tokens, longest_tokens, device, media: see `load_causal_lm`.
    """
    config = config_of(settings)
    _check_reads(config, settings, media)
    # transformers refuses a pad token outside of the embeddings, which grow below. The model's own is no substitute: it
    # may be eos, whose embedding would then not train.
    inside = tokenizer.pad_token_id < config.get_text_config().vocab_size
    changed = copy.deepcopy(config)
    set_pad_token(changed, tokenizer.pad_token_id if inside else None)
    changed.num_labels = 1
    wanted = RequestedModel(
        model_of(settings.name_or_path),
        changed,
        is_scalar=True,
        new_head=not must_have_head,
        replaces_head=settings.new_head,
    )
    model = _load(scalar_model_class(changed), settings, dtype, wanted, device=device, own_config=config)
    if not must_have_head:
        _grow_embeddings(model, len(tokenizer), pad_to_multiple_of=8)
    _check_vocabulary(model, settings, len(tokenizer))
    set_pad_token(model.config, tokenizer.pad_token_id)
    _measure(model, settings, longest_tokens, device, drew_weights=not must_have_head, media=media)
    return prepared(model, settings, embeddings_train=added_tokens > 0)


def _refuse_headless(config: Any, settings: ModelSettings) -> None:
    """ThreestepError if the configuration is not that of a reward model."""
    architectures = getattr(config, "architectures", None) or []
    if not any("SequenceClassification" in name for name in architectures):
        raise ThreestepError(
            f"'{settings.name_or_path}': expected a model for sequence classification, got "
            f"{', '.join(architectures) or 'no architecture'}; train one with step 2 and use its model folder"
        )
    if config.num_labels != 1:
        raise ThreestepError(
            f"'{settings.name_or_path}': expected a reward model with one label, got {config.num_labels} labels; "
            "train one with step 2 and use its model folder"
        )


def _check_reads(config: Any, settings: ModelSettings, media: RunMedia | None) -> None:
    """ThreestepError if the model does not read what the rows hold: text, and perhaps `media`."""
    check_reads_text(config, settings.name_or_path, settings.takes_media)
    if media is not None:
        check_reads_media(config, settings.name_or_path)


def _on(device: torch.device | None, model: PreTrainedModel) -> PreTrainedModel:
    """Move `model` to `device`, if there is one; a sharded model is where DeepSpeed puts it."""
    if device is not None and not hasattr(next(model.parameters()), "ds_id"):
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    return model


def _load(
    auto_class: Any,
    settings: ModelSettings,
    dtype: torch.dtype,
    wanted: RequestedModel,
    *,
    device: torch.device | None,
    own_config: Any = None,
) -> PreTrainedModel:
    """Return the model, all of whose tensors are the folder's, and those of an adapter that is given as a model.

    own_config: as the folder has it; of a scalar model
    """
    trust = {"trust_remote_code": settings.trust_remote_code}  # without it, transformers asks at the terminal
    adapter, plan = find_adapter(settings.name_or_path), None
    if adapter is not None:
        plan = adapter.planned(lambda: rehearsal.empty_model(auto_class, wanted.config, **trust), settings)
        wanted = replace(wanted, supplied=frozenset(plan.supplied))
    if wanted.is_scalar and not wanted.new_head and f"{HEAD}weight" not in wanted.supplied:
        _refuse_headless(own_config, settings)
    implementation, has_cuda = settings.attn_implementation, torch.cuda.is_available()
    attention = {}
    # sdpa is transformers' default. Given explicitly, it would fail for families that lack it; the default falls back.
    if implementation not in (AUTO, SDPA):
        kernel = kernel_of(implementation)
        if kernel is None or kernel.of_transformers:  # another is given once the model has been measured
            attention["attn_implementation"] = implementation
        if not has_cuda:
            raise ThreestepError(
                f"--attn_implementation {implementation} needs a CUDA device, but there is none here; use sdpa"
            )
    for preparer in settings.preparers:
        preparer.check_device(has_cuda)
        preparer.check_machine()
    with errors_explained("model", wanted.where, Exception):  # each value of config.json has an error of its own
        stored = rehearsal.stored_tensors(wanted.where, wanted.config)
        rehearsed = rehearsal.check_weights(auto_class, wanted, stored, **trust)
        with rehearsal.without_report(), _sharding_explained(wanted.where), merged_when_copied():
            model, report = auto_class.from_pretrained(
                wanted.where,
                config=wanted.config,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **trust,
                **attention,
            )
    rehearsal.judge_loaded(wanted, model, report, stored, rehearsed=rehearsed)
    stored_form(model.config).forget(model.config)
    if plan is not None:
        plan.put_on(_on(None if settings.waits_for_device else device, model), settings)
    return model


@contextlib.contextmanager
def _sharding_explained(name_or_path: str) -> Iterator[None]:
    """Under ZeRO-3, turn errors inside into a ThreestepError: a family fails to load if it reads a weight's shape or
    values while it is set up, of which a rank holds a flat part, or nothing."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    try:
        yield
    except Exception as problem:
        is_explained = isinstance(problem, (OSError, ImportError, ThreestepError, torch.OutOfMemoryError))
        # transformers' own ValueErrors explain themselves; a family's code fails to unpack a shape.
        if isinstance(problem, ValueError):
            is_explained = not _is_raised_by_a_family(problem)
        if is_explained or not is_deepspeed_zero3_enabled():
            raise
        raise ThreestepError(
            f"'{name_or_path}' cannot be loaded in shards, which --zero_stage 3 requires ({type(problem).__name__}: "
            f"{first_line(problem)}); use --zero_stage 2"
        ) from problem


def _is_raised_by_a_family(problem: Exception) -> bool:
    """True if a file modeling_FAMILY.py raised it, not transformers' common code."""
    raised_in = Path(traceback.extract_tb(problem.__traceback__)[-1].filename).name
    return raised_in.startswith("modeling_") and raised_in != "modeling_utils.py"


def _measure(
    model: PreTrainedModel,
    settings: ModelSettings,
    longest_tokens: int,
    device: torch.device | None,
    *,
    drew_weights: bool,
    media: RunMedia | None = None,
) -> None:
    """Put the model on its device and measure its own forward; then give it the attention that computes its rows, if
    that computes the same.

    drew_weights: each rank has drawn a head or embeddings of its own; the first rank's count, as they will in training.
    """
    for preparer in settings.preparers:
        preparer.before_device(model, device)
    align_weights(_on(device, model))
    if drew_weights:
        head = getattr(model, "score", None) or model.get_output_embeddings()
        send_from_first_rank([model.get_input_embeddings(), head])
    for preparer in settings.preparers:
        preparer.loaded(model)
    own = read_own_forward(model, longest_tokens, media)
    settle_attention(model, own, settings.attn_implementation, settings.dropout, compiled=settings.compiles)
    for preparer in settings.preparers:
        preparer.measured(model, own, settings.forward_form)


def _refuse_encoder(config: Any, settings: ModelSettings) -> None:
    """ThreestepError if the configuration says that tokens see later ones."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    encodes = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        config, "is_encoder_decoder", False
    )
    if encodes and getattr(config, "is_decoder", None) is False:
        raise ThreestepError(
            f"'{settings.name_or_path}': expected a causal language model, got an encoder ({config.model_type} with "
            "is_decoder false in config.json), whose tokens attend to later ones; use a causal language model"
        )


def _check_vocabulary(model: PreTrainedModel, settings: ModelSettings, tokenizer_size: int) -> None:
    rows = model.config.get_text_config().vocab_size
    if tokenizer_size > rows:
        raise ThreestepError(
            f"the tokenizer of '{settings.name_or_path}' has {tokenizer_size} tokens, but its model embeds {rows}; "
            "resize the model's embeddings, or use the model's own tokenizer"
        )


def _train_embeddings(model: PreTrainedModel) -> None:
    """Let the embeddings train, also beside adapters, which a note then says: old rows move with the new ones."""
    frozen = {id(weight) for weight in model.parameters() if not weight.requires_grad}
    for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
        if embeddings is not None:
            embeddings.requires_grad_(True)
    thawed = {
        name: weight for name, weight in model.named_parameters() if id(weight) in frozen and weight.requires_grad
    }
    own = own_forward_of(model)
    if own is not None and thawed:
        count = count_elements(thawed.values())
        own.notes.append(
            "tokens were added to the tokenizer, so the embeddings of all tokens train along with the adapters: "
            f"{count:,} parameters ({', '.join(thawed)})"
        )


def prepared(model: PreTrainedModel, settings: ModelSettings, embeddings_train: bool = False) -> PreTrainedModel:
    """Apply `settings` to a loaded model, in place: dropout, recomputation, adapters, preparers."""
    if settings.dropout is not None:
        switch_dropout(model, settings.dropout)
    if settings.dropout == 0:
        check_no_dropout(model)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for preparer in settings.preparers:
        preparer.before_adapters(model, settings.forward_form)
    for preparer in settings.preparers:
        preparer.add_adapters(model)
    freeze_parts(model, settings)
    freeze_named(model, settings, embeddings_train)
    if embeddings_train:
        _train_embeddings(model)
    for preparer in settings.preparers:
        preparer.after_adapters(model, settings.forward_form)
    return model


FROZEN = "frozen.txt"  # in a model folder: the names of weights that stay as they are, one a line


def freeze_parts(model: PreTrainedModel, settings: ModelSettings) -> None:
    """Freeze tower and projector where `settings` say so, but for adapters that they have. A text model has neither.

    ThreestepError for `--freeze_projector` where there is none.
    """
    is_beside, adapters = is_beside_language(model), adapters_of(model)
    weights = {name: part for name, part in model.named_parameters() if is_beside(name)}
    if settings.freeze_projector and not any(map(is_of_projector, weights)):
        refuse_without_projector(model)
    for name, weight in weights.items():
        frozen = settings.freeze_projector if is_of_projector(name) else settings.freeze_vision_tower
        if frozen and not adapters.holds(name):
            weight.requires_grad_(False)


def freeze_named(model: PreTrainedModel, settings: ModelSettings, embeddings_train: bool) -> None:
    """Freeze the weights that the model's folder names in frozen.txt, if it has that file.

    embeddings_train: they have new rows

    ThreestepError for names that the model lacks, and where embeddings or adapters would move a weight that is named.
    """
    path = Path(settings.name_or_path, FROZEN)
    if not path.is_file():
        return
    named = dict.fromkeys(path.read_text(encoding="utf-8").split())
    adapters = adapters_of(model)
    own = {name: weight for name, weight in model.named_parameters() if not adapters.holds(name)}
    weights = {adapters.plain_name(name): weight for name, weight in own.items()}
    unknown = [name for name in named if name not in weights and not name.startswith(OUTPUT_HEADS)]
    if unknown:
        raise ThreestepError(
            f"{path} names {unknown[0]}, which the trained model, {type(model).__name__}, does not have; start "
            "from one that has it, or remove that name from the file"
        )
    adapted = [adapters.plain_name(name) for name in own if len(adapters.parameters_of(model, name)) > 1]
    layers = {name.rpartition(".")[0] for name in adapted}
    moved = [name for name in named if name.rpartition(".")[0] in layers]
    is_whole = all(name in named or name.startswith(HEAD) for name in weights)
    if moved and not is_whole:
        raise ThreestepError(
            f"adapters are attached to {moved[0]} and {len(moved) - 1} other weights that are frozen ({path}), so "
            "the saved weights would change; put adapters on other layers, unfreeze these, or freeze the whole model"
        )
    frozen = [weights[name] for name in named if name in weights]
    if embeddings_train and any(weight is model.get_input_embeddings().weight for weight in frozen):
        raise ThreestepError(
            f"tokens were added to the tokenizer, so the embeddings must train, but they are frozen ({path}); unfreeze "
            "them, or start from a model and tokenizer that have the tokens"
        )
    for weight in frozen:
        weight.requires_grad_(False)
    log_on_main(f"model: {len(frozen)} of {len(weights)} weights are frozen ({path})")
