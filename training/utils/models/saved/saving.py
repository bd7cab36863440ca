"""A model folder that plain transformers loads: safetensors, configuration, tokenizer and chat template.

Transformers 5 loads settings that it refuses to save. `mend_settings` leaves those out that have no effect.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, disk_errors, first_line
from training.utils.base.storage import publish_folder, remove

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
            f"{len(unknown)} that the plain model does not know{_first(unknown)}; export a checkpoint of the run with "
            "the installed versions of constraints.txt"
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
                advice = '; to keep settings of sampling, write "do_sample": true to its generation_config.json'
            sentences.append(
                f"'{where}': its settings of generation have {_named(unset)}, which transformers ignores beside the "
                f"others and refuses to save; saved models go without{advice}"
            )
    config: Any = model.config
    misplaced = config._get_generation_parameters() if hasattr(config, "_get_generation_parameters") else {}
    if misplaced:
        for name in misplaced:
            delattr(config, name)
        sentences.append(
            f"'{where}': config.json has {_named(misplaced)}, which transformers reads in generation_config.json alone "
            "and refuses to save in config.json; saved models go without"
        )
    if any(getattr(part, "output_attentions", None) for part in (config, config.get_text_config())):
        config.output_attentions = config.get_text_config().output_attentions = False
        sentences.append(
            f"'{where}': config.json has output_attentions, which transformers refuses to save beside another "
            "attention than eager; saved models go without"
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
                    f"'{where}': its settings of generation (generation_config.json, or those in config.json) could "
                    f"not be saved with the model: transformers says: {first_line(problem)}; correct them"
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
    import torch

    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        skeleton: Any = type(model)(config)
    skeleton.to(dtype=model.dtype)
    if getattr(model, "generation_config", None) is not None:
        skeleton.generation_config = copy.deepcopy(model.generation_config)
    return skeleton
