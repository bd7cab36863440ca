"""Models that a Python program holds (`threestep.sft(model, ...)`): their folders' records of them, and the objects.

The front writes such a model to a folder, so that other processes and a resumed run read it as any other. A model
folder holds weights and a configuration; everything else that the object's training depends on stands in `given.json`:
frozen weights, numbers that the object computes, and, if no folder can hold it (a forward of its class, hooks), why. A
folder's model is trained only if it computes the object's numbers; otherwise a copy of the object is, in the process
that holds it.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError, first_line
from training.utils.loading.judgement import HEAD

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings

FILE = "given.json"
_NOISE_FACTOR, _NOISE_SEEDS = 5.0, (1, 2)  # as of `models.own_forward`
_MOST_NUMBERS = 256  # of each kind: 5 kB in given.json


@dataclass(frozen=True)
class Numbers:
    """A model's float64 output at the last token of a short sequence; `..._noise`: the most that rounding explains.

    trunk: the first entries of the last hidden state. logits: the first logits, or the score.
    """

    trunk: list[float]
    trunk_noise: float
    logits: list[float]
    logits_noise: float


@dataclass(frozen=True)
class GivenModel:
    """The content of given.json.

    kind: the object's class
    frozen: the weights that do not train
    only_object: why no folder stands for the object; None if its folder does
    notes: sentences for the log
    """

    kind: str
    frozen: tuple[str, ...]
    only_object: str | None
    notes: tuple[str, ...]
    numbers: Numbers


@dataclass(eq=False)
class GivenObject:
    """A model that this process holds. is_loaded: whether a run loaded copies of it, not its folder."""

    model: PreTrainedModel
    is_loaded: bool = False


_objects: contextvars.ContextVar[Mapping[str, GivenObject] | None] = contextvars.ContextVar("objects", default=None)


@contextlib.contextmanager
def objects_given(objects: Mapping[str, GivenObject]) -> Iterator[None]:
    """Inside, these folders stand for these objects."""
    token = _objects.set(objects)
    try:
        yield
    finally:
        _objects.reset(token)


def write_given(folder: Path, given: GivenModel) -> None:
    """Write given.json to the model's folder."""
    (folder / FILE).write_text(json.dumps(asdict(given), indent=1) + "\n", encoding="utf-8")


def given_in(name_or_path: str) -> GivenModel | None:
    """Return the content of given.json in a model's folder; None without it. ThreestepError if it is damaged."""
    path = Path(name_or_path, FILE)
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        frozen, notes, numbers = tuple(read.pop("frozen")), tuple(read.pop("notes")), Numbers(**read.pop("numbers"))
        return GivenModel(frozen=frozen, notes=notes, numbers=numbers, **read)
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise ThreestepError(
            f"{path} is damaged ({first_line(problem)}); call the run from Python again, which writes it"
        ) from problem


def only_as_object(name_or_path: str) -> bool:
    """True if the folder alone does not hold what its object computes."""
    given = given_in(name_or_path)
    return given is not None and given.only_object is not None


def copy_of_object(where: str, dtype: torch.dtype, settings: ModelSettings, is_scalar: bool) -> PreTrainedModel | None:
    """Return a copy of the object that the folder `where` stands for, in `dtype` and eval mode, if the folder alone
    does not give its output; None for all other folders.

    ThreestepError if this process does not hold the object, and for settings that a copy cannot have.
    """
    given = given_in(where)
    if given is None or given.only_object is None:
        return None
    _log_notes(given)
    return _copied(where, given, given.only_object, dtype, settings=settings, is_scalar=is_scalar)


def is_copy_of_object(model: PreTrainedModel) -> bool:
    """True if `copy_of_object` or `proven` made the model of an object, not of a folder."""
    from training.utils.models.own_forward import WHOLE_FORWARD

    return hasattr(model, WHOLE_FORWARD)


def proven(
    model: PreTrainedModel, where: str, dtype: torch.dtype, settings: ModelSettings, *, is_scalar: bool
) -> PreTrainedModel:
    """Return `model`, just loaded from the folder `where`, if it computes the same as the object of that folder;
    otherwise a copy of the object. A folder that stands for no object is left alone. A collective under ZeRO-3."""
    given = given_in(where)
    if given is None:
        return model
    _log_notes(given)
    numbers = read_numbers(model)
    same_head = type(model).__name__ == given.kind and len(numbers.logits) == len(given.numbers.logits)
    kinds = ("trunk", "logits") if same_head else ("trunk",)
    for kind in kinds:
        theirs, mine = getattr(given.numbers, kind), getattr(numbers, kind)
        most = getattr(given.numbers, f"{kind}_noise") + getattr(numbers, f"{kind}_noise")
        apart = _apart(theirs, mine)
        if not apart <= most:
            why = (
                f"its files give other numbers (by {apart:.2g}, rounding explains {most:.2g}), so that a part of it is "
                "in no file, such as a buffer that was changed"
            )
            return _copied(where, given, why, dtype, settings=settings, is_scalar=is_scalar)
    return model


