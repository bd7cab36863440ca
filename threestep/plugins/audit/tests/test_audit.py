"""The program: what it prints, its exit codes, its page; its flags and words, and the files that it reads."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from threestep.plugins.audit import __main__ as program
from threestep.plugins.audit.flags import RecordingArguments, check, step_needs
from threestep.plugins.audit.judge import AGREES, DIFFERS, NOT_JUDGED, Difference, Finding
from threestep.plugins.audit.reading import read_settings, read_tensors
from threestep.plugins.audit.recording.files import RecordHead, write_record
from threestep.plugins.audit.tests.audited_steps import record_of
from threestep.plugins.audit.tests.plain_faults import FAULTS
from threestep.plugins.audit.tests.plain_trainer import Setup
from threestep.plugins.audit.text import meaning, not_judged, verdict
from threestep.plugins.audit.words import settings_of_words
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.added import added_flags
from training.utils.flags.flags import note_mistakes

pytestmark = pytest.mark.unit


@pytest.fixture
def written(tmp_path):
    def write(objective: str = "sft", fault: str = "") -> str:
        own = next((each for each in FAULTS if (each.objective, each.name) == (objective, fault)), None)
        assert own is not None or not fault
        more = {} if own is None else own.setup
        record = record_of(Setup(objective, **more), **({} if own is None else own.replaced))
        write_record(tmp_path / "record", record)
        return str(tmp_path / "record")

    return write


def test_a_right_step(written, capsys):
    program.main([written()])
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "sft, step 4, 2 ranks, plain 1"
    states = {line.split()[0]: line.split()[1] for line in lines}
    assert (states["loss_mask"], states["logprobs"]) == ("agrees", "agrees")
    assert re.fullmatch(r"no difference: \d+ of \d+ quantities are judged, and all agree with their references", last)


def test_a_difference_that_rounding_allows_is_named():
    findings = [Finding("logprobs", AGREES, 9, farthest=(-7.5, -7.461, 0.85)), Finding("loss", AGREES, 1)]
    findings += [Finding("rollout_old_logprobs", AGREES, 9, farthest=(1.0, 3.0, math.inf))]
    assert verdict(findings).endswith(
        "references; rounding allows the largest difference, 0.039 of logprobs (allowed: 0.85)"
    )
    assert "rounding" not in verdict(findings[1:])
    assert meaning("logprob_sums").endswith(" ld_alpha") and "reference" in meaning("ref_logprob_sums")


def test_a_wrong_step_ends_with_1_and_has_a_page_and_json_has_the_same(written, tmp_path, capsys):
    folder, page = written("sft", "sum of means"), tmp_path / "page.html"
    with pytest.raises(SystemExit) as end:
        program.main([folder, "--out", str(page)])
    assert end.value.code == 1
    said, cause = capsys.readouterr().out.splitlines()[-1], "sum over micro-batches of their means"
    assert said.startswith("the first wrong quantity is loss: recorded ") and f"cause: the {cause}" in said
    html = page.read_text()
    assert f"<strong>The {cause}" in html.split("the first wrong quantity")[0]
    assert html.count(f"the {cause}") >= 2 and '<td class="differs">differs</td>' in html
    with pytest.raises(SystemExit):
        program.main([folder, "--json"])
    found = json.loads(capsys.readouterr().out)
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert cause in by_name["loss"]["difference"]["causes"][0] and "is loss" in found["verdict"]
    assert by_name["backward_loss"]["state"] == "not judged" and by_name["backward_loss"]["lacks"]


def test_the_page_of_a_right_step_is_green_and_sets_apart_what_is_not_judged(written, tmp_path):
    page = tmp_path / "page.html"
    program.main([written("grpo"), "--out", str(page)])
    html = page.read_text()
    judged, _, others = html.partition("<h2>Not judged</h2>")
    assert '<p class="warning verdict right">no difference: ' in judged and "/record: grpo, step " in judged
    assert "backward_loss</b>: the record lacks the figure backward_loss." in others and "backward_loss" not in judged
    assert "<small>the policy&#x27;s part of the actor&#x27;s loss</small>" in judged
    assert "value_loss" not in html and "critic_" not in html  # GRPO has no critic


def test_rows_that_agree_have_both_numbers_and_their_difference(written, capsys):
    program.main([written("grpo")])
    lines = {words[0]: " ".join(words[1:]) for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    number = r"-?[\d.]+(?:e-?\d+)?"
    apart = rf"recorded {number}, expected {number}, difference {number} \(allowed: {number}\)"
    assert re.fullmatch(f"agrees {apart}", lines["policy_loss"])
    assert re.fullmatch(rf"agrees \d+ numbers; largest difference: {apart}", lines["logprobs"])
    assert re.fullmatch(r"agrees \d+ numbers, all equal", lines["loss_mask"])
    assert re.fullmatch(rf"agrees recorded and expected {number}", lines["denominator"])


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("the state gradients.NAME", "record the step with --record_steps 3 --record_values (models of up to 20 mil"),
        ("the critic's model and state", "record the step with --record_steps 3 --record_values"),
        ("the setting advantage", "has no reference); to judge by one of the format, add --as advantage=VALUE"),
        ("the setting clip_low", "the policy loss is a function of your own, which has no reference"),
        ("the tensor rollout_ref_logprobs", "the run has no reference model (--kl_coef 0)"),
        ("the tensor logits", "Threestep does not record these numbers; what follows from them is judged"),
        ("another loss", "the record lacks another loss"),
    ],
)
def test_a_quantity_that_is_not_judged_says_what_would_have_it_judged(lacks, says):
    head = RecordHead("policy", 3, settings={"kl_in": "none"}, trainer={"name": "threestep"})
    first, second = (Finding(name, NOT_JUDGED, lacks=lacks) for name in ("one", "two"))
    [(why, names)] = not_judged(head, [first, second]).items()
    assert says in why and names == ["one", "two"]


def test_a_run_without_a_critic_has_no_rows_of_one(written, capsys):
    """An estimator of a user's own has no name in a record."""
    folder = Path(written("grpo"))
    head = json.loads((folder / "record.json").read_text())
    del head["settings"]["advantage"]
    (folder / "record.json").write_text(json.dumps(head))
    program.main([str(folder)])
    said = capsys.readouterr().out
    assert "policy_loss" in said and not re.search("value|critic|returns|corrections", said)


