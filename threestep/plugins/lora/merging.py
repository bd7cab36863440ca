"""Adapters on their base: planned before a weight is read, then merged into the base's weights, or trained on.

Strict: tensors that are missing, unexpected or of another shape are refused by name. The output of the base with the
adapter on, as PEFT runs it, is the truth: a merge with another output is refused, of whatever kind it is.

Whole tensors: those that replace one of the base's (PEFT's `modules_to_save`, embeddings, a scalar head).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.lora.adapted import ADAPTER
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.folders import CONFIG, AdapterFolder
from threestep.plugins.lora.preparers import Lora, lora_of
from training.utils.base.console import log_on_main
from training.utils.base.errors import ThreestepError, first_line
from training.utils.loading.configurations import errors_explained
from training.utils.loading.judgement import HEAD, OUTPUT_HEADS, counted
from training.utils.loading.weight_files import StoredTensor, read_header, stored_form
from training.utils.models.weights import whole_to_change

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings

_PREFIX = "base_model.model."  # of the names in PEFT's files


@dataclass(frozen=True)
class PeftPlan:
    """kind: PEFT's name, such as LORA. config: PEFT's, without whole modules.
    whole: the model's names of whole tensors, to those in the file. own: the adapter's tensors, by their names there.
    goes_on: it is trained on; otherwise merged.
    """

    adapter: AdapterFolder
    kind: str
    config: Any
    whole: Mapping[str, str]
    own: Mapping[str, StoredTensor]
    goes_on: bool = False

    @property
    def supplied(self) -> Collection[str]:
        return self.whole

    def put_on(self, model: PreTrainedModel, settings: ModelSettings) -> None:
        """See `_put_on`."""
        _put_on(model, self, settings)


class _Lora(NamedTuple):
    """shapes: of the tensors, by their names in PEFT's file. scales: by layer, the factor of the two's product."""

    shapes: dict[str, tuple[int, ...]]
    scales: dict[str, float]


def plan_adapter(
    adapter: AdapterFolder, make_empty: Callable[[], PreTrainedModel], settings: ModelSettings
) -> PeftPlan:
    """Compare the adapter's settings and the header of its file with its base. ThreestepError if they do not fit.

    make_empty: returns the model that it is for, on the meta device. settings: of the run
    """
    kind, config = str(adapter.settings.get("peft_type")), _peft_config(adapter)
    model = make_empty()
    if not stored_form(model.config).is_read_whole(model.config):
        raise ThreestepError(
            f"'{adapter.name}' is an adapter of '{adapter.base}', whose weights are quantized, so merging would "
            f"round them; set base_model_name_or_path in '{adapter.folder / CONFIG}' to the unquantized model"
        )
    stored = read_header(adapter.weights)
    for name in sorted(name for name, tensor in stored.items() if not tensor.is_whole):
        raise ThreestepError(
            f"'{adapter.weights}': {name} expects floating-point values, got {stored[name].dtype}; save or download "
            "the adapter again"
        )
    scores = hasattr(model, HEAD.removesuffix("."))
    dropped = {name for name in stored if scores and _bare(name).startswith(OUTPUT_HEADS)}
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    whole = {_bare(name): name for name in stored if _bare(name) in shapes and name not in dropped}
    _check_whole(adapter, model, whole, config)
    _check_shapes(
        adapter, {name: stored[name] for name in whole.values()}, {whole[name]: shapes[name] for name in whole}
    )
    config.modules_to_save = None
    adapting = {name: tensor for name, tensor in stored.items() if name not in dropped and name not in whole.values()}
    plan = PeftPlan(adapter, kind, config, whole, adapting)
    if kind != "LORA":  # some kinds cannot be made without weights; `_merge` looks at their tensors
        return plan
    expected = _of_adapter(plan, model)
    _check_tensors(plan, type(model).__name__, expected.shapes)
    own = lora_of(settings) if settings.trains_adapter_on else None
    same = own is not None and not whole.keys() - {f"{HEAD}weight"} and expected == _of_run(make_empty(), own)
    return replace(plan, goes_on=same)


def _put_on(model: PreTrainedModel, plan: PeftPlan, settings: ModelSettings) -> None:
    """Merge the adapter into `model`, or add it as the run's LoRA adapter (without dropout), and log which. A
    collective under ZeRO-3. ThreestepError if PEFT cannot merge it, or computes something else after."""
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    adapter, own = plan.adapter, lora_of(settings)
    with errors_explained("adapter", adapter.name, SafetensorError):
        tensors = load_file(adapter.weights)
    _replace_whole(model, plan, tensors)
    adapting = {name: tensors[name] for name in plan.own}
    if plan.goes_on and own is not None:
        add_lora(model, replace(own, lora_dropout=0.0))
        adapting = {name.removeprefix(_PREFIX): tensor for name, tensor in adapting.items()}
        unread = set_peft_model_state_dict(model, adapting, ADAPTER).unexpected_keys
        assert not unread, f"the plan's names are those of the model: {unread}"
        sentence = f"continuing to train adapter '{adapter.name}' of base '{adapter.base}'"
    else:
        if adapting:
            _merge(model, plan, adapting)
        sentence = f"merged adapter '{adapter.name}' into base '{adapter.base}'"
        if settings.trains_adapter_on and own is not None:
            sentence += "; the run's own LoRA has different settings and starts from new adapters"
    log_on_main(f"model: {sentence}")


def _merge(model: PreTrainedModel, plan: PeftPlan, adapting: dict[str, torch.Tensor]) -> None:
    import torch
    from peft import PeftModel, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    from training.utils.models.own_forward import current_difference, read_own_forward

    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.no_grad(), _refused_by_name(plan, type(model).__name__):
        adapted = PeftModel(model, plan.config)
        _check_tensors(plan, type(model).__name__, _shapes(adapted, "default"))
        unread = set_peft_model_state_dict(adapted, adapting).unexpected_keys
        assert not unread, f"the plan's names are those of the model: {unread}"
        truth = read_own_forward(model)
        for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
            with whole_to_change(layer.parameters()):
                layer.merge()
        adapted.merge_and_unload()  # all are merged already
        moved = current_difference(model, truth)
    for name in trained:  # PEFT freezes the base
        model.get_parameter(name).requires_grad_(True)
    if not moved <= truth.tolerance:
        raise ThreestepError(
            f"'{plan.adapter.name}': merging this adapter (kind {plan.kind}) into '{plan.adapter.base}' changes the "
            f"output by {moved:.2g}, but rounding explains only {truth.tolerance:.2g}; one of two tied tensors may be "
            "adapted: merge the adapter with PEFT, which trained it, and pass the merged model"
        )


@contextlib.contextmanager
def _refused_by_name(plan: PeftPlan, model: str) -> Iterator[None]:
    """Inside, turn PEFT's exceptions into a sentence, and silence its warnings."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ThreestepError, torch.OutOfMemoryError, AssertionError):
        raise
    except Exception as problem:
        raise ThreestepError(
            f"'{plan.adapter.name}' is an adapter of kind {plan.kind}, which PEFT cannot merge into {model} here "
            f"({type(problem).__name__}: {first_line(problem)}); pass a merged model, or a LoRA adapter"
        ) from problem


