"""The judge on a plain trainer: faults planted one at a time, and right steps, in layouts drawn at random.

    python -m threestep.plugins.audit.tests.audited_steps 7                 every fault and 300 right steps under seed 7
    python -m threestep.plugins.audit.tests.audited_steps 7 --count 30      fewer right steps

A fault counts as found if the first wrong quantity is the one it was planted in, and as explained if a cause that the
judge computes has its words. A right step counts if nothing differs. The exit code is 1 where a fault is missed or a
right step raises an alarm.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace

import numpy as np
import torch

from threestep.plugins.audit.judge import AGREES, Finding, first_wrong, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.tests.plain_llama import LLAMA_FAULTS
from threestep.plugins.audit.tests.plain_policy_trainer import OPTIONS, POLICY_FAULTS, POLICY_LOSSES, POLICY_OBJECTIVES
from threestep.plugins.audit.tests.plain_preferences import NAMES, PREFERENCE_FAULTS, PREFERENCE_OPTIONS
from threestep.plugins.audit.tests.plain_trainer import FAULTS, Setting, step_of
from threestep.plugins.audit.text import verdict

ALL_FAULTS = (*FAULTS, *POLICY_FAULTS, *PREFERENCE_FAULTS, *LLAMA_FAULTS)
OBJECTIVES = ("sft", "dpo", "reward", "pairs", "marked", "llama", *POLICY_OBJECTIVES)


def judged(objective: str, setting: Setting) -> list[Finding]:
    return judge(AuditedStep(step_of(objective, setting)))


def right_step(number: int, seed: int) -> tuple[str, Setting]:
    """The objective and the layout of a right step."""
    drawn = random.Random(f"{seed} {number}")
    objective = OBJECTIVES[number % len(OBJECTIVES)]
    losses = {"pairs": NAMES, "marked": ("kto", "bco")}.get(objective, ("sigmoid", "ipo"))
    options = {
        "loss": drawn.choice(losses),
        "policy_loss": drawn.choice(POLICY_LOSSES),
        "leaves_out": drawn.random() < 0.5,
        "kl_in": drawn.choice(("reward", "loss")),
        "reduction": drawn.choice(("token mean", "sequence mean")),
    }
    dtype = drawn.choice((torch.float32, torch.bfloat16))
    own = Setting(drawn.randrange(10**6), "", drawn.choice((1, 2)), drawn.random() < 0.5, dtype, options)
    return objective, own


def found(fault: tuple[str, str, str, str], seed: int) -> tuple[bool, bool, str]:
    """Whether a fault is found at its quantity, and whether its cause is named; and the verdict."""
    objective, name, quantity, words = fault
    options = PREFERENCE_OPTIONS.get(name) or OPTIONS.get(name, {})
    settings = (
        Setting(own, name, ranks=2, padded="pad" in name or own % 2 == 1, options={**options})
        for own in range(seed, seed + 10)
    )
    # Ranks may have as many tokens each, and then local denominators are right.
    setting = next(each for each in settings if _changes_something(objective, each))
    findings = judged(objective, setting)
    wrong = first_wrong(findings)
    if wrong is None or wrong.difference is None:
        return False, False, verdict(findings)
    return wrong.name == quantity, any(words in cause for cause in wrong.difference.causes), verdict(findings)


def _changes_something(objective: str, setting: Setting) -> bool:
    """Whether the fault shows in any figure or tensor of the step."""
    faulty, right = step_of(objective, setting), step_of(objective, replace(setting, fault=""))
    figures = [record.head.figures for record in (faulty, right)]
    if any(not np.isclose(figures[0].get(name, np.nan), value, rtol=1e-3) for name, value in figures[1].items()):
        return True
    pairs = [*zip(faulty.ranks, right.ranks, strict=True), (faulty.state, right.state)]
    return any(not np.allclose(one[name], other[name], rtol=1e-5, atol=1e-7) for one, other in pairs for name in one)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m threestep.plugins.audit.tests.audited_steps", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=300, help="right steps")
    options = parser.parse_args()
    results = [(fault, *found(fault, options.seed)) for fault in ALL_FAULTS]
    for fault, is_found, is_explained, said in results:
        if not (is_found and is_explained):
            print(f"{'found' if is_found else 'MISSED'}, {fault[0]}: {fault[1]}: {said}")
    alarms = 0
    for number in range(options.count):
        objective, setting = right_step(number, options.seed)
        findings = judged(objective, setting)
        if first_wrong(findings) is not None or not any(finding.state == AGREES for finding in findings):
            alarms += 1
            print(f"ALARM, {objective}, {setting}: {verdict(findings)}")
    places, causes = (sum(result[column] for result in results) for column in (1, 2))
    print(
        f"{len(results)} faults: {places} at their quantity, {causes} with their cause; {options.count} right steps: "
        f"{alarms} false alarms"
    )
    return int(places < len(results) or causes < len(results) or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
