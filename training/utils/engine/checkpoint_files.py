"""DeepSpeed's checkpoint files of one engine, by DeepSpeed's functions. Knows nothing of a run's checkpoints.

What is in a file, and why none is unpickled: see `state_files`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from training.utils.base.errors import ThreestepError
from training.utils.engine.state_files import PICKLED_SUFFIX, file_of, plain_torch_files, read_state

if TYPE_CHECKING:
    from training.utils.engine.training_engine import TrainingEngine

# Of weights and engine, below ZeRO-3 and in it (deepspeed 0.19, engine.py: _get_ckpt_name).
WHOLE_FILE = "mp_rank_00_model_states.pt"
SHARD_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def load_engine(engine: TrainingEngine, folder: Path, name: str) -> None:
    """Load folder/name, written by the same number of ranks in the same ZeRO stage. A collective."""
    inner = engine.engine
    # This rank's file alone: DeepSpeed takes any whose name fits a pattern.
    rank = "0" if inner.load_universal_checkpoint() else None
    file = file_of(inner._get_ckpt_name(str(folder), name, pp_placeholder=rank))
    if not file.exists():
        raise ThreestepError(f"--resume: there is no state of '{name}' in {folder}; resume from another one")
    inner._get_all_ckpt_names = lambda folder, tag: [str(file)]
    try:
        with plain_torch_files():
            inner.load_checkpoint(str(folder), tag=name)
    finally:
        del inner._get_all_ckpt_names  # the class's method is visible again


def convert_shards(source: Path, target: Path) -> None:
    """Write the universal checkpoint of `source`, written in ZeRO stages 1 to 3, into `target`."""
    from deepspeed.checkpoint import ds_to_universal

    options = argparse.Namespace(
        input_folder="",
        output_folder=str(target),
        num_extract_workers=1,  # more would be forked from a process that has threads
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with _for_deepspeed(source) as options.input_folder:
        ds_to_universal.main(options)


def holds_moments(folder: Path) -> bool:
    """True if the shards in `folder` hold Adam's counts and averages: not before its first step."""
    shard = read_state(min(folder.glob("*_optim_states.*")), mapped=True)["optimizer_state_dict"]
    return bool(shard["optimizer_state_dict"]["state"])


def engine_state(folder: Path) -> dict[str, torch.Tensor]:
    """All weights and buffers in DeepSpeed's checkpoint `folder`, by the names of the engine's module; from ZeRO-3 in
    float32."""
    if (file := file_of(folder / WHOLE_FILE)).is_file():
        state = read_state(file, mapped=True)
        found = state.get("module") if isinstance(state, dict) else None
        if not isinstance(found, dict) or not all(isinstance(each, torch.Tensor) for each in found.values()):
            raise ThreestepError(f"{file} expects the weights of an engine, and holds something else")
        return found
    if file_of(folder / SHARD_FILE).is_file():
        return joined_shards(folder)
    raise ThreestepError(f"{folder} holds neither {WHOLE_FILE} nor {SHARD_FILE}: DeepSpeed did not write it")


def joined_shards(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of ZeRO-3's shards in `folder`, in float32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _for_deepspeed(folder) as named:
        return get_fp32_state_dict_from_zero_checkpoint(*os.path.split(named))


@contextlib.contextmanager
def _for_deepspeed(folder: Path) -> Iterator[str]:
    """A folder of links to the files in `folder`, by the names that DeepSpeed's programs look for; inside, they read
    and write plain files, and print nothing."""
    with contextlib.ExitStack() as inside:
        place = inside.enter_context(tempfile.TemporaryDirectory())
        for path in folder.iterdir():
            Path(place, path.stem + PICKLED_SUFFIX).symlink_to(path.resolve())
        inside.enter_context(plain_torch_files())
        inside.enter_context(contextlib.redirect_stdout(io.StringIO()))
        inside.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield place