def _peft_config(adapter: AdapterFolder) -> Any:
    """PEFT's configuration; ThreestepError if the installed PEFT does not know all of it."""
    from peft import PeftConfig

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that it does not know, which are refused below
            config = PeftConfig.from_pretrained(str(adapter.folder))
    except (KeyError, TypeError, ValueError) as problem:
        raise ThreestepError(
            f"'{adapter.folder / CONFIG}' cannot be read by the installed PEFT ({type(problem).__name__}: "
            f"{first_line(problem)}); download or save the adapter again, or install the PEFT version that wrote it"
        ) from problem
    known = {field.name for field in dataclasses.fields(config)}
    unknown = sorted(name for name, value in adapter.settings.items() if value and name not in known)
    if unknown:
        raise ThreestepError(
            f"'{adapter.folder / CONFIG}' has settings unknown to the installed PEFT: {', '.join(unknown)}; install "
            "the PEFT version that wrote them"
        )
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ThreestepError(
            f"'{adapter.name}' is an adapter of kind {adapter.settings['peft_type']}, which changes no weights and "
            "cannot be merged; pass a model, or an adapter that changes weights, such as LoRA"
        )
    return config


def _bare(name: str) -> str:
    """The name that a whole tensor of PEFT's file has in the model."""
    return name.removeprefix(_PREFIX).replace(".modules_to_save.default.", ".").replace(".base_layer.", ".")


