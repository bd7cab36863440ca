"""When the routers' load is counted, and what a model without routers pays. The numbers: tests/invariants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.routers.test_routers import run, tiny
from training.utils.contracts.documents import plain
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel
from training.utils.routers.step_loss import RouterLoss, router_loss


def engine_of(model: Any) -> Any:
    """All that a router loss asks of an engine. forwards: (has gradients, targets) of each."""
    policy, forwards = PolicyModel(model), []

    def forward(rows: TokenRows) -> Any:
        forwards.append((torch.is_grad_enabled(), rows.target_ids_M.numel()))
        return policy(rows)

    class Engine(SimpleNamespace):
        __call__ = staticmethod(forward)

    return Engine(ranks=SimpleNamespace(device=torch.device("cpu"), is_main=True), forwards=forwards)


def rows_of(*lengths: int) -> list[TokenRows]:
    return [packed_rows([[plain(run(length, length, False))]], 0) for length in lengths]


def test_a_model_without_routers_pays_nothing(capsys):
    model = tiny_causal_lm("llama")
    engine = engine_of(model)
    routers = router_loss(engine, model, None)
    assert routers == RouterLoss() and capsys.readouterr().out == ""
    step = routers.of_step(rows_of(4, 5))
    assert step.part(rows_of(4)[0]) == 0.0 and step.figures("train") == {} and engine.forwards == []


def test_several_micro_batches_are_counted_first_and_one_is_not(capsys):
    model = tiny("mixtral")
    engine = engine_of(model)
    routers = router_loss(engine, model, 0.5)
    assert capsys.readouterr().out == "MixtralForCausalLM: router loss 0.5 (--router_aux_loss_coef)\n"
    together = packed_rows([[plain(run(4, 4, False))], [plain(run(6, 6, False))]], 0)
    step = routers.of_step([together])
    assert engine.forwards == []
    engine(together)
    whole = step.part(together)
    apart = rows_of(4, 6)
    step_apart = routers.of_step(apart)
    assert engine.forwards[1:] == [(False, 0), (False, 0)]
    parts = []
    for rows in apart:
        engine(rows)
        parts.append(step_apart.part(rows))
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)
    assert step_apart.figures("train") == pytest.approx(step.figures("train"), rel=1e-6)
    assert step.figures("train")["train/router_loss"] == pytest.approx(2.0 * float(whole), rel=1e-6)


def test_dropout_draws_the_same_when_the_load_is_counted():
    model = tiny("mixtral", attention_dropout=0.5).train()
    routers = router_loss(engine_of(model), model, 1.0)
    engine = routers.routed.engine
    rows = rows_of(9, 12)
    torch.manual_seed(3)
    step = routers.of_step(rows)
    total = 0.0
    for part in rows:
        engine(part)
        total += float(step.part(part))
    assert total == pytest.approx(step.figures("train")["train/router_loss"], rel=1e-6)
