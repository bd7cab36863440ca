"""Loaded models and their tokenizers, written as folders that a run reads as any other. A model for which no folder can
stand is refused. Nothing of the object is changed."""

from __future__ import annotations

import copy
import functools
import itertools
import shutil
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.storage import sha256_of
from training.utils.loading.models import FROZEN

_CRITIC = "critic_model_name_or_path"
_SHOWN = 3  # reasons in a sentence
# What to give in place of an object that has this attribute.
_INSTEAD = {
    "peft_config": "the model with its adapters merged (merge_and_unload()), or the adapter's folder",
    "_orig_mod": "its _orig_mod with torch_compile=True",
    "pretrained_model": "its pretrained_model",
    "module": "its module",
}
_FILES = ("*.safetensors", "config.json", FROZEN)  # that make a model
# Attributes of modules that change nothing of what they compute in a run: settings of memory, bookkeeping.
_BOOKKEEPING = ("training", "gradient_checkpointing", "name_or_path")
_PLAIN = (bool, int, float, str, type(None), types.FunctionType)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of weights
# transformers' own hooks, of recomputation and of further outputs
_WITHOUT_EFFECT = ("make_inputs_require_grads", "output_capturing_hook")
_PROBE = "Hello, world! 12 + 7 = 19\n\n  naïve café: 你好, Привет 🙂 <|x|> [INST] </s>\tEnd."


def folder_of_model(model: Any, tokenizer: Any, folder: Path, name: str, *, resumes: bool) -> str:
    """Write a loaded model with its tokenizer to `folder` / `name`; return that path.

    name: the flag that takes the model
    resumes: the run began with the folder that is there; ThreestepError if the model is another one

    Raises ThreestepError for another object, for a model that its folder does not stand for, and for a tokenizer that
    its files do not hold.
    """
    _check_kind(model, name)
    if tokenizer is None:
        raise ThreestepError(f"--{name} is a loaded model, so it needs a tokenizer, but tokenizer is None; pass one")
    _refuse(model, name, _differences(model))
    if getattr(model, "is_gradient_checkpointing", False):
        log("model: its gradient checkpointing setting is ignored; to turn it on, use gradient_checkpointing=True")
    if "_loss_function" in vars(model):
        log("warning: the model's own loss_function is ignored, because Threestep computes the loss itself")
    path, fresh = folder / name, folder / f".{name}.new"
    try:
        _save(model, tokenizer, fresh, name)
        _check_tokenizer(tokenizer, fresh)
        _refuse(model, name, _differences_of_numbers(model, fresh))
        _write_frozen(model, fresh, name)
        if resumes and path.is_dir():
            _check_same(fresh, path, name)
        shutil.rmtree(path, ignore_errors=True)
        fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return str(path)


def _check_kind(model: Any, name: str) -> None:
    """ThreestepError for what is no plain model whose weights are here."""
    from transformers import PreTrainedModel

    is_model = isinstance(model, PreTrainedModel)
    for attribute, instead in _INSTEAD.items():
        if hasattr(model, attribute) and (attribute == "peft_config" or not is_model):
            raise ThreestepError(f"--{name} expects a plain model, got a wrapped {_kind(model)}; pass {instead}")
    if not is_model:
        raise ThreestepError(f"--{name} expects a path, a hub name or a loaded transformers model, got {_kind(model)}")
    forms = ["quantized"] if getattr(model, "is_quantized", False) else []
    for weight in model.parameters():
        is_sharded = hasattr(weight, "ds_id") or type(weight).__name__ == "DTensor"
        forms += ["on the meta device"] * weight.is_meta + ["sharded"] * is_sharded
    if forms:
        raise ThreestepError(
            f"--{name} expects all weights in memory, but the weights of this {_kind(model)} are {forms[0]}; "
            "pass its folder instead"
        )


def _refuse(model: Any, name: str, reasons: list[str]) -> None:
    if reasons:
        more = f", and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        raise ThreestepError(
            f"--{name}: this {_kind(model)} would change if it were saved and loaded again: "
            f"{'; '.join(reasons[:_SHOWN])}{more}. Undo these changes, or save it together with its code "
            "(register_for_auto_class, save_pretrained) and pass that folder with --trust_remote_code true"
        )


