"""SFT and DPO from one file, by their command lines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_module
from tests.support.new_models import save_new_model
from threestep.plugins.programs import all_steps
from training.utils.plugins.registry import plugins

pytestmark = pytest.mark.timeout(900)  # on a busy machine


def test_sft_and_dpo_from_one_file(place: Path, monkeypatch, capsys):
    """The last step is DPO where the file has its section. How programs are started: test_add_a_step.py."""

    def launched(module: str, words: list[str], num_ranks: int | None, environment: dict[str, str] | None) -> int:
        ran = run_module(module, words, num_ranks or 1, environment)
        assert ran.code == 0, ran.words
        return ran.code

    start = save_new_model(place / "two_steps_start")
    monkeypatch.setattr(all_steps, "launch", launched)
    shared = {"data_path": ["embedded"], "data_split": "1,1,0", "max_seq_len": 64, "dtype": "fp32"}
    shared |= {"max_train_rows": 64, "max_eval_rows": 8, "per_device_train_batch_size": 16, "max_train_steps": 2}
    values = {"output_dir": str(place / "two_steps"), "model_name_or_path": str(start), "shared": shared}
    values |= {"seed": 1, "step2_dpo": {"learning_rate": 2e-3}}
    (place / "two_steps.yaml").write_text(json.dumps(values))  # JSON is YAML
    all_steps.main(["--config", str(place / "two_steps.yaml")])
    settings = (place / "two_steps/step2_dpo/config.yaml").read_text()
    assert f"model_name_or_path: {place}/two_steps/step1_sft/model\n" in settings
    assert (place / "two_steps/step2_dpo/model/model.safetensors").exists()
    own = {
        name: json.loads((place / f"two_steps/{name}/summary.json").read_text()) for name in ("step1_sft", "step2_dpo")
    }
    summary = json.loads((place / "two_steps/summary.json").read_text())
    assert summary["sft_eval_loss_after"] == own["step1_sft"]["eval_loss_after"]
    assert summary["dpo_pair_accuracy"] == own["step2_dpo"]["eval_accuracy"]
    assert own["step2_dpo"]["eval_loss_before"] == pytest.approx(math.log(2))
    assert "| step 2: accuracy of the implicit reward " in capsys.readouterr().out
    if "report" not in plugins():
        return
    report = (place / "two_steps/report.html").read_text(encoding="utf-8")
    assert "Step 1: supervised fine-tuning" in report and "Step 2: direct preference optimization" in report
