"""What an export makes of a run's last checkpoint is what the run saved, to the bit: any ZeRO stage, LoRA or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import MODULES, SHARED, run_program, save_start
from threestep.plugins.programs import export
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.timeout(900)  # on a busy machine
TRAINED = (
    "--per_device_train_batch_size 2 --learning_rate 1e-2 --report_mfu false --max_train_steps 2 --save_at_end true"
)
LORA = ["--lora_dim", 4]
ALONE: dict[str, list[object]] = {
    "zero_0": ["--zero_stage", 0, "--dtype", "fp32"],
    "zero_0_lora": ["--zero_stage", 0, "--dtype", "bf16", *LORA],
    "zero_2": ["--zero_stage", 2, "--dtype", "bf16"],
    "zero_2_lora": ["--zero_stage", 2, "--dtype", "fp32", *LORA, "--only_optimize_lora", "false"],
    "zero_3": ["--zero_stage", 3, "--dtype", "bf16"],
    "zero_3_lora": ["--zero_stage", 3, "--dtype", "bf16", *LORA],
}
PPO = (
    "--max_train_steps 2 --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --dtype bf16 "
    "--actor_zero_stage 3 --critic_zero_stage 2 --actor_lora_dim 4 --max_answer_seq_len 8 --save_at_end true "
    "--enable_ema true --ema_decay 0.5 --actor_learning_rate 1e-2 --critic_learning_rate 1e-3"
)


def run_all(place: Path, name: str, world_size: int, runs: list[tuple[int, list[object], Path]]) -> None:
    ends = run_program(place, name, world_size, [(MODULES[step], flags, folder) for step, flags, folder in runs])
    assert set(ends) == {"done"}


def data_of(place: Path, pairs_file: Path) -> list[object]:
    return ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", place / "export_cache"]


@pytest.fixture(scope="module")
def alone(place: Path, pairs_file: Path) -> Path:
    """On one rank: step 1, once for each of ALONE, and step 2 with ZeRO 3 and LoRA."""
    start = save_start(place / "start_export")
    flags = ["--model_name_or_path", start, *data_of(place, pairs_file), *TRAINED.split()]
    runs = [(1, [*flags, *own], place / f"export_{name}") for name, own in ALONE.items()]
    run_all(place, "exported", 1, [*runs, (2, [*flags, "--zero_stage", 3, *LORA], place / "export_reward")])
    return place


@pytest.fixture(scope="module")
def together(place: Path, pairs_file: Path, alone: Path) -> Path:
    """Step 3 on two ranks: ZeRO 3 with LoRA, ZeRO 2, a moving average."""
    models = ["--actor_model_name_or_path", place / "start_export"]
    models += ["--critic_model_name_or_path", place / "export_reward" / "model"]
    run_all(place, "together", 2, [(3, [*models, *data_of(place, pairs_file), *PPO.split()], place / "export_ppo")])
    return place


def same_folder(out: Path, saved: Path) -> None:
    mine, other = (load_file(folder / "model.safetensors") for folder in (out, saved))
    assert mine.keys() == other.keys()
    for name, weight in other.items():
        assert mine[name].dtype == weight.dtype and mine[name].equal(weight), name
    for path in saved.iterdir():
        if path.name not in ("model.safetensors", "config.json", "README.md"):  # the card is of a finished run
            assert (out / path.name).read_text() == path.read_text(), path.name
    own, config = (json.loads((folder / "config.json").read_text()) for folder in (out, saved))
    # A run measures the scale of a reward model's scores when its training is over.
    assert own == {name: value for name, value in config.items() if not name.startswith("threestep_score_")}


@pytest.mark.parametrize("name", [*ALONE, "reward"])
def test_the_model_of_one_rank(alone, tmp_path, capsys, name):
    run = alone / f"export_{name}"
    export.main([str(run), str(tmp_path / "out")])
    assert capsys.readouterr().out == f"model of {run}/checkpoints/step_000002 is in {tmp_path}/out\n"
    same_folder(tmp_path / "out", run / "model")
    assert "checkpoint step_000002: the model." in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("part", "saved"), [("model", "model"), ("critic", "critic"), ("average", "model_ema")])
def test_the_models_of_two_ranks(together, tmp_path, part, saved):
    folder = together / "export_ppo"
    export.main([str(folder / "checkpoints" / "step_000002"), str(tmp_path / "out"), "--part", part])
    same_folder(tmp_path / "out", folder / saved)


@pytest.mark.parametrize("name", ["zero_0_lora", "zero_3_lora"])
def test_lora_kept_apart_is_what_peft_loads(alone, tmp_path, name):
    same_apart(alone / f"export_{name}", alone / "start_export", tmp_path)


def same_apart(run: Path, started: Path, tmp_path: Path) -> None:
    """Export the run's adapter and its base, and compare PEFT's model of them with the run's. started: its model"""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    export.main([str(run), str(tmp_path / "out"), "--keep_lora"])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    start = load_file(started / "model.safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == start.keys()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        below = base(ids).logits
        whole = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)(ids).logits
    assert (whole - below).abs().max() > 0.05  # the adapters do something
    assert (whole - merged).abs().max() < 0.05 * (whole - below).abs().max() + 0.02  # merged in bf16
    settings = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "out")


def test_what_cannot_be_exported_is_one_sentence(alone, tmp_path):
    run = alone / "export_zero_0"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    for flags, sentence in [
        ([run, tmp_path / "full"], "full'; remove it, or choose another"),
        ([run, tmp_path / "out", "--keep_lora"], "was trained without LoRA; leave --keep_lora out"),
        ([run, tmp_path / "out", "--part", "critic"], "needs a checkpoint with a critic, but this one has only model"),
        ([run, tmp_path / "out", "--part", "average"], "has no average because the run did not use --enable_ema"),
    ]:
        with pytest.raises(ThreestepError, match=sentence):
            export.main([str(flag) for flag in flags])
    assert not (tmp_path / "out").exists()
