"""Where rows stand in the data: file and line, over several datasets, and why not."""

from __future__ import annotations

import json
import os
from pathlib import Path

from threestep.plugins.explain.explanation import KnownOfRun, Questions, explain
from threestep.plugins.explain.page import page
from threestep.plugins.explain.places import places_of_rows
from threestep.plugins.explain.text import as_json


def _file(path: Path, rows: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"p{row}", "completion": f"c{row}"}) + "\n" for row in range(rows)))
    return f"jsonl:{path}"


def test_a_row_is_found_by_file_and_line(tmp_path: Path):
    names = [_file(tmp_path / "one.jsonl", 3), _file(tmp_path / "two.jsonl", 2)]
    own = {"data_path": names, "data_output_path": str(tmp_path), "sft_only_data_path": []}
    places, note = places_of_rows([0, 2, 3, 4, 9], own, "sft")
    assert not note
    ends = {row: place.rpartition("/")[2] for row, place in places.items()}
    assert ends == {0: "one.jsonl, line 1", 2: "one.jsonl, line 3", 3: "two.jsonl, line 1", 4: "two.jsonl, line 2"}


def test_a_made_dataset_and_files_that_are_gone(tmp_path: Path):
    assert places_of_rows([1], {"data_path": ["embedded"]}, "sft") == ({}, "")
    places, note = places_of_rows([1], {"data_path": [f"jsonl:{tmp_path}/gone.jsonl"]}, "sft")
    assert not places
    assert "is not known" in note


def test_a_page_leaves_folders_out_where_files_have_other_names():
    from threestep.plugins.explain.page import _without_folders

    assert _without_folders(["a/b/one.jsonl, line 3", "", "two.jsonl, row 4"]) == [
        "one.jsonl, line 3",
        "",
        "two.jsonl, row 4",
    ]
    places = ["a/one.jsonl, line 3", "b/one.jsonl, line 3"]
    assert _without_folders(places) == places


def test_places_stand_on_the_page_and_in_the_list_of_lessons():
    from dataclasses import replace

    import numpy as np

    from threestep.plugins.audit.quantities.step import AuditedStep
    from threestep.plugins.explain.held_out import HeldOutResponses
    from threestep.plugins.explain.tests.explained_steps import PlainStep

    drawn = PlainStep(3, "sft").made().record
    ranks = [{**rank, "rows": np.arange(len(rank["lengths"])) + 40} for rank in drawn.ranks]
    step = AuditedStep(replace(drawn, ranks=ranks))
    held = HeldOutResponses(["a"], [np.array([3, 5, 2])], [1])
    known = KnownOfRun(places={40: "rows.jsonl, line 41"}, note="a note")
    found = explain([step], Questions(held, is_taught=True), known)
    assert "rows.jsonl, line 41" in found.table.sequences["from"]
    assert "rows.jsonl, line 41" in {lesson["from"] for lesson in as_json(found)["taught"]["lessons"]}
    assert all(lesson.text.count("\n") == 1 for lesson in found.named_lessons)  # a prompt and its response
    assert "rows.jsonl, line 41" in page(found)
    assert "a note" in page(found)


def test_a_run_that_is_not_trusted_has_plain_files_alone_read(tmp_path: Path):
    """Neither its module is run nor an address opened; and nothing is written where its settings say."""
    module, mark, cache = tmp_path / "module.py", tmp_path / "ran", tmp_path / "cache"
    module.write_text(f"open({str(mark)!r}, 'w').close()\n")
    plain, pipe = _file(tmp_path / "one.jsonl", 3), tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for own, words in (
        ({"data_path": [plain], "dataset_module": [str(module)]}, "module.py' run (dataset_module); give --trust_run"),
        (
            {"data_path": [plain, "jsonl:https://127.0.0.1:1/rows.jsonl"]},
            "is no file of this machine; give --trust_run",
        ),
        ({"data_path": [plain, "hub:owner/name"]}, "'hub:owner/name' is no file of this machine"),
        ({"data_path": [f"jsonl:{pipe}"]}, "is no plain file"),
        ({"data_path": 3}, "config.yaml, data_path: expects a valid list, got 3"),
    ):
        places, note = places_of_rows([1], {**own, "data_output_path": str(cache)}, "sft")
        assert not places and words in note
    assert not mark.exists()
    trusted = {"data_path": [plain], "dataset_module": [str(module)], "data_output_path": str(cache)}
    assert places_of_rows([1], trusted, "sft", trusts_run=True)[0]
    assert mark.exists()
