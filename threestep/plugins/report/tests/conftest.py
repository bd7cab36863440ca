"""Run folders as small as they can be: a few lines of every file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

SAMPLES = [
    {"step": step, "prompt_index": index, "uid": f"u{index}", "prompt": f"Human: {index}? Assistant:",
     "response": f" {index}", "reward": reward + 0.1 * index, "response_tokens": 3 + index, "ended": index != 2,
     "ground_truth": f"{index}", "check": 0.5}
    for step, reward in ((0, 1.0), (10, 1.5), (20, 2.0))
    for index in range(8)
]  # fmt: skip


def pair_sample(step: int, index: int, chosen: float, rejected: float, **more) -> dict:
    return {
        "step": step, "uid": f"u{index}", "prompt": f"p{index}", "responses": ["good <b>", "bad"],
        "scores": [chosen, rejected], "margin": chosen - rejected, **more,
    }  # fmt: skip


PAIRS = [pair_sample(0, index, 0.5, 0.25) for index in range(12)]
PAIRS += [pair_sample(9, index, index, 8.0) for index in range(12)]


def write_lines(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def sft_run(tmp_path) -> Callable[..., Path]:
    """Makes the folder of a run of step 1."""

    def make(name: str = "sft", losses: tuple = (4.0, 3.0, 2.5), **settings) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        lines = [{"step": 0, "seconds": 1.0, "eval/loss": 4.5, "eval/perplexity": 90.0}]
        lines += [
            {"step": step, "seconds": 1.0 + step, "train/loss": loss, "train/tokens_per_second": 100.0 * step,
             "train/learning_rate": 0.1, "train/skipped": 0.0}
            for step, loss in enumerate(losses, start=1)
        ]  # fmt: skip
        lines.append({"step": len(losses), "seconds": 10.0, "eval/loss": 2.4, "eval/perplexity": 11.0})
        write_lines(folder / "metrics.jsonl", lines)
        (folder / "config.yaml").write_text(
            yaml.safe_dump({"seed": 1, "neftune_alpha": 0.0, "learning_rate": 0.1, **settings})
        )
        (folder / "summary.json").write_text('{"eval_loss_before": 4.5, "eval_loss_after": 2.4, "seconds": 9.0}')
        split = {"rows": 90, "tokens": 1800, "truncated": 4, "dropped": {"too_long": 7}}
        (folder / "data_report.json").write_text(json.dumps({"train": split, "eval": {**split, "dropped": {}}}))
        return folder

    return make


@pytest.fixture
def ppo_run(tmp_path) -> Callable[..., Path]:
    """Makes the folder of a run of step 3."""

    def make(name: str = "ppo", samples: list = SAMPLES) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        lines = [
            {"step": 0, "seconds": 2.0, "eval/reward": 1.0, "eval/check": 0.5},
            {"step": 1, "seconds": 5.0, "rollout/score": 1.1, "rollout/kl": 0.0, "actor/learning_rate": 0.1,
             "critic/learning_rate": 0.2, "time/rollout": 1.0, "time/learn": 1.5},
            {"step": 2, "seconds": 9.0, "rollout/score": 1.9, "rollout/kl": 0.3, "actor/learning_rate": 0.05,
             "critic/learning_rate": 0.1, "time/rollout": 2.0, "time/learn": 2.0},
            {"step": 2, "seconds": 10.0, "eval/reward": 2.0, "eval/check": 0.75},
        ]  # fmt: skip
        write_lines(folder / "metrics.jsonl", lines)
        write_lines(folder / "samples.jsonl", samples)
        (folder / "config.yaml").write_text("ppo_epochs: 1\n")
        (folder / "summary.json").write_text('{"reward_standard_error": 0.25, "seconds": 10.0}')
        return folder

    return make


@pytest.fixture
def pair_run(tmp_path) -> Callable[..., Path]:
    """Makes the folder of a run on pairs that left samples alone."""

    def make(name: str, samples: list, program: str = "training.step2_reward.main"):
        folder = tmp_path / name
        folder.mkdir()
        write_lines(folder / "samples.jsonl", samples)
        (folder / "config.yaml").write_text(f"program: {program}\n")
        return folder

    return make
