"""Launched on two or four ranks: models in float64 on slices of rows and on whole rows, and what differs.

Report: {case: {"read", "gradient"}}, the largest difference of what a model returns, and of its gradient summed over
the group's ranks as a share of the largest; of cases named `broken_...`, whose backward is wrong on purpose, too.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

HEADS, SIZE, VOCAB = 12, 4, 29


def main() -> None:
    import torch
    import torch.distributed as dist

    from tests.distributed.launch import report
    from training.utils.sequence_parallel import exchange
    from training.utils.sequence_parallel.group import sequence_group

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, dict[str, float]] = {}
    try:
        for size in {2, ranks}:
            group = sequence_group(rank, ranks, size)
            for attention in ("sdpa", "sdpa_by_document"):
                for key_heads in (12, 3, 1):
                    model = model_of(key_heads, attention)
                    for form, rows in forms().items():
                        found[f"P{size}_{attention}_{key_heads}_{form}"] = compared(model, rows, group)
            model, rows = model_of(3, "sdpa_by_document"), forms()["packed"]
            model.gradient_checkpointing_enable()
            model.train()
            found[f"P{size}_recomputed"] = compared(model, rows, group)
            found[f"P{size}_scores"] = compared(model_of(3, "sdpa_by_document", scalar=True), rows, group)
        for name in ("_Exchange", "_Sum"):
            with broken(getattr(exchange, name)):
                found[f"broken{name}"] = compared(model_of(3, "sdpa_by_document"), rows, group)
    finally:
        report(found)
        dist.barrier()
        dist.destroy_process_group()


def broken(function: Any) -> Any:
    """Inside, a collective passes its gradient on as no other rank would: the exchange its own parts, the sum twice."""

    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        return (grad if function.__name__ == "_Exchange" else 2 * grad), None

    return mock.patch.object(function, "backward", staticmethod(backward))


def model_of(key_heads: int, attention: str, scalar: bool = False) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from training.utils.models.attention.document_attention import use_document_attention

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HEADS * SIZE,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=key_heads,
        max_position_embeddings=64,
        pad_token_id=0,
        num_labels=1,
        attn_implementation="sdpa",
        initializer_range=0.3,
    )
    model = (LlamaForSequenceClassification if scalar else LlamaForCausalLM)(config).double().eval()
    if attention != "sdpa":
        use_document_attention(model)
    return model


def forms() -> dict[str, Any]:
    """Rows of 23 tokens, which no P here divides: packed, with three responses of a prompt; padded; and one whose
    targets are all in its last slice."""
    import torch

    from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
    from training.utils.layout.rows import packed_rows

    random = torch.Generator().manual_seed(4)

    def part(tokens: int, targets: int) -> TokenSequence:
        ids = torch.randint(1, VOCAB, (tokens,), generator=random)
        return TokenSequence(ids, torch.arange(tokens) >= tokens - targets)

    shared = shared_prompt(part(5, 0), [part(4, 4), part(3, 3), part(2, 2)])
    return {
        "packed": packed_rows([[shared, plain(part(9, 6))], [plain(part(20, 12))]], 0),
        "padded": packed_rows([[plain(part(23, 9))], [plain(part(7, 5))]], 0),
        "late": packed_rows([[plain(part(23, 2))]], 0),
    }


def compared(model: Any, rows: Any, group: Any) -> dict[str, float]:
    """Differences between the model on whole rows and on slices of them."""
    import torch
    import torch.distributed as dist

    from training.utils.models.token_model import PolicyModel, ScalarModel

    def read(sequence: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own = copy.deepcopy(model)
        if hasattr(own, "score"):
            numbers = ScalarModel(own, **sequence)(rows).double()
            numbers = torch.stack([numbers, numbers])
        else:
            found = PolicyModel(own, **sequence)(rows, with_entropy=True)
            numbers = torch.stack([found.logprobs_M, found.log_normalizers_M, found.entropies_M])
        loss_of(numbers).backward()
        gradient = torch.cat([weight.grad.flatten() for weight in own.parameters() if weight.grad is not None])
        return numbers.detach(), gradient

    whole, wanted = read({})
    parts, gradient = read({"sequence": group})
    dist.all_reduce(gradient, group=group.group)
    return {
        "read": float((whole - parts).abs().max()),
        "gradient": float((wanted - gradient).abs().max() / wanted.abs().max()),
    }


def loss_of(numbers: Any) -> Any:
    """Not linear in a target: the gradient of one depends on all."""
    return (numbers[0].sum() / 10).square() + (numbers[1:] * numbers[:1]).sum() / 10


if __name__ == "__main__":
    main()
