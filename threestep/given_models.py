"""Loaded models and their tokenizers, written as folders that a run reads, with a record of the rest of the object.
Nothing of the object is changed."""

from __future__ import annotations

import contextlib
import copy
import shutil
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError, first_line
from training.utils.base.storage import sha256_of
from training.utils.loading.given import GivenModel, GivenObject, given_in, read_numbers, write_given

_CRITIC = "critic_model_name_or_path"
_SHOWN = 3  # reasons in a sentence
_LOSS_EPS = 16  # two orders of one short sum differ by a few roundings
# What wraps a model: an attribute that it has, and what to give in its place.
_WRAPPERS = {
    "peft_config": "one with adapters; merge them first (model.merge_and_unload()), or save the adapter and give its "
    "folder",
    "_orig_mod": "one that torch.compile wrapped; give the model itself (model._orig_mod), and torch_compile=True",
    "pretrained_model": "one with a value head around it; give model.pretrained_model",
    "module": "one that an engine or DistributedDataParallel wrapped; give its .module before it is wrapped",
}
# Attributes of modules that change nothing of what they compute in a run: settings of memory, bookkeeping.
_BOOKKEEPING = ("training", "gradient_checkpointing", "name_or_path")
_PLAIN = (bool, int, float, str, type(None), types.FunctionType)
_HOOKS = {
    "_forward_hooks": "a forward hook", "_forward_pre_hooks": "a forward hook",
    "_backward_hooks": "a backward hook", "_backward_pre_hooks": "a backward hook",
}  # fmt: skip
_PROBE = "Hello, world! 12 + 7 = 19\n\n  naïve café: 你好, Привет 🙂 <|x|> [INST] </s>\tEnd."


def folder_of_model(
    model: Any, tokenizer: Any, folder: Path, name: str, *, kind: str, resumes: bool
) -> tuple[str, GivenModel]:
    """Write a loaded model with its tokenizer to `folder` / `name`; return that path, and the facts of the object
    besides its weights, which stand in the folder's given.json.

    name: the flag that takes the model
    kind: of the step: sft, reward, dpo or ppo
    resumes: the run began with the folder that is there; ThreestepError if the model is another one

    Raises ThreestepError for another object, for a model that cannot be saved whole, and for a tokenizer that its files
    do not hold.
    """
    _check_kind(model, name)
    if tokenizer is None:
        raise ThreestepError(f"{name} is a loaded model, and tokenizer expects its tokenizer, got None")
    _check_weights(model, name)
    skeleton = _skeleton(model)
    _check_saved_again(model, skeleton)
    _check_ties(model, skeleton)
    path, fresh = folder / name, folder / f".{name}.new"
    try:
        mended = _save(model, tokenizer, fresh, name)
        _check_tokenizer(tokenizer, fresh)
        described = _described(model, fresh, skeleton, name, kind=kind, mended=mended)
        write_given(fresh, described)
        if resumes and path.is_dir():
            _check_same(fresh, path, name)
        shutil.rmtree(path, ignore_errors=True)
        fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return str(path), described


def _save(model: Any, tokenizer: Any, folder: Path, name: str) -> list[str]:
    """Save; return a sentence for each kind of settings that the folder lacks, as transformers does not save them."""
    from training.utils.models.adapters.saving import mend_settings

    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _configs_restored(model):
        sentences = mend_settings(model)
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except (OSError, ValueError, RuntimeError, NotImplementedError) as problem:
            raise ThreestepError(
                f"{name} expects a model that can be saved, and saving this {_kind(model)} fails: {first_line(problem)}"
            ) from problem
    return sentences


def _check_kind(model: Any, name: str) -> None:
    from transformers import PreTrainedModel

    for attribute, advice in _WRAPPERS.items():
        if hasattr(model, attribute) and (attribute == "peft_config" or not isinstance(model, PreTrainedModel)):
            raise ThreestepError(f"{name} expects a whole model, got {advice} (a {_kind(model)})")
    if not isinstance(model, PreTrainedModel):
        raise ThreestepError(f"{name} expects a path, a hub name or a loaded transformers model, got {_kind(model)}")


