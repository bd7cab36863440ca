"""Step 3 watched: evaluation alone, greedy and by source; the training that its KL ends, and its traces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.compared import figures
from tests.end_to_end.conftest import MODULES, SHARED, run_program
from tests.end_to_end.test_resume import scorer, start  # noqa: F401  # fixtures
from tests.support.json_lines import read_lines

pytestmark = pytest.mark.timeout(900)  # on a busy machine

FLAGS = (
    "--max_train_steps 3 --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --dtype fp32 "
    "--max_answer_seq_len 8 --actor_learning_rate 1e-2 --critic_learning_rate 1e-3 --val_greedy --checker exact_match "
    "--reference_column chosen"
)
SAMPLES = 3  # of evaluation alone
PHASES = ("1_prompts", "2_rollout", "3_score", "4_read", "5_rewards", "6_advantages", "7_learn", "other")


# At first of 0 and 1 alone, so that the best of two is also the share of prompts with a right answer.
REWARD = """
calls = 0


def sized(prompts, responses, **columns):
    global calls
    calls += 1
    return [float(len(text) % 2) if calls == 1 else len(text) % 5 / 4 for text in responses]
"""


@pytest.fixture(scope="module")
def runs(place: Path, start: Path, scorer: Path, pairs_file: Path) -> dict[str, Path]:  # noqa: F811
    """Two data sources with the same prompts, so that their evaluations differ in nothing but the seeds."""
    root = place / "watching"
    root.mkdir()
    for name in ("one", "two"):
        shutil.copy(pairs_file, root / f"{name}.jsonl")
    data = ["--data_path", f"jsonl:{root}/one.jsonl", f"jsonl:{root}/two.jsonl", *SHARED.split()]
    flags = ["--actor_model_name_or_path", start, "--critic_model_name_or_path", scorer, *data, *FLAGS.split()]
    flags += ["--data_output_path", root / "cache"]
    stopped = [*flags, "--stop_kl", 1e-9, "--save_at_end"]
    wanted = {
        "only": [*flags, "--val_only", "--val_samples", SAMPLES],
        "trained": [*flags, "--val_before_train", "false", "--profile_steps", 2],
        "stopped": stopped,
        "unwatched": [*flags, "--eval_fraction", 0, "--max_train_steps", 1],
    }
    (root / "sized.py").write_text(REWARD)
    best = "--advantage reinforce++ --kl_coef 0 --val_samples 2 --eval_interval 1 --load_best_model_at_end"
    wanted["best"] = [
        *["--actor_model_name_or_path", start, *data, *FLAGS.replace("--critic_learning_rate 1e-3 ", "").split()],
        *["--data_output_path", root / "cache", "--reward", f"{root}/sized.py:sized", *best.split()],
        *["--metric_for_best_model", "reward_best@2"],
    ]
    runs = [(MODULES[3], own, root / name) for name, own in wanted.items()]
    runs.append((MODULES[3], [*stopped, "--resume"], root / "stopped"))
    assert run_program(root, "watched", 1, runs) == ["done"] * 6
    return {name: root / name for name in wanted}


def test_evaluation_alone(runs):
    folder = runs["only"]
    (line,) = figures(folder)
    samples = figures(folder, "samples.jsonl")
    assert line["step"] == 0 and not (folder / "model").exists() and not (folder / "critic").exists()
    for group, greedy in (("eval", False), ("eval_greedy", True)):
        rewards = [sample["reward"] for sample in samples if sample.get("greedy", False) is greedy]
        count = 24 if greedy else 24 * SAMPLES
        assert line[f"{group}/reward"] == pytest.approx(sum(rewards) / len(rewards)) and len(rewards) == count
        halves = [line[f"{group}_{name}.jsonl/reward"] for name in ("one", "two")]
        assert line[f"{group}/reward"] == pytest.approx(sum(halves) / 2)
    sampled = [sample for sample in samples if not sample.get("greedy")]
    by_prompt = [[own["reward"] for own in sampled if own["prompt_index"] == index] for index in range(24)]
    assert all(len(set(own)) > 1 for own in by_prompt)  # seeds of their own
    assert line["eval/reward_best@3"] == pytest.approx(sum(map(max, by_prompt)) / 24)
    assert line["eval/reward_worst@3"] == pytest.approx(sum(map(min, by_prompt)) / 24)
    assert line["eval/check_best@3_low"] <= line["eval/check_best@3"] <= line["eval/check_best@3_high"]
    assert "eval_two.jsonl/check_majority@2" in line and not any(name.startswith("eval_greedy/check_") for name in line)
    # The same prompts have the same greedy answers, and other samples.
    assert line["eval_greedy_one.jsonl/response_tokens"] == line["eval_greedy_two.jsonl/response_tokens"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_after"] == pytest.approx(line["eval/reward"]) and "reward_before" not in summary


def test_the_best_of_two_decides_by_one_name_over_a_whole_run(runs):
    """Also where rewards stop to be 0 and 1."""
    lines = [line for line in figures(runs["best"]) if "eval/reward" in line]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all("eval/reward_best@2" in line for line in lines) and not any("pass@" in name for name in lines[0])
    rewards = [sample["reward"] for sample in figures(runs["best"], "samples.jsonl")]
    assert any(reward not in (0.0, 1.0) for reward in rewards)
    best = max(lines[1:], key=lambda line: line["eval/reward_best@2"])  # a checkpoint follows a rollout
    summary = json.loads((runs["best"] / "summary.json").read_text())
    assert summary["reward_after"] == pytest.approx(best["eval/reward"])


def test_every_phase_has_its_time_and_a_chosen_rollout_its_trace(runs):
    lines = read_lines(runs["trained"] / "metrics.jsonl")
    steps = [line for line in lines if "rollout/score" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 3]  # no evaluation before
    for line in steps:
        assert all(line[f"time/{phase}"] > 0 for phase in PHASES)
        assert line["train/mfu"] > 0
    assert steps[1]["seconds"] - steps[0]["seconds"] == pytest.approx(
        sum(value for name, value in steps[1].items() if name.startswith("time/")), abs=0.05
    )
    (trace,) = (runs["trained"] / "profile").iterdir()
    assert trace.name == "step2_rank0.pt.trace.json.gz"
    assert "reward_before" not in json.loads((runs["trained"] / "summary.json").read_text())


def test_a_run_without_held_out_prompts_trains(runs):
    assert [line["step"] for line in figures(runs["unwatched"])] == [1]
    summary = json.loads((runs["unwatched"] / "summary.json").read_text())
    assert summary.keys() == {"held_out_prompts", "seconds"} and (runs["unwatched"] / "report.html").exists()


def test_the_kl_ends_the_run_as_if_it_had_been_the_last_rollout(runs):
    """The first rollout's KL is 0, the second's above the bound; the resumed run has nothing left to do."""
    lines = figures(runs["stopped"])
    assert [line["step"] for line in lines] == [0, 1, 2, 2] and "eval/reward" in lines[-1]
    assert lines[2]["rollout/kl"] > 1e-9 >= lines[1]["rollout/kl"]
    assert (runs["stopped"] / "model").exists()
    assert (runs["stopped"] / "checkpoints" / "latest").read_text() == "step_000002\n"
