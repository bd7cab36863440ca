"""Which weights train at which rate, before DeepSpeed sees the optimizer."""

from __future__ import annotations

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.optimizers import make_optimizer
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.training_engine import TrainingEngine, _scheduler
from training.utils.models.weights import Adapters, mark_adapted

RATE, ADAPTER_RATE, DECAY = 1e-3, 5e-2, 0.1


class Factors(Adapters):
    """Two matrices beside a layer's own."""

    def __init__(self, rate: float | None) -> None:
        self.learning_rate = rate

    def holds(self, name: str) -> bool:
        return ".added_" in name


def adapted(rate: float | None) -> torch.nn.Module:
    """Its layer's own weight is frozen."""
    layer = torch.nn.Module()
    layer.own = torch.nn.Linear(3, 3)
    layer.own.weight.requires_grad_(False)
    layer.added_A, layer.added_B = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
    mark_adapted(layer, Factors(rate))
    return torch.nn.ModuleDict({"layer": layer, "score": torch.nn.Linear(3, 1)})


def rates_and_decays(module: torch.nn.Module, **settings: float) -> dict[str, tuple[float, float]]:
    engine_settings = EngineSettings(learning_rate=RATE, weight_decay=DECAY, **settings)
    groups = make_optimizer(module, engine_settings).param_groups
    of = {id(weight): (group["lr"], group["weight_decay"]) for group in groups for weight in group["params"]}
    return {name: of[id(weight)] for name, weight in module.named_parameters() if id(weight) in of}


def test_adapters_train_at_their_own_rate():
    adapters = ("layer.added_A.weight", "layer.added_B.weight")
    others = {"layer.own.bias": (RATE, 0.0), "score.weight": (RATE, DECAY), "score.bias": (RATE, 0.0)}
    assert rates_and_decays(adapted(ADAPTER_RATE)) == {
        **dict.fromkeys(adapters, (ADAPTER_RATE, DECAY)),
        **others,
    }
    assert rates_and_decays(adapted(None)) == {**dict.fromkeys(adapters, (RATE, DECAY)), **others}


def test_a_model_without_adapters_has_no_group_for_them():
    settings = EngineSettings(learning_rate=RATE)
    groups = make_optimizer(torch.nn.Linear(2, 2), settings).param_groups
    assert [group["lr"] for group in groups] == [RATE, RATE]


def test_adams_settings_reach_it():
    settings = EngineSettings(adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-3)
    for group in make_optimizer(torch.nn.Linear(2, 2), settings).param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.7), 1e-3)


@pytest.mark.parametrize("schedule", ["cosine", "polynomial"])  # one of ours, one of transformers'
def test_a_share_of_the_run_warms_up_as_its_steps_do(schedule):
    """0.25 of 10 steps is 2.5, and rounds up to 3."""

    def rates(**warmup: float) -> list[float]:
        settings = EngineSettings(learning_rate=RATE, lr_scheduler_type=schedule, **warmup)
        optimizer = make_optimizer(torch.nn.Linear(2, 2), settings)
        scheduler, found = _scheduler(optimizer, settings, total_steps=10), []
        for _ in range(10):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert rates(warmup_ratio=0.25) == rates(num_warmup_steps=3) != rates(num_warmup_steps=2)


def test_a_model_that_is_frozen_as_a_whole_is_refused():
    frozen, alone = torch.nn.Linear(2, 2).requires_grad_(False), Ranks(0, 0, 1, torch.device("cpu"))
    with pytest.raises(ThreestepError, match="^nothing to train: every weight .* frozen; unfreeze some, or train adap"):
        TrainingEngine(frozen, EngineSettings(), alone, total_steps=1)


def test_a_warm_up_as_long_as_the_run_is_all_of_it():
    """A scheduler is asked for the rate after the last step too, where nothing is left to decay over."""
    settings = EngineSettings(learning_rate=RATE, lr_scheduler_type="polynomial", num_warmup_steps=4)
    optimizer = make_optimizer(torch.nn.Linear(2, 2), settings)
    scheduler, found = _scheduler(optimizer, settings, total_steps=4), []
    for _ in range(4):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx([0.0, RATE / 4, RATE / 2, 3 * RATE / 4])