def _differences(model: Any) -> list[str]:
    """The parts of the object that a model of its configuration lacks, or has otherwise."""
    plain = _plain_model(model)
    if plain is None:
        kind = f"{type(model).__module__}.{_kind(model)}"
        return [f"its class is {kind}, but transformers loads another class for its configuration"]
    others = dict(plain.named_modules())
    reasons = []
    for name, module in model.named_modules():
        where, other = name or "the model", others.pop(name, None)
        if type(other) is not type(module):
            reasons.append(f"{where} is a {_kind(module)}" + (f", not a {_kind(other)}" if other is not None else ""))
            continue
        hooks = itertools.chain.from_iterable((getattr(module, kind, None) or {}).values() for kind in _HOOKS)
        if any(getattr(hook, "__name__", "") not in _WITHOUT_EFFECT for hook in hooks):
            reasons.append(f"{where} has a hook")
        # accelerate replaces forwards to move tensors between devices.
        own = [] if hasattr(module, "_hf_hook") else sorted(vars(module).keys() - vars(other).keys())
        methods = (each for each in own if isinstance(getattr(type(module), each, None), types.FunctionType))
        reasons += [f"{where}.{method} is replaced" for method in methods]
    for name, weight in model.named_parameters():
        if any(getattr(weight, kind, None) for kind in _GRADIENT_HOOKS):
            reasons.append(f"{name} has a gradient hook")
    names, known = model.state_dict().keys(), plain.state_dict().keys()
    reasons += [f"{name} is not a weight of its configuration" for name in sorted(names - known)]
    reasons += [f"it lacks {name}" for name in sorted(others.keys() | (known - names))]
    tied = _tied(model)
    for group in sorted(map(sorted, tied ^ _tied(plain))):
        how = "one tensor" if frozenset(group) in tied else "two tensors"
        reasons.append(f"{' and '.join(group)} are {how}, but not in its configuration")
    return reasons


def _plain_model(model: Any) -> Any:
    """The model of the object's class that transformers makes of its configuration, without weights; None if it makes
    none."""
    from training.utils.loading.rehearsal import empty_model
    from training.utils.models.families import language_model_class, scalar_model_class

    config = model.config
    classes = (language_model_class(config, False), language_model_class(config, True), scalar_model_class(config))
    for auto_class in classes:
        with suppress(ValueError):  # the family has no such class
            made = empty_model(auto_class, config, trust_remote_code=False)
            if type(made) is type(model):
                return made
    return None


def _attributes(module: Any, other: Any) -> Iterator[str]:
    """The plain attributes of a module that are not those of `other`."""
    for name, value in vars(other).items():
        if name.startswith("_") or name in _BOOKKEEPING or name.endswith("_cached") or not isinstance(value, _PLAIN):
            continue
        now = getattr(module, name, None)
        if _told(now) != _told(value) and not (isinstance(now, _PLAIN) and now == value):
            yield f"{name} is {_told(now):.60}, but {_told(value):.60} in its configuration"


def _told(value: Any) -> str:
    """A plain value as text; a function by its name, as constructors make functions anew."""
    return value.__qualname__ if isinstance(value, types.FunctionType) else repr(value)


def _tied(model: Any) -> set[frozenset[str]]:
    owners: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(weight), set()).add(name)
    return {frozenset(names) for names in owners.values() if len(names) > 1}


def _save(model: Any, tokenizer: Any, folder: Path, name: str) -> None:
    from training.utils.loading.saving import mend_settings

    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    saved = copy.copy(model)  # saving writes class and precision into the configuration, and settings are mended
    saved.config, saved.generation_config = (
        copy.deepcopy(getattr(model, part, None)) for part in ("config", "generation_config")
    )
    for sentence in mend_settings(saved):
        log(f"warning: {sentence}")
    try:
        saved.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, ValueError, RuntimeError, NotImplementedError) as problem:
        raise ThreestepError(
            f"--{name} expects a model that can be saved, but saving this {_kind(model)} failed: {first_line(problem)}"
        ) from problem


def _write_frozen(model: Any, folder: Path, name: str) -> None:
    """Name the weights that do not train."""
    frozen = [weight for weight, part in model.named_parameters() if not part.requires_grad]
    if name == _CRITIC and len(frozen) == len(list(model.parameters())):
        log("model: all weights of the given reward model are frozen, but the critic initialized from it is trained")
    elif frozen:
        (folder / FROZEN).write_text("\n".join(frozen) + "\n", encoding="utf-8")


