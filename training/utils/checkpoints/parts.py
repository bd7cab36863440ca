"""The parts of a checkpoint's folder, written and loaded by all ranks: engines, other weights, generators.

model/ (step 3: actor/, critic/)   DeepSpeed's own files
models/model/, ...                 what an export needs besides: configuration, tokenizer, processor
NAME_0.safetensors, ...            each rank's share of other weights (`OtherWeights`)
random_0.json, ...                 each rank's generators
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import disk_errors
from training.utils.base.seeds import random_state, set_random_state
from training.utils.checkpoints.folder import as_written, check_keys, read_record
from training.utils.engine.checkpoint_files import load_engine
from training.utils.engine.ranks.collectives import gathered, wait_for_main
from training.utils.loading.saving import write_description
from training.utils.models.families import copy_files

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.guests import OtherWeights
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine

DESCRIPTIONS = "models"  # a folder for each engine: what an export needs besides its state


@dataclass(frozen=True)
class CheckpointParts:
    """The trained and kept parts of a run. Every method but `describe` is a collective.

    others: further weights of the first model
    tokenizers: by the engines' names, for `threestep export`
    processor: files of the processor that belongs to the models, for the same
    """

    engines: Mapping[str, TrainingEngine]
    ranks: Ranks
    others: Sequence[OtherWeights] = ()
    tokenizers: Mapping[str, Any] = field(default_factory=dict)
    processor: Sequence[Path] = ()

    def write(self, folder: Path) -> str | None:
        """Write every rank's files to `folder`, which has a folder for each engine; return the first disk error."""
        errors: list[str] = []
        for name, engine in self.engines.items():
            _save_engine(engine, folder, name, errors)
        with collected_disk_errors(errors):
            for each in self.others:
                _save_shares(each.shares, _shares_file(folder, each.name, self.ranks.rank))
            _random_file(folder, self.ranks.rank).write_text(json.dumps(random_state()), encoding="utf-8")
        return _first_disk_error(errors)

    def describe(self, folder: Path) -> None:
        """Write the files that an export needs besides the engines'. On rank 0 alone."""
        for name in self.engines.keys() & self.tokenizers.keys():
            model: Any = self.engines[name].module.model
            write_description(folder / DESCRIPTIONS / name, model, self.tokenizers[name])
            copy_files(self.processor, folder / DESCRIPTIONS / name)

    def load(self, folder: Path) -> None:
        """Load the files of the same number of ranks, with the same ZeRO stages."""
        for name, engine in self.engines.items():
            load_engine(engine.engine, folder, name)
        for each in self.others:
            each.load_state(saved_shares(folder, each.name, self.ranks.rank))
        self.load_random(folder)

    def load_random(self, folder: Path) -> None:
        """Load this rank's generators, saved by the same number of ranks."""
        path = _random_file(folder, self.ranks.rank)
        saved = read_record(path)
        check_keys(saved, ("python", "numpy", "torch", "cuda"), str(path))
        with as_written(str(path)):
            set_random_state(saved)


@contextlib.contextmanager
def collected_disk_errors(errors: list[str]) -> Iterator[None]:
    """Disk errors inside are collected, not raised: if one rank left, the others would wait for it."""
    try:
        yield
    except OSError as problem:
        errors.append(": ".join(str(part) for part in (problem.filename, problem.strerror or problem) if part))


def disk_error_of(action: Callable[[], Any], is_main_rank: bool) -> str | None:
    """Do something on rank 0; return its disk error, if any, on every rank. A collective."""
    errors: list[str] = []
    if is_main_rank:
        with collected_disk_errors(errors):
            action()
    return _first_disk_error(errors)


def _first_disk_error(errors: list[str]) -> str | None:
    """The first error of any rank, on every rank. A collective, before which rank 0 may work on files for long."""
    wait_for_main()
    return next((error for own in gathered(errors) for error in own), None)


def _save_engine(engine: TrainingEngine, folder: Path, name: str, errors: list[str]) -> None:
    keeper = engine.engine.checkpoint_engine
    save: Callable[..., Any] = keeper.save
    commit: Callable[..., Any] = keeper.commit
    makedirs: Callable[..., Any] = keeper.makedirs

    def collecting_save(state_dict: Any, path: Any) -> None:
        with collected_disk_errors(errors):
            save(state_dict, path)

    def collecting_makedirs(path: Any, exist_ok: bool = False) -> None:
        with collected_disk_errors(errors):
            makedirs(path, exist_ok=exist_ok)

    def waiting_commit(info: Any) -> Any:
        wait_for_main()  # below stage 3 only the first rank writes the weights; DeepSpeed's barrier is next
        return commit(info)

    keeper.save, keeper.commit, keeper.makedirs = collecting_save, waiting_commit, collecting_makedirs
    try:
        engine.engine.save_checkpoint(str(folder), tag=name, save_latest=False)
    finally:
        del keeper.save, keeper.commit, keeper.makedirs  # the class's methods are visible again


def _random_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"random_{rank}.json"


def _shares_file(checkpoint: Path, name: str, rank: int) -> Path:
    return checkpoint / f"{name}_{rank}.safetensors"


def saved_shares(checkpoint: Path, name: str, rank: int) -> list[torch.Tensor]:
    """A rank's shares of other weights."""
    from safetensors.torch import load_file

    shares = load_file(_shares_file(checkpoint, name, rank))
    return [shares[str(index)] for index in range(len(shares))]


def _save_shares(shares: Sequence[torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    with disk_errors(path):
        save_file({str(index): share.contiguous() for index, share in enumerate(shares)}, path)