def _log_notes(given: GivenModel) -> None:
    for note in given.notes:
        is_warning = note.startswith("warning: ")
        log_on_main(note if is_warning else f"model: {note}")


def _copied(
    where: str, given: GivenModel, why: str, dtype: torch.dtype, *, settings: ModelSettings, is_scalar: bool
) -> PreTrainedModel:
    from transformers.integrations import is_deepspeed_zero3_enabled

    from training.utils.models.own_forward import WHOLE_FORWARD

    held = (_objects.get() or {}).get(where)
    what = f"'{where}' was a {given.kind} of a Python program, which no folder can stand for: {why}"
    if held is None:
        raise ThreestepError(f"{what}; call the run from that program again, without num_ranks")
    if is_deepspeed_zero3_enabled():
        raise ThreestepError(
            f"{what}; a copy of it is not sharded: use --zero_stage 2, or save it as what a folder holds"
        )
    for why_not in (each.not_of_objects for each in settings.preparers):
        if why_not:
            raise ThreestepError(f"{what}; {why_not}")
    score: Any = getattr(held.model, "score", None)
    if is_scalar and getattr(score, "out_features", 1) != 1:
        raise ThreestepError(f"{what}; its score has {score.out_features} outputs, and a reward model has one")
    if is_scalar and score is None:
        raise ThreestepError(
            f"{what}; a reward model needs a head `score`, which it lacks, and transformers' class with one would not "
            "compute the same: give a model of sequence classification, or a plain one"
        )
    if not held.is_loaded:
        log_on_main(
            f"model: a copy of the {given.kind} that was given is used, as no folder holds what it computes: {why}; "
            "folders of the run hold its weights alone, and result.model the object with them"
        )
    model = _deep_copy(held.model, given, what)
    if is_scalar:
        _check_score(model, what)
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
            weight.requires_grad_(True)  # `train_as_given` freezes what is to stay frozen
    setattr(model, WHOLE_FORWARD, True)
    held.is_loaded = True
    return model.eval()


def _deep_copy(model: PreTrainedModel, given: GivenModel, what: str) -> PreTrainedModel:
    """A copy that shares no tensor with `model` and computes the same; ThreestepError if there is none."""
    try:
        copied = copy.deepcopy(model)
    except Exception as problem:  # noqa: BLE001 (a class may refuse to be copied by any error)
        raise ThreestepError(
            f"{what}; and it cannot be copied ({type(problem).__name__}: {first_line(problem)}), which leaves the one "
            "that was given as it is"
        ) from problem
    with _uses_noted(model) as uses:
        numbers = read_numbers(copied)
    if uses:
        raise ThreestepError(
            f"{what}; and a copy of it still computes with {uses[0]} of the object that was given: a hook or a forward "
            "holds that object; let it use its arguments (module, inputs, output), or `self`"
        )
    apart = _apart(given.numbers.logits, numbers.logits)
    if not apart <= given.numbers.logits_noise + numbers.logits_noise:
        raise ThreestepError(
            f"{what}; and a copy of it computes other numbers (by {apart:.2g}): its forward or a hook keeps a state "
            "that changes from call to call"
        )
    return copied


def _check_score(model: PreTrainedModel, what: str) -> None:
    """ThreestepError if the model's score is not its head's at the last token: values are read from the head, at every
    token."""
    import torch

    from training.utils.models.own_forward import in_eval_mode
    from training.utils.models.tensors.rounding import make_probes

    outputs: list[torch.Tensor] = []
    (segment,) = make_probes(model.config, 0).alone[0].segments
    handle = model.score.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad(), in_eval_mode(model):
        score = model(input_ids=segment.tokens.input_ids.unsqueeze(0).to(model.device)).logits.flatten()
    handle.remove()
    if not outputs or not torch.equal(outputs[-1][0, -1].flatten(), score):
        raise ThreestepError(
            f"{what}; its forward makes another score than its head `score` gives at the last token, where scores and "
            "values are read: let the head, or what is below it, compute the score"
        )


