"""Step 3 with --share_trunk by its command line: it is stopped and resumed to the bit, and what it leaves loads in
plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.end_to_end.compared import figures, same
from tests.end_to_end.conftest import MODULES, SHARED, run_module, run_program, save_start
from threestep.command import commands

pytestmark = pytest.mark.timeout(900)  # on a busy machine
FLAGS = (
    "--share_trunk --actor_lora_dim 4 --critic_lora_dim 2 --max_train_steps 2 --per_device_generation_batch_size 2 "
    "--per_device_training_batch_size 2 --max_answer_seq_len 8 --ppo_epochs 2 --reward length "
    "--reward_length_characters 20 --actor_zero_stage 2 --actor_learning_rate 1e-2 --critic_learning_rate 1e-2 "
    "--dtype bf16 --enable_ema --ema_decay 0.5 --save_at_end"
)


def test_two_rollouts_unbroken_and_resumed(place: Path, pairs_file: Path) -> None:
    start, root = save_start(place / "start_shared"), place / "shared_trunk"
    root.mkdir()
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", root / "cache"]
    own: list[object] = ["--actor_model_name_or_path", start, *data, *FLAGS.split()]
    module, unbroken, stopped = MODULES[3], root / "unbroken", root / "stopped"
    runs = [
        (module, own, unbroken),
        (module, [*own, "--stop_before", "1s"], stopped),
        (module, [*own, "--resume"], stopped),
    ]
    assert run_program(root, "runs", 1, runs) == ["done", "exit 0", "done"]
    same(unbroken, stopped, ("model", "critic", "model_ema"))
    assert figures(unbroken, "samples.jsonl") == figures(stopped, "samples.jsonl")

    if (export := commands().get("export")) is not None:  # a plugin's
        checkpoint = unbroken / "checkpoints" / "step_000002"
        ran = run_module(export.module, [checkpoint, root / "exported", "--part", "critic"])
        assert ran.code == 0, ran.words
        folders = (root / "exported", unbroken / "critic")
        exported, saved = (load_file(folder / "model.safetensors") for folder in folders)
        assert exported.keys() == saved.keys() and all(exported[name].equal(saved[name]) for name in saved)

    trunk = load_file(start / "model.safetensors")
    critic = AutoModelForSequenceClassification.from_pretrained(unbroken / "critic")
    actor = AutoModelForCausalLM.from_pretrained(unbroken / "model")
    config = json.loads((unbroken / "critic" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and critic.config.num_labels == 1
    assert critic.score.weight.abs().max() > 0
    for name, weight in critic.model.named_parameters():  # adapters of its own are merged in, and into matrices alone
        mine, start_weight = actor.model.get_parameter(name), trunk[f"model.{name}"].to(torch.bfloat16)
        adapted = name.endswith("proj.weight")
        assert weight.equal(start_weight) != adapted and mine.equal(weight) != adapted, name
