"""Step 3 by its command line with rollout servers, of which one dies: the run and its report, the key nowhere. And a
server that is cut off, in a network of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.end_to_end.conftest import SHARED, pairs_file, place, run_step, save_start  # noqa: F401  # fixtures
from threestep.plugins.vllm.tests.fake_rollout_server import KEY, FakeServer
from threestep.plugins.vllm.tests.network_cut import SECONDS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def servers():
    found = [FakeServer({"architectures": ["LlamaForCausalLM"], "longest_tokens": 100_000}) for _ in range(2)]
    yield found
    for server in found:
        server.stop()


def test_a_run_ahead_of_training_on_two_ranks(place, pairs_file, servers):  # noqa: F811
    servers[1].faults["die_after"] = 4
    flags = [
        *("--actor_model_name_or_path", save_start(place / "start_of_servers", pad_is_eos=True)),
        *("--data_path", f"jsonl:{pairs_file}", "--data_output_path", place / "servers_cache", *SHARED.split()),
        *"--actor_learning_rate 1e-3 --max_answer_seq_len 8 --num_samples_per_prompt 2 --advantage grpo".split(),
        *"--per_device_generation_batch_size 4 --per_device_training_batch_size 8 --rollouts_ahead 1".split(),
        *"--dtype fp32 --actor_zero_stage 3 --max_train_steps 3 --rollout_engine vllm_server".split(),
        *"--reward length --reward_length_characters 20".split(),
        *("--vllm_servers", ",".join(server.address for server in servers), "--rollout_timeout", 60),
    ]
    folder = place / "servers"
    ran = run_step(3, [*flags, "--output_dir", folder], ranks=2, environment={"VLLM_API_KEY": KEY})
    assert ran.code == 0, ran.words
    assert "is left out (" in ran.stdout and "Traceback" not in ran.stderr
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "rollout/servers" in line]
    assert [line["rollout/age"] for line in steps] == [0.0, 1.0] and steps[-1]["rollout/servers"] == 1
    assert sum(line["rollout/weight_megabytes_sent"] for line in steps) > 0
    assert load_file(folder / "model" / "model.safetensors")
    for path in folder.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    assert KEY not in ran.stdout + ran.stderr
    without = [word for word in flags if word != "--vllm_servers" and not str(word).startswith("http://")]
    ran = run_step(3, [*without, "--output_dir", place / "none"])
    assert ran.code != 0 and "--rollout_engine vllm_server needs --vllm_servers http://HOST:PORT" in ran.stderr


def has_namespaces() -> bool:
    return bool(shutil.which("ip")) and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="network namespaces need root and iproute2")
def test_a_server_that_is_cut_off():
    """What it had is drawn by the other one, with one sentence, within the time that a server has."""
    words = ["unshare", "--net", sys.executable, "-m", "threestep.plugins.vllm.tests.network_cut"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    in_rollout, in_transfer = json.loads(ran.stdout.splitlines()[-1])
    print(in_rollout, in_transfer)
    for found in (in_rollout, in_transfer):
        assert found["same"] and found["said"].count("is left out") == 1, found
    assert f"no answer within {SECONDS:g} seconds" in in_rollout["said"] and in_rollout["seconds"] < 2 * SECONDS + 1
    assert "(weights: it stopped receiving weights for too long" in in_transfer["said"]
    assert in_transfer["seconds"] < 2 * SECONDS + 1
