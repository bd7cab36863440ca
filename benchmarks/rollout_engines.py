"""Rollout engines for measurements, selected as step 3's `--rollout_engine benchmarks/rollout_engines.py:NAME`.

SpreadRollout: random tokens without a model, lengths spread evenly: leaves only what follows the rollout to measure.
WatchedRollout: the default engine; it also records its rank's resident memory as each rollout begins, in the folder
that the environment variable THREESTEP_MEMORY_FOLDER names: evaluation before training, each step, evaluation after it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Decode, RolloutEngine, RolloutRequest, RolloutSettings
from training.utils.generation.decoding.hf import TransformersRollout

SHORTEST = 16
MEMORY_FOLDER = "THREESTEP_MEMORY_FOLDER"


class SpreadRollout(RolloutEngine):
    """Lengths evenly from 16 to max_new_tokens, in an order drawn from the seeds. The model is not used."""

    def roll_out(self, model: PreTrainedModel, request: RolloutRequest) -> Rollout:
        started = time.perf_counter()
        sampling, seeds = request.sampling, request.seeds
        ids_BP, mask_BP = request.repeated()
        count, most = len(seeds), sampling.max_new_tokens
        drawn = torch.Generator().manual_seed(seeds[0])
        even_B = torch.linspace(SHORTEST, most, count).round().long()
        lengths_B = even_B[torch.randperm(count, generator=drawn)].to(ids_BP.device)
        width = int(lengths_B.max())
        vocabulary = model.config.vocab_size
        ids_BR = torch.randint(vocabulary, (count, width), generator=drawn).to(ids_BP.device)
        # No end and no pad token: those are the workload's first two tokens.
        ids_BR = ids_BR.clamp(min=max(sampling.end_token_id, sampling.pad_token_id) + 1)
        inside_BR = torch.arange(width, device=ids_BR.device) < lengths_B.unsqueeze(1)
        return Rollout(
            prompt_ids_BP=ids_BP,
            prompt_mask_BP=mask_BP,
            response_ids_BR=ids_BR.masked_fill(~inside_BR, sampling.pad_token_id),
            response_lengths_B=lengths_B,
            sampled_logprobs_BR=torch.zeros(count, width, device=ids_BR.device),
            ended_B=torch.ones(count, dtype=torch.bool, device=ids_BR.device),
            seconds=time.perf_counter() - started,
        )


class WatchedRollout(TransformersRollout):
    """Writes a line of `resident_bytes` to `file`, emptied at the start, as each rollout begins."""

    def __init__(self, decode: Decode | None, file: Path) -> None:
        super().__init__(decode)
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")

    @classmethod
    def create(cls, decode: Decode | None, settings: RolloutSettings) -> WatchedRollout:
        return cls(decode, memory_file(os.environ[MEMORY_FOLDER], int(os.environ.get("RANK", "0"))))

    def roll_out(self, *given: Any, **named: Any) -> Rollout:
        with self._file.open("a") as lines:
            lines.write("{} {}\n".format(*resident_bytes()))
        return super().roll_out(*given, **named)


def memory_file(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"memory_rank{rank}.txt"


def resident_bytes() -> tuple[int, int]:
    """Of this process: all, and the anonymous part, which it wrote itself (proc(5), status: VmRSS, RssAnon). The rest
    is file pages, mostly libraries, which the system may reclaim at any time."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    everything, own = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    return everything, own