def _check_weights(model: Any, name: str) -> None:
    """ThreestepError for weights that are not here as a whole, and a loop of another trainer on them."""
    if getattr(model, "is_quantized", False):
        raise ThreestepError(f"{name} expects unquantized weights, got a quantized {_kind(model)}; give its path")
    for where, weight in model.named_parameters():
        if weight.is_meta:
            raise ThreestepError(
                f"{name} expects weights, got a {_kind(model)} on the meta device; load it, or give a path"
            )
        if hasattr(weight, "ds_id") or type(weight).__name__ == "DTensor":
            raise ThreestepError(
                f"{name} expects whole weights, got a {_kind(model)} in shards ({where}); save it as a whole, and give "
                "its path: runs shard it by --zero_stage 3"
            )
        if getattr(weight, "_post_accumulate_grad_hooks", None):
            raise ThreestepError(
                f"{name}: {where} has a hook behind its gradient's accumulation, which is of another training loop (as "
                "an optimizer in the backward is); remove it"
            )


def _described(model: Any, folder: Path, skeleton: Any, name: str, *, kind: str, mended: Sequence[str]) -> GivenModel:
    """The facts of the object that its folder lacks. mended: sentences on settings that are not saved"""
    plain = _plain_model(model, folder)
    is_plain = type(plain) is type(model)
    reasons = [] if is_plain else [f"its class is {type(model).__module__}.{_kind(model)}"]
    reasons += _differences(model, plain if is_plain else skeleton)
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    notes = [f"warning: {sentence}" for sentence in mended]
    if name == _CRITIC and len(frozen) == len(list(model.parameters())):
        frozen = []
        notes.append("all weights of the reward model were given frozen; the critic that starts from it trains")
    if getattr(model, "is_gradient_checkpointing", False):
        notes.append("it was given with gradient checkpointing, which a run turns on by gradient_checkpointing=True")
    if reasons and kind == "sft":
        notes += _other_loss(model)
    more = f", and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    only_object = "; ".join(reasons[:_SHOWN]) + more if reasons else None
    return GivenModel(_kind(model), tuple(frozen), only_object, tuple(notes), read_numbers(model))


def _plain_model(model: Any, folder: Path) -> Any:
    """The model that transformers makes of the folder's configuration, without weights: of the object's kind, or a
    language model."""
    from training.utils.loading.configurations import load_config
    from training.utils.loading.rehearsal import empty_model
    from training.utils.models.families.parts import language_model_class
    from training.utils.models.families.scalar_class import scalar_model_class

    config = load_config(str(folder))
    kinds = [lambda: language_model_class(config, False), lambda: language_model_class(config, True)]
    made = None
    for auto_class in (*kinds, lambda: scalar_model_class(config)):
        with contextlib.suppress(ValueError):  # the family has no such class
            made = empty_model(auto_class(), config)
            if type(made) is type(model):
                return made
    return made


def _skeleton(model: Any) -> Any:
    """The model that the object's class makes of its configuration, without weights."""
    from training.utils.models.adapters.saving import plain_skeleton

    try:
        skeleton = plain_skeleton(model)
    except Exception as problem:  # noqa: BLE001 (a user's class may fail by any error)
        raise ThreestepError(
            f"{_kind(model)}(config) fails ({type(problem).__name__}: {first_line(problem)}), by which its trained "
            "weights are saved; let its constructor take the configuration alone"
        ) from problem
    skeleton.tie_weights()
    return skeleton


def _check_saved_again(model: Any, skeleton: Any) -> None:
    """ThreestepError if the names of the weights are not those of the class: trained ones could not be saved."""
    odd = sorted(model.state_dict().keys() ^ skeleton.state_dict().keys())
    if odd:
        raise ThreestepError(
            f"{len(odd)} weights of the model ({odd[0]}) are not those of {_kind(model)}(config), so that no folder "
            "could hold what was trained: take parametrizations off "
            "(torch.nn.utils.parametrize.remove_parametrizations), save pruned or normalised weights as plain ones, "
            "and make modules of your own in the class's constructor"
        )


