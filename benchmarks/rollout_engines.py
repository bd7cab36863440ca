"""Rollout engines that measurements need, and step 3 with them:

    python -m benchmarks.rollout_engines --rollout_engine spread|watched FLAGS OF STEP 3

spread: responses of random tokens at once, their lengths spread evenly: what is left to measure follows the rollout.
watched: the usual engine, which also notes the resident memory of its rank as each rollout begins, in
OUTPUT_DIR/memory_rank0.txt and so on: the evaluation before training, every step, the evaluation after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from training.step3_ppo.main import main
from training.step3_ppo.records import Rollout
from training.step3_ppo.rollout import ENGINES
from training.step3_ppo.rollout.base import Decode, RolloutEngine, Sampling
from training.step3_ppo.rollout.hf import TransformersRollout
from training.utils.run.program import run_program

SHORTEST = 16


class SpreadRollout(RolloutEngine):
    """Lengths from 16 to max_new_tokens, evenly, in an order that the seeds draw. No model is asked."""

    def __init__(self, decode: Decode | None = None) -> None:
        pass

    def roll_out(
        self,
        model: PreTrainedModel,
        prompt_ids_BP: torch.Tensor,
        prompt_mask_BP: torch.Tensor,
        sampling: Sampling,
        seeds: Sequence[int],
        samples_per_prompt: int = 1,
    ) -> Rollout:
        started = time.perf_counter()
        count, most = len(seeds), sampling.max_new_tokens
        drawn = torch.Generator().manual_seed(seeds[0])
        even_B = torch.linspace(SHORTEST, most, count).round().long()
        lengths_B = even_B[torch.randperm(count, generator=drawn)].to(prompt_ids_BP.device)
        width = int(lengths_B.max())
        vocabulary = model.config.vocab_size
        ids_BR = torch.randint(vocabulary, (count, width), generator=drawn).to(prompt_ids_BP.device)
        # Neither ends nor pads: the workload's first two tokens.
        ids_BR = ids_BR.clamp(min=max(sampling.end_token_id, sampling.pad_token_id) + 1)
        inside_BR = torch.arange(width, device=ids_BR.device) < lengths_B.unsqueeze(1)
        return Rollout(
            prompt_ids_BP=prompt_ids_BP.repeat_interleave(samples_per_prompt, dim=0),
            prompt_mask_BP=prompt_mask_BP.repeat_interleave(samples_per_prompt, dim=0),
            response_ids_BR=ids_BR.masked_fill(~inside_BR, sampling.pad_token_id),
            response_lengths_B=lengths_B,
            sampled_logprobs_BR=torch.zeros(count, width, device=ids_BR.device),
            ended_B=torch.ones(count, dtype=torch.bool, device=ids_BR.device),
            seconds=time.perf_counter() - started,
        )


class WatchedRollout(TransformersRollout):
    """Writes a line of `resident_bytes` as each rollout begins. file: emptied at the start."""

    def __init__(self, decode: Decode | None, file: Path) -> None:
        super().__init__(decode)
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")

    def roll_out(self, *given: Any, **named: Any) -> Rollout:
        with self._file.open("a") as lines:
            lines.write("{} {}\n".format(*resident_bytes()))
        return super().roll_out(*given, **named)


def memory_file(output_dir: str | Path, rank: int) -> Path:
    return Path(output_dir) / f"memory_rank{rank}.txt"


def resident_bytes() -> tuple[int, int]:
    """Of this process: all, and the anonymous part, what it wrote itself (proc(5), status: VmRSS, RssAnon). The rest is
    pages of files, libraries mostly, which the system takes back when it likes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    everything, own = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    return everything, own


def main_with_engines(argv: Sequence[str]) -> None:
    """Step 3's main, to which the table of engines names these two as well."""
    output_dir = argv[list(argv).index("--output_dir") + 1]
    file = memory_file(output_dir, int(os.environ.get("RANK", "0")))
    ENGINES["spread"] = SpreadRollout
    ENGINES["watched"] = lambda decode: WatchedRollout(decode, file)
    main(argv)


if __name__ == "__main__":
    run_program(main_with_engines)
