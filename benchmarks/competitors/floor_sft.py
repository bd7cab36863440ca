"""The floor of step 1: a bare PyTorch loop on full rows of the same tokens, no mask, no padding, no engine.

    python -m benchmarks.competitors.floor_sft --workload DIR --dtype fp32 --steps 10 [--head targets] [--width 512]

--head all: loss, and so logits, on every token. --head targets: only where supervised fine-tuning has it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.workload import Workload

ROWS, WIDTH = 8, 512


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--head", default="all", choices=("all", "targets"))
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--width", type=int, default=WIDTH, help="tokens of a row")
    arguments = parser.parse_args()
    workload = Workload(Path(arguments.workload))
    ids, is_target = tokens_of(workload)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    size = arguments.rows * arguments.width
    for step in range(arguments.steps):
        started = time.perf_counter()
        here = slice(step * size, (step + 1) * size)
        rows, targets = (part[here].view(arguments.rows, arguments.width).to(device) for part in (ids, is_target))
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            hidden = model.model(input_ids=rows, use_cache=False)[0][:, :-1]
            wanted = rows[:, 1:]
            if arguments.head == "targets":
                hidden, wanted = hidden[targets[:, 1:]], wanted[targets[:, 1:]]
            logits = model.lm_head(hidden)
            loss = functional.cross_entropy(logits.flatten(0, -2).float(), wanted.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({"units": size, "seconds": time.perf_counter() - started}), flush=True)


def tokens_of(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    rows = [json.loads(line) for line in workload.sft.read_text().splitlines()]
    prompts = tokenizer([row["prompt"] for row in rows], add_special_tokens=False)["input_ids"]
    answers = tokenizer([row["chosen"] for row in rows], add_special_tokens=False)["input_ids"]
    ids, is_target = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids += prompt + answer + [tokenizer.eos_token_id]
        is_target += [False] * len(prompt) + [True] * (len(answer) + 1)
    return torch.tensor(ids), torch.tensor(is_target)


if __name__ == "__main__":
    main()
