"""A run that replays another's rollouts ends with the same weights, without generating anything."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.end_to_end.conftest import SHARED, run_step, save_start

pytestmark = pytest.mark.timeout(900)  # on a busy machine


def test_a_replayed_run_ends_with_the_same_weights(place, pairs_file):
    start, critic = (save_start(place / f"{name}_of_replay", pad_is_eos=True) for name in ("start", "critic"))
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(critic, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(critic)
    shared = [
        *("--actor_model_name_or_path", start, "--critic_model_name_or_path", critic),
        *("--data_path", f"jsonl:{pairs_file}", "--data_output_path", place / "replay_cache", *SHARED.split()),
        *"--dtype fp32 --actor_learning_rate 1e-3 --critic_learning_rate 1e-4 --max_train_steps 2".split(),
        *"--per_device_generation_batch_size 4 --per_device_training_batch_size 4 --max_answer_seq_len 8".split(),
        *("--temperature", 0.9, "--top_p", 0.95, "--min_p", 0.01, "--stop", "q", "--bad_words", "the", "apple"),
    ]
    rollouts, folders = place / "rollouts", [place / "dumped", place / "replayed"]
    for flag, folder in zip(("--rollout_dump", "--rollout_replay"), folders, strict=True):
        ran = run_step(3, [*shared, flag, rollouts, "--output_dir", folder])
        assert ran.code == 0, ran.words
    for model in ("model", "critic"):
        dumped, replayed = (load_file(folder / model / "model.safetensors") for folder in folders)
        assert all(dumped[name].equal(replayed[name]) for name in dumped) and dumped.keys() == replayed.keys()
    samples = [(folder / "samples.jsonl").read_text() for folder in folders]
    assert samples[0] == samples[1]
    texts = [json.loads(line)["response"] for line in samples[0].splitlines()]
    assert any("q" in text for text in texts) and not any("apple" in text for text in texts)
