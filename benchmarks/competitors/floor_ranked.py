"""K ranked responses a prompt by bare PyTorch, in packed rows: the prompt once, or (--unshared) in every sequence.

    python -m benchmarks.competitors.floor_ranked --workload DIR --responses 4 [--unshared] --dtype fp32 --steps 10

The same rows, model and loss as step 2, without engine and loop: what sharing a prompt gains in the model itself.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer

from benchmarks.competitions import prompts_of
from benchmarks.workload import Workload
from training.step2_reward.loss import LossOptions, ranking_loss
from training.utils.contracts.documents import Document, TokenSequence, shared_prompt, unshared
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.planner import forward_plan, plan_step
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import load_scalar_model
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import ScalarModel

LONGEST = 512


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--responses", type=int, required=True)
    parser.add_argument("--unshared", action="store_true")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    workload = Workload(Path(arguments.workload))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(str(workload.model), None)
    scorer = load_scalar_model(ModelSettings(str(workload.model)), dtype, tokenizer, must_have_head=False).train()
    scorer = scorer.to(device)
    model = ScalarModel(scorer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    prompts = prompts_of(arguments.responses)
    documents = _documents(workload, arguments.responses)
    pairs = arguments.responses * (arguments.responses - 1) // 2
    for step in range(arguments.steps):
        batch = documents[step * prompts : (step + 1) * prompts]
        rows = [each.to(device) for each in _laid_out(batch, arguments.unshared, scorer.config.hidden_size, prompts)]
        started = time.perf_counter()
        scores_B = torch.cat([model(each) for each in rows])
        scores_PK = scores_B.view(-1, arguments.responses)
        gaps = [
            scores_PK[:, i] - scores_PK[:, j]
            for i in range(arguments.responses)
            for j in range(i + 1, arguments.responses)
        ]
        zeros = torch.zeros(len(gaps) * prompts, device=device)
        weights = torch.full_like(zeros, 1 / pairs)
        ranking_loss(torch.cat(gaps), zeros, zeros, weights, prompts_in_step=prompts, options=LossOptions()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({"units": pairs * prompts, "seconds": time.perf_counter() - started}), flush=True)


def _laid_out(batch: list[Document], apart: bool, hidden_size: int, prompts: int) -> list[TokenRows]:
    """All sequences of the batch in one forward. Unshared, scores come in the order of the rows, so the pairs are of
    any two sequences: the work is that of the right ones."""
    parts = [alone for document in batch for alone in unshared(document)] if apart else batch
    plan = forward_plan(prompts * 8, LONGEST, hidden_size, packed=True, ranks=1, max_tokens_per_micro_batch=10**9)
    (rows,) = plan_step([part.tokens for part in parts], plan)[0]
    return [packed_rows([[parts[index] for index in row] for row in rows], 1)]


def _documents(workload: Workload, responses: int) -> list[Document]:
    tokenizer = AutoTokenizer.from_pretrained(workload.model)

    def run(ids: list[int]) -> TokenSequence:
        return TokenSequence(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool))

    documents = []
    for line in workload.ranked(responses).read_text().splitlines()[:500]:
        row = json.loads(line)
        prompt, *others = tokenizer([row["prompt"], *row["responses"]])["input_ids"]
        if len(prompt) + max(map(len, others)) < LONGEST:
            documents.append(shared_prompt(run(prompt), [run([*ids, tokenizer.eos_token_id]) for ids in others]))
    return documents


if __name__ == "__main__":
    main()
