"""A checkpoint's weights as a model folder, on one process and without an engine.

The model is put together as it was trained, adapters beside the weights, and then read out and saved by what the end of
a run calls: `full_tensors` and `save_model`. Whole weights (ZeRO 0, 1, 2) are read as tensors alone. Shards of ZeRO-3
are put together by DeepSpeed's own zero_to_fp32, which unpickles: call this after every byte was compared with the
checkpoint's manifest, and on checkpoints that a run of one's own wrote.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch

from training.utils.engine.training_engine import TrainingEngine, full_tensors
from training.utils.models.description import DescribedModel, read_description, write_description
from training.utils.models.saving import save_adapter, save_model
from training.utils.run.errors import ThreestepError

_DESCRIPTIONS = "models"
_WHOLE = "mp_rank_00_model_states.pt"  # DeepSpeed's names (deepspeed 0.19, engine.py: _get_ckpt_name)
_SHARD = "zero_pp_rank_0_mp_rank_00_model_states.pt"
_INSIDE = "model."  # PolicyModel and ScalarModel hold the transformers model under this name


def describe_engine(checkpoint: Path, name: str, engine: TrainingEngine, tokenizer: Any) -> None:
    """Write beside an engine's state what an export needs besides. On rank 0 alone."""
    model: Any = engine.module.model
    write_description(checkpoint / _DESCRIPTIONS / name, model, tokenizer)


def described_engines(checkpoint: Path) -> list[str]:
    """The names of the engines of a checkpoint that can be exported."""
    return sorted(path.name for path in (checkpoint / _DESCRIPTIONS).glob("*"))


def export_model(checkpoint: Path, name: str, out: Path, of_average: bool = False, keep_lora: bool = False) -> None:
    """Write engine `name` of an undamaged checkpoint to the model folder `out`.

    of_average: the moving average of its weights in their place. keep_lora: the weights below the adapters as the
    model, and the adapters as PEFT keeps them in `out`/adapter; otherwise they are merged. Raises ThreestepError where
    the checkpoint lacks what is asked for.
    """
    described = read_description(checkpoint / _DESCRIPTIONS / name)
    if keep_lora and not described.has_lora:
        raise ThreestepError(f"--keep_lora: '{name}' of {checkpoint} was trained without LoRA; leave the flag out")
    weights = engine_weights(checkpoint / name)
    if of_average:
        weights |= average_weights(checkpoint, weights, described.trained)
    _fill(described, weights, checkpoint)
    model = described.model
    if keep_lora:
        save_model(out, model, dict(full_tensors(model, 0, merged=False)), described.tokenizer)
        save_adapter(out / "adapter", model, base=out)
    else:
        save_model(out, model, dict(full_tensors(model, 0)), described.tokenizer)


def engine_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights and buffers in DeepSpeed's checkpoint `folder` under the model's own names; ZeRO-3's in float32."""
    if (folder / _WHOLE).is_file():
        found = torch.load(folder / _WHOLE, map_location="cpu", weights_only=True, mmap=True)["module"]
    elif (folder / _SHARD).is_file():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name)
    else:
        raise ThreestepError(f"{folder} holds neither {_WHOLE} nor {_SHARD}: no checkpoint that DeepSpeed wrote")
    return {name.removeprefix(_INSIDE): tensor for name, tensor in found.items() if name.startswith(_INSIDE)}


def average_weights(
    checkpoint: Path, weights: dict[str, torch.Tensor], trained: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The trained weights' moving averages, float32: the ranks' shares (see WeightAverage) in a row."""
    from safetensors.torch import load_file

    ranks = len(list(checkpoint.glob("average_*.safetensors")))
    if ranks == 0:
        raise ThreestepError(f"{checkpoint} holds no moving average: the run had no --enable_ema; leave 'average' out")
    shares = [load_file(checkpoint / f"average_{rank}.safetensors") for rank in range(ranks)]
    averages = {}
    for index, name in enumerate(trained):
        flat = torch.cat([share[str(index)] for share in shares])
        averages[name] = flat[: weights[name].numel()].view(weights[name].shape)
    return averages


def _fill(described: DescribedModel, weights: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Put `weights` in the place of the model's empty ones, in the dtype that it trained in."""
    model = described.model
    typed = {
        name: weight.to(described.dtype) if weight.is_floating_point() else weight for name, weight in weights.items()
    }
    # Buffers that are made anew whenever the model is loaded are no part of a state, and stay empty.
    missing = sorted(model.state_dict().keys() - typed.keys() - set(getattr(model, "_tied_weights_keys", None) or ()))
    if missing:
        raise ThreestepError(
            f"{checkpoint} lacks {len(missing)} weights of its model, the first of them {missing[0]}: the installed "
            "transformers or peft names them otherwise than those of the run; export with the run's own versions"
        )
    model.load_state_dict(typed, strict=False, assign=True)
    model.tie_weights()
