"""From flags to the rows of all phases: who gets which rows, what builds them again, and mistakes in files and flags.

The weaknesses of DeepSpeed-Chat's data code, each with the test that would find it here: a cache keyed by names
(`test_what_changes_rows_rebuilds`), non-atomic pickles (test_cache), bloat and padding (test_dataset), split rounding
(test_portions), different seeds (`test_phases_share_no_row`), another end token in another phase
(`test_one_end_token_in_all_phases`), loss on the prompt and masks from ids where pad is eos (test_row_maker).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.data_flags import with_flags
from tests.support.pair_rows import PAIR, Own, all_rows, many
from tests.support.tiny_tokenizers import SENTENCES, train_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.data.build import build as building
from training.utils.data.build.build import build_phase
from training.utils.data.cache.workers import BuildStopped
from training.utils.data.kinds.table import KINDS


def test_prompt_ids_are_the_same_in_all_phases(build):
    rows = [{**PAIR, "prompt": f"{prompt}"} for prompt in ("Human: a Assistant:", "no space", "ends in one ")] * 4
    sentences, responses, prompts = (build(phase, rows).train for phase in (1, 2, 3))
    assert len(sentences) == 12
    for sentence, row, prompt in zip(sentences, responses, prompts, strict=True):
        ids = row.prompt_ids.tolist()
        assert ids == prompt.flipped_prompt_ids[::-1].tolist() == sentence.input_ids[~sentence.loss_mask].tolist()


@pytest.mark.parametrize("token", [None, "<|pad|>"])
def test_one_end_token_in_all_phases(build, tiny_tokenizer, token):
    end_id = tiny_tokenizer.eos_token_id if token is None else tiny_tokenizer.pad_token_id
    sentences, pairs = (build(phase, end_of_conversation_token=token).train for phase in (1, 2))
    for ids in [row.input_ids for row in sentences] + [ids for row in pairs for ids in row.response_ids]:
        assert ids[-1] == end_id and (ids == end_id).sum() == 1


def test_phases_share_no_row_and_cover_all(flags, tiny_tokenizer):
    built = [build_phase(phase, flags(), tiny_tokenizer, seed=1234) for phase in (1, 2, 3)]
    trained = [row.row_id for phase in built for row in phase.train]
    held_out = {row.row_id for phase in built for row in phase.eval}
    assert len(trained) == len(set(trained)) == 36 and len(held_out) == 4
    assert sorted([*trained, *held_out]) == list(range(40))
    assert [len(phase.train) for phase in built] == [7, 15, 14]  # 36 by 2, 4, 4: 7.2, 14.4, 14.4


def test_evaluation_rows_that_are_trained_on_are_a_warning(build, write_rows, tmp_path):
    said: list[str] = []
    (tmp_path / "data").mkdir()
    write_rows(many(PAIR, 9), "data/train.jsonl")
    address = f"jsonl:{Path(write_rows(many(PAIR, 12)[7:], 'data/test.jsonl')).parent}"
    built = build(1, data_path=[address], log=said.append)
    assert (len(built.train), len(built.eval)) == (9, 5)
    assert "warning: 2 evaluation rows are also trained on; remove them from the training rows" in said
    # Carved from rows that repeat each other: a count.
    build(1, many(PAIR, 9) * 2, eval_fraction=0.3, log=(other := list[str]()).append)
    assert any(", 3 equal to a training row, none dropped" in line for line in other), other
    assert not any(line.startswith("warning: ") for line in other)


def test_several_datasets_are_concatenated_after_splitting(build, write_rows):
    paths = [f"jsonl:{write_rows(many(PAIR, n), f'{n}.jsonl')}" for n in (20, 40)]
    built = build(1, data_path=paths, data_split="2,4,4")
    ids = [row.row_id for row in built.train]
    assert len([i for i in ids if i < 20]) == 4 and len([i for i in ids if i >= 20]) == 8
    assert [source["first_row_id"] for source in built.train.manifest["sources"]] == [0, 20]
    assert len(built.eval) == 0


def test_sft_only_data_goes_whole_into_phase_1(flags, write_rows, tiny_tokenizer):
    data = flags(sft_only_data_path=[f"jsonl:{write_rows(many(PAIR, 10), 'alone.jsonl')}"], data_split="0,1,1")
    built = build_phase(1, data, tiny_tokenizer, seed=1)
    assert {row.row_id for row in all_rows(built)} - set(range(40)) == set(range(40, 50))
    assert len(built.train) == 9  # nothing of data_path, nine of ten rows of the other
    for phase in (2, 3):
        assert max(row.row_id for row in all_rows(build_phase(phase, data, tiny_tokenizer, seed=1))) < 40
    alone = with_flags(data, data_path=[])
    assert len(build_phase(1, alone, tiny_tokenizer, seed=1).train) == 9
    with pytest.raises(
        ThreestepError, match="--data_path expects at least one dataset, got none; .* .a generated task.$"
    ):
        build_phase(3, alone, tiny_tokenizer, seed=1)


def test_own_evaluation_rows_are_used_and_row_ids_number_all_rows_of_all_sources(own, flags, tiny_tokenizer):
    data = own(get_eval_data=lambda self: [{"p": "Human: x Assistant:", "c": " y", "r": " z"}] * 3)
    built = [build_phase(phase, data, tiny_tokenizer, 1) for phase in (1, 2, 3)]
    assert sum(len(phase.train) for phase in built) == 20
    assert [[row.row_id for row in phase.eval] for phase in built] == [[20, 21, 22]] * 3
    data = with_flags(data, data_path=["own", *flags().source.data_path], data_split="1,0,0", eval_fraction=0.0)
    built = build_phase(1, data, tiny_tokenizer, 1)
    # 20 training rows, 3 evaluation rows, then 40 of the file.
    assert [row.row_id for row in built.eval] == [20, 21, 22]
    assert sorted(row.row_id for row in built.train) == [*range(20), *range(23, 63)]


def test_the_same_rows_at_any_world_size(flags, tiny_tokenizer, tmp_path):
    """Two processes with ranks and hashes of their own ask at once for all phases: one builds, both read the same
    rows."""
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = flags()
    program = f"""
