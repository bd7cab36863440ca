"""Checks that a model's weights are all there, and nothing else: before they are read, and once more after.

Before: transformers loads tensors without values, of the names and shapes in the files' headers, into a model without
values, by the rules of a real load (renamed, merged and tied tensors). That takes no memory and reveals what it does
not report when it loads under ZeRO-3: unexpected tensors and wrong shapes. All ranks see the same.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from training.utils.base.errors import ThreestepError, first_line
from training.utils.loading.configurations import errors_explained
from training.utils.loading.judgement import HEAD, LoadReport, RequestedModel, judge
from training.utils.loading.weight_files import (
    INDEX,
    ONE_FILE,
    StoredTensor,
    WholeWeights,
    read_header,
    stored_form,
    weight_files,
)

_LOGGER = "transformers.modeling_utils"  # which reports what was loaded
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


def check_weights(auto_class: Any, wanted: RequestedModel, stored: Mapping[str, StoredTensor], **options: Any) -> bool:
    """Compare the headers of the files with the model; ThreestepError if they differ. Return whether that could be
    done; otherwise the model is checked once it is loaded.

    auto_class: transformers' class that loads it
    options: further arguments of its from_config
    """
    if not stored or not isinstance(stored_form(wanted.config), WholeWeights):  # other forms have other names
        return False
    try:
        report, model = _rehearsed(empty_model(auto_class, wanted.config, **options), stored)
    except NotImplementedError:  # a model that reads its values while it is loaded, of which there are none
        return False
    if wanted.is_scalar:
        check_has_head(model)
    judge(wanted, report, stored)
    _check_whole(model, stored)
    _check_tied(wanted, model, stored)
    return True


def judge_loaded(
    wanted: RequestedModel,
    model: Any,
    report: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    *,
    rehearsed: bool,
) -> None:
    """Check the report of from_pretrained: ThreestepError if it did not load the tensors that the rehearsal did.

    rehearsed: the result of `check_weights`
    report: transformers' loading_info, which under ZeRO-3 knows of missing tensors alone
    """
    if wanted.is_scalar:
        check_has_head(model)
    parameters = {name for name, _ in model.named_parameters()}
    loaded = LoadReport(
        names=parameters,
        missing=frozenset(report["missing_keys"]) & parameters,
        unexpected=frozenset(),  # reported already
        wrong_shapes=_shapes(report["mismatched_keys"]),
        unconverted=tuple(report["error_msgs"]),
    )
    if not rehearsed:
        return judge(wanted, replace(loaded, unexpected=frozenset(report["unexpected_keys"])), stored)
    new = {name for name in loaded.missing if wanted.new_head and name.startswith(HEAD)}
    lacking = sorted(loaded.missing - new - wanted.supplied)
    if lacking and hasattr(model.get_parameter(lacking[0]), "ds_id"):
        raise ThreestepError(
            f"'{wanted.where}' cannot be loaded in shards, which --zero_stage 3 requires: transformers initializes "
            f"{len(lacking)} of its tensors at random ({lacking[0]}), although the files have them; use --zero_stage 2"
        )
    judge(replace(wanted, replaces_head=False), replace(loaded, missing=frozenset(lacking)), stored)


def stored_tensors(name_or_path: str, config: Any) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors of a folder or hub name; {} if the hub has none, which transformers may
    convert. ThreestepError if a folder has none, or damaged ones. Weights of a hub name are downloaded first."""
    explicit = getattr(config, "transformers_weights", None)
    if Path(name_or_path).is_dir():
        files = weight_files(Path(name_or_path), explicit)
        if not files:
            raise ThreestepError(
                f"'{name_or_path}' has a config.json but no weights; add {explicit or ONE_FILE}, or {INDEX} "
                "with the files it names"
            )
    else:
        files = _downloaded(name_or_path, explicit)
    return {name: tensor for file in files for name, tensor in read_header(file).items()}


def _downloaded(name: str, explicit: str | None) -> list[Path]:
    from transformers.utils import cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    for file in (explicit,) if explicit else (ONE_FILE, INDEX):
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            shards = get_checkpoint_shard_files(name, path)[0] if file.endswith(".index.json") else [path]
            return [Path(shard) for shard in shards]
    return []


