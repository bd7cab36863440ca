"""The settings of a loop are the flags; whole runs are opened and finished in tests/end_to_end."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.data_flags import data_flags
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.console import LogPace
from training.utils.contracts.guests import GuestFeature
from training.utils.engine.config.arguments import EngineArguments
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.planner import PlanSettings, forward_overhead_tokens
from training.utils.models.flops import model_shape
from training.utils.run.run_arguments import RunArguments
from training.utils.run.trackers import LogArguments
from training.utils.setup.guests import GuestFeatures
from training.utils.setup.one_model_run import loop_settings
from training.utils.setup.training_run import LoopSettings


def ranks(world_size: int = 1) -> Ranks:
    return Ranks(0, 0, world_size, torch.device("cpu"))


class OfHiddenSize64:
    """A model in all that `loop_settings` asks of one."""

    hidden_size = 64
    _attn_implementation = "sdpa"

    @property
    def config(self):
        return self

    def get_text_config(self):
        return self

    def named_modules(self):
        return iter(())

    def parameters(self):
        return [torch.zeros(1000), torch.zeros(500)]


@pytest.mark.parametrize("packed", [False, True])
def test_the_loop_is_the_flags(packed, capsys):
    engine = EngineArguments(
        per_device_train_batch_size=5, per_device_eval_batch_size=7, max_tokens_per_micro_batch=999, eval_interval=4,
        report_mfu=False, share_beginnings=32,
    )  # fmt: skip
    run = RunArguments(seed=2)
    log_flags = LogArguments(logging_seconds=2.0)
    data = data_flags(max_seq_len=200)
    flags = SimpleNamespace(run=run, engine=engine, data=data, reporting=log_flags, guests=GuestFeatures())
    loop = loop_settings(flags, (10, 15), OfHiddenSize64(), packed, ranks=ranks(3), pad_token_id=1)
    said = capsys.readouterr().out
    assert said == ("" if packed else "--share_beginnings: padded rows have one sequence each, and share nothing\n")
    each = forward_overhead_tokens(1500, on_gpu=False)
    train = PlanSettings(
        3, 999, 5, packed, max_row_tokens=200, quadratic_tokens=384.0, forward_tokens=each, least_shared_tokens=32
    )
    evaluation = PlanSettings(3, 999, 7, packed, max_row_tokens=200, quadratic_tokens=384.0, forward_tokens=each)
    rest = {
        "eval_interval": 4, "pad_token_id": 1, "seed": 2,
        "log_pace": LogPace(2.0),
    }  # fmt: skip
    assert loop == LoopSettings(10, 15, train, evaluation, **rest)
    run.shuffle = False
    assert loop_settings(flags, (10, 15), OfHiddenSize64(), packed, ranks=ranks(3), pad_token_id=1) == replace(
        loop, shuffle=False
    )


def test_forwards_on_a_cpu_are_small_where_none_is_read_twice():
    """30 x 200 tokens are above 2,048."""

    class Twice(GuestFeature):
        def reads_twice(self, model: Any) -> bool:
            return True

    engine = EngineArguments(per_device_train_batch_size=30, report_mfu=False)
    groups = {"run": RunArguments(), "engine": engine, "reporting": LogArguments()}
    model = tiny_causal_lm("llama")
    for guests, bound in ((GuestFeatures(), 2048), (GuestFeatures([GuestFeature(), Twice()]), 6000)):
        flags = SimpleNamespace(**groups, data=data_flags(max_seq_len=200), guests=guests)
        loop = loop_settings(flags, (1, 30), model, True, ranks=ranks(), pad_token_id=1)
        assert loop.train_plan.max_tokens_per_micro_batch == bound
    assert not GuestFeatures().keep_forwards_small(model, on_cpu=False, sharing=1)
    assert not GuestFeatures().keep_forwards_small(model, on_cpu=True, sharing=2)


def test_the_meter_knows_the_model_and_the_rate_of_this_machine(capsys):
    model = tiny_causal_lm("llama")
    groups = {"run": RunArguments(seed=2), "engine": EngineArguments(), "reporting": LogArguments()}
    flags = SimpleNamespace(**groups, data=data_flags(max_seq_len=20), guests=GuestFeatures())
    loop = loop_settings(flags, (1, 16), model, True, ranks=ranks(), pad_token_id=1)
    assert loop.meter is not None and loop.meter.shape == model_shape(model)
    rate = loop.meter.peak_flops_per_second
    assert 1e8 < rate < 1e15
    assert capsys.readouterr().out == (
        f"mfu: matmuls in float32 reach {rate / 1e12:.3g} TFLOP/s here; train/mfu is the share of it\n"
    )
