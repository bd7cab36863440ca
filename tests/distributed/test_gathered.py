"""What ZeRO-3 gathers ahead of a backward that does not come is waited for and released: weights can be saved, lent and
averaged at any time, and nothing stays whole."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed

PROGRAM = """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.distributed.launch import report
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.training_engine import FrozenModel
    from training.utils.engine.ranks.startup import started_process_group
    from training.utils.engine.training_engine import TrainingEngine
    from threestep.plugins.ema.weight_average import WeightAverage
    from training.utils.setup.setup import load_under

    SHAPE = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2, vocab_size=128)
    IDS = torch.arange(8).view(1, 8)

    def loaded(settings, ranks):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=True)
        return load_under(settings, ranks, lambda dtype: AutoModelForCausalLM.from_config(config, dtype=dtype))

    def loss_of(engine):
        return engine(input_ids=IDS, labels=IDS).loss

    def statuses(engine):
        weights = [weight for weight in engine.module.parameters() if not weight.ds_persist]
        return sorted({weight.ds_status.name for weight in weights})

    with started_process_group() as ranks:
        settings = EngineSettings(zero_stage=3, zero3_live_parameters=200_000)
        model = loaded(settings, ranks)
        engine = TrainingEngine(model, settings, ranks, 4)
        average = WeightAverage(engine, 0.5)
        for _ in range(3):  # from the third on, DeepSpeed gathers ahead
            engine.backward(loss_of(engine))
            engine.step()
        found = {}
        loss = loss_of(engine)
        found["before a backward"] = statuses(engine)
        saved = engine.full_state(model)
        found["saved before a backward"] = statuses(engine)
        engine.backward(loss)
        engine.step()
        after = engine.full_state(model)
        found["changed"] = sorted(name for name in saved if not torch.equal(saved[name], after[name]))
        with torch.no_grad():
            read = float(loss_of(engine))
        found["read"] = statuses(engine)
        average.update()
        loss_of(engine)
        average.put_in_place()
        engine.full_state(model)
        frozen = FrozenModel(loaded(settings, ranks), settings, ranks)
        again = [float(frozen(input_ids=IDS, labels=IDS).loss) for _ in range(3)]
        report(found | {"frozen": statuses(frozen._module), "readings": [read, *again], "weights": len(saved)})
"""


@pytest.fixture(scope="module")
def reports():
    return run_ranks(PROGRAM, 2)


def test_a_forward_that_nothing_follows_leaves_nothing_whole_or_under_way(reports):
    for found in reports:
        assert found["read"] == found["frozen"] == ["NOT_AVAILABLE"]
        assert found["saved before a backward"] == ["NOT_AVAILABLE"]


def test_what_a_backward_needs_is_under_way_before_it(reports):
    """Otherwise this file shows nothing."""
    assert all("INFLIGHT" in found["before a backward"] for found in reports)


def test_a_backward_finds_its_weights_after_they_were_saved(reports):
    first, second = reports
    assert len(first["changed"]) == first["weights"] > 0 == second["weights"]
    assert first["readings"][1:] == [first["readings"][1]] * 3 != [first["readings"][0]] * 3
