"""The very rows that Threestep's step 1 plans, trained by bare PyTorch: what is left of its step is overhead.

    python -m benchmarks.competitors.floor_rows --workload DIR --dtype fp32 --steps 10

Only forward, backward, clipping and the optimizer are timed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.competitions import SFT_ACCUMULATION, SFT_FORWARD
from benchmarks.competitors.floor_sft import tokens_of
from benchmarks.workload import Workload
from training.step1_sft.loss import sft_loss
from training.utils.contracts.documents import Document, TokenSequence, plain
from training.utils.engine.ranks.devices import keep_freed_memory
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import forward_overhead_tokens, plan_step
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import load_causal_lm
from training.utils.models.attention import plan_for
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel

LONGEST = 512


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    workload = Workload(Path(arguments.workload))
    keep_freed_memory()  # as Threestep does
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    causal_lm = load_causal_lm(ModelSettings(str(workload.model)), dtype, 0).train().to(device)
    policy = PolicyModel(causal_lm)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    weights = sum(parameter.numel() for parameter in causal_lm.parameters())
    plan = plan_for(causal_lm, SFT_FORWARD, LONGEST, packed=True, ranks=1)
    plan = replace(plan, forward_tokens=forward_overhead_tokens(weights, on_gpu=device.type == "cuda"))
    documents = _documents(workload)
    per_step = SFT_FORWARD * SFT_ACCUMULATION
    stream = ShuffledStream(len(documents), seed=1)
    for step in range(arguments.steps):
        batch = [documents[index] for index in stream.take(step * per_step, per_step)]
        rows = plan_step([document.tokens for document in batch], plan)[0]
        laid_out = [packed_rows([[batch[index] for index in row] for row in each], 1).to(device) for each in rows]
        targets = sum(each.target_ids_M.numel() for each in laid_out)
        started = time.perf_counter()
        for each in laid_out:
            sft_loss(policy(each).logprobs_M, targets).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        print(json.dumps({"units": sum(document.tokens for document in batch), "seconds": seconds}), flush=True)


def _documents(workload: Workload) -> list[Document]:
    ids, is_target = tokens_of(workload)
    end_id = int(ids[-1])
    ends = (torch.nonzero(ids == end_id).flatten() + 1).tolist()
    return [
        plain(TokenSequence(ids[begin:end], is_target[begin:end]))
        for begin, end in zip([0, *ends], ends, strict=False)
        if end - begin <= LONGEST
    ]


if __name__ == "__main__":
    main()
