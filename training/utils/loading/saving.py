"""Saved models: model folders that plain transformers loads, and models without weights as checkpoints hold them.

A model folder has safetensors, configuration, tokenizer and chat template. Transformers 5 loads settings that it
refuses to save; `mend_settings` leaves those out that have no effect. A checkpoint has the configuration, the
tokenizer, settings of adapters and the dtype. With the engine's weights, these are enough to make a model folder.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, disk_error_in, disk_errors, first_line
from training.utils.base.machine import is_out_of_memory
from training.utils.base.storage import parse_json, publish_folder, remove
from training.utils.base.user_files import named_object
from training.utils.loading.tokenizers import read_tokenizer
from training.utils.models.families import language_model_class, media_architecture, scalar_model_class
from training.utils.models.weights import NO_ADAPTERS, adapters_of, described_layers
from training.utils.plugins.registry import added, missing, missing_plugin

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.utils.plugins.plugin import AdapterEntry


# Settings of generation that only sampling reads (transformers 5.19, generation/configuration_utils.py: validate), and
# how that function names what it refuses.
_OF_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
_REFUSED = re.compile(r"^- `(\w+)`: ", re.MULTILINE)


def save_model(
    folder: str | Path,
    model: PreTrainedModel,
    tensors: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write `tensors` (the full, merged weights under the plain model's names) as the model in `folder`.

    It is written next to `folder`, flushed to disk and renamed: a folder that exists is whole, and stays until the new
    one is. Call on rank 0 only. write_more: writes further files into the folder.

    Raises ThreestepError if `tensors` are not those of the plain model, OSError if the disk refuses it.
    """
    folder = Path(folder)
    beside = folder.parent / f".{folder.name}.{os.getpid()}"
    remove(beside)
    for sentence in mend_settings(model):
        log(sentence)
    plain = plain_skeleton(model)
    # Tied weights share one tensor and are saved once; the skeleton knows which.
    unknown = sorted(plain.load_state_dict(tensors, strict=False, assign=True).unexpected_keys)
    plain.tie_weights()
    lacking = sorted(name for name, tensor in plain.state_dict().items() if tensor.is_meta)
    if lacking or unknown:
        raise ThreestepError(
            f"'{folder}': cannot save {type(model).__name__}: it lacks {len(lacking)} tensors{_first(lacking)} and has "
            f"{len(unknown)} that the plain model lacks{_first(unknown)}; export a checkpoint of the run with "
            "the versions in constraints.txt installed"
        )
    try:
        with disk_errors(beside):
            _write(beside, plain, None, tokenizer, write_more=write_more)
            publish_folder(beside, folder)
    finally:
        remove(beside)  # the room of what did not become a model


def save_without_weights(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write the files of `save_model`, but for the weights. Arguments: see there."""
    _write(folder, plain_skeleton(model), {}, tokenizer, write_more=write_more)


def _write(
    folder: Path,
    plain: PreTrainedModel,
    tensors: dict[str, torch.Tensor] | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    write_more: Callable[[Path], None] | None,
) -> None:
    plain.save_pretrained(folder, state_dict=tensors)
    tokenizer.save_pretrained(folder)
    if write_more is not None:
        write_more(folder)


def mend_settings(model: PreTrainedModel) -> list[str]:
    """Unset settings that transformers refuses to save and nothing reads, in place: settings of generation without
    effect beside the others (`temperature` without `do_sample`), those in the configuration, where generation does not
    look, and `output_attentions`. Return a sentence for each kind that there was.

    Raises ThreestepError for settings of generation that transformers refuses for another reason.
    """
    sentences = []
    generation: Any = getattr(model, "generation_config", None)
    where, advice = model.name_or_path or type(model).__name__, ""
    if generation is not None and model.can_generate():
        if unset := _unset_ignored(generation, where):
            if unset.keys() & _OF_SAMPLING:
                advice = '; to keep the sampling settings, set "do_sample": true in its generation_config.json'
            sentences.append(
                f"'{where}': its generation settings have {_named(unset)}, which transformers ignores given the other "
                f"settings and refuses to save; saved models omit them{advice}"
            )
    config: Any = model.config
    misplaced = config._get_generation_parameters() if hasattr(config, "_get_generation_parameters") else {}
    if misplaced:
        for name in misplaced:
            delattr(config, name)
        sentences.append(
            f"'{where}': config.json has {_named(misplaced)}, which transformers reads only from "
            "generation_config.json and refuses to save in config.json; saved models omit them"
        )
    if any(getattr(part, "output_attentions", None) for part in (config, config.get_text_config())):
        config.output_attentions = config.get_text_config().output_attentions = False
        sentences.append(
            f"'{where}': config.json has output_attentions, which transformers refuses to save with any "
            "attention but eager; saved models omit it"
        )
    return sentences


def _unset_ignored(generation: Any, where: str) -> dict[str, Any]:
    """Unset the settings that transformers names when it refuses the others beside them; return their values."""
    unset: dict[str, Any] = {}
    while True:
        try:
            generation.validate(strict=True)
            return unset
        except (ValueError, TypeError, AttributeError) as problem:
            names = [name for name in _REFUSED.findall(str(problem)) if getattr(generation, name, None) is not None]
            if not names:
                raise ThreestepError(
                    f"'{where}': its generation settings (generation_config.json, or those in config.json) could not "
                    f"be saved with the model (transformers: {first_line(problem)}); correct them"
                ) from problem
        for name in names:
            unset[name] = getattr(generation, name)
            setattr(generation, name, None)


def _named(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _first(names: list[str]) -> str:
    return f" ({names[0]})" if names else ""


def plain_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The same architecture without weights (meta device) and without adapters."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        skeleton: Any = type(model)(config)
    skeleton.to(dtype=model.dtype)
    if getattr(model, "generation_config", None) is not None:
        skeleton.generation_config = copy.deepcopy(model.generation_config)
    return skeleton


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
            f"{folder}: the files that describe the checkpoint's model are damaged: "
            f"{type(problem).__name__}: {first_line(problem)}"
        ) from problem


def _described(folder: Path) -> DescribedModel:
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
        raise ThreestepError(f"layers of the model are stored as {kind}; {missing_plugin('packed_layers', kind)}")
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
    found = getattr(torch, words)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected a dtype, got '{words}'")
    return found