def _check_ties(model: Any, skeleton: Any) -> None:
    """ThreestepError if other weights are one tensor than the class ties."""
    own, plain = (_tied(each) for each in (model, skeleton))
    odd = sorted(own ^ plain, key=sorted)
    if odd:
        names = " and ".join(sorted(odd[0]))
        how = "are one tensor in the model and two" if odd[0] in own else "are two tensors in the model and one"
        raise ThreestepError(
            f"{names} {how} in {_kind(model)}(config), so that no folder could hold what was trained: tie them as "
            "model.config.tie_word_embeddings says, or change that"
        )


def _tied(model: Any) -> set[frozenset[str]]:
    owners: dict[int, set[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(weight), set()).add(name)
    return {frozenset(names) for names in owners.values() if len(names) > 1}


def _differences(model: Any, plain: Any) -> list[str]:
    """Modules, hooks and attributes of the object that `plain`, made of the configuration, lacks."""
    others = dict(plain.named_modules())
    reasons = []
    for name, module in model.named_modules():
        where = name or "the model"
        other = others.get(name)
        if other is None or type(other) is not type(module):
            reasons.append(f"{where} is a {_kind(module)}" + (f", not a {_kind(other)}" if other is not None else ""))
            continue
        reasons += [f"{where} has {hooks}" for hooks in _hooks_of(module)]
        reasons += [f"{where}.{what}" for what in _attributes(module, other)]
    for name, weight in model.named_parameters():
        if getattr(weight, "_backward_hooks", None):
            reasons.append(f"{name} has a gradient hook")
    return list(dict.fromkeys(reasons))


def _hooks_of(module: Any) -> list[str]:
    sentences = []
    for attribute, words in _HOOKS.items():
        hooks = (getattr(module, attribute, None) or {}).values()
        # transformers' enable_input_require_grads, which is of recomputation alone
        if any("make_inputs_require_grad" not in getattr(hook, "__qualname__", "") for hook in hooks):
            sentences.append(words)
    return sentences


def _attributes(module: Any, other: Any) -> list[str]:
    """The attributes of a module that are not as its constructor makes them."""
    own, plain = vars(module), vars(other)
    differences = [f"{name} is replaced" for name in own if callable(own[name]) and _is_method(type(module), name, own)]
    for name, value in plain.items():
        counts = not name.startswith("_") and name not in _BOOKKEEPING and not name.endswith("_cached")
        if counts and isinstance(value, _PLAIN):
            now = own.get(name)
            if now != value and not (now != now and value != value):  # NaN
                differences.append(f"{name} is {now!r}, and {value!r} by its configuration")
    return differences


def _is_method(kind: type, name: str, own: Mapping[str, Any]) -> bool:
    """True if an attribute hides a method of the class; not for accelerate's, which moves tensors between devices."""
    return isinstance(getattr(kind, name, None), types.FunctionType) and "_hf_hook" not in own


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """ThreestepError if the tokenizer's files hold another one than the object."""
    from training.utils.models.families.tokenizer_files import read_tokenizer

    given = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
    _check_origin(given)
    try:
        read, _ = read_tokenizer(folder)
    except (OSError, ValueError) as problem:
        raise ThreestepError(f"the tokenizer's files cannot be read again: {first_line(problem)}") from problem

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
            f"tokenizer expects one that its files hold, and this {_kind(given)}, saved and read again, has another "
            f"{odd}: something of it is in memory alone; change what is saved (its files, add_tokens, chat_template)"
        )