def test_marks_of_sequences_are_counted_in_words():
    marks = Difference(8, 9, 3.0, 0.0, "sequence 2", "sequence 1", ("no response ends",))
    assert verdict([Finding("token_ids", DIFFERS, 9, difference=marks)]) == (
        "the first wrong quantity is token_ids: wrong in 8 of 9 sequences, first sequence 1; cause: no response ends"
    )


def test_a_quantity_without_a_cause_names_the_next_with_one():
    first = Finding("loss", DIFFERS, 1, difference=Difference(1, 1, 2.0, math.nan, "", "", ()))
    second = Finding("grad_norm", DIFFERS, 1, difference=Difference(1, 1, 2.0, 1.0, "", "", ("the square",)))
    assert verdict([first, second]) == (
        "the first wrong quantity is loss: recorded 2, expected another number; no known cause gives the "
        "recorded numbers; grad_norm differs too, cause: the square"
    )


def test_what_a_user_says_replaces_the_recorded_settings(written, capsys):
    folder = written("grpo")
    program.main([folder])
    with pytest.raises(SystemExit):
        program.main([folder, "--as", "ddof 0"])
    assert "denominator n - 1 (ddof 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "expects the folder of a record, such as RUN/records/step_000010"),
        ("nowhere", "nowhere is not the record of a step: it has no record.json"),
        ("nowhere", "(in step 3, to step_000001_update1 and so on)"),
        ("RUN", "is a run, not the record of a step; give one of its records: RUN/records/step_000003"),
        ("RECORD --trust_run", "--trust_run is only for two runs (RUN_A RUN_B), but one folder was given"),
        ("RECORD RECORD --code_b elsewhere", "--code_b is only for reruns; add --trust_run, or remove"),
        ("RECORD --work elsewhere", "--work is only for two runs"),
        ("RECORD RECORD --as grpo", "--as applies to a single record, but two runs were given"),
        ("RECORD RECORD", "has no digests.jsonl"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, words, message):
    record = tmp_path / "record"
    record.mkdir()
    (record / "record.json").write_text("{}")
    (tmp_path / "run" / "records" / "step_000003").mkdir(parents=True)
    with pytest.raises(ThreestepError) as refusal:
        program.main(words.replace("RECORD", str(record)).replace("RUN", str(tmp_path / "run")).split())
    assert message in str(refusal.value).replace(str(tmp_path / "run"), "RUN")


