"""Step 3 on a judge and on a served reward model: over two ranks, with a server that fails, replayed from its log, and
what is left of the key."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.compared import figures
from tests.end_to_end.conftest import SHARED, run_step, save_start
from tests.support.scoring_server import judged, mostly_failing, rated_by_length, scoring_server

pytestmark = [
    pytest.mark.timeout(900),  # on a busy machine
]
KEY = "sk-planted-in-the-environment"


@pytest.fixture(scope="module")
def flags(place, pairs_file) -> list[object]:
    return [
        *("--actor_model_name_or_path", save_start(place / "start_of_judges", pad_is_eos=True)),
        *("--data_path", f"jsonl:{pairs_file}", "--data_output_path", place / "judges_cache", *SHARED.split()),
        *"--dtype fp32 --actor_learning_rate 1e-3 --max_train_steps 2 --max_answer_seq_len 8 --advantage rloo".split(),
        *"--num_samples_per_prompt 2 --per_device_generation_batch_size 4 --per_device_training_batch_size 8".split(),
    ]


def judge_file(place: Path, url: str, **changes: object) -> Path:
    settings = {"model": "tiny", "base_url": f"{url}/v1", "rubric": "Longer is better.", "pause": 0.01}
    path = place / "lengths.yaml"
    path.write_text(json.dumps({**settings, "key_variable": "JUDGE_KEY", **changes}))
    return path


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def left_by(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_two_ranks_ask_each_response_once_and_a_replay_ends_with_the_same_weights(place, flags):
    """Three of ten requests fail, which leaves no trace in what is trained."""
    folder = place / "judged"
    with scoring_server(judged(rated_by_length), fails=mostly_failing) as server:
        own = [*flags, "--reward", f"judge:{judge_file(place, server.url)}", "--output_dir", folder]
        ran = run_step(3, own, ranks=2, environment={"JUDGE_KEY": KEY})
        assert ran.code == 0, ran.words
        answered = Counter(body["messages"][-1]["content"] for body in server.answered)
        assert set(answered.values()) == {1} and len(server.asked) > len(server.answered) > 20
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY.encode() not in left_by(folder) and KEY not in ran.words
    lines = [
        line for rank in (0, 1) for line in (folder / f"verdicts/lengths.rank{rank}.jsonl").read_text().splitlines()
    ]
    assert len(lines) == len(answered) and sum(json.loads(line)["requests"] for line in lines) == len(server.asked)
    trained = [line for line in figures(folder) if "rollout/score" in line]
    assert len(trained) == 2 and all(line["reward/lengths"] == line["rollout/score"] for line in trained)
    # Nobody listens any more, and there is no key.
    again = [*flags, "--reward", f"judge:{place / 'lengths.yaml'}", "--reward_replay", folder]
    ran = run_step(3, [*again, "--output_dir", place / "judged_again"], ranks=2)
    assert ran.code == 0, ran.words
    assert weights(place / "judged_again") == weights(folder) != b"" and figures(place / "judged_again") == figures(
        folder
    )


@pytest.mark.long
def test_a_judge_that_never_answers_ends_the_run_on_both_ranks(place, flags):
    with scoring_server(judged(rated_by_length), silent=True) as server:
        file = judge_file(place, server.url, seconds=1, retries=1)
        own = [*flags, "--reward", f"judge:{file}", "--output_dir", place / "silent"]
        ran = run_step(3, own, ranks=2, environment={"JUDGE_KEY": KEY})
    assert ran.code != 0 and ran.stderr.count("error: the reward 'lengths' has no verdict on prompt ") == 1, ran.words
    assert "no answer" in ran.stderr and KEY not in ran.words


@pytest.fixture(scope="module")
def reward_model(place) -> Path:
    """A scalar model of random weights with the actor's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = save_start(place / "served_reward_model", with_weights=False)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def served(folder: Path, log: Path, *words: str) -> Iterator[tuple[str, str]]:
    """What `threestep serve` or `serve-reward` says once it serves, and its key."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("THREESTEP_API_KEY", None)
    command = [sys.executable, "-m", "threestep", words[0], str(folder), "--port", "0", *words[1:]]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while "key: " not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        said = log.read_text()
        assert "key: " in said, said
        yield said.partition("http://")[2].split()[0], said.partition("key: ")[2].split()[0]
    finally:
        process.terminate()
        assert process.wait(60) == 0


def scores(folder: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_served_reward_model_is_the_local_one(place, flags, reward_model):
    """Its scores to 1e-5 on every sample, from the tokens as they were drawn; with equal bits, equal weights."""
    common = [*flags, "--clip_reward", 1000, "--actor_model_name_or_path", save_start(place / "start_of_served")]
    local = run_step(3, [*common, "--critic_model_name_or_path", reward_model, "--output_dir", place / "local"])
    assert local.code == 0, local.words
    with served(reward_model, place / "serve_reward.log", "serve-reward") as (address, key):
        own = [*common, "--reward", f"http:http://{address}", "--output_dir", place / "remote"]
        ran = run_step(3, own, environment={"THREESTEP_API_KEY": key})
        assert ran.code == 0, ran.words
        wrong = [*common, "--reward", f"http:http://{address}", "--output_dir", place / "wrong"]
        refused = run_step(3, wrong, environment={"THREESTEP_API_KEY": "sk-another-key-of-nobody"})
        assert refused.code != 0 and "the server answered 401" in refused.words
        assert "sk-another-key-of-nobody" not in refused.words
    name = f"reward/{address.partition('/')[0].replace(':', '_')}"
    ours, theirs = scores(place / "local", "reward/model"), scores(place / "remote", name)
    assert len(ours) == len(theirs) > 20 and theirs == pytest.approx(ours, abs=1e-5)
    parts = [[line.get("rollout/score") for line in figures(place / run)] for run in ("local", "remote")]
    assert parts[1] == pytest.approx(parts[0], abs=1e-5)
    trained = [[line for line in figures(place / run) if "rollout/score" in line] for run in ("local", "remote")]
    names = ("rollout/score", "rollout/score_std", "rollout/score_min", "rollout/score_max", "rollout/advantage_std")
    if all(one[key] == other[key] for one, other in zip(*trained, strict=True) for key in names):  # the same bits
        assert weights(place / "local") == weights(place / "remote")
    assert key.encode() not in left_by(place / "remote") and key not in ran.words
    # A function that gives the same bits.
    log = [json.loads(line) for line in next((place / "remote" / "verdicts").iterdir()).read_text().splitlines()]
    known = [[line["asked"]["prompts"], line["asked"]["responses"], line["value"]] for line in log]
    assert len({(prompt, response) for prompt, response, _ in known}) == len(known)
    (place / "known.json").write_text(json.dumps(known))
    (place / "known_scores.py").write_text(KNOWN.format(file=place / "known.json"))
    again = [*common, "--reward", f"{place / 'known_scores.py'}:known", "--output_dir", place / "by_function"]
    ran = run_step(3, again)
    assert ran.code == 0, ran.words
    assert weights(place / "by_function") == weights(place / "remote")


KNOWN = """
import json

KNOWN = {{(prompt, response): value for prompt, response, value in json.load(open("{file}"))}}

def known(prompts, responses, **columns):
    return [KNOWN[each] for each in zip(prompts, responses)]
"""


@pytest.mark.long
def test_threestep_serve_is_a_judge(place, flags):
    """A model of random weights says no verdict: each question is asked again, and none is a score."""
    start = flags[1]
    with served(start, place / "serve.log", "serve", "--engine", "ours", "--served_name", "tiny") as (address, key):
        changes = {"retries": 1, "max_tokens": 4, "key_variable": "J_KEY", "question": "{prompt}{response}"}
        file = judge_file(place, f"http://{address.removesuffix('/v1')}", **changes)
        own = [*flags, "--reward", f"judge:{file}", "--output_dir", place / "by_threestep"]
        ran = run_step(3, own, environment={"J_KEY": key})
    assert ran.code != 0 and "the reply has no verdict" in ran.words and "(after 2 requests)" in ran.words
    lines = [
        json.loads(line) for line in next((place / "by_threestep" / "verdicts").iterdir()).read_text().splitlines()
    ]
    assert all("value" not in line and line["tokens"] > 16 for line in lines) and lines
    assert key not in ran.words and key.encode() not in left_by(place / "by_threestep")
