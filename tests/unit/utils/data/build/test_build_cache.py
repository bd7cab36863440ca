"""What changes rows rebuilds them; what does not is resumed, in no time and with the same report."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from tests.support.data_flags import with_flags
from tests.support.pair_rows import PAIR, Own, many
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.data.build import build
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.table import KINDS


def test_what_is_passed_over_is_logged_also_of_a_cache(flags, tiny_tokenizer, tmp_path):
    for name in ("rows.jsonl", ".git/rows.jsonl"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(json.dumps({"question": "a", "answer": "b", "c": {"d": None}}) + "\n")
    address = f"jsonl:{tmp_path / 'data'}"
    for _ in range(2):
        log: list[str] = []
        data = flags(data_path=[address], data_split="1,0,0", eval_fraction=0.0)
        assert len(build_phase(1, data, tiny_tokenizer, seed=1, log=log.append).train) == 1
        (hidden,) = [line for line in log if "hidden" in line]
        assert hidden.startswith(f"data: {address}: not read: 1 hidden file (.git/rows.jsonl); to read")
        assert any(line.startswith(f"data: {address}: nulls are read as missing keys where all") for line in log)


def test_the_second_run_resumes_in_under_a_second(flags, tiny_tokenizer):
    rows = many(PAIR, 3000)
    log: list[str] = []
    build_phase(1, flags(rows), tiny_tokenizer, 1, log=log.append)
    assert any("phase1 built in" in line for line in log)
    log.clear()
    started = time.perf_counter()
    again = build_phase(1, flags(rows), tiny_tokenizer, 1, log=log.append)
    assert time.perf_counter() - started < 1.0
    assert again.report.resumed and any("phase1 read from the cache in" in line for line in log)
    assert not any("built in" in line for line in log)


def test_cut_rows_are_said_with_their_share(flags, tiny_tokenizer):
    log: list[str] = []
    data = flags(many(PAIR, 40))
    data = dataclasses.replace(data, rows=dataclasses.replace(data.rows, max_seq_len=8))
    built = build_phase(1, data, tiny_tokenizer, 1, log=log.append)
    assert built.report.train.truncated == built.report.train.rows > 0
    cut = [line for line in log if " were cut at " in line]
    rows = built.report.train.rows
    assert cut[0].startswith(
        f"warning: {rows} of {rows} training rows (100.0%) were cut at --max_seq_len 8 tokens (--tr"
    )
    assert cut[1].startswith(f"warning: {built.report.eval.rows} of {built.report.eval.rows} evaluation rows (100.0%)")
    whole = dataclasses.replace(built.report.train, truncated=0)
    whole = dataclasses.replace(built.report, train=whole, eval=whole)
    assert not [*build.warnings_of(KINDS["sentences"], data.rows, whole)]


def test_ranks_other_than_the_main_one_are_silent(flags, tiny_tokenizer):
    log: list[str] = []
    build_phase(1, flags(), tiny_tokenizer, 1, is_main_rank=False, log=log.append)
    assert log == []


def change_one_row(path):
    content = Path(path).read_bytes()
    assert b"3 is 6" in content
    Path(path).write_bytes(content.replace(b"3 is 6", b"3 is 7", 1))


OTHER_TOKENIZER = [*SENTENCES, "so very many other words to merge, so very many"]


@pytest.mark.parametrize(
    ("what", "phases"),
    [
        ("tokenizer", (1, 2, 3)),
        ("seed", (1, 2, 3)),
        ("row", (1, 2, 3)),
        ("data_split", (1, 2, 3)),
        ("eval_fraction", (1, 2, 3)),
        ("max_train_rows", (1, 2, 3)),
        ("max_seq_len", (1, 2)),
        ("truncation", (1, 2)),
        ("end_of_conversation_token", (1, 2)),
        ("loss_on", (1,)),
        ("max_prompt_seq_len", (3,)),
        ("prompt_truncation", (3,)),
        ("code", (1, 2, 3)),
    ],
)
def test_what_changes_rows_rebuilds_and_what_does_not_resumes(flags, tiny_tokenizer, monkeypatch, what, phases):
    data, tokenizer, seed = flags(), tiny_tokenizer, 1
    for phase in (1, 2, 3):
        build_phase(phase, data, tokenizer, seed)
    changes = {
        "data_split": "3,4,4",
        "eval_fraction": 0.2,
        "max_train_rows": 30,
        "max_seq_len": 511,
        "truncation": "left",
        "end_of_conversation_token": "<|pad|>",
        "loss_on": "conversation",
        "max_prompt_seq_len": 255,
        "prompt_truncation": "left",
    }
    if what in changes:
        data = with_flags(data, **{what: changes[what]})
    elif what == "tokenizer":
        tokenizer = train_tokenizer(OTHER_TOKENIZER)
    elif what == "seed":
        seed = 2
    elif what == "row":
        change_one_row(data.source.data_path[0].partition(":")[2])
    elif what == "code":
        monkeypatch.setattr("training.utils.data.build.build.ROWS", "another version")
    for phase in (1, 2, 3):
        log: list[str] = []
        built = build_phase(phase, data, tokenizer, seed, log=log.append)
        assert built.report.resumed == (phase not in phases), (phase, log)
        if phase in phases:
            named = {"row": "rows of [0]", "end_of_conversation_token": "end of conversation"}.get(what, what)
            assert any("changed since the last one" in line and named in line for line in log), log


def test_the_same_data_elsewhere_is_another_name_and_the_same_rows(flags, write_rows, tiny_tokenizer):
    data = flags()
    first = build_phase(2, data, tiny_tokenizer, 1)
    os.utime(data.source.data_path[0].partition(":")[2])  # only the time of the file changes
    assert build_phase(2, data, tiny_tokenizer, 1).report.resumed
    assert first.train.manifest["parts"]["seed"] == "1"


def test_rebuild_cache_rebuilds(flags, tiny_tokenizer):
    build_phase(1, flags(), tiny_tokenizer, 1)
    log: list[str] = []
    assert not build_phase(1, flags(rebuild_cache=True), tiny_tokenizer, 1, log=log.append).report.resumed
    assert any("rebuild_cache was asked for" in line for line in log)


def test_the_cache_holds_no_padding(flags, tiny_tokenizer):
    built = build_phase(1, flags(many(PAIR, 1000), max_seq_len=4096), tiny_tokenizer, 1)
    assert max(built.train.lengths) < 60
    size = os.path.getsize(built.train.path)
    assert size < built.report.train.tokens * 4 + len(built.train) * 60


def test_a_resumed_report_is_the_built_one(flags, tiny_tokenizer):
    data = flags([PAIR, {**PAIR, "chosen": ""}] * 10)
    first, again = (build_phase(1, data, tiny_tokenizer, 1).report for _ in range(2))
    assert not first.resumed and again.resumed
    assert (first.train, first.eval) == (again.train, again.eval) and first.train.dropped


def test_a_changed_row_of_a_class_rebuilds(own, tiny_tokenizer):
    data = own()
    build_phase(1, data, tiny_tokenizer, 1)
    assert build_phase(1, data, tiny_tokenizer, 1).report.resumed
    data = own(rows=[*Own.rows[:19], {"p": "Human: a Assistant:", "c": " b", "r": " d"}])
    assert not build_phase(1, data, tiny_tokenizer, 1).report.resumed


def test_the_margin_column_concerns_phase_2_alone(flags, tiny_tokenizer):
    data = flags([{**PAIR, "prompt": f"Human: {i}? Assistant:", "sure": 1} for i in range(9)], data_split="1,1,1")
    for phase in (1, 3):
        build_phase(phase, data, tiny_tokenizer, 1)
        assert build_phase(phase, with_flags(data, margin_column="sure"), tiny_tokenizer, 1).report.resumed
