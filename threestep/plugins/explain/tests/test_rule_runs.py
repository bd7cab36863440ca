"""Rules by the run's own program: the flags they stand for, and a checkpoint that is taken up under them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from threestep.plugins.explain import rule_runs
from threestep.plugins.explain.rule_runs import flags_of, run_under
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import sha256_of, sha256_of_object

SEQUENCES = "seq-mean-token-mean"
KNOWN = dict.fromkeys(
    ("advantage", "policy_loss", "loss_aggregation", "clip_range_low", "weight_decay", "loss_type", "beta")
)


@pytest.mark.parametrize(
    ("said", "objective", "flags"),
    [
        ("advantage=rloo loss=gspo", "policy", {"advantage": "rloo", "policy_loss": "gspo"}),
        ("clip_low=0.1, reduction=sequence_mean", "policy", {"clip_range_low": 0.1, "loss_aggregation": SEQUENCES}),
        ("loss=ipo beta=0.3", "dpo", {"loss_type": "ipo", "beta": 0.3}),
    ],
)
def test_words_of_a_rule_are_flags(said: str, objective: str, flags: dict[str, Any]):
    assert flags_of(said, objective, KNOWN) == flags


@pytest.mark.parametrize("said", ["std_ddof=1", "weight_decay=0.1"])
def test_a_setting_that_no_flag_decides_is_refused(said: str):
    with pytest.raises(ThreestepError, match="is none, or stands in the optimizer's state"):
        flags_of(said, "sft", KNOWN)


def test_a_checkpoint_is_rewritten_whole(tmp_path: Path):
    content = {"format": 2, "step": 1, "settings": {"advantage": "grpo", "seed": 1}, "files": {}}
    path, state = tmp_path / "manifest.json", tmp_path / "trainer.json"
    path.write_text(json.dumps({**content, "sha256": sha256_of_object(content)}))
    state.write_text(json.dumps({"state": {"trainer": {"kl_control": {"coefficient": 0.1}}}}))
    rule_runs._rewrite(tmp_path, {"advantage": "rloo", "kl_coef": 0.3})
    found = json.loads(path.read_text())
    digest = found.pop("sha256")
    assert digest == sha256_of_object(found)
    assert found["settings"] == {"advantage": "rloo", "seed": 1, "kl_coef": 0.3}
    assert found["files"]["trainer.json"]["sha256"] == sha256_of(state)
    assert json.loads(state.read_text())["state"]["trainer"]["kl_control"]["coefficient"] == 0.3


def test_a_run_without_the_checkpoint_is_refused(tmp_path: Path, monkeypatch):
    digests = SimpleNamespace(folder=tmp_path, settings=KNOWN, steps={(4, 0): {}})
    monkeypatch.setattr(rule_runs, "read_digests", lambda run: digests)
    step: Any = SimpleNamespace(head=SimpleNamespace(step=4, objective="policy"))
    with pytest.raises(ThreestepError, match="right before step 4"):
        run_under(step, tmp_path, "advantage=rloo", work=tmp_path / "work", start=lambda *_: None)  # type: ignore[arg-type]
