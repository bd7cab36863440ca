"""One case of training: a random model under the project's engine, on random tokens, in a process of its own.

    python -m benchmarks.gpu_day.training_case --shape tiny --steps 3 [--zero_stage 3] [--offload] [--lora_dim 64] ...

Prints a line of JSON for each optimizer step: seconds, loss, and bytes on the GPU at most and after it. Out of memory
ends it as it ends a program: one sentence, code 2.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from tests.support.lora_settings import lora_settings
from training.utils.run.program import run_program


def main(argv: Sequence[str]) -> None:
    """Train and print."""
    arguments = _arguments(argv)
    if arguments.deterministic:
        import os

        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first product
    import torch

    from training.utils.engine.ranks.startup import started_process_group

    if arguments.deterministic:
        torch.use_deterministic_algorithms(True)
    with started_process_group() as ranks:
        for line in _steps(arguments, ranks):
            print(json.dumps(line), flush=True)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--lora_dim", type=int, default=0)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="of each row")
    parser.add_argument("--documents", type=int, default=1, help="of each row")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="deterministic kernels alone")
    parser.add_argument("--room_mb", type=int, help="memory that may still be taken once the engine is made")
    return parser.parse_args(argv)


def _steps(arguments: argparse.Namespace, ranks: Any) -> Any:
    """Yield the figures of each step."""
    import torch

    from benchmarks.gpu_day import machine
    from benchmarks.gpu_day.models import SHAPES, plain_rows
    from training.utils.layout.rows import packed_rows

    engine = engine_of(arguments, ranks)
    if arguments.room_mb is not None:
        machine.leave_room(arguments.room_mb * 2**20)
    vocabulary = SHAPES[arguments.shape][-1]
    for step in range(arguments.steps):
        documents = plain_rows(arguments.rows, arguments.tokens, arguments.documents, vocabulary, seed=step)
        rows = packed_rows(documents, 0).to(ranks.device)
        machine.wait()
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = -engine(rows).logprobs_M.mean()
        engine.backward(loss)
        engine.step()
        machine.wait()
        seconds = time.perf_counter() - started
        peak, after = 0, 0
        if ranks.device.type == "cuda":
            peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        yield {
            "seconds": seconds,
            "loss": float(loss),
            "peak_bytes": peak,
            "bytes_after": after,
            "tokens": arguments.rows * arguments.tokens,
        }


def engine_of(arguments: argparse.Namespace, ranks: Any) -> Any:
    """Return a TrainingEngine of the random model that the flags describe."""
    from benchmarks.gpu_day.models import random_model
    from threestep.plugins.kernels.flex import use_flex_attention
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.loading.models import prepared
    from training.utils.models.own_forward import read_own_forward
    from training.utils.models.token_model import PolicyModel
    from training.utils.setup.setup import load_under

    settings = EngineSettings(dtype=arguments.dtype, zero_stage=arguments.zero_stage, offload=arguments.offload)
    where = None if arguments.zero_stage == 3 else ranks.device  # born sharded: DeepSpeed puts it where it belongs
    model = load_under(settings, ranks, lambda dtype: random_model(arguments.shape, dtype, where, arguments.attention))
    read_own_forward(model, 0)
    use_flex_attention(model)
    wanted = lora_settings(
        name_or_path="", gradient_checkpointing=arguments.gradient_checkpointing, lora_dim=arguments.lora_dim
    )
    model = prepared(model, wanted)
    return TrainingEngine(PolicyModel(model), settings, ranks, max(1, arguments.steps))


if __name__ == "__main__":
    run_program(main)
