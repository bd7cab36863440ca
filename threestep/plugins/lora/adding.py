"""LoRA with PEFT: adapters added to a model in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from threestep.plugins.lora.adapted import ADAPTER, mark_layers
from training.utils.base.errors import ThreestepError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.lora.settings import LoraSettings

END_OF_NAME = "$"  # behind a part: the layer's name is it, or ends with a dot and it


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> PreTrainedModel:
    """Add adapters to `model` in place and return it. Adapters that it has already are these, trained on, but for their
    dropout.

    `lora_module_name` is "all-linear" (every linear layer but the head) or parts of the names of the layers, separated
    by commas, each the end of a name where a $ is behind it. Of a model that reads more than text these are layers of
    the language model, but for a part that only names of its tower or projector have. With `only_optimize_lora` all
    other weights are frozen, except a scalar head.
    """
    if ADAPTER in getattr(model, "peft_config", {}):
        _set_lora_dropout(model, settings.lora_dropout)
    else:
        _add_adapters(model, settings)
    mark_layers(model, settings.lora_learning_rate)
    for name, parameter in model.named_parameters():
        if not settings.only_optimize_lora or name.startswith("score."):
            parameter.requires_grad_(True)
    return model


def described(model: PreTrainedModel, folder: Path) -> None:
    """Put on the adapters that a checkpoint describes (`AdapterEntry.described`)."""
    from peft import LoraConfig

    model.add_adapter(LoraConfig.from_pretrained(str(folder)), adapter_name=ADAPTER)
    mark_layers(model)


def _add_adapters(model: PreTrainedModel, settings: LoraSettings) -> None:
    from peft import LoraConfig

    part = settings.lora_module_name
    config = LoraConfig(
        r=settings.lora_dim,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]  # a float serves: the scale is alpha / r
        lora_dropout=settings.lora_dropout,
        # PEFT's own "all-linear" also wraps the weights of experts and routers, which are no layers (peft 0.21).
        use_dora=settings.use_dora,
        target_modules=_layers_named(model, [""] if part == "all-linear" else part.split(",")),
    )
    try:
        model.add_adapter(config, adapter_name=ADAPTER)
    except ValueError as problem:
        raise ThreestepError(
            f"--lora_dim: PEFT cannot add adapters to {type(model).__name__} here: {first_line(problem)}; name other "
            "layers with --lora_module_name, or train without LoRA"
        ) from problem


def _set_lora_dropout(model: PreTrainedModel, rate: float) -> None:
    import torch
    from peft.tuners.lora import LoraLayer

    model.peft_config[ADAPTER].lora_dropout = rate  # type: ignore[attr-defined]  # PEFT's
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout[ADAPTER] = torch.nn.Dropout(rate) if rate else torch.nn.Identity()


def _layers_named(model: PreTrainedModel, parts: Sequence[str]) -> list[str]:
    """Return the names of the linear layers to adapt; those left out are noted with the model's own forward."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from threestep.plugins.lora.adaptable import why_no_adapters
    from training.utils.models.own_forward import own_forward_of

    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module not in heads
    }
    lacking = [part for part in parts if not any(_is_named(name, part) for name in found)]
    named = _in_language(model, found, parts)
    found = {name: module for name, module in found.items() if name in named}
    if lacking or not found:
        raise ThreestepError(
            f"--lora_module_name expects 'all-linear' or part of a linear layer's name in {type(model).__name__}, "
            f"such as 'layers.', got '{','.join(lacking)}'"
        )
    reasons = why_no_adapters(model, found)
    left = [name for name in found if name not in reasons]
    notes = [_in_words(reason, [name for name in reasons if reasons[name] == reason]) for reason in {*reasons.values()}]
    if not left:
        raise ThreestepError(
            f"--lora_module_name '{','.join(parts)}': {'; '.join(notes)}; name other layers of "
            f"{type(model).__name__}, or train without LoRA"
        )
    own = own_forward_of(model)
    if own is not None:
        own.notes.extend(sorted(notes))
    return left


def _in_language(model: PreTrainedModel, names: Collection[str], parts: Sequence[str]) -> set[str]:
    """Return the names that hold one of `parts`: in the language model, and of a tower or projector where a part is of
    no name in the language model."""
    from training.utils.models.families import is_beside_language

    is_beside, found = is_beside_language(model), set[str]()
    for part in parts:
        named = {name for name in names if _is_named(name, part)}
        found |= {name for name in named if not is_beside(name)} or named
    return found


def _is_named(name: str, part: str) -> bool:
    return f".{name}".endswith(f".{part[:-1]}") if part.endswith(END_OF_NAME) else part in name


def _in_words(reason: str, names: list[str]) -> str:
    kinds = sorted({name.rpartition(".")[2] for name in names})
    layers = "1 layer" if len(names) == 1 else f"{len(names)} layers"
    return f"no adapters on {layers} ({', '.join(kinds[:6])}): {reason}"
