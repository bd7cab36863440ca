"""A step by its command line on one rank, on which something breaks while it trains. Started by test_faults.py.

    python -m tests.end_to_end.fault_program FAULT RANK MODULE FLAGS...

FAULT happens on RANK before its third backward: `raise`, `kill` (SIGKILL), `exit` (os._exit), `hang`, `memory` (what
the CPU's allocator says), or `none`; `slow`: RANK takes 20 seconds to publish a checkpoint, and to write the model.
"""

from __future__ import annotations

import importlib
import os
import signal
import time

from training.utils.engine.training_engine import TrainingEngine
from training.utils.run.program import run_program


def break_down(fault: str) -> None:
    if fault == "raise":
        raise ZeroDivisionError("planted: this rank fails")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        os._exit(3)
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or the launcher's SIGKILL ends it, after half a minute
        time.sleep(600)


def slow_files() -> None:
    from training.utils.checkpoints.folder import CheckpointFolder
    from training.utils.loading import saving

    def slow(write):
        def waited(*given):
            time.sleep(20)
            return write(*given)

        return waited

    CheckpointFolder.publish = slow(CheckpointFolder.publish)
    saving.save_model = slow(saving.save_model)


def main(argv: list[str]) -> None:
    fault, rank, module, *flags = argv
    backwards = []
    forward = TrainingEngine.backward

    def backward(engine, loss) -> None:
        backwards.append(loss)
        if len(backwards) == 3 and os.environ.get("RANK", "0") == rank:
            break_down(fault)
        forward(engine, loss)

    TrainingEngine.backward = backward
    if fault == "slow" and os.environ.get("RANK", "0") == rank:
        slow_files()
    if fault == "memory" and os.environ.get("RANK", "0") == rank:
        import deepspeed

        def refuse(engine, loss, **given) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

        deepspeed.DeepSpeedEngine.backward = refuse
    importlib.import_module(module).main(flags)


if __name__ == "__main__":
    run_program(main)
