"""How much of what ZeRO-3 gathers is under way before it is needed, and how many elements are whole at once, at shapes
of 7B, 13B and 70B with every width, and so every limit, scaled down, and eight layers.

    python -m tests.invariants.prefetch_program

Two ranks, layers recomputed in the backward; counted in the third step, when DeepSpeed knows the order of modules. A
line for each model with the limits of before, and with those of `zero3_limits` on a GPU of 80 GB.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

SCALE = 64  # of widths and the vocabulary
ELEMENTS = SCALE**2  # so much smaller is a matrix
LAYERS = 8
# hidden size, of the MLP, heads of queries and of keys, vocabulary
SHAPES = {
    "7B": (4096, 11008, 8, 8, 32000),
    "13B": (5120, 13824, 8, 8, 32000),
    "70B": (8192, 28672, 8, 1, 128256),
}
# DeepSpeed-Chat's two limits, beside DeepSpeed's default
BEFORE = {
    "stage3_max_live_parameters": 30_000_000,
    "stage3_prefetch_bucket_size": 30_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
_COORDINATOR = "_PartitionedParameterCoordinator__"


def main(names: list[str]) -> None:
    from tests.distributed.launch import report
    from training.utils.engine.ranks.startup import started_process_group

    with started_process_group():
        report({name: {"before": counted(name, BEFORE), "now": counted(name, limits_now(name))} for name in names})


def scaled_model(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden, inner, heads, key_heads, vocabulary = SHAPES[name]
    config = AutoConfig.for_model(
        "llama",
        hidden_size=hidden // SCALE,
        intermediate_size=inner // SCALE,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary // SCALE,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def limits_now(name: str) -> dict[str, int]:
    from training.utils.engine.zero3 import ModelSizes, model_sizes, zero3_limits

    sizes = {key: size * ELEMENTS for key, size in vars(model_sizes(scaled_model(name))).items()}
    return zero3_limits(ModelSizes(**sizes), 2, 80 * 10**9, on_gpu=True)


def counted(name: str, limits: Mapping[str, int]) -> dict[str, float]:
    """ahead: share of the gathered elements; whole: most elements at once, and bound: what --dry_run says of them, as
    of the model that is not scaled."""
    import deepspeed
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    from threestep.plugins.plan.dry_run.engine_memory import gathered_elements
    from training.utils.engine.zero3 import model_sizes

    model = scaled_model(name)
    model.gradient_checkpointing_enable()
    sizes = model_sizes(model)
    zero = {key: limit // ELEMENTS for key, limit in limits.items()}
    zero |= {"stage": 3, "reduce_bucket_size": 100_000, "stage3_param_persistence_threshold": 2 * 128}  # norms alone
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero},
        dist_init_required=False,
    )
    tally = Tally(PartitionedParameterCoordinator)
    ids = torch.arange(8).view(1, 8)
    for _ in range(3):
        tally.gathered = tally.ahead = tally.whole = 0
        with tally.counting():
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    engine.destroy()
    bound = gathered_elements(sizes.weights, sizes.module, zero, trains=True)
    return {
        "ahead": tally.ahead / tally.gathered,
        "whole": tally.whole * ELEMENTS,
        "bound": bound * ELEMENTS,
    }


class Tally:
    """Counts elements that DeepSpeed's coordinator gathers (deepspeed 0.19)."""

    def __init__(self, coordinator: Any) -> None:
        self.coordinator = coordinator
        self.gathered = self.ahead = self.whole = 0
        self._needed: set[Any] = set()

    def counting(self) -> Any:
        fetch = self.coordinator._fetch_sub_module_impl
        gather = getattr(self.coordinator, _COORDINATOR + "all_gather_params")

        def fetched(owner: Any, module: Any, forward: bool, is_leaf: bool) -> None:
            self._needed = set(module.parameters(recurse=is_leaf))
            fetch(owner, module, forward, is_leaf)

        def gathered(owner: Any, weights: Any, forward: bool) -> None:
            elements = sum(part.ds_numel for part in weights if part.ds_status.name == "NOT_AVAILABLE")
            self.gathered += elements
            self.ahead += elements if self._needed.isdisjoint(weights) else 0
            gather(owner, weights, forward)
            self.whole = max(self.whole, getattr(owner, _COORDINATOR + "n_available_params"))

        name = _COORDINATOR + "all_gather_params"
        return patch.multiple(self.coordinator, **{"_fetch_sub_module_impl": fetched, name: gathered})


def print_table() -> None:
    from tests.distributed.launch import run_ranks

    first, _ = run_ranks(Path(__file__), 2, list(SHAPES), timeout_seconds=1800)
    for name, found in first.items():
        for limits, row in found.items():
            print(f"{name:4} {limits:7} ahead {row['ahead']:.3f} whole {row['whole']:.3g} at most {row['bound']:.3g}")


if __name__ == "__main__":
    import sys

    if "RANK" in os.environ:
        main([word for word in sys.argv[1:] if word in SHAPES] or ["7B"])
    else:
        print_table()