def _differences_of_numbers(model: Any, folder: Path) -> list[str]:
    """Attributes and tensors that the folder's model has otherwise than the object, and how far apart they compute."""
    import torch

    from training.utils.loading.configurations import errors_explained
    from training.utils.loading.rehearsal import without_report
    from training.utils.models.own_forward import current_difference, read_own_forward

    def tensors(one: Any) -> dict[str, Any]:
        return {**dict(one.named_parameters()), **dict(one.named_buffers(remove_duplicate=False))}

    widest = functools.reduce(torch.promote_types, {weight.dtype for weight in model.parameters()})
    with errors_explained("model", str(folder), Exception), without_report():
        loaded = type(model).from_pretrained(folder, dtype=widest).to(model.device)
    own = tensors(model)
    for name, tensor in tensors(loaded).items():
        tensor.data = tensor.data.to(own[name].dtype if name in own else tensor.dtype)
    read = read_own_forward(loaded)
    apart = current_difference(model, read)
    # Both have computed the same: families keep what they did last, and buffers as long as a row.
    own, theirs, others = tensors(model), tensors(loaded), dict(loaded.named_modules())
    reasons = [
        f"{name or 'the model'}.{what}"
        for name, module in model.named_modules()
        for what in _attributes(module, others.get(name, module))
    ]
    reasons += [
        f"{name} is missing from its saved files or differs there"
        for name, tensor in own.items()
        if name not in theirs or not torch.equal(theirs[name].to(tensor.device), tensor)
    ]
    if not apart <= read.tolerance:
        reasons.append(f"its outputs change by {apart:.2g} (rounding explains at most {read.tolerance:.2g})")
    return reasons


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """ThreestepError if the tokenizer's files hold another one than the object."""
    from training.utils.loading.tokenizers import read_tokenizer

    given = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    _check_origin(given)
    try:
        read, _ = read_tokenizer(folder)
    except (OSError, ValueError) as problem:
        raise ThreestepError(f"the saved tokenizer cannot be loaded: {first_line(problem)}") from problem

    def told(one: Any) -> dict[str, Any]:
        texts = [_PROBE, *one.get_added_vocab()]
        return {
            "vocabulary": one.get_vocab(),
            "chat template": one.chat_template,
            "special tokens": one.special_tokens_map,
            "encoding": [one(text)["input_ids"] for text in texts],
            "encoding without special tokens": [one(text, add_special_tokens=False)["input_ids"] for text in texts],
            "decoding": one.decode(one(_PROBE)["input_ids"]),
        }

    mine, theirs = told(given), told(read)
    odd = next((what for what in mine if mine[what] != theirs[what]), None)
    if odd is not None:
        raise ThreestepError(
            f"tokenizer: saving and reloading this {_kind(given)} changes its {odd}, because part of it exists only in "
            "memory; make such changes where they are saved (its files, add_tokens, chat_template)"
        )


def _check_origin(given: Any) -> None:
    """ThreestepError if the tokenizer was read from files by a class that makes other ids than their tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    from training.utils.loading.tokenizers import read_tokenizer, text_ids

    origin = getattr(given, "name_or_path", None)
    if type(given) is PreTrainedTokenizerFast or not origin or not Path(origin).is_dir():
        return
    try:
        in_file, _ = read_tokenizer(origin)
    except (OSError, ValueError):  # the folder is no longer a tokenizer's
        return
    if type(in_file) is PreTrainedTokenizerFast and text_ids(given) != text_ids(in_file):
        raise ThreestepError(
            f"tokenizer: its ids differ from those of the tokenizer.json of '{origin}', because transformers loaded it "
            f"as a {_kind(given)}; pass transformers.PreTrainedTokenizerFast.from_pretrained('{origin}')"
        )


def _check_same(fresh: Path, began: Path, name: str) -> None:
    """ThreestepError if a model that was just written differs from the one that the run began with."""
    now, then = (
        {(path.name, sha256_of(path)) for kind in _FILES for path in folder.glob(kind)} for folder in (fresh, began)
    )
    if odd := sorted({file for file, _ in now ^ then}):
        raise ThreestepError(
            f"--{name} is not the model that the run in {began.parent.parent} started with "
            f"({', '.join(odd[:_SHOWN])}); pass the original model to resume, or use another output_dir"
        )


def _kind(value: Any) -> str:
    return type(value).__name__
