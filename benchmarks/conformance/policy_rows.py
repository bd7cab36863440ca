"""Eight fixed responses to four prompts: what a rollout would have left, as GRPO trainers get it that take one."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.conformance.material import make_model, make_tokenizer
from benchmarks.conformance.seen import Response

POLICY: dict[str, Any] = {"beta": 0.1, "clip": 0.2, "longest": 16, "rate": 0.1}
PROMPT_WIDTH = 4
LENGTHS = (3, 16, 7, 1, 12, 5, 9, 2)
ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 1.3, -1.3, -0.7, 0.7)


def policy_rows() -> dict[str, torch.Tensor]:
    """ids_BT, response_mask_BR, old_BR and ref_BR of models near the policy, advantages_B."""
    draw = torch.Generator().manual_seed(0)
    vocabulary = len(make_tokenizer())
    ids = torch.randint(5, vocabulary - 5, (8, PROMPT_WIDTH + POLICY["longest"]), generator=draw)
    mask = torch.arange(POLICY["longest"])[None] < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        current = response_logprobs(make_model(make_tokenizer()), ids)
    old = current + 0.3 * torch.randn(current.shape, generator=draw)
    ref = current + 0.3 * torch.randn(current.shape, generator=draw)
    return {"ids": ids, "mask": mask, "old": old, "ref": ref, "advantages": torch.tensor(ADVANTAGES)}


def responses() -> list[Response]:
    """The same, one by one."""
    rows, found = policy_rows(), []
    for row, length in enumerate(LENGTHS):
        old, ref = (rows[name][row, :length] for name in ("old", "ref"))
        found.append(Response(rows["ids"][row, : PROMPT_WIDTH + length], old, ref, float(rows["advantages"][row])))
    return found


def response_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the response's places, (B, R)."""
    logits = model(input_ids=ids).logits[:, PROMPT_WIDTH - 1 : -1].log_softmax(-1)
    return logits.gather(2, ids[:, PROMPT_WIDTH:, None])[..., 0]


def policy_batches(micro_batch: int) -> list[dict[str, Any]]:
    """The inputs of TRL's loss, a dict per micro-batch; ids after a response's end are padding."""
    rows = policy_rows()
    pad = make_tokenizer().pad_token_id
    batches = []
    for start in range(0, 8, micro_batch):
        places = slice(start, start + micro_batch)
        ids = rows["ids"][places]
        mask = rows["mask"][places]
        batches.append(
            {
                "prompt_ids": ids[:, :PROMPT_WIDTH],
                "prompt_mask": torch.ones(len(ids), PROMPT_WIDTH, dtype=torch.long),
                "completion_ids": ids[:, PROMPT_WIDTH:].masked_fill(~mask, pad),
                "completion_mask": mask.long(),
                "advantages": rows["advantages"][places],
                "old_per_token_logps": rows["old"][places],
                "ref_per_token_logps": rows["ref"][places],
                "num_items_in_batch": rows["mask"].sum(),
            }
        )
    return batches
