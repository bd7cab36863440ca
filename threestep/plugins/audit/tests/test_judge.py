"""Planted faults are found at their quantity with their cause; right steps raise no alarm; a record's ranks as one."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from threestep.plugins.audit import reference_page
from threestep.plugins.audit.judge import AGREES, DIFFERS, NOT_JUDGED, first_wrong, judge
from threestep.plugins.audit.quantities import QUANTITIES
from threestep.plugins.audit.quantities.ids import notes_on_ids
from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.recording.files import RecordHead, StepRecord
from threestep.plugins.audit.recording.schema import FIGURES, SETTINGS, STATES, TENSORS
from threestep.plugins.audit.tests.audited_steps import findings_of, found, record_of, right_setup
from threestep.plugins.audit.tests.plain_faults import EXAMINED, FAULTS
from threestep.plugins.audit.tests.plain_trainer import Setup
from threestep.plugins.audit.text import as_json, verdict

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")]
PLANTED = [*EXAMINED, *FAULTS]


@pytest.mark.parametrize("place", range(len(PLANTED)), ids=[f"{each.objective}: {each.name}" for each in PLANTED])
def test_a_fault_is_found_with_its_cause(place):
    is_found, is_explained, said = found(PLANTED[place], seed=2 + place % 2)
    assert is_found and is_explained, said


@pytest.mark.parametrize("number", range(18))
def test_a_right_step_raises_no_alarm(number):
    setup = right_setup(number, seed=5)
    findings = findings_of(setup)
    assert first_wrong(findings) is None, (setup, verdict(findings))
    agrees = {finding.name for finding in findings if finding.state == AGREES}
    assert len(agrees) >= 3
    if setup.objective == "ppo":
        assert agrees >= {"new_values", "value_loss"} | ({"critic_gradients"} if "model" in setup.keeps else set())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 30))
def test_many_right_steps_and_faults(seed):
    for number in range(60):
        findings = findings_of(setup := right_setup(number, seed))
        assert first_wrong(findings) is None, (setup, verdict(findings))
    missed = [(fault.name, said) for fault in PLANTED for *ok, said in [found(fault, seed)] if not all(ok)]
    assert not missed


def test_the_difference_has_its_place_and_its_size():
    record = record_of(Setup(ranks=1, packed=False))
    own = record.ranks[0]
    [place] = np.flatnonzero(own["loss_mask"])[5:6]
    own["token_losses"][place] += 0.5
    finding = first_wrong(judge(AuditedStep(record)))
    difference = finding.difference
    assert (finding.name, difference.entries, difference.causes) == ("token_losses", 1, ())
    assert difference.recorded - difference.right == pytest.approx(0.5, abs=1e-5)
    ends = np.cumsum(own["lengths"])
    sequence = int(np.searchsorted(ends, place, side="right"))
    column = int(place - ends[sequence] + own["lengths"][sequence])
    assert f"row {own['rows'][sequence]}, token {column} (token id {own['token_ids'][place]})" == difference.where


# Tensors that a quantity is, or is computed from; not those of another estimator, or of tokens without loss.
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    ("objective", "name"),
    [
        *(("grpo", f"rollout_{name}") for name in ("ref_logprobs", "old_logprobs", "sampling_logprobs", "scores")),
        *(("ppo", "rollout_values"), ("dpo", "ref_logprob_sums"), ("dpo", "logprob_sums"), ("reward", "scores")),
        ("sft", "loss"),
    ],
)
def test_numbers_that_are_not_finite_differ(objective: str, name: str, bad: float):
    record = record_of(Setup(objective, ranks=1, step=1, settings={"kl_in": "reward"}))
    if name == "loss":
        record.head.figures["loss"] = bad
    else:
        record.ranks[0][name] = np.full_like(record.ranks[0][name], bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        findings = judge(AuditedStep(record))
    assert first_wrong(findings) is not None
    assert [each.state for each in findings if each.name == name and name == "loss"] == [DIFFERS] * (name == "loss")
    assert AGREES not in [finding.state for finding in findings if finding.name == name]
    assert f"recorded {bad:g}, expected {bad:g}" not in verdict(findings)
    json.dumps(as_json(record.head, findings), allow_nan=False)  # no number that JSON does not have


def test_what_a_record_lacks_is_named():
    record = record_of(Setup(keeps="logits"))
    del record.ranks[1]["logits"], record.ranks[0]["token_losses"], record.ranks[1]["token_losses"]
    record.head.settings.pop("max_grad_norm")
    lacks = {finding.name: finding.lacks for finding in judge(AuditedStep(record)) if finding.state == NOT_JUDGED}
    assert lacks == {
        "logprobs": "the model's configuration",
        "logits": "the tensor logits of 1 ranks",
        "gradients": "the model's configuration",
        "backward_loss": "the figure backward_loss",
        "token_losses": "the tensor token_losses",
        "clipped_gradients": "the setting max_grad_norm",
    }


@pytest.mark.parametrize("wanted", ["of the data", "of the template", None])
def test_a_system_prompt_of_the_template(wanted: str | None):
    record = record_of(Setup(ranks=1, packed=True))
    own = record.ranks[0]
    ids = own["token_ids"][:3].copy()
    own["token_ids"][np.cumsum([0, *own["lengths"]])[4] :][:3] = ids  # another row that begins so
    told = {"template_prompt": " ".join(map(str, ids)), **({"system_prompt": wanted} if wanted else {})}
    step = AuditedStep(record, told)
    wrong = first_wrong(judge(step))
    notes = [] if wanted else [f"2 of {len(own['lengths'])}"]
    assert [note.split(" sequences")[0] for note in notes_on_ids(step)] == notes
    if wanted != "of the data":
        assert wrong is None or wrong.name != "token_ids"
        return
    assert (wrong.name, wrong.difference.entries) == ("token_ids", 2)
    assert wrong.difference.causes == ("the template adds a system prompt, which no row has",)


def test_every_quantity_is_a_part_of_a_record_and_the_reference_page_has_it_with_its_causes():
    text, names = reference_page.page(), {*TENSORS, *FIGURES, *(state.removesuffix(".") for state in STATES)}
    for quantity in QUANTITIES:
        sentences = [cause.sentence for cause in quantity.causes]
        assert len(set(sentences)) == len(sentences)
        assert quantity.name in names and f"| `{quantity.name}` |" in text
        assert [sentence for sentence in sentences if sentence not in text] == []
    assert [name for name in (*TENSORS, *SETTINGS, *FIGURES) if f"| `{name}` |" not in text] == []
    assert [name for name in STATES if f"| `{name}NAME` |" not in text] == []


# --- a record's ranks as one


@pytest.fixture
def step() -> AuditedStep:
    """Two ranks: sequences of 2 and 1 tokens in two micro-batches; one of 3 tokens in one."""
    first = {
        "lengths": np.array([2, 1]), "rows": np.array([4, 9]), "micro_batches": np.array([0, 1]),
        "token_ids": np.array([5, 6, 7]), "chosen": np.array([0]), "rejected": np.array([1]),
        "loss_mask": np.array([False, True, True]), "micro_losses": np.zeros(2, np.float32),
    }  # fmt: skip
    second = {
        "lengths": np.array([3, 2]), "rows": np.array([1, 2]), "micro_batches": np.array([0, 0]),
        "token_ids": np.arange(5), "chosen": np.array([1]), "rejected": np.array([0]),
        "loss_mask": np.ones(5, dtype=bool), "micro_losses": np.zeros(1, np.float32),
    }  # fmt: skip
    return AuditedStep(StepRecord(RecordHead("sft", 1, 2, {"beta": 0.1}), [first, second]), {"beta": 0.2})


def test_ranks_are_joined(step):
    assert step.setting("beta") == 0.2 and (step.ranks, step.micro_batches) == (2, 3)
    assert step.sequence_T.tolist() == [0, 0, 1, 2, 2, 2, 3, 3] and step.place_T.tolist() == [0, 1, 0, 0, 1, 2, 0, 1]
    assert step.micro_S.tolist() == [0, 1, 2, 2] and step.rank_S.tolist() == [0, 0, 1, 1]
    assert step.tensor("chosen").tolist() == [0, 3] and step.tensor("rejected").tolist() == [1, 2]
    units = step.token_units(np.ones(8))
    assert units.weights_U.tolist() == [0, 1, 1, 1, 1, 1, 1, 1] and units.micro_U.tolist() == [0, 0, 1, 2, 2, 2, 2, 2]


def test_places_have_names_and_what_is_missing_has(step):
    assert step.where("T", 4) == "row 1 of rank 1, token 1 (token id 1)"
    assert step.where("S", 1) == "row 9 of rank 0"
    assert step.where("P", 1) == "the pair of row 2 of rank 1 and its rejected response"
    assert [step.where("K", index) for index in range(3)] == [
        "micro-batch 0 of rank 0", "micro-batch 1 of rank 0", "micro-batch 0 of rank 1",
    ]  # fmt: skip
    calls = {"scores": step.tensor, "gamma": step.setting, "loss": step.figure, "gradients.": step.state}
    for name, call in calls.items():
        with pytest.raises(LackingError, match=name):
            call(name)
