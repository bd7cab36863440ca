"""`threestep export --mtp vllm`."""

from __future__ import annotations

import pytest

from threestep.plugins.programs import export
from training.utils.base.errors import ThreestepError


def test_a_head_of_a_run_without_one_leaves_nothing(tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model/config.json").write_text("{}")
    (run / "summary.json").write_text("{}")
    with pytest.raises(ThreestepError, match="--mtp vllm expects a run with a head for multi-token prediction, and"):
        export.main([str(run), str(tmp_path / "out"), "--mtp", "vllm"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", [["--part", "critic"], ["--keep_lora"]])
def test_a_head_goes_with_the_merged_model(tmp_path, other):
    with pytest.raises(ThreestepError, match="--mtp expects the merged model: leave --keep_lora and --part out"):
        export.main([str(tmp_path), str(tmp_path / "out"), "--mtp", "vllm", *other])
