"""A model without its weights, as a checkpoint holds it: configuration, tokenizer, adapter settings, dtype.

Together with the engine's weights in the checkpoint, that is enough to make a model folder.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError, disk_error_in, first_line
from training.utils.base.memory import is_out_of_memory
from training.utils.base.storage import parse_json
from training.utils.base.user_files import named_object
from training.utils.models.families.parts import language_model_class, media_architecture
from training.utils.models.families.scalar_class import scalar_model_class
from training.utils.models.families.tokenizer_files import read_tokenizer
from training.utils.models.tensors.adapters import NO_ADAPTERS, adapters_of
from training.utils.models.tensors.packed import described_layers
from training.utils.plugins.registry import added, missing, missing_plugin

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.plugins.plugin import AdapterEntry

_FACTS = "weights.json"


@dataclass(frozen=True)
class DescribedModel:
    """model: on the meta device, with its adapters and its packed layers.
    dtype: of its floating-point weights.
    buffers: those that are saved in another dtype, by name.
    trained: names of the trained weights, in the order of `model.parameters()`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    trained: tuple[str, ...]
    buffers: dict[str, torch.dtype] = field(default_factory=dict)

    def dtype_of(self, name: str) -> torch.dtype:
        return self.buffers.get(name, self.dtype)

    @property
    def has_adapters(self) -> bool:
        return adapters_of(self.model) is not NO_ADAPTERS


def write_description(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the files that `read_description` reads to `folder`: small, nothing pickled."""

    folder.mkdir(parents=True)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    adapters_of(model).describe(model, folder)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    saved = model.state_dict().keys()
    buffers = {
        name: _in_words(buffer.dtype)
        for name, buffer in model.named_buffers()
        if name in saved and buffer.is_floating_point() and buffer.dtype is not model.dtype
    }
    facts = {"dtype": _in_words(model.dtype), "trained": trained, "buffers": buffers, **described_layers(model)}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def read_description(folder: Path) -> DescribedModel:
    """Return the described model, with its weights on the meta device. ThreestepError for damaged files."""
    try:
        for path in folder.glob("*.json"):
            if not path.is_file():  # transformers would leave it out
                raise ValueError(f"{path.name} is no file")
        return _described(folder)
    except Exception as problem:  # each file and value has an error of its own
        if isinstance(problem, ThreestepError) or is_out_of_memory(problem) or disk_error_in(problem) is not None:
            raise
        raise ThreestepError(
            f"{folder} expects the files by which a checkpoint describes a model, and they are damaged: "
            f"{type(problem).__name__}: {first_line(problem)}"
        ) from problem


def _described(folder: Path) -> DescribedModel:
    import torch
    import transformers

    facts = parse_json((folder / _FACTS).read_text(encoding="utf-8"))
    dtype = _of_words(facts["dtype"])
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    auto_class = _class_of(config)
    with torch.device("meta"):
        model: Any = auto_class.from_config(config, dtype=dtype)
        _put_adapters(model, folder)
    _pack_layers(model, facts)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    tokenizer, _ = read_tokenizer(folder)
    buffers = {name: _of_words(of) for name, of in facts.get("buffers", {}).items()}
    return DescribedModel(model, tokenizer, dtype, tuple(facts["trained"]), buffers)


def _put_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Put on the adapters that `Adapters.describe` wrote."""
    for file in missing("adapters"):
        if (folder / file).is_file():
            raise ThreestepError(f"the model has adapters ({file}); {missing_plugin('adapters', file)}")
    entries: dict[str, AdapterEntry] = added("adapters", ())
    for file, entry in entries.items():
        if (folder / file).is_file():
            named_object(entry.described)(model, folder)


def _pack_layers(model: PreTrainedModel, facts: Mapping[str, Any]) -> None:
    """Put the layers that `described_layers` described in the place of those of a model on meta."""
    for kind in facts.keys() & missing("packed_layers"):
        raise ThreestepError(f"layers of the model are kept as {kind}; {missing_plugin('packed_layers', kind)}")
    for kind, place in added("packed_layers", ()).items():
        if kind in facts:
            named_object(place)(model, facts)


def _class_of(config: Any) -> Any:
    """Return the class or Auto class of the model that `architectures` names."""
    if any("SequenceClassification" in name for name in config.architectures):
        return scalar_model_class(config)
    return language_model_class(config, with_media=media_architecture(config) in config.architectures)


def _in_words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_words(words: str) -> torch.dtype:
    import torch

    found = getattr(torch, words)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected a dtype, got '{words}'")
    return found
