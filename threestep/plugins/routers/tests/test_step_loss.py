"""When the routers' load is counted, and what a model without routers pays. The numbers: tests/invariants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.routers.step_loss import RouterLoss, router_losses
from threestep.plugins.routers.tests.test_routers import run, tiny
from training.utils.contracts.documents import plain
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel


def engine_of(model: Any) -> Any:
    """All that a router loss asks of an engine. forwards: (has gradients, targets) of each."""
    policy, forwards = PolicyModel(model), []

    def forward(rows: TokenRows) -> Any:
        forwards.append((torch.is_grad_enabled(), rows.target_ids_M.numel()))
        return policy(rows)

    class Engine(SimpleNamespace):
        __call__ = staticmethod(forward)

    return Engine(ranks=SimpleNamespace(device=torch.device("cpu"), is_main=True), forwards=forwards)


def loss_of(engine: Any, model: Any, coefficient: float) -> RouterLoss:
    [found] = router_losses([(engine, model)], coefficient)
    assert found is not None
    return found


def forward_of(engine: Any) -> Any:
    return lambda index, rows: engine(rows)


def rows_of(*lengths: int) -> list[TokenRows]:
    return [packed_rows([[plain(run(length, length, False))]], 0) for length in lengths]


def test_a_model_without_routers_pays_nothing(capsys):
    model = tiny_causal_lm("llama")
    engine = engine_of(model)
    assert router_losses([(engine, model)], None) == [None] and capsys.readouterr().out == ""
    assert engine.forwards == []


def test_several_micro_batches_are_counted_first_and_one_is_not(capsys):
    model = tiny("mixtral")
    engine = engine_of(model)
    routers = loss_of(engine, model, 0.5)
    assert capsys.readouterr().out == "MixtralForCausalLM: router loss 0.5 (--router_aux_loss_coef)\n"
    together = packed_rows([[plain(run(4, 4, False))], [plain(run(6, 6, False))]], 0)
    step = routers.begin([together], forward_of(engine))
    assert engine.forwards == []
    engine(together)
    whole = step.loss_part(together)
    apart = rows_of(4, 6)
    step_apart = routers.begin(apart, forward_of(engine))
    assert engine.forwards[1:] == [(False, 0), (False, 0)]
    parts = []
    for rows in apart:
        engine(rows)
        parts.append(step_apart.loss_part(rows))
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)
    assert step_apart.end("train") == pytest.approx(step.end("train"), rel=1e-6)
    assert step.end("train")["train/router_loss"] == pytest.approx(2.0 * float(whole), rel=1e-6)


def test_dropout_draws_the_same_when_the_load_is_counted():
    model = tiny("mixtral", attention_dropout=0.5).train()
    routers = loss_of(engine_of(model), model, 1.0)
    engine = routers.engine
    rows = rows_of(9, 12)
    torch.manual_seed(3)
    step = routers.begin(rows, forward_of(engine))
    total = 0.0
    for part in rows:
        engine(part)
        total += float(step.loss_part(part))
    assert total == pytest.approx(step.end("train")["train/router_loss"], rel=1e-6)