@contextlib.contextmanager
def _uses_noted(model: PreTrainedModel) -> Iterator[list[str]]:
    """Inside, every operation on a tensor of `model` adds its name to the list."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    tensors = [*model.named_parameters(), *model.named_buffers()]
    owner = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors if tensor.numel()}
    used: list[str] = []

    class UsesOfTensors(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                    used.extend(filter(None, [owner.get(leaf.untyped_storage().data_ptr())]))
            return function(*args, **(kwargs or {}))

    with UsesOfTensors():
        yield used


def read_numbers(model: PreTrainedModel) -> Numbers:
    """Return the numbers of `model` on a short sequence, in eval mode; train mode and buffers are restored. A
    collective under ZeRO-3, for a model that no engine has.

    ThreestepError for a model that cannot be called with token ids alone, or has no logits; for numbers that are not
    finite; and for those that are drawn at random.
    """
    import torch

    from training.utils.models.own_forward import in_eval_mode
    from training.utils.models.tensors.rounding import make_probes, rms, rounded_once_more
    from training.utils.models.tensors.weights import whole_where_used

    kind = type(model).__name__
    (segment,) = make_probes(model.config, 0).alone[0].segments
    ids_1T = segment.tokens.input_ids.unsqueeze(0).to(model.device)

    def read(seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        with contextlib.nullcontext() if seed is None else rounded_once_more(model, seed):
            states, logits = model.base_model(input_ids=ids_1T)[0], model(input_ids=ids_1T).logits
        last = (part[0].reshape(-1, part.shape[-1])[-1][:_MOST_NUMBERS] for part in (states, logits))
        trunk, output = (part.detach().double().cpu() for part in last)
        return trunk, output

    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.no_grad(), in_eval_mode(model), whole_where_used(model):
        try:
            plain, again, *noisy = [read(seed) for seed in (None, None, *_NOISE_SEEDS)]
        except Exception as problem:  # noqa: BLE001 (a user's forward may fail by any error)
            raise ThreestepError(
                f"a model expects a forward that makes logits (or a score) of token ids alone, and that of {kind} "
                f"fails ({type(problem).__name__}: {first_line(problem)})"
            ) from problem
        finally:
            for buffer, was in buffers:
                buffer.copy_(was)
    noise = []
    for place, numbers in enumerate(plain):
        if not bool(numbers.isfinite().all()):
            raise ThreestepError(f"the {kind} computes {float(numbers[~numbers.isfinite()][0])}; check its weights")
        rounding = torch.finfo(model.dtype).eps * float(numbers.abs().max())
        if rms(again[place] - numbers) > _NOISE_FACTOR * rounding:
            raise ThreestepError(
                f"the {kind} computes other numbers in each call in eval mode, so that none could be checked or "
                "repeated: draw at random in train mode alone, and let hooks keep no state"
            )
        noise.append(_NOISE_FACTOR * rms(torch.cat([other[place] - numbers for other in noisy])) + rounding)
    return Numbers(plain[0].tolist(), noise[0], plain[1].tolist(), noise[1])


def _apart(some: list[float], others: list[float]) -> float:
    """Root mean square of the difference; infinite if they are not as many."""
    if len(some) != len(others):
        return float("inf")
    squares = [(one - other) ** 2 for one, other in zip(some, others, strict=True)]
    return float((sum(squares) / max(1, len(squares))) ** 0.5)


def train_as_given(model: PreTrainedModel, settings: ModelSettings, embeddings_train: bool) -> None:
    """Freeze the weights that are frozen in the object of the model's folder, and copy its gradient hooks. A model
    whose folder stands for no object is left alone.

    embeddings_train: they have new rows; ThreestepError if they were frozen
    """
    from training.utils.models.adapters.lora import is_adapter_tensor, merged_name

    given = given_in(settings.name_or_path)
    if given is None:
        return
    weights = {merged_name(name): weight for name, weight in model.named_parameters() if not is_adapter_tensor(name)}
    frozen = [weights[name] for name in given.frozen if name in weights]
    adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if is_adapter_tensor(name)}
    held_fast = [name for name in given.frozen if name.rpartition(".")[0] in adapted]
    is_whole = all(name in given.frozen or name.startswith(HEAD) for name in weights)  # a new head is not the object's
    if held_fast and not is_whole:
        raise ThreestepError(
            f"--lora_dim {settings.lora_dim} trains adapters on {held_fast[0]} and {len(held_fast) - 1} other weights "
            "that were given frozen, which would move them as saved; name the layers with --lora_module_name, unfreeze "
            "them, or give a model that is frozen as a whole"
        )
    for weight in frozen:
        weight.requires_grad_(False)
    if frozen:
        log_on_main(
            f"model: {len(frozen)} of {len(weights)} weights stay as they are: they were given frozen (requires_grad)"
        )
    embeddings = model.get_input_embeddings().weight
    if embeddings_train and any(weight is embeddings for weight in frozen):
        raise ThreestepError(
            "the tokenizer gained tokens, whose embeddings must be trained, and the model was given with frozen "
            "embeddings; unfreeze them, or give a model and tokenizer that have the tokens"
        )
    held = (_objects.get() or {}).get(settings.name_or_path)
    if held is not None:
        _copy_gradient_hooks(dict(held.model.named_parameters()), weights)


def _copy_gradient_hooks(theirs: Mapping[str, torch.nn.Parameter], ours: Mapping[str, torch.nn.Parameter]) -> None:
    """Copy the hooks of parameters, which copies lose (torch 2.13, Parameter.__deepcopy__)."""
    for name, weight in theirs.items():
        hooks = list((getattr(weight, "_backward_hooks", None) or {}).values())
        mine = ours.get(name)
        if not hooks or mine is None or not mine.requires_grad or mine._backward_hooks:
            continue
        if mine.shape != weight.shape:
            raise ThreestepError(
                f"the gradient hook of {name} is for {tuple(weight.shape)}, and the weight is {tuple(mine.shape)} here;"
                " give a model and tokenizer of one size"
            )
        for hook in hooks:
            mine.register_hook(hook)
