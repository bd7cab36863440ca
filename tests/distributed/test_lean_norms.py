"""RMSNorms that keep less under ZeRO-3, where their weights are gone between forward and backward: the same weights
after three steps, to the bit."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed

PROGRAM = """
    import json
    import tempfile
    from pathlib import Path

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.distributed.launch import report
    from training.utils.engine.config.arguments import EngineSettings
    from threestep.plugins.deepspeed_json.users_json import UsersJson
    from training.utils.engine.ranks.startup import started_process_group
    from training.utils.engine.training_engine import TrainingEngine
    from threestep.plugins.speed.lean.forwards import keep_less
    from training.utils.setup.setup import load_under

    SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    SHAPE |= dict(num_key_value_heads=1, head_dim=16)
    SMALL = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}  # nothing stays whole
    STEPS = 3

    def trained(family, lean, frozen, settings, ranks):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SHAPE)
        model = load_under(settings, ranks, lambda dtype: AutoModelForCausalLM.from_config(config, dtype=dtype))
        norms = [part for part in model.modules() if type(part).__name__.endswith("RMSNorm")]
        if frozen:
            for norm in norms:
                norm.requires_grad_(False)
        changed = keep_less(model) if lean else 0
        engine = TrainingEngine(model, settings, ranks, STEPS)
        gone, losses = [], []
        for step in range(STEPS):
            ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(10 * step + ranks.rank))
            loss = engine(input_ids=ids, labels=ids).loss
            gone.append(sum(norm.weight.numel() == 0 for norm in norms))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return engine.full_state(model), changed, max(gone), losses

    with started_process_group() as ranks, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.json")
        path.write_text(json.dumps(SMALL))
        settings = EngineSettings(zero_stage=3, own_config=UsersJson(str(path)))
        found = {}
        for family in ("llama", "gemma2", "olmo2"):
            for frozen in (False, True):
                plain, _, _, losses = trained(family, False, frozen, settings, ranks)
                lean, changed, gone, again = trained(family, True, frozen, settings, ranks)
                differ = sorted(name for name in plain if not torch.equal(plain[name], lean[name]))
                case = f"{family} frozen" if frozen else family
                found[case] = {"differ": differ, "changed": changed, "gone": gone, "weights": len(plain)}
                found[case]["losses"] = losses == again and losses[0] != losses[-1]
        report(found)
"""
NORMS = {"llama": 5, "gemma2": 9, "olmo2": 9}


def test_a_weight_that_is_gathered_for_the_backward():
    first, second = run_ranks(PROGRAM, 2)
    assert len(first) == len(second) == 6
    for case, seen in [*first.items(), *second.items()]:
        assert seen["differ"] == [] and seen["losses"], case
        norms = NORMS[case.split()[0]]
        assert seen["changed"] == norms + 2 and seen["gone"] == norms, case  # and two gated MLPs
    assert all(seen["weights"] > 20 for seen in first.values())
