"""The program: what it prints, its exit codes, its page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from threestep.plugins.audit import __main__ as program
from threestep.plugins.audit.judge import DIFFERS, Difference, Finding
from threestep.plugins.audit.recording.files import write_record
from threestep.plugins.audit.tests.audited_steps import ALL_FAULTS
from threestep.plugins.audit.tests.plain_trainer import Setting, step_of
from threestep.plugins.audit.text import verdict
from training.utils.base.errors import ThreestepError

pytestmark = pytest.mark.unit


def written(folder: Path, objective: str = "sft", fault: str = "") -> str:
    assert not fault or fault in {name for _, name, *_ in ALL_FAULTS}
    write_record(folder, step_of(objective, Setting(2, fault, ranks=2)))
    return str(folder)


def test_a_right_step(tmp_path, capsys):
    program.main([written(tmp_path / "right")])
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == "sft, step 4, 2 ranks, plain"
    states = {line.split()[0]: line.split()[1] for line in lines}
    assert (states["loss_mask"], states["logprobs"]) == ("agrees", "agrees")
    assert last == "no difference: 11 of 15 quantities are judged, and agree with their references"


def test_a_wrong_step_ends_with_1_and_has_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as end:
        program.main([written(tmp_path / "wrong", fault="mean of micro-batches"), "--out", str(page)])
    assert end.value.code == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert (
        said.startswith("the first wrong quantity is loss: recorded ") and "cause: the mean over micro-batches" in said
    )
    html = page.read_text()
    assert "<strong>The mean over micro-batches of their means" in html.split("the first wrong quantity")[0]
    assert html.count("the mean over micro-batches of their means") == 2 and '<td class="differs">differs</td>' in html


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


def test_json_has_the_same(tmp_path, capsys):
    with pytest.raises(SystemExit):
        program.main([written(tmp_path / "wrong", "grpo", "clip bounds swapped"), "--json"])
    found = json.loads(capsys.readouterr().out)
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert "swapped" in by_name["policy_loss"]["difference"]["causes"][0] and "policy_loss" in found["verdict"]
    assert by_name["value_loss"]["state"] == "not judged" and by_name["value_loss"]["lacks"]


def test_what_a_user_says_replaces_the_recorded_settings(tmp_path, capsys):
    folder = written(tmp_path / "right", "grpo")
    program.main([folder])
    with pytest.raises(SystemExit):
        program.main([folder, "--as", "ddof 0"])
    assert "denominator n - 1 (ddof 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "expects the folder of a record, such as RUN/records/step_000010"),
        (["nowhere"], "nowhere expects the record of a step, a folder with record.json, and has none"),
        (["nowhere"], "of step 3 to step_000001_update1 and so on"),
    ],
)
def test_mistakes_are_one_sentence(argv, words):
    with pytest.raises(ThreestepError) as refusal:
        program.main(argv)
    assert words in str(refusal.value)


def test_flags_of_two_runs_and_of_a_record_are_apart(tmp_path):
    folder = written(tmp_path / "right")
    with pytest.raises(ThreestepError, match="--trust_run is for two runs, RUN_A RUN_B, and one folder is given"):
        program.main([folder, "--trust_run"])
    with pytest.raises(ThreestepError, match="--code_b is for runs that are run again; give --trust_run, or leave it"):
        program.main([folder, folder, "--code_b", "elsewhere"])
    with pytest.raises(ThreestepError, match="--work is for two runs"):
        program.main([folder, "--work", "elsewhere"])
    with pytest.raises(ThreestepError, match="--as is for a record, and two runs are given"):
        program.main([folder, folder, "--as", "grpo"])
    with pytest.raises(ThreestepError, match="expects a run with digests.jsonl"):
        program.main([folder, folder])