import json
from transformers import PreTrainedTokenizerFast
from tests.support.data_flags import data_flags
from training.utils.data.build.build import build_phase
data = data_flags(data_path={data.source.data_path!r}, data_output_path={data.cache.data_output_path!r},
                  data_split="2,4,4")
tokenizer = PreTrainedTokenizerFast.from_pretrained({str(tmp_path / "tokenizer")!r})
built = [build_phase(phase, data, tokenizer, seed=1) for phase in (1, 2, 3)]
print(json.dumps([[[row.row_id for row in each.train] for each in built], [each.report.from_cache for each in built]]))
"""
    ranks = []
    for rank in ("0", "1"):
        environment = {**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "PYTHONHASHSEED": rank}
        command = [sys.executable, "-c", program]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    (rows_0, resumed_0), (rows_1, resumed_1) = (json.loads(rank.communicate(timeout=60)[0]) for rank in ranks)
    here = [build_phase(phase, data, tiny_tokenizer, seed=1) for phase in (1, 2, 3)]
    assert rows_0 == rows_1 == [[row.row_id for row in built.train] for built in here]
    assert [one + other for one, other in zip(resumed_0, resumed_1, strict=True)] == [1, 1, 1]
    assert all(built.report.from_cache for built in here)


# --- what changes rows rebuilds them; what does not is resumed, with the same report


def test_what_is_passed_over_is_logged_also_of_a_cache(build, tmp_path):
    for name in ("rows.jsonl", ".git/rows.jsonl"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(json.dumps({"question": "a", "answer": "b", "c": {"d": None}}) + "\n")
    address = f"jsonl:{tmp_path / 'data'}"
    for _ in range(2):
        log: list[str] = []
        assert len(build(1, data_path=[address], log=log.append).train) == 1
        (hidden,) = [line for line in log if "hidden" in line]
        assert hidden.startswith(f"data: {address}: not read: 1 hidden file (.git/rows.jsonl); to read")
        assert any(line.startswith(f"data: {address}: nulls are read as missing keys if all") for line in log)


def test_cut_rows_are_said_with_their_share(build, flags, tiny_tokenizer):
    log: list[str] = []
    built = build(1, many(PAIR, 40), max_seq_len=8, eval_fraction=0.1, log=log.append)
    train, held_out = built.report.train, built.report.eval
    assert train.truncated == train.rows > 0
    cut = [line for line in log if " were cut at " in line]
    said = f"warning: {train.rows} of {train.rows} training rows (100.0%) were cut at --max_seq_len 8 tokens (--tr"
    assert cut[0].startswith(said)
    assert cut[1].startswith(f"warning: {held_out.rows} of {held_out.rows} evaluation rows (100.0%)")
    whole = dataclasses.replace(train, truncated=0)
    whole = dataclasses.replace(built.report, train=whole, eval=whole)
    assert not [*building.warnings_of(KINDS["sentences"], flags().rows, whole)]
    log.clear()
    build_phase(1, flags(many(PAIR), max_seq_len=9), tiny_tokenizer, 1, is_main_rank=False, log=log.append)
    assert log == []


def change_one_row(data):
    path = Path(data.source.data_path[0].partition(":")[2])
    content = path.read_bytes()
    assert b"3 is 6" in content
    path.write_bytes(content.replace(b"3 is 6", b"3 is 7", 1))


ALL, CHAT, PLAIN = (1, 2, 3), "chat_template", "human_assistant"


@pytest.mark.parametrize(
    ("what", "value", "phases", "said", "style"),
    [
        ("tokenizer", None, ALL, "tokenizer", PLAIN),
        ("seed", 2, ALL, "seed", PLAIN),
        ("row", None, ALL, "rows of [0]", PLAIN),
        ("code", None, ALL, "code", PLAIN),
        ("data_split", "3,4,4", ALL, "data_split", PLAIN),
        ("eval_fraction", 0.2, ALL, "eval_fraction", PLAIN),
        ("max_train_rows", 30, ALL, "max_train_rows", PLAIN),
        ("max_seq_len", 511, (1, 2), "max_seq_len", PLAIN),
        ("truncation", "left", (1, 2), "truncation", PLAIN),
        ("end_of_conversation_token", "<|pad|>", (1, 2), "end of conversation", PLAIN),
        ("loss_on", "conversation", (1,), "loss_on", PLAIN),
        ("max_prompt_seq_len", 255, (3,), "max_prompt_seq_len", PLAIN),
        ("prompt_truncation", "left", (3,), "prompt_truncation", PLAIN),
        ("prompt_style", PLAIN, ALL, "prompt_style", CHAT),
        ("chat_template", "llama3", ALL, "chat template", CHAT),
        ("chat_template_kwargs", '{"x": 1}', ALL, "chat template kwargs", CHAT),
        ("train_turns", "last", (1,), "train_turns", CHAT),
        ("bad_conversations", "drop", ALL, "bad_conversations", CHAT),
    ],
)
def test_what_changes_rows_rebuilds_and_what_does_not_resumes(
    flags, tiny_tokenizer, monkeypatch, tmp_path, what, value, phases, said, style
):
    data, seed = flags(prompt_style=style), 1
    tokenizer = tiny_tokenizer if style == PLAIN else chat_tokenizer(chat_template("chatml"))
    first = [build_phase(phase, data, tokenizer, seed).report for phase in ALL]
    os.utime(data.source.data_path[0].partition(":")[2])  # a file's time is no part
    again = [build_phase(phase, data, tokenizer, seed).report for phase in ALL]
    assert [dataclasses.replace(each, from_cache=True) for each in first] == again
    if what == "tokenizer":
        tokenizer = train_tokenizer([*SENTENCES, "so very many other words to merge, so very many"])
    elif what == "seed":
        seed = value
    elif what == "row":
        change_one_row(data)
    elif what == "code":
        monkeypatch.setattr(building, "ROWS", "another version")
    elif what == "chat_template":
        (tmp_path / "mine.jinja").write_text(chat_template(value))
        data = with_flags(data, chat_template=str(tmp_path / "mine.jinja"))
    else:
        data = with_flags(data, **{what: value})
    for phase in ALL:
        log: list[str] = []
        built = build_phase(phase, data, tokenizer, seed, log=log.append)
        assert built.report.from_cache == (phase not in phases), (phase, log)
        assert phase not in phases or any("changed since the last build" in line and said in line for line in log), log


def test_rebuild_cache_rebuilds(build):
    build(1)
    log: list[str] = []
    assert not build(1, rebuild_cache=True, log=log.append).report.from_cache
    assert any("--rebuild_cache is set" in line for line in log)


def test_a_changed_row_of_a_class_rebuilds(own, tiny_tokenizer):
    data = own()
    build_phase(1, data, tiny_tokenizer, 1)
    assert build_phase(1, data, tiny_tokenizer, 1).report.from_cache
    data = own(rows=[*Own.rows[:19], {"p": "Human: a Assistant:", "c": " b", "r": " d"}])
    assert not build_phase(1, data, tiny_tokenizer, 1).report.from_cache


# --- mistakes

LINE_10 = r"rows.jsonl, line 10: column 'chosen': expected text or a number, got a truth"


@pytest.mark.parametrize(
    ("phases", "rows", "given", "said"),
    [
        ((1,), [], {}, "dataset 'jsonl:.*rows.jsonl' is empty"),
        # Also in the phases that would not get that row: it is found in step 1, not after hours.
        (ALL, [*many(PAIR, 9), '{"prompt": "x", "chosen": true}'], {}, LINE_10),
        ((1,), [{"prompt": "a", "answer": "b"}] * 3, {}, "step 1 needs responses, but the columns are 'answer'"),
        ((1,), None, {"data_split": "0,0,0"}, "--data_split expects .*got '0,0,0'"),
        ((1,), None, {"data_split": "2,4"}, "--data_split expects .*got '2,4'"),
        ((2,), [{**row, "rejected": None} for row in many(PAIR)], {},
         r"all 7 rows .* were dropped \(7 no_rejected\).*--rejected_column"),
        ((1,), None, {"max_seq_len": 3}, "raise --max_seq_len or change --truncation"),
        ((3,), None, {"max_prompt_seq_len": 3}, "raise --max_prompt_seq_len or change --prompt_truncation"),
        ((1,), [{"frage": "Was?"}], {},
         "fit no format(?!.*threestep inspect.*threestep inspect).*; threestep inspect with the same data flags shows "
         "how the rows are read$"),
    ],
)  # fmt: skip
def test_mistakes_in_files_and_flags(flags, tiny_tokenizer, phases, rows, given, said):
    for phase in phases:
        with pytest.raises(ThreestepError, match=said):
            build_phase(phase, flags(rows, **given), tiny_tokenizer, 1)


def test_no_pad_token_where_it_matters(flags):
    tokenizer = train_tokenizer(SENTENCES)
    tokenizer.pad_token = None
    assert len(build_phase(1, flags(), tokenizer, 1).train) == 7
    for phase in (2, 3):
        with pytest.raises(ThreestepError, match=f"no pad token, which step {phase}"):
            build_phase(phase, flags(), tokenizer, 1)


def test_a_full_disk_is_no_mistake_in_the_data(build, monkeypatch):
    def stop(*given, **named):
        raise BuildStopped("the disk is full")

    monkeypatch.setattr(building, "open_or_build", stop)
    with pytest.raises(BuildStopped, match="^the disk is full$"):
        build(1)
