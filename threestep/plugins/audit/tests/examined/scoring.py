"""The judge's findings on a record beside what a fault should show."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np

from threestep.plugins.audit.judge import Finding, first_wrong, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import read_record
from threestep.plugins.audit.tests.examined.fault import Fault, PlainFault
from threestep.plugins.audit.tests.examined.plain import Setup
from threestep.plugins.audit.tests.examined.plain_policy import trainer_of
from threestep.plugins.audit.text import verdict
from threestep.plugins.audit.words import settings_of_words

MOST_CAUSES = 3  # of which one is right; a longer list names nothing


@dataclass(frozen=True)
class Verdict:
    """quantity: the first wrong one, "" if none. causes: of it, in the judge's order. sentence: what a user reads."""

    quantity: str
    causes: tuple[str, ...]
    sentence: str

    def finds(self, fault: Fault) -> bool:
        return self.quantity in fault.quantity

    def explains(self, fault: Fault) -> bool:
        """The right quantity, and the cause among the first few."""
        named = self.causes[:MOST_CAUSES]
        return self.finds(fault) and any(re.search(fault.names, cause) for cause in named)


def judged(folder: Path, said: str = "") -> Verdict:
    """The verdict on a record. said: as `--as` has it."""
    findings = judge(AuditedStep(read_record(folder), settings_of_words(said)))
    wrong: Finding | None = first_wrong(findings)
    causes = wrong.difference.causes if wrong is not None and wrong.difference is not None else ()
    return Verdict(wrong.name if wrong is not None else "", causes, verdict(findings))


def same_records(one: Path, other: Path) -> bool:
    """Whether the numbers of two records are the same: then a fault did nothing."""
    first, second = read_record(one), read_record(other)
    if first.head.figures != second.head.figures:
        return False
    parts = zip([*first.ranks, first.state], [*second.ranks, second.state], strict=True)
    return all(
        name in theirs and np.array_equal(values, theirs[name]) for own, theirs in parts for name, values in own.items()
    )


def write_plain(folder: Path, setup: Setup, **replaced: object) -> Path:
    """Train plainly, and write the record."""
    trainer = trainer_of(setup, **replaced)
    trainer.train()
    trainer.write(folder)
    return folder


def of_plain_fault(fault: PlainFault, seed: int) -> Verdict:
    """The verdict on a step of the plain trainer with a fault."""
    setup = Setup(**{"seed": seed, **fault.setup})
    with tempfile.TemporaryDirectory() as place:
        planted = write_plain(Path(place) / "planted", setup, **fault.replaced)
        assert not same_records(planted, write_plain(Path(place) / "right", setup)), f"{fault.name} changes nothing"
        return judged(planted)


def right_setups(seed: int) -> Iterator[Setup]:
    """Without end: every objective, packed and padded on either side, in float32 and bf16, on 1 and 2 ranks."""
    forms = [*product(("sft", "dpo", "reward", "grpo", "ppo"), ("packed", "right", "left"), (False, True), (1, 2))]
    for number in count():
        objective, form, bf16, ranks = forms[number % len(forms)]
        own = {"packed": form == "packed", "left": form == "left", "bf16": bf16, "ranks": ranks}
        shape = {"micro_batches": 1 + number % 4, "step": 3 + number % 3, "seed": seed + number}
        yield Setup(objective, settings=_SETTINGS[objective][number % len(_SETTINGS[objective])], **own, **shape)


# Settings that are not the plain trainer's usual ones.
_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sft": [{}, {"reduction": "sequence mean"}, {"schedule": "cosine", "warmup_steps": 5}],
    "dpo": [{}, {"label_smoothing": 0.0, "beta": 0.05}],
    "reward": [{}, {"center_coef": 0.0, "label_smoothing": 0.1}],
    "grpo": [{}, {"kl_in": "reward"}, {"reduction": "sequence mean", "kl_in": "none"}],
    "ppo": [{}, {"whiten": False, "kl_estimator": "k3"}, {"kl_in": "loss", "kl_estimator": "k3"}],
}
