"""By hand, on two or more ranks: the seconds of an optimizer step on long rows, shared by all ranks and one on each.

    M=threestep.plugins.long_rows.tests.distributed.long_rows_clock
    THREESTEP_RANKS=2 python -m training.utils.run.launch $M 16384 steps=5 width=128

Arguments: tokens, then name=number for other sizes than SIZES'. Both are trained under ZeRO-3 in bfloat16 on as many
rows a step as there are ranks, in turns in one process group: the ranks of a group compute a slice of each row, one row
after the other; without groups each rank computes a row of its own. After these a step of each is profiled: the
exchange is what `_Exchange` takes forward and backward, with the copies before it and waiting for the other ranks.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from threestep.plugins.long_rows.tests.distributed.long_rows_program import SIZES, model_of, row_of

EXCHANGE = ("_Exchange", "_ExchangeBackward")


def main(argv: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from tests.support.shared_rows import sharing_rows
    from training.utils.engine.ranks.startup import started_process_group

    tokens = int(argv[0])
    sizes = {**SIZES, "steps": 3, "width": 128, "inner": 384, "heads": 2, "vocabulary": 1000}
    sizes |= {name: int(number) for name, number in (word.split("=") for word in argv[1:])}
    torch.set_num_threads(1)
    with started_process_group() as ranks:
        steps = {
            "alone": step_of(tokens, sizes, ranks),
            "shared": step_of(tokens, sizes, sharing_rows(ranks, ranks.world_size)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(sizes["steps"] + 1):  # the first is not counted
            for name in sorted(steps, reverse=turn % 2 == 1):
                dist.barrier()
                started = time.perf_counter()
                steps[name]()
                dist.barrier()
                seconds[name].append(time.perf_counter() - started)
        if ranks.rank == 0:
            print(f"{ranks.world_size} ranks, {tokens} tokens, {sizes}", flush=True)
            for name, each in seconds.items():
                print(f"  {name}: {' '.join(f'{one:.2f}' for one in each)}", flush=True)
            ratios = [one / other for one, other in zip(seconds["shared"][1:], seconds["alone"][1:], strict=True)]
            print(f"  shared / alone: median {statistics.median(ratios):.3f} of {sorted(ratios)}", flush=True)
        for name, step in steps.items():
            print(f"  rank {ranks.rank}, {name}, profiled: {profiled(step)}", flush=True)
        dist.barrier()


def step_of(tokens: int, sizes: dict[str, int], ranks: Any) -> Any:
    """A function that takes an optimizer step, and returns its loss."""
    from training.step1_sft.loss import sft_loss
    from training.utils.engine.accumulate import MicroBatch, MicroLoss, Trainee, accumulate
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.token_model import PolicyModel
    from training.utils.setup.setup import load_under

    settings = EngineSettings(dtype="bf16", zero_stage=3, learning_rate=1e-4)
    model = load_under(settings, ranks, lambda dtype: model_of(tokens, sizes).to(dtype))
    engine = TrainingEngine(PolicyModel(model, sharing=ranks.sharing), settings, ranks, 1000)
    whole = [row_of(tokens, sizes["vocabulary"]) for _ in range(ranks.world_size)]
    rows = whole if ranks.sharing.size > 1 else whole[:1]
    targets = len(whole) * len(whole[0].target_ids_M)

    def loss_of(row: Any) -> MicroLoss:
        loss = sft_loss(engine(row).logprobs_M, targets)
        return MicroLoss(loss, {"loss": loss.detach()})

    batches = [MicroBatch(row, lambda row=row: loss_of(row)) for row in rows]
    return lambda: accumulate([Trainee("sft", engine, batches)]).totals["loss"]


def profiled(step: Any) -> dict[str, float]:
    """Seconds of a step, of the exchange in it and of ZeRO-3's collectives."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        started = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - started
    found = {event.key: event.cpu_time_total / 1e6 for event in profile.key_averages()}
    named = {"exchange": EXCHANGE, "all_to_all": ("gloo:all_to_all",)}
    rest = {key: value for key, value in found.items() if key.startswith("gloo:") and "all_to_all" not in key}
    sums = {name: sum(found.get(key, 0.0) for key in keys) for name, keys in named.items()}
    return {"loss": loss, "seconds": seconds, **sums, "other collectives": sum(rest.values())}


if __name__ == "__main__":
    main(sys.argv[1:])
