"""Launched on P ranks: the tensors of one forward and backward of a long row, whole and in slices.

Arguments: tokens (several lengths by hand: 8192,16384), then name=number for other sizes than SIZES'. Report:
{"whole" or "sliced": {"peak", "largest", "seconds"}}, bytes held at once beside weights and gradients, and of the
largest tensor. By hand, for a table:

    M=threestep.plugins.long_rows.tests.distributed.long_rows_program
    THREESTEP_RANKS=2 python -m training.utils.run.launch $M 8192,16384 whole=0
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

SIZES = {"layers": 2, "width": 32, "inner": 96, "heads": 4, "vocabulary": 4000, "tiles": 1, "recompute": 0, "whole": 1}


def main(argv: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from tests.distributed.launch import report
    from tests.invariants.peak_program import COLLECTIVES, held_for_gloo
    from threestep.plugins.long_rows.sharing import SharedRows
    from training.utils.models.row_sharing import ALONE

    lengths = [int(each) for each in argv[0].split(",")]
    sizes = {**SIZES, **{name: int(n) for name, n in (word.split("=") for word in argv[1:])}}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for name in COLLECTIVES:
            setattr(dist, name, held_for_gloo(getattr(dist, name)))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        groups = {"sliced": SharedRows(ranks).joined(rank, ranks), **({"whole": ALONE} if sizes["whole"] else {})}
        for tokens in lengths:
            found = {name: of_a_step(tokens, sizes, group) for name, group in groups.items()}
            if "THREESTEP_TEST_RESULT" in os.environ:
                report(found)
            else:
                print(f"P {ranks}, rank {rank}, {tokens} tokens, {sizes}: {found}", flush=True)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def of_a_step(tokens: int, sizes: dict[str, int], group: Any) -> dict[str, float]:
    import torch

    from tests.invariants.peak_program import memory_events, most_at_once
    from training.utils.models.token_model import PolicyModel

    rows = row_of(tokens, sizes["vocabulary"])
    model = PolicyModel(model_of(tokens, sizes), chunk_mb=1, sharing=group)
    started = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(rows).logprobs_M.sum().backward()
    seconds, weights = time.perf_counter() - started, sum(weight.nbytes for weight in model.parameters())
    events = memory_events(profile)
    return {
        "peak": most_at_once(events) - weights,
        "largest": max(event.nbytes() for event in events),
        "seconds": seconds,
    }


def row_of(tokens: int, vocabulary: int) -> Any:
    """Two documents in one row, every token a target, so that a rank has one target for each of its tokens."""
    import torch

    from training.utils.contracts.documents import TokenSequence, plain
    from training.utils.layout.rows import packed_rows

    def document(length: int) -> Any:
        ids = torch.randint(1, vocabulary, (length,), generator=torch.Generator().manual_seed(length))
        return plain(TokenSequence(ids, torch.arange(length) > 0))

    return packed_rows([[document(tokens // 4), document(tokens - tokens // 4)]], 0)


def model_of(tokens: int, sizes: dict[str, int]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from threestep.plugins.speed.arguments import SpeedArguments
    from threestep.plugins.speed.preparers import preparers
    from training.utils.flags.added import added_flags
    from training.utils.loading.models import prepared
    from training.utils.models.document_attention import use_document_attention
    from training.utils.models.settings import ModelSettings

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["width"], intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], max_position_embeddings=tokens,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    use_document_attention(model)
    added = added_flags("step1_sft")()
    added.of(SpeedArguments).mlp_tiles = sizes["tiles"]
    recompute, changes = bool(sizes["recompute"]), tuple(preparers(added, ""))
    return prepared(model, ModelSettings("made", gradient_checkpointing=recompute, preparers=changes)).train()


if __name__ == "__main__":
    main(sys.argv[1:])
