"""Steps of a run: run again to be explained, under other rules, at its end; where their rows stand; flags."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.explain import at_end, records, rule_runs
from threestep.plugins.explain.at_end import explain_at_end
from threestep.plugins.explain.explanation import KnownOfRun, Questions, explain
from threestep.plugins.explain.flags import ExplainArguments, check, step_needs
from threestep.plugins.explain.held_out import HeldOutResponses
from threestep.plugins.explain.page import _without_folders, page
from threestep.plugins.explain.places import places_of_rows
from threestep.plugins.explain.records import steps_of_run
from threestep.plugins.explain.rule_runs import flags_of, run_under
from threestep.plugins.explain.tests.explained_steps import PlainStep
from threestep.plugins.explain.text import as_json
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.storage import sha256_of, sha256_of_object
from training.utils.flags.added import added_flags
from training.utils.run.run_folder import EndedRun, RunFolder


def _refuse(*_: Any) -> Any:
    raise AssertionError("nothing is started")


def test_nothing_is_run_again_of_a_run_that_is_not_trusted(tmp_path):
    with pytest.raises(
        ThreestepError, match="rerunning the step would run the run's own settings and code; add --trust_run"
    ):
        steps_of_run(tmp_path, [1], 1, work=tmp_path / "work", start=None)


@pytest.mark.parametrize(
    ("settings", "step", "words"),
    [
        ({"sequence_parallel_size": 2}, 1, "used --sequence_parallel_size 2, but a step is recorded with whole rows"),
        ({}, 5, ".1 to 2., got 5"),
    ],
)
def test_rows_over_several_ranks_and_a_step_that_the_run_did_not_take_are_refused(
    tmp_path, monkeypatch, settings, step, words
):
    digests = SimpleNamespace(folder=tmp_path, settings=settings, steps={(1, 0): {}, (2, 0): {}})
    monkeypatch.setattr(records, "read_digests", lambda run: digests)
    with pytest.raises(ThreestepError, match=words):
        steps_of_run(tmp_path, [step], 1, work=tmp_path / "work", start=_refuse)


@pytest.mark.parametrize(
    ("folders", "known", "words"),
    [
        (["step_000002_update1", "step_000002_update2"], [], "expects 1 to 2, since step 2 has 2 updates, got 7"),
        (["step_000002"], [], "expects 1 to 1, since step 2 has 1 update, got 7"),
        ([], [(2, 1), (2, 2), (3, 1)], "expects 1 to 2, since step 2 has 2 updates, got 7"),
    ],
)
def test_an_update_that_the_step_did_not_take_is_refused(tmp_path, monkeypatch, folders, known, words):
    for name in folders:
        (tmp_path / "records" / name).mkdir(parents=True)
        (tmp_path / "records" / name / "record.json").write_text("{}")
    digests = SimpleNamespace(folder=tmp_path, settings={}, steps=dict.fromkeys(known))
    monkeypatch.setattr(records, "read_digests", lambda run: digests)
    with pytest.raises(ThreestepError, match=f"--update {words}"):
        steps_of_run(tmp_path, [2], 7, work=tmp_path / "work", start=_refuse)


# --- rules by the run's own program

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
        ("std_ddof=1", "sft", None),
        ("weight_decay=0.1", "sft", None),
    ],
)
def test_words_of_a_rule_are_flags_or_refused(said, objective, flags):
    if flags is not None:
        assert flags_of(said, objective, KNOWN) == flags
        return
    with pytest.raises(ThreestepError, match="is not a flag or is part of the optimizer's state"):
        flags_of(said, objective, KNOWN)


def test_a_checkpoint_is_rewritten_whole(tmp_path):
    content = {"format": 2, "step": 1, "settings": {"advantage": "grpo", "seed": 1}, "files": {}}
    path, state = tmp_path / "manifest.json", tmp_path / "trainer.json"
    path.write_text(json.dumps({**content, "sha256": sha256_of_object(content)}))
    state.write_text(json.dumps({"state": {"trainer": {"kl_control": {"coefficient": 0.1}}}}))
    rule_runs._rewrite(tmp_path, {"advantage": "rloo", "kl_coef": 0.3})
    found = json.loads(path.read_text())
    assert found.pop("sha256") == sha256_of_object(found)
    assert found["settings"] == {"advantage": "rloo", "seed": 1, "kl_coef": 0.3}
    assert found["files"]["trainer.json"]["sha256"] == sha256_of(state)
    assert json.loads(state.read_text())["state"]["trainer"]["kl_control"]["coefficient"] == 0.3


def test_a_run_without_the_checkpoint_is_refused(tmp_path, monkeypatch):
    digests = SimpleNamespace(folder=tmp_path, settings=KNOWN, steps={(4, 0): {}})
    monkeypatch.setattr(rule_runs, "read_digests", lambda run: digests)
    step: Any = SimpleNamespace(head=SimpleNamespace(step=4, objective="policy"))
    with pytest.raises(ThreestepError, match="right before step 4"):
        run_under(step, tmp_path, "advantage=rloo", work=tmp_path / "work", start=_refuse)


# --- at the end of a run


def test_explanations_are_made_of_records_and_a_failure_is_a_line(tmp_path, monkeypatch, capsys):
    calls: list[Any] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        failed = "update2" in words[3]
        return subprocess.CompletedProcess(words, int(failed), "", "one\nthe model is too large\n" if failed else "")

    monkeypatch.setattr(at_end.subprocess, "run", run)
    for name in ("step_000002", "step_000004_update1", "step_000004_update2"):
        (tmp_path / "records" / name).mkdir(parents=True)
        (tmp_path / "records" / name / "record.json").write_text("{}")
    explain_at_end(EndedRun(RunFolder(tmp_path, True), {"explain_steps": [4, 2, 9]}, True))
    assert [Path(words[3]).name for words in calls] == ["step_000002", "step_000004_update1", "step_000004_update2"]
    assert calls[0][-1] == str(tmp_path / "explained" / "step_000002")
    said = capsys.readouterr()
    words = said.out + said.err
    assert "step 4 is not explained: the model is too large" in words
    assert "step 9 is not explained: it has no record" in words
    assert str(tmp_path / "explained" / "step_000004_update1" / "explained.html") in words


def test_an_explained_step_is_a_recorded_one_and_parallel_paths_have_none():
    def flags(steps: list[int]) -> Any:
        added = added_flags("step1_sft")(explain_ExplainArguments=ExplainArguments(steps))
        data = SimpleNamespace(form=SimpleNamespace())
        return SimpleNamespace(added=added, data=data, settings={"optimizer": "adamw"})

    mistakes = Mistakes()
    check(flags([]), mistakes)
    assert not mistakes.sentences and step_needs(flags([])) == ({"--explain_steps": False}, "")
    check(flags([1]), mistakes)
    assert "--explain_steps needs each sequence" in str(mistakes.sentences)
    whole, own = step_needs(flags([1]))
    assert whole == {"--explain_steps": True} and own.startswith("steps are recorded")


# --- where rows stand in the data


def _file(path: Path, rows: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"p{row}", "completion": f"c{row}"}) + "\n" for row in range(rows)))
    return f"jsonl:{path}"


def test_a_row_is_found_by_file_and_line(tmp_path):
    names = [_file(tmp_path / "one.jsonl", 3), _file(tmp_path / "two.jsonl", 2)]
    own = {"data_path": names, "data_output_path": str(tmp_path), "sft_only_data_path": []}
    places, note = places_of_rows([0, 2, 3, 4, 9], own, "sft")
    ends = {row: place.rpartition("/")[2] for row, place in places.items()}
    assert not note
    assert ends == {0: "one.jsonl, line 1", 2: "one.jsonl, line 3", 3: "two.jsonl, line 1", 4: "two.jsonl, line 2"}
    assert places_of_rows([1], {"data_path": ["embedded"]}, "sft") == ({}, "")  # which is made
    (tmp_path / "table.csv").write_text("question,answer\na,b\nc,d\n")
    places, note = places_of_rows([1], {"data_path": [str(tmp_path / "table.csv")]}, "sft")
    assert not note and places[1].endswith("table.csv, line 3")
    places, note = places_of_rows([1], {"data_path": [f"jsonl:{tmp_path}/gone.jsonl"]}, "sft")
    assert not places and "are not known" in note


def test_a_page_leaves_folders_out_where_files_have_other_names():
    found = _without_folders(["a/b/one.jsonl, line 3", "", "two.jsonl, row 4"])
    assert found == ["one.jsonl, line 3", "", "two.jsonl, row 4"]
    places = ["a/one.jsonl, line 3", "b/one.jsonl, line 3"]
    assert _without_folders(places) == places


def test_places_stand_on_the_page_and_in_the_list_of_lessons():
    drawn, place = PlainStep(3, "sft").made().record, "rows.jsonl, line 41"
    ranks = [{**rank, "rows": np.arange(len(rank["lengths"])) + 40} for rank in drawn.ranks]
    held = HeldOutResponses(["a"], [np.array([3, 5, 2])], [1])
    known = KnownOfRun(places={40: place}, note="a note")
    found = explain([AuditedStep(replace(drawn, ranks=ranks))], Questions(held, is_taught=True), known)
    assert place in found.table.sequences["from"]
    assert place in {lesson["from"] for lesson in as_json(found)["taught"]["lessons"]}
    assert all(lesson.text.count("\n") == 1 for lesson in found.named_lessons)  # a prompt and its response
    assert place in page(found) and "a note" in page(found)


def test_a_run_that_is_not_trusted_has_plain_files_alone_read(tmp_path):
    """Neither its module is run nor an address opened; and nothing is written where its settings say."""
    module, mark, cache = tmp_path / "module.py", tmp_path / "ran", tmp_path / "cache"
    module.write_text(f"open({str(mark)!r}, 'w').close()\n")
    plain, pipe = _file(tmp_path / "one.jsonl", 3), tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    of_module = {"data_path": [plain], "dataset_module": [str(module)]}
    elsewhere = {"data_path": [plain, "jsonl:https://127.0.0.1:1/rows.jsonl"]}
    for own, words in (
        (of_module, "module.py' (dataset_module); add --trust_run"),
        (elsewhere, "is not a file on this machine; add --trust_run"),
        ({"data_path": [plain, "hub:owner/name"]}, "'hub:owner/name' is not a file on this machine"),
        ({"data_path": [f"jsonl:{pipe}"]}, "is not a regular file"),
        ({"data_path": 3}, "config.yaml, data_path: expects a valid list, got 3"),
    ):
        places, note = places_of_rows([1], {**own, "data_output_path": str(cache)}, "sft")
        assert not places and words in note
    assert not mark.exists()
    assert places_of_rows([1], {**of_module, "data_output_path": str(cache)}, "sft", trusts_run=True)[0]
    assert mark.exists()
