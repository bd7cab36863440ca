"""`reward-evaluate` on the model of a chain, and on one that others made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Chain, Ran, run_module, save_start

pytestmark = pytest.mark.timeout(900)  # on a busy machine

EVALUATE = "threestep.plugins.evaluation.reward_evaluation"


@pytest.fixture(scope="module")
def report(alone: Chain) -> dict:
    return json.loads((alone.folders[2] / "reward_report.json").read_text())


def test_two_ranks_evaluate_as_the_trainer_did(alone: Chain, report: dict, place: Path):
    flags = ["--model_name_or_path", alone.folders[2] / "model", *alone.data_flags[2], "--output_dir", place / "judged"]
    ran = run_module(EVALUATE, [*flags, "--zero_stage", 3], ranks=2)
    assert ran.code == 0, ran.words
    found = json.loads((place / "judged" / "evaluation.json").read_text())
    assert found["split"] == "eval" and found["model"] == str(alone.folders[2] / "model")
    for name in ("pairs", "accuracy", "score_gap", "loss", "accuracy_shorter", "calibration_error"):
        assert found[name] == pytest.approx(report["evaluation"][name], abs=1e-5)
    assert found["chosen"]["percentiles"] == pytest.approx(report["evaluation"]["chosen"]["percentiles"], abs=1e-5)
    for words in (
        "12 pairs from 12 prompts: accuracy",
        "expected calibration error",
        "extra tokens in the better response",
        "#",
    ):
        assert ran.stdout.count(words) >= 1, ran.words
    assert ran.stdout.count("12 pairs from 12 prompts") == 1 and not ran.stderr.strip(), ran.words


@pytest.fixture(scope="module")
def scored(place: Path, pairs_file: Path) -> tuple[Path, Ran]:
    """A reward model that somebody else saved: no pad token, neither in the tokenizer nor in the configuration."""
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = save_start(place / "foreign_start", pad_token=None)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, pad_token_id=None)
    model.save_pretrained(folder)
    flags = ["--model_name_or_path", folder, "--score_file", pairs_file, "--output", place / "scores.jsonl"]
    return folder, run_module(EVALUATE, [*flags, "--max_seq_len", 128], ranks=1)


def test_a_line_a_pair(scored, place: Path, pairs_file: Path):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder, ran = scored
    assert ran.code == 0, ran.words
    lines = [line for line in ran.stdout.splitlines() if line.startswith("pair ")]
    written = [json.loads(line) for line in (place / "scores.jsonl").read_text().splitlines()]
    assert len(lines) == len(written) == 60
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for place_in_file, text in list(enumerate(pairs_file.read_text().splitlines(), start=1))[::7]:
        pair, told = json.loads(text), written[place_in_file - 1]
        for name in ("chosen", "rejected"):
            ids = tokenizer(pair["prompt"] + pair[name] + tokenizer.eos_token, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                assert told[name] == pytest.approx(float(model(input_ids=ids).logits), abs=1e-4)
        winner = "chosen" if told["gap"] > 0 else "rejected"
        assert told["pair"] == place_in_file and told["winner"] == winner
        scores = f"chosen {told['chosen']:.4f}, rejected {told['rejected']:.4f}, gap {told['gap']:+.4f}"
        assert lines[place_in_file - 1] == f"pair {place_in_file}: {scores}: {winner} wins"
