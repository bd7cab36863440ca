"""The judge on a plain trainer: faults planted one at a time, and right steps, in layouts drawn at random.

    python -m threestep.plugins.audit.tests.audited_steps 7                 every fault and 300 right steps under seed 7
    python -m threestep.plugins.audit.tests.audited_steps 7 --count 30      fewer right steps

A fault counts as found if the first wrong quantity is the one it was planted in, and as explained if one of the first
three causes that the judge computes names it. A right step counts if nothing differs. The exit code is 1 where a fault
is missed or a right step raises an alarm.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from pathlib import Path

import numpy as np

from threestep.plugins.audit.judge import AGREES, first_wrong, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import StepRecord, read_record
from threestep.plugins.audit.tests.plain_faults import EXAMINED, FAULTS, Fault
from threestep.plugins.audit.tests.plain_policy import PolicyTrainer
from threestep.plugins.audit.tests.plain_trainer import PlainTrainer, Setup
from threestep.plugins.audit.text import verdict

MOST_CAUSES = 3  # of which one is right; a longer list names nothing
# Settings that right steps have in turns.
SETTINGS = {
    "sft": [{}, {"reduction": "sequence mean"}, {"schedule": "cosine", "warmup_steps": 5}, {"temperature": 0.7}],
    "dpo": [
        {"label_smoothing": 0.0, "beta": 0.05}, {"preference_terms": "sigmoid:0.8,sft:0.2"},
        *({"preference_loss": name} for name in ("sigmoid", "sigmoid_norm", "robust", "ipo", "hinge", "apo_zero")),
        {"preference_loss": "apo_down"}, {"preference_loss": "simpo", "simpo_gamma": 0.6},
        {"preference_loss": "cpo", "cpo_alpha": 0.7}, {"preference_loss": "orpo"},
    ],
    "marked": [{}, {"preference_loss": "bco"}],
    "reward": [{}, {"center_coef": 0.0, "label_smoothing": 0.1}],
    "grpo": [
        {}, {"kl_in": "reward"}, {"temperature": 50.0},  # of a KL near 0, whose rounding is small, too
        {"reduction": "sequence mean", "kl_in": "none"}, {"advantage": "grpo_passk"},
        *({"advantage": name, "norm_by": "none", "gamma": 0.95} for name in ("rloo", "opo", "remax", "reinforce++")),
        *({"policy_loss": name} for name in ("gspo", "cispo", "geo_mean", "sapo", "gpg", "clip_cov")),
    ],
    "ppo": [{}, {"whiten": False, "kl_estimator": "k3"}, {"kl_in": "loss", "kl_estimator": "k3"}],
}  # fmt: skip


def record_of(setup: Setup, **replaced: object) -> StepRecord:
    """Train plainly, by replaced methods; the record by its files."""
    kind = PolicyTrainer if setup.objective in ("grpo", "ppo") else PlainTrainer
    trainer = type("Trainer", (kind,), dict(replaced))(setup)
    trainer.train()
    with tempfile.TemporaryDirectory() as folder:
        trainer.write(Path(folder))
        return read_record(Path(folder))


def findings_of(setup: Setup, **replaced: object) -> list:
    return judge(AuditedStep(record_of(setup, **replaced)))


def same_records(one: StepRecord, other: StepRecord) -> bool:
    """Whether the numbers of two records are the same: then a fault did nothing."""
    parts = zip([*one.ranks, one.state], [*other.ranks, other.state], strict=True)
    return one.head.figures == other.head.figures and all(
        name in theirs and np.array_equal(values, theirs[name]) for own, theirs in parts for name, values in own.items()
    )


def found(fault: Fault, seed: int) -> tuple[bool, bool, str]:
    """Whether a fault is found at its quantity, and whether its cause is named; and the verdict."""
    setup = Setup(fault.objective, **{"seed": seed, "packed": seed % 2 == 0, **fault.setup})
    planted = record_of(setup, **fault.replaced)
    right = record_of(Setup(**{**vars(setup), "uses": {}}))
    if same_records(planted, right):
        return False, False, "it changes nothing"
    findings = judge(AuditedStep(planted))
    wrong = first_wrong(findings)
    if wrong is None or wrong.difference is None or wrong.name not in fault.quantity.split("|"):
        return False, False, verdict(findings)
    of_critic = wrong.difference.where.startswith("the critic's ") or not wrong.name.startswith("critic")
    names = any(re.search(fault.names, cause) for cause in wrong.difference.causes[:MOST_CAUSES]) or not fault.names
    return of_critic, names, verdict(findings)


def right_setup(number: int, seed: int) -> Setup:
    """A right step: every objective in turns, its settings, layouts, dtypes and ranks drawn."""
    drawn = random.Random(f"{seed} {number}")
    objective = [*SETTINGS][number % len(SETTINGS)]
    settings = SETTINGS[objective][number // len(SETTINGS) % len(SETTINGS[objective])]
    if settings.get("advantage") == "reinforce++":
        settings = {**settings, "whiten": True}
    layout = {"packed": drawn.random() < 0.4, "left": drawn.random() < 0.5, "bf16": drawn.random() < 0.5}
    shape = {"ranks": drawn.choice((1, 2)), "micro_batches": drawn.randint(1, 4), "step": drawn.randint(3, 5)}
    more = {"leaves_out": drawn.random() < 0.3, "keeps": drawn.choice(("logits model", "logits", "model"))}
    return Setup(objective, settings=settings, seed=drawn.randrange(10**6), **layout, **shape, **more)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m threestep.plugins.audit.tests.audited_steps", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=300, help="right steps")
    options = parser.parse_args()
    results = [(fault, *found(fault, options.seed)) for fault in (*EXAMINED, *FAULTS)]
    for fault, is_found, is_explained, said in results:
        if not (is_found and is_explained):
            print(f"{'found' if is_found else 'MISSED'}, {fault.objective}: {fault.name}: {said}")
    alarms = 0
    for number in range(options.count):
        setup = right_setup(number, options.seed)
        findings = findings_of(setup)
        if first_wrong(findings) is not None or not any(finding.state == AGREES for finding in findings):
            alarms += 1
            print(f"ALARM, {setup}: {verdict(findings)}")
    places, causes = (sum(result[column] for result in results) for column in (1, 2))
    print(
        f"{len(results)} faults: {places} at their quantity, {causes} with their cause; {options.count} right steps: "
        f"{alarms} false alarms"
    )
    return int(places < len(results) or causes < len(results) or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
