"""Tasks of lm-evaluation-harness beside the evaluations of a run. Skips where lm_eval is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_step, save_start

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
pytestmark = pytest.mark.timeout(900)  # on a busy machine
TASK = """task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" yes", " no"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
RANKS = [pytest.param(1, "0", id="1-z0"), *(pytest.param(2, z, marks=pytest.mark.long, id=f"2-z{z}") for z in "23")]


def metrics_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("ranks", "stage"), RANKS)
def test_a_run_with_tasks_trains_what_one_without_trains(ranks: int, stage: str, place, pairs_file, tmp_path):
    """To the bit, with dropout, which reads the random state."""
    start = save_start(place / "harness_start")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": word}) + "\n" for word in ("a", "bee", "sea")))
    (tmp_path / "choice.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    flags = f"--model_name_or_path {start} --data_path jsonl:{pairs_file} --max_seq_len 100 --max_train_steps 4 "
    flags += f"--per_device_train_batch_size 2 --data_split 1,0,0 --data_output_path {tmp_path / 'cache'} "
    flags += f"--eval_interval 2 --zero_stage {stage} --dropout 0.1 --learning_rate 1e-3 --report_samples 0"
    tasks = ["--harness_tasks", tmp_path / "choice.yaml", "--harness_rows", "2"]
    for name, more in (("without", []), ("with", tasks)):
        ran = run_step(1, [*flags.split(), "--output_dir", tmp_path / name, *more], ranks=ranks)
        assert ran.code == 0, ran.words
    found = {
        line["step"]: line["eval/choice_acc"] for line in metrics_of(tmp_path / "with") if "eval/choice_acc" in line
    }
    assert set(found) == {0, 2, 4} and set(found.values()) <= {0.0, 0.5, 1.0}
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("without", "with")]
    assert weights[0] == weights[1]
    assert json.loads((tmp_path / "with" / "harness.json").read_text())["choice"]["rows"] == 2
    assert "choice" in (tmp_path / "with" / "report.html").read_text()
