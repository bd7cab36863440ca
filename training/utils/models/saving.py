"""A model folder that plain transformers loads: safetensors, configuration, tokenizer and chat template."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.models.lora import ADAPTER
from training.utils.run.disk_errors import disk_errors
from training.utils.run.errors import ThreestepError
from training.utils.run.storage import publish_folder, remove

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model(
    folder: str | Path,
    model: PreTrainedModel,
    tensors: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write `tensors` (the full, merged weights under the plain model's names) as the model in `folder`.

    It is written next to `folder`, flushed to disk and renamed: a folder that is there is whole, and stays until the
    new one is. Call on rank 0 only. write_more: writes what else belongs into the folder.

    Raises ThreestepError if `tensors` are not those of the plain model, OSError if the disk refuses it.
    """
    folder = Path(folder)
    beside = folder.parent / f".{folder.name}.{os.getpid()}"
    remove(beside)
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
            plain.save_pretrained(beside)
            tokenizer.save_pretrained(beside)
            if write_more is not None:
                write_more(beside)
            publish_folder(beside, folder)
    finally:
        remove(beside)  # the room of what did not become a model


def _first(names: list[str]) -> str:
    return f" ({names[0]})" if names else ""


def save_adapter(folder: str | Path, model: PreTrainedModel, base: str | Path) -> None:
    """Write only the LoRA adapters of `model`, in PEFT's format. base: the model folder without them."""
    model.peft_config[ADAPTER].base_model_name_or_path = str(base)  # type: ignore[attr-defined]  # PEFT's
    model.save_pretrained(str(folder))


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
