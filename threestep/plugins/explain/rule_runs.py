"""A step under another rule by the run's own program: resumed from the checkpoint before it with other flags.

What the program then does is that rule's step, to the bit; the references of the judge have no part in it. The
checkpoint is copied, and the copy says that it was written under the rule, so that the program takes it up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.audit.bisect.digest_files import read_digests
from threestep.plugins.audit.bisect.rerun import checkpoint_before, rerun
from threestep.plugins.explain.records import recorded_steps
from threestep.plugins.explain.rules import said_settings
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import sha256_of, sha256_of_object

if TYPE_CHECKING:
    from threestep.plugins.audit.bisect.rerun import Running, Start
    from threestep.plugins.audit.quantities.step import AuditedStep

# Flags that have other names than a record's settings; those of the same name are not listed.
_FLAGS = {
    "preference_loss": "loss_type",
    "clip_low": "clip_range_low",
    "clip_high": "clip_range_high",
    "reduction": "loss_aggregation",
    "whiten": "whiten_advantages",
}
_OF_OPTIMIZER = ("weight_decay",)  # a checkpoint holds it in the optimizer's state
_OF_WORDS = {
    "token mean": "token-mean",
    "sequence mean": "seq-mean-token-mean",
    "sequence sum": "seq-mean-token-sum",
    "sequence sum norm": "seq-mean-token-sum-norm",
}


def flags_of(said: str, objective: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that the words of --with stand for. known: the run's. ThreestepError for a setting that no flag
    of the run decides alone."""
    found = {}
    for name, value in said_settings(said, objective).items():
        flag = _FLAGS.get(name, name)
        if flag not in known or flag in _OF_OPTIMIZER:
            raise ThreestepError(
                f"--run_rules needs settings that are flags of the run, but {name} is not a flag or is part of the "
                "optimizer's state; remove --run_rules"
            )
        found[flag] = _OF_WORDS.get(value, value) if flag == "loss_aggregation" else value
    return found


def run_under(step: AuditedStep, run: Path, said: str, *, work: Path, start: Start) -> AuditedStep:
    """Return the record of a run's step under a rule. work: a folder that is replaced. ThreestepError where the run has
    no checkpoint right before the step, or the rule draws other samples."""
    digests, number = read_digests(run), step.head.step
    began = checkpoint_before(digests, number)
    if began != number - 1:
        raise ThreestepError(
            f"--run_rules needs a checkpoint right before step {number:,} in {run / 'checkpoints'}, but the last one "
            f"before it is from step {began:,}; run with --save_every, or remove --run_rules"
        )
    flags = flags_of(said, step.head.objective, digests.settings)
    key = next((key for key in ((number, 1), (number, 0)) if key in digests.steps), None)
    if key is None:
        raise ThreestepError(f"--run_rules needs step {number:,} in the digests of {run}, but they do not contain it")

    def start_under(words: Sequence[str], ranks: int, output: Path) -> Running:
        if began:
            _rewrite(work / "checkpoints" / f"step_{began:06}", flags)
        return start(words, ranks, output)

    own = {**flags, "record_steps": [number], "record_values": True}
    again = rerun(digests, key, work, start_under, first=number, settings=own)
    found = recorded_steps(again.folder.parent, [number], 1)
    if found is None:
        raise ThreestepError(f"--run_rules: the step with {said} left no record with its state; see {work}.log")
    _check_same(step, found[-1], said)
    for name, value in said_settings(said, step.head.objective).items():
        if found[-1].settings.get(name, value) != value:
            raise ThreestepError(
                f"--run_rules needs {name}={value}, but the rerun continued with {found[-1].settings[name]} from the "
                "checkpoint; remove --run_rules"
            )
    return found[-1]


def _rewrite(checkpoint: Path, flags: Mapping[str, Any]) -> None:
    """Put the rule's flags into a checkpoint: its manifest, and the coefficient of the KL that the trainer goes on
    with."""
    path, state = checkpoint / "manifest.json", checkpoint / "trainer.json"
    content = json.loads(path.read_text("utf-8"))
    content.pop("sha256")
    content["settings"] |= flags
    if "kl_coef" in flags:
        saved = json.loads(state.read_text("utf-8"))
        saved["state"]["trainer"]["kl_control"]["coefficient"] = flags["kl_coef"]
        state.write_text(json.dumps(saved), encoding="utf-8")
        content["files"][state.name] = {"size_bytes": state.stat().st_size, "sha256": sha256_of(state)}
    path.write_text(json.dumps({**content, "sha256": sha256_of_object(content)}, indent=1), encoding="utf-8")


def _check_same(real: AuditedStep, other: AuditedStep, said: str) -> None:
    """ThreestepError unless both steps begin with the same weights and have the same tokens."""
    ids = (real.tensor("token_ids"), other.tensor("token_ids"))
    before = (real.state("weights_before."), other.state("weights_before."))
    if not np.array_equal(*ids) or any(not np.array_equal(before[0][name], before[1][name]) for name in before[0]):
        raise ThreestepError(
            f"--run_rules requires the rerun with {said} to have the same samples and weights, but they differed: the "
            "explained step is not the first update of its rollout, or the rule affects sampling; remove --run_rules"
        )