def _check_whole(adapter: AdapterFolder, model: PreTrainedModel, whole: Collection[str], config: Any) -> None:
    """ThreestepError if a module that was saved whole is not, or shares its tensor with one that was not saved."""
    modules = tuple(getattr(config, "modules_to_save", None) or ())
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    lacks = [name for name in names if any(f".{module}." in f".{name}" for module in modules) and name not in whole]
    if lacks:
        raise ThreestepError(
            f"'{adapter.weights}' lacks {counted(lacks)}, which modules_to_save in its {CONFIG} lists; save or "
            "download the adapter again"
        )
    for name in whole:
        weight = model.get_parameter(name)
        tied = [other for other in names if other not in whole and model.get_parameter(other) is weight]
        if tied:
            raise ThreestepError(
                f"'{adapter.name}' has {name} but not {tied[0]}, which '{adapter.base}' ties to it; merge the adapter "
                "with PEFT, which trained it, and pass the merged model"
            )


def _of_adapter(plan: PeftPlan, model: PreTrainedModel) -> _Lora:
    """Add the settings' LoRA to `model`, which is on the meta device, and return its shapes and scales."""
    import torch
    from peft import PeftModel

    config = copy.deepcopy(plan.config)
    config.init_lora_weights = False  # there is nothing to draw
    with torch.device("meta"), _refused_by_name(plan, type(model).__name__):
        return _Lora(_shapes(PeftModel(model, config), "default"), _scales(model))


def _of_run(model: PreTrainedModel, own: Lora) -> _Lora:
    """See `_of_adapter`; for the run's LoRA."""
    import torch

    with torch.device("meta"):
        add_lora(model, own)
    return _Lora({_PREFIX + name: shape for name, shape in _shapes(model, ADAPTER).items()}, _scales(model))


def _shapes(adapted: Any, name: str) -> dict[str, tuple[int, ...]]:
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _scales(model: PreTrainedModel) -> dict[str, float]:
    from peft.tuners.lora import LoraLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {name: next(iter(layer.scaling.values())) for name, layer in layers.items()}


def _check_shapes(
    adapter: AdapterFolder, stored: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for name in sorted(wanted.keys() & stored.keys()):
        if wanted[name] != stored[name].shape:
            raise ThreestepError(
                f"'{adapter.weights}': {name} expects the shape {list(wanted[name])} of '{adapter.base}' and "
                f"{CONFIG}, got {list(stored[name].shape)}; use the base model that it was trained on, or merge the "
                "adapter with PEFT, which trained it"
            )


def _check_tensors(plan: PeftPlan, model: str, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """ThreestepError if the file's tensors are not those that are `wanted`."""
    adapter, stored = plan.adapter, plan.own
    _check_shapes(adapter, stored, wanted)
    unexpected, missing = sorted(stored.keys() - wanted.keys()), sorted(wanted.keys() - stored.keys())
    if unexpected:
        raise ThreestepError(
            f"'{adapter.weights}' has {counted(unexpected)}, which {CONFIG} does not define for {model} of "
            f"'{adapter.base}'; use the base model that it was trained on"
        )
    if missing:
        raise ThreestepError(
            f"'{adapter.weights}' has {len(stored)} of the {len(wanted)} tensors that {CONFIG} requires for {model} "
            f"of '{adapter.base}', and lacks {counted(missing)}; save or download the adapter again, or use the base "
            "model that it was trained on"
        )


def _replace_whole(model: PreTrainedModel, plan: PeftPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

    taken: dict[int, str] = {}
    for name, stored in plan.whole.items():
        weight = model.get_parameter(name)
        first = taken.setdefault(id(weight), stored)
        if not torch.equal(tensors[first], tensors[stored]):
            raise ThreestepError(
                f"'{plan.adapter.weights}': {first} and {stored} differ, but '{plan.adapter.base}' ties them; merge "
                "the adapter with PEFT, which trained it, and pass the merged model"
            )
        with torch.no_grad(), whole_to_change([weight]):
            weight.copy_(tensors[stored])
