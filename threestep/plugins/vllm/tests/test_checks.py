"""What the engines of vLLM cannot go with in step 3, and what their flags do to its settings."""

from __future__ import annotations

import pytest
from transformers import Qwen2Config

from tests.support.ppo_flags import ppo_flags
from tests.unit.step3_ppo.flags.test_checks import names_of
from threestep.plugins.routers.tests.test_routers import flags_of
from threestep.plugins.speculation.settings import Speculation
from threestep.plugins.vllm import checks
from threestep.plugins.vllm.engine import VllmRollout
from threestep.plugins.vllm.servers.engine import VllmServerRollout
from training.step3_ppo.flags.checks import checked_components
from training.step3_ppo.flags.rollout_choices import draws_exactly
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.generation.table import RolloutEngineFlags, engine_class

DRAFTS = {"vllm_speculate": 2, "mtp_num_layers": 1, "rollout_engine": "vllm", "dry_run": True}

LOOKUP = "examples/environments/lookup.py:Lookup"


def test_names_stand_for_engines():
    assert (engine_class("vllm"), engine_class("vllm_server")) == (VllmRollout, VllmServerRollout)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mtp_num_layers": 0}, "--vllm_speculate 2 guesses by a head .* there is none; give .* or leave"),
        ({"rollout_engine": "hf"}, "--rollout_engine hf does not support --vllm_speculate, got 2; leave it out or use"),
        ({"rollout_engine": "vllm_server"}, "--rollout_engine vllm_server does not support --vllm_speculate, got 2; "),
        ({"speculate": "1"}, "--vllm_speculate 2 is for --rollout_engine vllm and --speculate 1 for hf; leave one of"),
        ({"rollout_replay": "there"}, "--vllm_speculate 2 draws several tokens at once, and --rollout_replay draws"),
        ({"min_p": 0.05}, r"--vllm_speculate 2 verifies drafts without min-p \(vLLM 0.32 .*, got --min_p 0.05; leave"),
        ({"vllm_tensor_parallel_size": 2}, "of the head, and --vllm_tensor_parallel_size is 2; leave one of them out"),
        ({"mtp_final_norm": False}, "--vllm_speculate 2 expects a Qwen2, .* got qwen2 with a head without a norm at"),
    ],
)
def test_what_drafts_cannot_go_with(given, said, monkeypatch):
    monkeypatch.setattr(checks, "load_config", lambda *_: Qwen2Config())
    assert names_of(**DRAFTS).loop.how == Speculation(2, name="--vllm_speculate")
    with pytest.raises(ThreestepError, match=said):
        names_of(**{**DRAFTS, **given})


def test_an_unknown_engine_is_the_only_mistake(monkeypatch):
    monkeypatch.setattr(checks, "load_config", lambda *_: Qwen2Config())
    with pytest.raises(ThreestepError) as raised:
        names_of(**{**DRAFTS, "rollout_engine": "vllmm"})
    assert "expects one of" in str(raised.value) and "does not support" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"parallel_thinking": True}, "--rollout_engine vllm does not support --parallel_thinking, got True; leave it"),
        ({"speculate": "1", "mtp_num_layers": 1}, "--rollout_engine vllm does not support --speculate, got 1; leave"),
        ({"rollouts_ahead": 1}, "--rollout_engine vllm does not support --rollouts_ahead, got 1; leave it out or use"),
        (
            {"environment": LOOKUP, "reward": "environment", "advantage": "grpo", "vllm_tensor_parallel_size": 2},
            "--vllm_tensor_parallel_size 2 has ranks draw t",
        ),
        ({"rollout_engine": "vllm_server"}, "--rollout_engine vllm_server expects --vllm_servers http://HOST:PORT"),
    ],
)
def test_what_the_engines_cannot_do(given, said):
    with pytest.raises(ThreestepError, match=said):
        names_of(**{"rollout_engine": "vllm", "dry_run": True, **given})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"vllm_speculate": 2}, "--vllm_speculate 2 drafts tokens, some of them wrong"),
        ({"vllm_tensor_parallel_size": 2}, "--vllm_tensor_parallel_size 2 has several ranks draw"),
        ({"vllm_prefix_caching": False}, "--vllm_prefix_caching false takes away the cache"),
    ],
)
def test_what_does_not_go_with_replayed_routers(given, why):
    with pytest.raises(ThreestepError) as raised:
        checked_components(flags_of(rollout_engine="vllm", **given))
    assert "--replay_routers follow" in str(raised.value) and why in str(raised.value)


def test_servers_record_experts():
    checked_components(flags_of(rollout_engine="vllm_server", vllm_servers="http://127.0.0.1:8000"))


@pytest.mark.parametrize("given", ["hf", "vllm"])
def test_flags_of_another_engine_are_refused(given: str):
    flags, mistakes = RolloutEngineFlags(), Mistakes()
    flags.vllm_server.vllm_servers = "http://127.0.0.1:8000"  # type: ignore[attr-defined]
    flags.refuse_others(given, mistakes)
    assert mistakes.sentences == [
        f"--vllm_servers: of --rollout_engine vllm_server, and it is {given}; leave out what has no effect"
    ]
    own = Mistakes()
    flags.refuse_others("vllm_server", own)
    assert own.sentences == []


def test_what_vllm_draws_is_corrected_by_default():
    assert not draws_exactly(ppo_flags(rollout_engine="vllm")) and draws_exactly(ppo_flags())
