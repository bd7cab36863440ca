"""Two ranks, of which the first works on files alone now and then: the other may not yet wait in a collective, which
has a limit. Started by test_leaving.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.launch import report
from threestep.plugins.other_ranks import universal
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints import folder as checkpoint_folder
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.loop import checkpointed_run
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.checkpoints.plan import plan_checkpoints
from training.utils.engine.ranks.collectives import on_main
from training.utils.engine.ranks.startup import Ranks, started_process_group
from training.utils.engine.training_engine import TrainingEngine
from training.utils.run.run_folder import RunFolder

PLACE = Path(sys.argv[1])
WORKING = PLACE / "working"
early: list[str] = []


def slow(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, which takes its time, and a file that stands for as long."""

    def taken(*args: Any, **kwargs: Any) -> Any:
        WORKING.write_text(name)
        time.sleep(0.3)
        try:
            return act(*args, **kwargs)
        finally:
            WORKING.unlink()

    return taken


def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """`collective`, which notes where the first rank still works."""

    def entered(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)  # so that the first rank has begun
        if WORKING.exists():
            early.append(f"{name} while {WORKING.read_text()}")
        return collective(*args, **kwargs)

    return entered


class Engine:
    """As DeepSpeed saves below ZeRO-3: the first rank writes, and a barrier follows."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.engine, self.checkpoint_engine = ranks, self, self

    def save(self, content: object, path: str) -> None:
        slow("an engine saves", torch.save)(content, path)

    def commit(self, info: object) -> bool:
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        if self.ranks.is_main:
            self.checkpoint_engine.save({}, f"{folder}/{tag}/states.pt")
        self.checkpoint_engine.commit(None)
        dist.barrier()

    def full_tensors(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        dist.barrier()  # as a gather
        yield from model.named_parameters()


def engines(ranks: Ranks) -> Any:
    return {"model": Engine(ranks)}


def run(ranks: Ranks, resume: str | None, digest: Callable[[], str]) -> None:
    plan = plan_checkpoints(CheckpointArguments(resume=resume), str(PLACE / "run"), "training.a", {}, ranks=ranks)
    parts = CheckpointParts(engines(ranks), ranks)
    folder = RunFolder(PLACE / "run", ranks.is_main)
    with checkpointed_run(plan, folder, parts, "rows", model_digests={"model": digest}) as (_, saving):
        saving.save(1 if resume is None else 2, {})


def main() -> None:
    with started_process_group(901.0) as ranks:
        from deepspeed.utils.groups import _clone_world_group

        limit = _clone_world_group()._get_backend(ranks.device).options._timeout
        if ranks.is_main:
            CheckpointFolder.publish = slow("a checkpoint is published", CheckpointFolder.publish)
            checkpoint_folder.damage = slow("checksums are compared", checkpoint_folder.damage)
        for name in ("broadcast_object_list", "all_gather_object", "barrier"):
            if not ranks.is_main:
                setattr(dist, name, watched(name, getattr(dist, name)))
        run(ranks, None, slow("a model is hashed", lambda: "a" * 64))
        run(ranks, "latest", lambda: "a" * 64)

        universal.convert, universal.load = slow("a checkpoint is converted", lambda *_: None), lambda *_: None
        checkpoint = PLACE / "run" / "checkpoints" / "step_000002"
        parts = CheckpointParts(engines(ranks), ranks)
        universal.load_converted(parts, checkpoint, PLACE / "beside", saved_ranks=2, seed=0)
        said = ""
        try:
            on_main(slow("a mistake is found", mistaken), ranks.is_main, patient=True)
        except ThreestepError as mistake:
            said = str(mistake)
        if ranks.is_main:
            slow("a model is written", lambda: None)()
        TrainingEngine.full_state(Engine(ranks), torch.nn.Linear(1, 1))
        if ranks.is_main:
            slow("the last model is written", lambda: None)()
    report({"early": early, "said": said, "limit": limit.total_seconds()})


def mistaken() -> None:
    raise ThreestepError("a disk is full")


if __name__ == "__main__":
    main()
