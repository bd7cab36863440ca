"""Step 3 on a judge and on a served reward model: over two ranks, with a server that fails, replayed from its log, and
what is left of the key."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.end_to_end.compared import figures
from tests.end_to_end.conftest import SHARED, run_step, save_start
from tests.support.scoring_server import judged, mostly_failing, rated_by_length, scoring_server

pytestmark = [
    pytest.mark.timeout(900),  # on a busy machine
    pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the package openai"),
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
    ran = run_step(3, [*again, "--output_dir", place / "replayed"], ranks=2)
    assert ran.code == 0, ran.words
    assert weights(place / "replayed") == weights(folder) != b"" and figures(place / "replayed") == figures(folder)


@pytest.mark.long
def test_failures_of_the_server_change_nothing_but_time(place, flags):
    found = []
    for name, fails in (("failing", mostly_failing), ("sound", lambda number: 0)):
        with scoring_server(judged(rated_by_length), fails=fails) as server:
            own = [*flags, "--reward", f"judge:{judge_file(place, server.url)}", "--output_dir", place / name]
            ran = run_step(3, own, environment={"JUDGE_KEY": KEY})
            assert ran.code == 0, ran.words
        found.append((weights(place / name), figures(place / name)))
    assert found[0] == found[1]


@pytest.mark.long
def test_a_judge_that_never_answers_ends_the_run_on_both_ranks(place, flags):
    with scoring_server(judged(rated_by_length), silent=True) as server:
        file = judge_file(place, server.url, seconds=1, retries=1)
        own = [*flags, "--reward", f"judge:{file}", "--output_dir", place / "silent"]
        ran = run_step(3, own, ranks=2, environment={"JUDGE_KEY": KEY})
    assert ran.code != 0 and ran.stderr.count("error: the reward 'lengths' has no verdict on prompt ") == 1, ran.words
    assert "no answer" in ran.stderr and KEY not in ran.words
