"""DeepSpeed's checkpoint files of one engine, by DeepSpeed's own functions. Knows nothing of a run's checkpoints.

Shards are unpickled: call `convert_shards` and `joined_shards` only for a run's own folder, once its bytes are checked.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from training.utils.engine.training_engine import TrainingEngine
from training.utils.run.errors import ThreestepError

# Of weights and engine, below ZeRO-3 and in it (deepspeed 0.19, engine.py: _get_ckpt_name).
WHOLE_FILE = "mp_rank_00_model_states.pt"
SHARD_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def load_engine(engine: TrainingEngine, folder: Path, name: str) -> None:
    """Load folder/name, written by the same number of ranks in the same ZeRO stage. A collective."""
    loaded, _ = engine.engine.load_checkpoint(str(folder), tag=name)
    if loaded is None:
        raise ThreestepError(f"--resume: DeepSpeed finds no state of '{name}' in {folder}; resume from another one")


def read_file(path: Path, mmap: bool = False) -> Any:
    """Load one of DeepSpeed's files by torch's safe loader, which also gets DeepSpeed's own classes. mmap: tensors are
    read where they are used."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def convert_shards(source: Path, target: Path) -> None:
    """Write the universal checkpoint of `source`, written in ZeRO stages 1 to 3, into `target`."""
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # more would be forked from a process that has threads
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with _silence():
        ds_to_universal.main(options)


def holds_moments(folder: Path) -> bool:
    """Whether the shards in `folder` hold what Adam has counted and averaged: not before its first step."""
    shard = read_file(min(folder.glob("*_optim_states.pt")), mmap=True)["optimizer_state_dict"]
    return bool(shard["optimizer_state_dict"]["state"])


def joined_shards(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of ZeRO-3's shards in `folder`, in float32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _silence():
        return get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
