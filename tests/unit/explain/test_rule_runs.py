"""Rules by the run's own program: the flags they stand for, and a checkpoint that is taken up under them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from training.explain import rule_runs
from training.explain.rule_runs import flags_of, run_under
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import sha256_of_object

KNOWN = dict.fromkeys(
    ("advantage", "policy_loss", "loss_aggregation", "clip_range_low", "actor_weight_decay", "loss_type", "beta")
)


@pytest.mark.parametrize(
    ("said", "objective", "flags"),
    [
        ("advantage=rloo loss=gspo", "policy", {"advantage": "rloo", "policy_loss": "gspo"}),
        ("clip_low=0.1, weight_decay=0.2", "policy", {"clip_range_low": 0.1, "actor_weight_decay": 0.2}),
        ("loss=ipo beta=0.3", "dpo", {"loss_type": "ipo", "beta": 0.3}),
    ],
)
def test_words_of_a_rule_are_flags(said: str, objective: str, flags: dict[str, Any]):
    assert flags_of(said, objective, KNOWN) == flags


def test_a_setting_without_a_flag_is_refused():
    with pytest.raises(ThreestepError, match="no flag is std_ddof"):
        flags_of("std_ddof=1", "policy", KNOWN)


def test_a_checkpoint_is_rewritten_whole(tmp_path: Path):
    content = {"format": 2, "step": 1, "settings": {"advantage": "grpo", "seed": 1}, "files": {}}
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**content, "sha256": sha256_of_object(content)}))
    rule_runs._rewrite(path, {"advantage": "rloo"})
    found = json.loads(path.read_text())
    digest = found.pop("sha256")
    assert digest == sha256_of_object(found)
    assert found["settings"] == {"advantage": "rloo", "seed": 1}


def test_a_run_without_the_checkpoint_is_refused(tmp_path: Path, monkeypatch):
    digests = SimpleNamespace(folder=tmp_path, settings=KNOWN, steps={(4, 0): {}})
    monkeypatch.setattr(rule_runs, "read_digests", lambda run: digests)
    step: Any = SimpleNamespace(head=SimpleNamespace(step=4, objective="policy"))
    with pytest.raises(ThreestepError, match="right before step 4"):
        run_under(step, tmp_path, "advantage=rloo", work=tmp_path / "work", start=lambda *_: None)  # type: ignore[arg-type]
