"""Launched on two or four ranks: engine_program's cases, each row over `size` ranks (`--sequence_parallel_size`).

Arguments and report: as engine_program's; and "refused", what the check at the start says of a wrong exchange.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.invariants.engine_program import LORA_DIM, Case, regularized


@dataclass(frozen=True)
class SlicedCase:
    """A case on groups of `size` ranks."""

    size: int
    case: Case


# Which run unless it is the long form, on two ranks.
ORDINARY = """
    packed_dpo_z3 packed_ranking_z2 padded_sft_z1 shared_sft regularized balanced_sft_z3
""".split()


def cases(world_size: int) -> list[SlicedCase]:
    """Steps 1 and 2 at every ZeRO stage, packed and padded, and what else touches a forward. Four ranks are one group
    of four and two of two; models have two key-value heads."""
    packed = Case("", packed=True, micro=6)
    kinds = {"sft": "causal", "dpo": "causal", "ranking": "scalar", "kto": "causal"}
    found = [
        replace(packed, name=f"packed_{kind}_z{stage}", kind=kind, model=model, zero_stage=stage)
        for kind, model in kinds.items()
        for stage in range(4)
    ]
    found += [Case(f"padded_{kind}_z1", kind, model, zero_stage=1, micro=2) for kind, model in kinds.items()]
    found += [
        replace(packed, name="packed_in_turns", micro=1, checkpointing=True, zero_stage=3),
        replace(packed, name="tiles", checkpointing=True, zero_stage=3, tiles=3),
        replace(packed, name="untied", model="untied", zero_stage=2),
        replace(packed, name="offload", offload=True, zero_stage=2),
        replace(packed, name="offload_z3", offload=True, zero_stage=3),
        replace(packed, name="bf16", dtype="bf16", zero_stage=2),
        replace(packed, name="shared_sft", rows="conversations", shared=4),
        replace(packed, name="shared_dpo", rows="conversations", shared=4, kind="dpo", zero_stage=2),
        replace(packed, name="margins", kind="ranking", model="scalar", rows="margins"),
        replace(packed, name="one_a_step", per_step=1, zero_stage=2),
        replace(packed, name="mixture", model="mixture", router_coef=0.0, zero_stage=2),
        regularized("regularized", 3, packed=True, micro=6),
        regularized("regularized_lora", 2, lora_dim=LORA_DIM, checkpointing=True, packed=True, micro=6),
    ]
    found += [replace(packed, name=family, model=family) for family in ("qwen3", "gpt2", "opt", "gemma3_text")]
    mixtures = (("sft", "", 0), ("dpo", "", 1), ("ranking", "_scalar", 2), ("sft", "", 3))
    several = replace(packed, micro=2)  # micro-batches, whose load is counted before the first backward
    found += [
        replace(several, name=f"balanced_{kind}_z{stage}", kind=kind, model=f"mixture{form}", zero_stage=stage)
        for kind, form, stage in mixtures
    ]
    mixture = replace(packed, model="mixture")
    found += [
        replace(mixture, name="balanced_at_once", zero_stage=3),
        replace(mixture, name="balanced_padded", packed=False, micro=2, checkpointing=True),
        replace(mixture, name="balanced_wide", model="mixture_wide", zero_stage=3),
        replace(mixture, name="balanced_shared", rows="conversations", shared=4, zero_stage=2),
        replace(mixture, name="balanced_lora", lora_dim=LORA_DIM, lora_part="self_attn", checkpointing=True),
    ]
    sizes = [size for size in (2, 4) if world_size % size == 0]
    return [
        SlicedCase(size, replace(case, name=case.name if size == world_size else f"{case.name}_two_groups"))
        for size in sizes
        for case in found
    ]


def wanted(world_size: int, is_long: bool) -> list[SlicedCase]:
    """The cases that are run."""
    return [each for each in cases(world_size) if is_long or each.case.name in ORDINARY]


def main(models: Path, out: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from tests.invariants.engine_program import run_case
    from tests.support.shared_rows import sharing_rows
    from training.utils.engine.ranks.startup import started_process_group

    found = {}
    with started_process_group() as ranks:
        for each in wanted(ranks.world_size, is_long):
            found[each.case.name] = run_case(each.case, models, out, sharing_rows(ranks, each.size))
        found["refused"] = refused(models, sharing_rows(ranks, ranks.world_size))
    report(found)


def refused(models: Path, ranks: Any) -> str:
    """Return the sentence of a run in which the output of each head is taken for the next one's."""
    from tests.invariants.engine_program import LONGEST, make_engine
    from threestep.plugins.long_rows import attention
    from training.utils.base.errors import ThreestepError
    from training.utils.setup.setup import may_pack

    engine, model = make_engine(Case("refused"), models, ranks)
    whole = attention.slices_of_rows
    try:
        with mock.patch.object(attention, "slices_of_rows", lambda *given: whole(*given).roll(1, 2)):
            may_pack(False, model, engine, lambda rows: engine(rows).logprobs_M, longest_tokens=LONGEST, log=print)
    except ThreestepError as refusal:
        return str(refusal)
    finally:
        ranks.leaving.close()
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["long"])
