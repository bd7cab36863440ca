"""A trained model is written to its folder, or where a part of the course writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.contracts.run import RunCourse
from training.utils.engine.ranks.startup import Ranks
from training.utils.setup.final_models import FinalModels

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


class Elsewhere(RunCourse):
    def write_refused(self, place: Path, save: Callable[[Path], None], refusal: OSError) -> Path:
        save(place.parents[1] / "elsewhere")
        return place.parents[1] / "elsewhere"


def saved_in(place: Path) -> None:
    place.mkdir()


def test_in_its_folder(tmp_path):
    final = FinalModels(tmp_path, [Elsewhere()], ALONE)
    final.write("model", saved_in)
    final.check()
    assert (tmp_path / "model").is_dir()


def test_a_disk_that_refuses(tmp_path):
    (tmp_path / "run").write_text("no folder")
    with pytest.raises(ThreestepError, match="run/model"):
        FinalModels(tmp_path / "run", [RunCourse()], ALONE).write("model", saved_in)
    final = FinalModels(tmp_path / "run", [RunCourse(), Elsewhere()], ALONE)
    final.write("model", saved_in)
    assert (tmp_path / "elsewhere").is_dir()
    with pytest.raises(ThreestepError, match="the run is trained, .* then mv .*/elsewhere .*/run/model$"):
        final.check()