# --- the words of --as


def test_words_and_values():
    assert settings_of_words("grpo, token mean, k3") == {
        "advantage": "grpo", "reduction": "token mean", "kl_estimator": "k3",
    }  # fmt: skip
    assert settings_of_words("GAE, KL in loss, ddof 0, whitened, no std, beta=0.1, whiten=false,") == {
        "advantage": "gae", "kl_in": "loss", "std_ddof": 0.0, "whiten": False, "norm_by": "none", "beta": 0.1,
    }  # fmt: skip
    assert settings_of_words("") == {}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("grop", "got 'grop'; did you mean 'grpo'"),
        ("beta", "got 'beta'"),
        ("bet=1", "got 'bet=1'; did you mean 'beta='"),
        ("beta=much", "--as: beta expects a number, got 'much'"),
        ("kl_in=nowhere", "--as: kl_in expects one of reward, loss, none, got 'nowhere'"),
        ("whiten=2", "--as: whiten expects true or false, got '2'"),
    ],
)
def test_other_words_are_refused(said, words):
    with pytest.raises(ThreestepError) as refusal:
        settings_of_words(said)
    assert words in str(refusal.value)


# --- flags that record steps


def flags_of(has_form: bool = False, optimizer: str = "adamw", **given):
    added = added_flags("step1_sft")(audit_RecordingArguments=RecordingArguments(**given))
    data = SimpleNamespace(form=SimpleNamespace() if has_form else None)
    return SimpleNamespace(added=added, data=data, settings={"optimizer": optimizer})


PATHS = "--record_steps needs each sequence to be one contiguous run of tokens, but --parallel_thinking lays out paths"
ADAMW = "--record_steps records and checks AdamW's steps, but --optimizer is sign; remove one of them"


@pytest.mark.parametrize(
    ("has_form", "optimizer", "steps", "refused"),
    [
        (False, "adamw", [1], []),
        (True, "adamw", [], []),
        (True, "adamw", [1], [PATHS]),
        (False, "sign", [], []),
        (False, "sign", [1], [ADAMW]),
    ],
)
def test_parallel_paths_and_steps_of_another_optimizer_are_not_recorded(has_form, optimizer, steps, refused):
    mistakes = Mistakes()
    check(flags_of(has_form, optimizer, record_steps=steps), mistakes)
    assert len(mistakes.sentences) == len(refused)
    assert all(found.startswith(words) for found, words in zip(mistakes.sentences, refused, strict=True))


def test_a_recorded_step_reads_whole_rows_in_forwards_of_its_own_and_values_are_of_records():
    assert step_needs(flags_of()) == ({"--record_steps": False}, "")
    whole, own = step_needs(flags_of(record_steps=[2]))
    assert whole == {"--record_steps": True} and own.startswith("steps are recorded (--record_steps")
    mistakes = Mistakes()
    note_mistakes(RecordingArguments(record_values=True), mistakes)
    assert [sentence[:36] for sentence in mistakes.sentences] == ["--record_values needs --record_steps"]


# --- files


def test_what_is_no_file_is_refused_and_settings_that_are_not_there_are_none(tmp_path):
    (tmp_path / "folder").mkdir()
    os.symlink("nowhere", tmp_path / "link")
    for name in ("folder", "link"):
        for read in (read_settings, read_tensors):
            with pytest.raises(ThreestepError, match=f"{name} .*file"):
                read(tmp_path / name)
    assert read_settings(tmp_path / "gone") == {}
    with pytest.raises(ThreestepError, match="gone is missing: expected tensors"):
        read_tensors(tmp_path / "gone")


@pytest.mark.parametrize("text", ["a: b: c", "- [", "[1]", "1: 2", "9" * 6000, "!!python/object/apply:os.getcwd []"])
def test_settings_are_a_mapping(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ThreestepError, match="config.yaml"):
        read_settings(path)
    path.write_text("a: 1\nb: [x]\n")
    assert read_settings(path) == {"a": 1, "b": ["x"]}


def test_tensors_are_whole(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": np.arange(3)}, path)
    assert read_tensors(path)["x"].tolist() == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ThreestepError, match="is not a safetensors file of integers, booleans or floats"):
        read_tensors(path)
