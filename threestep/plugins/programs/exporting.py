"""A checkpoint's weights as a model folder, on one process and without an engine.

The model is rebuilt as it was trained, with its adapters, then saved as at the end of a run: by `full_tensors` and
`save_model`. ZeRO-3's shards are joined by DeepSpeed's zero_to_fp32. Nothing is unpickled (see
`engine.checkpoint_files`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.parts import DESCRIPTIONS, saved_shares
from training.utils.engine.checkpoint_files import engine_state
from training.utils.engine.zero3 import full_tensors
from training.utils.loading.saving import DescribedModel, read_description, save_model
from training.utils.models.families import copy_files, processor_files
from training.utils.models.weights import adapters_of

_INSIDE = "model."  # PolicyModel and ScalarModel hold the transformers model under this name


def described_engines(checkpoint: Path) -> list[str]:
    """The names of the engines of a checkpoint that can be exported."""
    return sorted(path.name for path in (checkpoint / DESCRIPTIONS).glob("*"))


def export_model(
    checkpoint: Path,
    name: str,
    out: Path,
    of_average: bool = False,
    *,
    keep_lora: bool = False,
    write_beside: Sequence[Callable[..., None]] = (),
) -> None:
    """Write engine `name` of an undamaged checkpoint to the model folder `out`.

    of_average: its weights' moving average instead
    keep_lora: the model without its adapters, and PEFT's folder of them in `out`/adapter; otherwise they are merged

    Raises ThreestepError if the checkpoint lacks any of it.
    """
    described = read_description(checkpoint / DESCRIPTIONS / name)
    if keep_lora and not described.has_adapters:
        raise ThreestepError(f"--keep_lora: '{name}' in {checkpoint} was trained without LoRA; leave --keep_lora out")
    state = engine_state(checkpoint / name)
    weights = {key.removeprefix(_INSIDE): tensor for key, tensor in state.items() if key.startswith(_INSIDE)}
    if of_average:
        weights |= average_weights(checkpoint, weights, described.trained)
    _fill(described, weights, checkpoint)
    model = described.model
    processor = processor_files(checkpoint / DESCRIPTIONS / name)
    tensors = dict(full_tensors(model, 0, merged=not keep_lora))
    save_model(out, model, tensors, described.tokenizer, write_more=lambda folder: copy_files(processor, folder))
    for write in write_beside:
        write(checkpoint, name, state, described.dtype, out=out)
    if keep_lora:
        adapters_of(model).save(model, out / "adapter", base=out)


def average_weights(
    checkpoint: Path, weights: dict[str, torch.Tensor], trained: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The trained weights' moving averages, float32: the ranks' shares joined."""
    ranks = len(list(checkpoint.glob("average_*.safetensors")))
    if ranks == 0:
        raise ThreestepError(
            f"--part average: {checkpoint} has no average because the run did not use --enable_ema; choose another "
            "--part"
        )
    ranks_shares = [saved_shares(checkpoint, "average", rank) for rank in range(ranks)]
    averages = {}
    for index, name in enumerate(trained):
        flat = torch.cat([shares[index] for shares in ranks_shares])
        averages[name] = flat[: weights[name].numel()].view(weights[name].shape)
    return averages


def _fill(described: DescribedModel, weights: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Replace the model's empty weights by `weights`, each in the dtype that it trained in."""
    model = described.model
    typed = {
        name: weight.to(described.dtype_of(name)) if weight.is_floating_point() else weight
        for name, weight in weights.items()
    }
    # Buffers that are computed whenever the model is loaded are not part of a state, and stay empty.
    tied = getattr(model, "all_tied_weights_keys", {})  # by this model's configuration, not by its family alone
    missing = sorted(model.state_dict().keys() - typed.keys() - tied.keys())
    if missing:
        raise ThreestepError(
            f"{checkpoint} lacks {len(missing)} of its model's weights, such as {missing[0]}: the installed "
            "transformers or peft names them differently; export with the versions that the run used"
        )
    try:
        unknown = sorted(model.load_state_dict(typed, strict=False, assign=True).unexpected_keys)
    except RuntimeError as problem:
        line = str(problem).strip().splitlines()[-1].strip()
        raise ThreestepError(
            f"{checkpoint} has weights whose sizes differ from those in the model's configuration: {line}"
        ) from problem
    if unknown:
        raise ThreestepError(
            f"{checkpoint} has {len(unknown)} weights that its model does not have, such as {unknown[0]}: the "
            "installed transformers or peft names them differently; export with the versions that the run used"
        )
    model.tie_weights()
