"""Planted faults are found at their quantity with their cause; right steps raise no alarm."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from threestep.plugins.audit import reference_page
from threestep.plugins.audit.judge import AGREES, DIFFERS, NOT_JUDGED, first_wrong, judge
from threestep.plugins.audit.quantities import QUANTITIES
from threestep.plugins.audit.quantities.ids import notes_on_ids
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.schema import FIGURES, SETTINGS, STATES, TENSORS
from threestep.plugins.audit.tests.audited_steps import ALL_FAULTS, found, judged, right_step
from threestep.plugins.audit.tests.plain_trainer import Setting, step_of
from threestep.plugins.audit.text import as_json, verdict

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")]


@pytest.mark.parametrize("fault", ALL_FAULTS, ids=lambda fault: f"{fault[0]}: {fault[1]}")
def test_a_fault_is_found_with_its_cause(fault):
    is_found, is_explained, said = found(fault, seed=3)
    assert is_found and is_explained, said


@pytest.mark.parametrize("number", range(12))
def test_a_right_step_raises_no_alarm(number):
    objective, setting = right_step(number, seed=5)
    findings = judged(objective, setting)
    assert first_wrong(findings) is None, verdict(findings)
    assert sum(finding.state == AGREES for finding in findings) >= 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 30))
def test_many_right_steps_and_faults(seed):
    for number in range(60):
        objective, setting = right_step(number, seed)
        findings = judged(objective, setting)
        assert first_wrong(findings) is None, (objective, setting, verdict(findings))
    missed = [(fault, said) for fault in ALL_FAULTS for *ok, said in [found(fault, seed)] if not all(ok)]
    assert not missed


def test_the_difference_has_its_place_and_its_size():
    record = step_of("sft", Setting(2, padded=True))
    own = record.ranks[0]
    [place] = np.flatnonzero(own["loss_mask"])[5:6]
    own["token_losses"][place] += 0.5
    finding = first_wrong(judge(AuditedStep(record)))
    assert finding is not None and finding.name == "token_losses" and finding.difference is not None
    difference = finding.difference
    assert (difference.entries, difference.causes) == (1, ())
    assert difference.recorded - difference.right == pytest.approx(0.5, abs=1e-5)
    sequence, column = divmod(int(place), int(own["lengths"][0]))
    if sequence < 3:  # rows of the first micro-batch are as long
        assert f"row {own['rows'][sequence]}, token {column} (token id {own['token_ids'][place]})" == difference.where


def test_numbers_that_are_not_finite_differ():
    record = step_of("sft", Setting(2))
    record.head.figures["loss"] = float("nan")  # type: ignore[index]
    findings = judge(AuditedStep(record))
    assert {finding.name: finding.state for finding in findings}["loss"] == DIFFERS


# Tensors that a quantity is, or is computed from; not those of another estimator, or of tokens without loss.
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    ("objective", "name"),
    [
        *(("grpo", f"rollout_{name}") for name in ("ref_logprobs", "old_logprobs", "sampling_logprobs", "scores")),
        ("gae", "rollout_values"),
        ("pairs", "ref_logprob_sums"),
        ("dpo", "logprob_sums"),
        ("reward", "scores"),
    ],
)
def test_tensors_that_are_not_finite_differ(objective: str, name: str, bad: float):
    record = step_of(objective, Setting(3))
    record.ranks[0][name] = np.full_like(record.ranks[0][name], bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        findings = judge(AuditedStep(record))
    assert first_wrong(findings) is not None
    assert AGREES not in [finding.state for finding in findings if finding.name == name]
    assert f"recorded {bad:g}, expected {bad:g}" not in verdict(findings)


def test_json_has_no_number_that_json_does_not_have():
    record = step_of("sft", Setting(2))
    record.ranks[0]["token_losses"][:] = np.inf
    json.dumps(as_json(record.head, judge(AuditedStep(record))), allow_nan=False)


def test_what_a_record_lacks_is_named():
    record = step_of("sft", Setting(2, ranks=2))
    del record.ranks[1]["logits"], record.ranks[0]["token_losses"], record.ranks[1]["token_losses"]
    record.head.settings.pop("max_grad_norm")  # type: ignore[attr-defined]
    lacks = {finding.name: finding.lacks for finding in judge(AuditedStep(record)) if finding.state == NOT_JUDGED}
    assert lacks == {
        "logprobs": "the model's configuration",
        "logits": "the tensor logits of 1 ranks",
        "gradients": "the model's configuration",
        "micro_losses": "the tensor micro_losses",
        "backward_loss": "the figure backward_loss",
        "token_losses": "the tensor token_losses",
        "clipped_gradients": "the setting max_grad_norm",
    }


@pytest.mark.parametrize("wanted", ["of the data", "of the template", None])
def test_a_system_prompt_of_the_template(wanted: str | None):
    record = step_of("sft", Setting(2))
    own = record.ranks[0]
    ids = own["token_ids"][:2].copy()
    own["token_ids"][np.cumsum([0, *own["lengths"]])[4] :][:2] = ids  # another row that begins so
    told = {"template_prompt": " ".join(map(str, ids)), **({"system_prompt": wanted} if wanted else {})}
    step = AuditedStep(record, told)
    wrong = first_wrong(judge(step))
    assert [note.split(" sequences")[0] for note in notes_on_ids(step)] == ([] if wanted else ["2 of 10"])
    if wanted != "of the data":
        assert wrong is None or wrong.name != "token_ids"
        return
    assert wrong is not None and wrong.name == "token_ids" and wrong.difference is not None
    assert (wrong.difference.entries, wrong.difference.causes) == (
        2,
        ("the template adds a system prompt, which no row has",),
    )


def test_every_quantity_is_a_part_of_a_record():
    names = {*TENSORS, *FIGURES, *(state.removesuffix(".") for state in STATES)}
    assert {quantity.name for quantity in QUANTITIES} <= names
    for quantity in QUANTITIES:
        sentences = [cause.sentence for cause in quantity.causes]
        assert len(set(sentences)) == len(sentences)


def test_the_reference_page_has_every_quantity_cause_and_name():
    text = reference_page.page()
    for quantity in QUANTITIES:
        assert f"| `{quantity.name}` |" in text
        assert [cause.sentence for cause in quantity.causes if cause.sentence not in text] == []
    assert [name for name in (*TENSORS, *SETTINGS, *FIGURES) if f"| `{name}` |" not in text] == []
    assert [name for name in STATES if f"| `{name}NAME` |" not in text] == []
