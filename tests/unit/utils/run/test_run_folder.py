"""What a run leaves behind."""

from __future__ import annotations

import json

import yaml

from training.utils.run.run_folder import RunFolder


def test_settings_and_summary(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b", is_main_rank=True)
    folder.write_config({"seed": 1, "data_path": ["x"], "limit": None, "text": "größer"}, "A run of 2 ranks.")
    folder.write_json("summary.json", {"loss": 0.5})
    folder.write_json("summary.json", {"loss": 0.25})
    assert (folder.path / "config.yaml").read_text(encoding="utf-8").startswith("# A run of 2 ranks.\n")
    assert yaml.safe_load((folder.path / "config.yaml").read_text(encoding="utf-8")) == {
        "seed": 1, "data_path": ["x"], "limit": None, "text": "größer"
    }  # fmt: skip
    assert json.loads((folder.path / "summary.json").read_text()) == {"loss": 0.25}
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "summary.json"]
    assert folder.model == tmp_path / "a" / "b" / "model"


def test_logs_are_appended_cut_back_and_begun_anew(tmp_path):
    folder = RunFolder(tmp_path, is_main_rank=True)
    folder.append_samples([{"prompt": "größer\n", "reward": 1.0}])
    sizes = folder.log_sizes()
    assert sizes == {"samples.jsonl": (tmp_path / "samples.jsonl").stat().st_size}
    folder.append_samples([{"prompt": "b"}, {"prompt": "c"}])
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["größer\n", "b", "c"]
    assert "größer" in lines[0]
    (tmp_path / "metrics.jsonl").write_text("begun after the sizes were taken")
    folder.cut_logs(sizes)
    folder.cut_logs({"samples.jsonl": 10**6})  # one that is shorter stays as it is
    assert (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines() == lines[:1]
    assert not (tmp_path / "metrics.jsonl").exists()
    folder.cut_logs({})
    assert folder.log_sizes() == {}


def test_other_ranks_write_nothing(tmp_path):
    folder = RunFolder(tmp_path / "out", is_main_rank=False)
    folder.write_config({}, "")
    folder.write_json("summary.json", {})
    folder.cut_logs({})
    folder.append_samples([{}])
    assert not (tmp_path / "out").exists()