def _check_origin(given: Any) -> None:
    """ThreestepError if the tokenizer was read from files by a class that makes other ids than their tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    from training.utils.models.families.tokenizer_files import read_tokenizer, text_ids

    origin = getattr(given, "name_or_path", None)
    if type(given) is PreTrainedTokenizerFast or not origin or not Path(origin).is_dir():
        return
    try:
        in_file, _ = read_tokenizer(origin)
    except (OSError, ValueError):  # the folder is no longer a tokenizer's
        return
    if type(in_file) is PreTrainedTokenizerFast and text_ids(given) != text_ids(in_file):
        raise ThreestepError(
            f"tokenizer makes other ids than the tokenizer.json of '{origin}': transformers read it as a "
            f"{_kind(given)}; give transformers.PreTrainedTokenizerFast.from_pretrained('{origin}')"
        )


def _check_same(fresh: Path, began: Path, name: str) -> None:
    """ThreestepError if a model that was just written differs from the one that the run began with."""
    now_files, then_files = (
        {path.name: sha256_of(path) for path in (*folder.glob("*.safetensors"), folder / "config.json")}
        for folder in (fresh, began)
    )
    odd = sorted({name for name, _ in now_files.items() ^ then_files.items()})
    now, then = given_in(str(fresh)), given_in(str(began))
    if then is not None and now is not None and (now.frozen, now.only_object) != (then.frozen, then.only_object):
        odd.append("what is frozen or of the object alone")
    if odd:
        raise ThreestepError(
            f"{name} is another model than the run in {began.parent.parent} began with ({', '.join(odd[:_SHOWN])}); "
            "give that one to resume it, or another output_dir"
        )


@contextlib.contextmanager
def _configs_restored(model: Any) -> Iterator[None]:
    """Restore configurations at the end: save_pretrained writes the class and the precision into them, and refused
    settings are mended."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    configs += [model.config.get_text_config(), getattr(model, "generation_config", None)]
    were = {id(one): (one, dict(vars(one))) for one in configs if one is not None and hasattr(one, "__dict__")}
    try:
        yield
    finally:
        for one, was in were.values():
            vars(one).clear()
            vars(one).update(was)


def _other_loss(model: Any) -> list[str]:
    """A sentence if the model's forward has another loss of labels than the mean negative log-likelihood of its logits,
    which step 1 trains."""
    import torch

    from training.utils.models.own_forward import in_eval_mode
    from training.utils.models.tensors.rounding import make_probes

    ids_1T = make_probes(model.config, 0).alone[0].segments[0].tokens.input_ids.unsqueeze(0).to(model.device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.no_grad(), in_eval_mode(model):
        try:
            answer = model(input_ids=ids_1T, labels=ids_1T)
        except Exception:  # noqa: BLE001 (it makes no loss of labels)
            return []
        finally:
            for buffer, was in buffers:
                buffer.copy_(was)
    loss = getattr(answer, "loss", None)
    if loss is None or getattr(answer, "aux_loss", None) is not None:  # a mixture's balancing loss is trained too
        return []
    plain = torch.nn.functional.cross_entropy(answer.logits[0, :-1].float(), ids_1T[0, 1:])
    most = _LOSS_EPS * torch.finfo(model.dtype).eps
    if torch.isclose(loss.float(), plain, rtol=most, atol=most):
        return []
    return [
        f"warning: its forward makes a loss of {float(loss):.4f} of labels for which the mean negative log-likelihood "
        f"of its logits is {float(plain):.4f}; the run trains the latter, and does not call the former"
    ]


def trained_object(held: GivenObject, folder: Path) -> Any:
    """A copy of the object with the trained weights of a run's model folder, in their precision."""
    import torch

    read = type(held.model).from_pretrained(folder, dtype="auto")
    model = copy.deepcopy(held.model).cpu().eval()
    rows = read.get_input_embeddings().weight.shape[0]
    if model.get_input_embeddings().weight.shape[0] != rows:
        model.resize_token_embeddings(rows)
    with torch.no_grad():
        for name, weight in read.named_parameters():
            mine = model.get_parameter(name)
            mine.data = weight.detach().clone()
    return model


def _kind(value: Any) -> str:
    return type(value).__name__
