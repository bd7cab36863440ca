"""What the ranks write into a checkpoint's folder, and load from it: engines, the moving average, generators.

model/ (step 3: actor/, critic/)   DeepSpeed's own files
average_0.safetensors, ...         each rank's share of the moving average
random_0.json, ...                 each rank's generators
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.utils.engine import universal
from training.utils.engine.collectives import barrier, gathered, on_main, wait_for_main
from training.utils.engine.startup import Ranks
from training.utils.engine.training_engine import TrainingEngine
from training.utils.engine.weight_average import WeightAverage
from training.utils.run.errors import ThreestepError
from training.utils.run.seeds import random_state, seed_everything, set_random_state


@dataclass(frozen=True)
class Parts:
    """Those of one run. average: None where it keeps none. Every method is a collective."""

    engines: Mapping[str, TrainingEngine]
    average: WeightAverage | None
    ranks: Ranks

    def write(self, folder: Path) -> str | None:
        """Write every rank's files; return what a disk refused, None where all was written. `folder` has a folder for
        each engine."""
        refusals: list[str] = []
        for name, engine in self.engines.items():
            _save_engine(engine, folder, name, refusals)
        with noting(refusals):
            if self.average is not None:
                _save_average(self.average, _average_file(folder, self.ranks.rank))
            _random_file(folder, self.ranks.rank).write_text(json.dumps(random_state()), encoding="utf-8")
        return agreed(refusals)

    def load(self, folder: Path) -> None:
        """Take up what as many ranks wrote, with the same ZeRO stages."""
        for name, engine in self.engines.items():
            loaded, _ = engine.engine.load_checkpoint(str(folder), tag=name)
            if loaded is None:
                raise ThreestepError(f"--resume: DeepSpeed finds no state of '{name}' in {folder}")
        if self.average is not None:
            self.average.load_state(_read_average(_average_file(folder, self.ranks.rank)))
        self._load_random(folder)

    def load_elsewhere(self, folder: Path, beside: Path, saved_ranks: int, seed: int) -> None:
        """Take up what `saved_ranks` ranks wrote, whatever their ZeRO stages, by way of the folder `beside`.

        The generators go on where there are as many ranks; otherwise they begin anew, from `seed` and the rank.
        """
        on_main(lambda: self._convert(folder, beside), self.ranks.is_main, patient=True)
        for name, engine in self.engines.items():
            universal.load(engine, beside, name)
        if self.average is not None:
            self.average.load_whole([_read_average(_average_file(folder, rank)) for rank in range(saved_ranks)])
        if saved_ranks == self.ranks.world_size:
            self._load_random(folder)
        else:
            seed_everything(seed, self.ranks.rank)
        barrier()
        if self.ranks.is_main:
            shutil.rmtree(beside, ignore_errors=True)

    def _convert(self, folder: Path, beside: Path) -> None:
        shutil.rmtree(beside, ignore_errors=True)
        for name, engine in self.engines.items():
            universal.convert(folder / name, beside / name, engine)

    def _load_random(self, folder: Path) -> None:
        set_random_state(json.loads(_random_file(folder, self.ranks.rank).read_text(encoding="utf-8")))


@contextlib.contextmanager
def noting(refusals: list[str]) -> Iterator[None]:
    """What a disk refuses inside is noted, not raised: a rank that left would let the others wait for it."""
    try:
        yield
    except OSError as problem:
        refusals.append(": ".join(str(part) for part in (problem.filename, problem.strerror or problem) if part))


def agreed(refusals: list[str]) -> str | None:
    """The first refusal of any rank, on every rank. A collective, before which rank 0 may work on files for long."""
    wait_for_main()
    return next((refusal for own in gathered(refusals) for refusal in own), None)


def _save_engine(engine: TrainingEngine, folder: Path, name: str, refusals: list[str]) -> None:
    keeper = engine.engine.checkpoint_engine
    save: Callable[..., Any] = keeper.save
    commit: Callable[..., Any] = keeper.commit

    def noting_save(state_dict: Any, path: Any) -> None:
        with noting(refusals):
            try:
                save(state_dict, path)
            except RuntimeError as problem:  # what torch.save makes of a full disk
                raise OSError(None, str(problem).splitlines()[0], str(path)) from problem

    def waiting_commit(info: Any) -> Any:
        wait_for_main()  # below stage 3 the first rank writes the weights alone; DeepSpeed's barrier comes next
        return commit(info)

    keeper.save, keeper.commit = noting_save, waiting_commit
    try:
        engine.engine.save_checkpoint(str(folder), tag=name, save_latest=False)
    finally:
        del keeper.save, keeper.commit  # the class's own again


def _random_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"random_{rank}.json"


def _average_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"average_{rank}.safetensors"


def _save_average(average: WeightAverage, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({str(index): share.contiguous() for index, share in enumerate(average.state())}, path)
    except SafetensorError as problem:
        raise OSError(None, str(problem), str(path)) from problem


def _read_average(path: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    shares = load_file(path)
    return [shares[str(index)] for index in range(len(shares))]