def empty_model(auto_class: Any, config: Any, **options: Any) -> Any:
    """Return the model on the meta device, whole also where those outside are born sharded. Arguments: see
    `check_weights`."""
    where = getattr(config, "name_or_path", "") or type(config).__name__
    with _unsharded(), torch.device("meta"), errors_explained("model with the shape in config.json", where, Exception):
        return auto_class.from_config(copy.deepcopy(config), **options)


def _rehearsed(empty: Any, stored: Mapping[str, StoredTensor]) -> tuple[LoadReport, Any]:
    """Load tensors without values into a model without values; return transformers' report, and that model."""
    tensors = {
        name: torch.empty(tensor.shape, dtype=_DTYPES.get(tensor.dtype, torch.uint8), device="meta")
        for name, tensor in stored.items()
    }
    with _unsharded(), _captured_report() as messages, _no_progress_bar():
        names = empty.state_dict().keys()
        try:
            model, report = type(empty).from_pretrained(
                None,
                config=empty.config,
                state_dict=tensors,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except NotImplementedError:
            raise
        except RuntimeError as problem:  # a conversion failed; the log alone names it
            table = "\n".join(messages)
            failed = re.findall(r"^(\S+) +\| CONVERSION", table, re.MULTILINE) or [first_line(problem)]
            why = "".join(f" ({line})" for line in re.findall(r"^Error: (.+)$", table, re.MULTILINE)[:1])
            return LoadReport(names, frozenset(), unconverted=tuple(failed), why_unconverted=why), empty
    load = LoadReport(
        names,
        missing=frozenset(report["missing_keys"]),
        unexpected=frozenset(report["unexpected_keys"]),
        wrong_shapes=_shapes(report["mismatched_keys"]),
        unconverted=tuple(report["error_msgs"]),
    )
    return load, model


def check_has_head(model: Any) -> None:
    """ThreestepError if a scalar model's head is not in the place where it is read and trained."""
    if not hasattr(model, HEAD.removesuffix(".")):
        raise ThreestepError(f"{type(model).__name__} has no scalar head named 'score'; use another model family")


def _shapes(mismatched: Any) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
    return tuple((name, tuple(got), tuple(model)) for name, got, model in sorted(mismatched))


def _check_whole(model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """ThreestepError for a weight that is stored as quantized ones are: transformers would take its integers for
    numbers."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in sorted(stored.items()):
        if not tensor.is_whole and (name in parameters or name.endswith(".weight")):
            raise ThreestepError(
                f"'{tensor.file}': {name} is stored in {tensor.dtype}, as quantized weights are, but config.json has "
                "no quantization_config that describes it; download the folder again, or use the model that was "
                "quantized"
            )


def _check_tied(wanted: RequestedModel, model: Any, stored: Mapping[str, StoredTensor]) -> None:
    """ThreestepError if the configuration ties two tensors that are both stored, with different values.

    Transformers unties them then, but not under ZeRO-3, where it compares their shards.
    """
    from safetensors import safe_open

    for one, other in getattr(model, "all_tied_weights_keys", {}).items():
        if model.get_parameter(one) is model.get_parameter(other) or not {one, other} <= stored.keys():
            continue
        values = []
        for name in (one, other):
            with safe_open(stored[name].file, framework="pt") as file:
                values.append(file.get_tensor(name))
        if not torch.equal(*values):
            raise ThreestepError(
                f"'{wanted.where}': config.json ties {one} to {other}, but the files hold both, with different values; "
                'set "tie_word_embeddings": false in config.json, or remove one of them'
            )


@contextlib.contextmanager
def _unsharded() -> Iterator[None]:
    """Inside, transformers makes whole models, also where those outside are born sharded."""
    from transformers.integrations import deepspeed as sharding

    held = sharding._hf_deepspeed_config_weak_ref
    sharding.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        sharding._hf_deepspeed_config_weak_ref = held


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _captured_report() -> Iterator[list[str]]:
    """Inside, transformers' log of loading is not printed; it is in the list."""
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.WARNING)  # a user may have silenced transformers
    try:
        with _filtered(keep):
            yield messages
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def without_report() -> Iterator[None]:
    """Inside, transformers does not print its table of missing and unexpected tensors, which `judge` puts in words."""
    with _filtered(lambda record: "LOAD REPORT" not in record.getMessage()):
        yield


@contextlib.contextmanager
def _filtered(keep: Any) -> Iterator[None]:
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
