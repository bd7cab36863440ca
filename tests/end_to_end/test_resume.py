"""Runs that were stopped after each step and resumed end as those that were never stopped, to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.end_to_end.compared import figures, same
from tests.end_to_end.conftest import MODULES, SHARED, run_module, run_program, save_scorer, save_start
from tests.support.forked_programs import ON_CPU, ROOT
from threestep.command import commands

pytestmark = pytest.mark.timeout(900)  # on a busy machine
BATCH = "--per_device_train_batch_size 2 --learning_rate 1e-3 --report_mfu false --max_train_steps 3 --eval_interval 2"

PPO = (
    "--max_train_steps 3 --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --eval_interval 2 "
    "--max_answer_seq_len 8 --kl_control adaptive --kl_target 0.1 --kl_horizon 100 --actor_learning_rate 1e-3 "
    "--critic_learning_rate 1e-3"
)


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    """A tiny model with dropout, so that a run draws random numbers as it trains."""
    folder = save_start(place / "start_resume")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    return folder


@pytest.fixture(scope="module")
def scorer(place: Path, start: Path) -> Path:
    return save_scorer(place / "scorer", start)


@pytest.mark.parametrize("world_size", [1, 2])
def test_stopped_and_resumed(
    place: Path, start: Path, scorer: Path, pairs_file: Path, text_file: Path, world_size: int
) -> None:
    """bf16 without ZeRO on one rank; float32 with ZeRO 2 on two, with a sampler of prompts that has a
    state, and DPO of adapters."""
    root = place / f"resume_{world_size}"
    root.mkdir()
    dtype = ["--dtype", "bf16" if world_size == 1 else "fp32"]
    stage = 0 if world_size == 1 else 2
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", place / "resume_cache"]
    trained = ["--model_name_or_path", start, *data, *dtype, *BATCH.split(), "--zero_stage", stage]
    flags: dict[int | str, list[object]] = {1: [*trained, "--neftune_alpha", 5]}
    if world_size == 1:
        flags[2] = trained
    else:
        flags["dpo"] = [*trained, "--lora_dim", 4]
    flags[3] = [
        "--actor_model_name_or_path", start, "--critic_model_name_or_path", scorer, *data, *dtype, *PPO.split(),
        "--actor_zero_stage", stage, "--critic_zero_stage", stage, "--unsupervised_dataset_name", f"jsonl:{text_file}",
        "--enable_ema", "--ema_decay", 0.5,
    ]  # fmt: skip
    if world_size == 2:
        flags[3] += ["--prompt_sampler", f"{ROOT}/examples/curriculum.py:WorstAgain"]
    runs = []
    for step, own in flags.items():
        runs.append((MODULES[step], own, root / f"{step}_unbroken"))
        # Time is always short: the run ends after its first step.
        runs.append((MODULES[step], [*own, "--stop_before", "1s"], root / f"{step}_stopped"))
        runs.append((MODULES[step], [*own, "--resume"], root / f"{step}_stopped"))
    unsampled = [step for step in flags if step != 3]
    runs += [(MODULES[step], [*flags[step], "--report_samples", 0], root / f"{step}_unsampled") for step in unsampled]
    ends = [*["done", "exit 0", "done"] * len(flags), *["done"] * len(unsampled)]
    assert run_program(root, "runs", world_size, runs) == ends
    for step in unsampled:  # to look at samples changes nothing
        same(root / f"{step}_unbroken", root / f"{step}_unsampled")
        assert not (root / f"{step}_unsampled" / "samples.jsonl").exists()
    for step in flags:
        unbroken, stopped = root / f"{step}_unbroken", root / f"{step}_stopped"
        same(unbroken, stopped, ("model", "critic", "model_ema") if step == 3 else ("model",))
        assert (stopped / "checkpoints" / "latest").read_text() == "step_000001\n"
        assert figures(unbroken, "samples.jsonl") == figures(stopped, "samples.jsonl") != []


def test_what_auto_chose_is_chosen_again_where_it_cannot_be_kept(place: Path, start: Path, pairs_file: Path):
    """Of GRPO without dropout at ZeRO 2, whose forwards that read are learned from: at ZeRO 3 they are not."""
    root = place / "resume_auto"
    root.mkdir()
    folder = root / "run"
    flags: list[object] = [
        "--actor_model_name_or_path", start, "--actor_dropout", 0, "--data_path", f"jsonl:{pairs_file}",
        *SHARED.split(), "--data_output_path", place / "resume_cache", "--reward", "length", "--advantage", "grpo",
        *"--reward_length_characters 9 --num_samples_per_prompt 2 --max_train_steps 3 --max_answer_seq_len 8".split(),
        *"--per_device_generation_batch_size 2 --per_device_training_batch_size 4 --kl_coef 0.1".split(),
    ]  # fmt: skip
    again: list[object] = ["--config", folder / "config.yaml", "--resume", "--actor_zero_stage", 3]
    module = MODULES[3]
    runs = [
        (module, [*flags, "--actor_zero_stage", 2, "--stop_before", "1s"], folder),
        (module, [*again, "--stop_before", "1s"], folder),
        (module, [*again, "--actor_zero_stage", 2, "--stop_before", "1d"], folder),
    ]
    found = []
    for number, run in enumerate(runs):
        ends = run_program(root, f"run{number}", 1, [run])
        assert ends in (["exit 0"], ["done"]), ends
        config = yaml.safe_load((folder / "config.yaml").read_text())
        found.append((config["reuse_forwards"], config["actor_zero_stage"]))
    assert found == [(True, 2), (False, 3), (False, 2)]


def test_sigterm_ends_two_ranks_with_a_checkpoint_and_the_command_to_go_on(
    place: Path, start: Path, pairs_file: Path, without_compiler: dict[str, str]
):
    """Through DeepSpeed's launcher, which passes no signal on, on a machine where nothing can be compiled."""
    folder = place / "resume_sigterm"
    flags = ["--model_name_or_path", start, "--data_path", f"jsonl:{pairs_file}", "--output_dir", folder]
    flags += ["--data_output_path", place / "resume_cache", *SHARED.split(), *BATCH.split(), "--num_train_epochs", 1000]
    flags[flags.index("--max_train_steps") + 1] = 4000
    command = [sys.executable, "-m", "training.utils.run.launch", MODULES[1], *(str(flag) for flag in flags)]
    environment = {**os.environ, **ON_CPU, "THREESTEP_RANKS": "2", **without_compiler}
    log = open(place / "sigterm.txt", "w+")  # noqa: SIM115
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and "train/loss" in metrics.read_text()) and time.monotonic() < deadline:
            assert process.poll() is None, (place / "sigterm.txt").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=300)
    finally:
        process.kill()
        log.close()
    said = (place / "sigterm.txt").read_text()
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("stopped after step ")]
    done = int(line.split()[3])
    assert line.endswith(
        f"(SIGTERM); to resume: THREESTEP_RANKS=2 python -m training.utils.run.launch training.step1_sft.main --config "
        f"{folder}/config.yaml --resume"
    )
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{done:06d}\n"
    assert figures(folder)[-1]["step"] == done and not (folder / "model").exists()


TRUNK = (
    "--share_trunk --actor_lora_dim 4 --critic_lora_dim 2 --max_train_steps 2 --per_device_generation_batch_size 2 "
    "--per_device_training_batch_size 2 --max_answer_seq_len 8 --ppo_epochs 2 --reward length "
    "--reward_length_characters 20 --actor_zero_stage 2 --actor_learning_rate 1e-2 --critic_learning_rate 1e-2 "
    "--dtype bf16 --enable_ema --ema_decay 0.5 --save_at_end"
)


def test_a_shared_trunk_resumes_to_the_bit_and_loads_in_plain_transformers(place: Path, pairs_file: Path) -> None:
    start, root = save_start(place / "start_shared"), place / "shared_trunk"
    root.mkdir()
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", root / "cache"]
    own: list[object] = ["--actor_model_name_or_path", start, *data, *TRUNK.split()]
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
