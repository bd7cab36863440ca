"""The long form of the tests of mixtures of experts, run by hand:

    python -m tests.mixtures packing           32 seeds of five families: none may be refused packed rows
    python -m tests.mixtures exact [RANKS]     every case of tests/invariants/test_mixture_exact.py at each ZeRO stage
    python -m tests.mixtures ppo [RANKS]       step 3 (tests/invariants/test_ppo_exact.py), at each ZeRO stage

One line is printed for each family or case; the exit code is 1 where one is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
SEEDS = 32


def packing() -> bool:
    """Ask the start-up check whether documents may share rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.families.builds import draw_weights
    from tests.families.configs import tiny_config
    from training.utils.models.layout_check import why_not_packed
    from training.utils.models.token_model import PolicyModel

    is_right = True
    for family in FAMILIES:
        reasons = []
        for seed in range(SEEDS):
            model = AutoModelForCausalLM.from_config(tiny_config(family, sliding_window=None)).eval()
            draw_weights(model, seed)
            policy = PolicyModel(model)
            reasons.append(why_not_packed(model, lambda rows, of=policy: of(rows).logprobs_M, 30, torch.device("cpu")))
        refused = [f"seed {seed}: {reason}" for seed, reason in enumerate(reasons) if reason is not None]
        sys.stdout.write(f"{family}: {len(refused)} of {SEEDS} refused {'; '.join(refused)}\n")
        is_right = is_right and not refused
    return is_right


def exact(world_size: int) -> bool:
    """Compare with plain PyTorch in float64."""
    from tests.distributed.launch import run_ranks
    from tests.invariants import engine_program, test_mixture_exact, tiny

    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        models, out = Path(folder, "models"), Path(folder, "out")
        tiny.save_models(models)
        program = Path(__file__).parent / "invariants" / "mixture_program.py"
        reports = run_ranks(program, world_size, [models, out, "every"], timeout_seconds=7200.0)
        for case in engine_program.mixture_cases(world_size, every=True):
            try:
                test_mixture_exact.check(case, models, out, reports[0][case.name])
                said = "equal"
            except AssertionError as difference:
                said, is_right = f"DIFFERENT {str(difference).splitlines()[:3]}", False
            sys.stdout.write(f"{case.name}: {said}\n")
    return is_right


def ppo(world_size: int) -> bool:
    """Compare step 3's actor and critic with plain PyTorch in float64."""
    from tests.distributed.launch import run_ranks
    from tests.invariants import ppo_program, test_ppo_exact, tiny

    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        models, out = Path(folder, "models"), Path(folder, "out")
        tiny.save_models(models)
        out.mkdir()
        program = Path(__file__).parent / "invariants" / "ppo_program.py"
        reports = run_ranks(program, world_size, [models, out, "every_mixture"], timeout_seconds=7200.0)
        for layout in ppo_program.ALL_MIXTURES:
            try:
                told = reports[0]["mixtures"][layout]
                test_ppo_exact.check_iterations(told, models, out, f"mixture_{layout}", mixture=True)
                said = "equal"
            except AssertionError as difference:
                said, is_right = f"DIFFERENT {str(difference).splitlines()[:3]}", False
            sys.stdout.write(f"{layout}: {said}\n")
    return is_right


if __name__ == "__main__":
    what, *ranks = sys.argv[1:] or [""]
    if what not in ("packing", "exact", "ppo"):
        sys.exit(__doc__)
    if what == "packing":
        sys.exit(0 if packing() else 1)
    sys.exit(0 if {"exact": exact, "ppo": ppo}[what](int(ranks[0]) if ranks else 1) else 1)
