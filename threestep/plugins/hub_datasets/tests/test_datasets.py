"""Each built-in dataset against three rows with its columns, saved to disk under its name: made up for these tests,
the third with whatever the dataset is known to have holes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest

from tests.support.data_flags import data_flags, raw_dataset_of
from tests.unit.utils.data.test_fingerprint_row_versions import PAIRS as RECORDED
from tests.unit.utils.data.test_fingerprint_row_versions import digest, texts_of
from threestep.plugins import hub_datasets
from threestep.plugins.hub_datasets import datasets as classes
from threestep.plugins.hub_datasets import jsonfile
from training.utils.base.errors import ThreestepError
from training.utils.data import registry
from training.utils.data.arguments import DataArguments
from training.utils.data.build.build import build_phase


class Case(NamedTuple):
    """`texts`: prompt, chosen and rejected of each row."""

    eval_split: str | None
    rows: list[dict[str, Any]]
    texts: list[tuple[str | None, str | None, str | None]]


def rows_of(columns: str, *rows: tuple) -> list[dict[str, Any]]:
    return [dict(zip(columns.split(), row, strict=True)) for row in rows]


def asked(*rows: tuple[str | None, str | None, str | None]) -> list[tuple[str | None, str | None, str | None]]:
    """Questions that stand between the two roles."""
    return [(prompt and f" Human: {prompt} Assistant:", chosen, rejected) for prompt, chosen, rejected in rows]


CONVERSATIONS = Case(
    "test",
    rows_of(
        "prompt response chosen rejected",
        ("\n\nHuman: Hi\n\nAssistant:", " Hello", " Hello", " Go"),
        ("\n\nHuman: Tea?\n\nAssistant: Yes.\n\nHuman: Milk?\n\nAssistant:", " A drop.", " A drop.", " Assistant: no"),
        ("\n\nHuman: ?\n\nAssistant:", "", "", " So"),
    ),
    [
        ("\n\nHuman: Hi\n\nAssistant:", " Hello", " Go"),
        ("\n\nHuman: Tea?\n\nAssistant: Yes.\n\nHuman: Milk?\n\nAssistant:", " A drop.", " Assistant: no"),
        ("\n\nHuman: ?\n\nAssistant:", "", " So"),
    ],
)


def passages(*texts: str) -> list[dict[str, str]]:
    return [{"docid": "1", "title": "t", "text": text} for text in texts]


MIRACL = Case(
    "dev",
    rows_of(
        "query_id query positive_passages negative_passages",
        ("1", "茶?", passages("绿", "红"), passages("水")),
        ("2", "山?", passages("高"), passages("低")),
        ("3", "河?", passages("长"), []),
    ),
    asked(("茶?", " 绿", " 水"), ("山?", " 高", " 低"), ("河?", " 长", None)),
)


def mkqa(language: str) -> Case:
    def answers(*texts: str | None) -> list[dict[str, Any]]:
        return [{"type": "entity", "entity": "", "text": text, "aliases": []} for text in texts]

    rows = [
        {
            "query": "how many", "answers": {language: answers(*given), "en": answers("four")},
            "queries": {language: query, "en": "how many"}, "example_id": 1,
        }
        for query, given in (("几?", ["四", "4"]), ("谁?", ["我"]), ("哪?", [None]))
    ]  # fmt: skip
    return Case(None, rows, asked(("几?", " 四", None), ("谁?", " 我", None), ("哪?", None, None)))


CASES: dict[str, Case] = {
    "Dahoas/rm-static": CONVERSATIONS,
    "Dahoas/full-hh-rlhf": CONVERSATIONS,
    "Dahoas/synthetic-instruct-gptj-pairwise": Case(
        None,
        rows_of("prompt chosen rejected", ("Hi", "Hello", "Go"), ("Count.", "1 2", "2 1"), ("?", "!", None)),
        asked(("Hi", " Hello", " Go"), ("Count.", " 1 2", " 2 1"), ("?", " !", None)),
    ),
    "yitingxie/rlhf-reward-datasets": Case(
        "test",
        rows_of(
            "prompt chosen rejected",
            ("\n\nHuman: Hi\n\n", "Assistant: Hello", "Assistant: Go"),
            ("\n\nHuman: Say it\n\n", "Assistant: I Assistant: so", "Assistant: no"),
            ("\n\nHuman: ?\n\n", "\n\nAssistant: Ah", " Oh"),
        ),
        [
            ("\n\nHuman: Hi\n\nAssistant:", " Hello", " Go"),
            ("\n\nHuman: Say it\n\nAssistant:", " I Assistant: so", " no"),
            ("\n\nHuman: ?\n\nAssistant:", " Ah", " Oh"),
        ],
    ),
    "openai/webgpt_comparisons": Case(
        None,
        rows_of(
            "question answer_0 answer_1 score_0 score_1",
            ({"full_text": "Why?"}, "So [1].", "Because [1, 2] of that [3].", "-0.5", "0.5"),
            ({"full_text": "How?"}, "Thus (see above).", "No.", "1.0", "-1.0"),
            ({"full_text": "When?"}, "Now.", "Then.", "0.0", "0.0"),
        ),
        asked(
            ("Why?", " Because of that.", " So."), ("How?", " Thus (see above).", " No."), ("When?", " Now.", " Then.")
        ),
    ),
    "stanfordnlp/SHP": Case(
        "validation",
        rows_of(
            "history human_ref_A human_ref_B labels", ("Why?", "a", "b", 0), ("How?", "a", "b", 1), ("Who?", "c", "", 1)
        ),
        asked(("Why?", " b", " a"), ("How?", " a", " b"), ("Who?", " c", " ")),
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": Case(
        "test",
        rows_of(
            "prompt label",
            ("USER: Hi ASSISTANT:", "Hello"),
            ("USER: Hi ASSISTANT: Yes? USER: Bye ASSISTANT:", "Bye"),
            ("USER: ? ASSISTANT:", None),
        ),
        [
            ("Human: Hi Assistant:", " Hello", None),
            ("Human: Hi Assistant: Yes? Human: Bye Assistant:", " Bye", None),
            ("Human: ? Assistant:", None, None),
        ],
    ),
    "wangrui6/Zhihu-KOL": Case(
        None,
        rows_of(
            "INSTRUCTION RESPONSE SOURCE METADATA",
            ("为什么?", "因为", "x", "{}"),
            ("怎么?", "这样", "x", "{}"),
            (None, "好", "x", "{}"),
        ),  # fmt: skip
        asked(("为什么?", " 因为", None), ("怎么?", " 这样", None), (None, " 好", None)),
    ),
    "Cohere/miracl-zh-queries-22-12": MIRACL,
    "Cohere/miracl-ja-queries-22-12": MIRACL,
    "Hello-SimpleAI/HC3-Chinese": Case(
        None,
        rows_of(
            "id question human_answers chatgpt_answers",
            ("0", "什么?", ["这个", "那个"], ["它"]),
            ("1", "谁?", ["他"], []),
            ("2", "哪里?", [], ["这里"]),
        ),  # fmt: skip
        asked(("什么?", " 这个", None), ("谁?", " 他", None), ("哪里?", None, None)),
    ),
    "mkqa-Chinese": mkqa("zh_cn"),
    "mkqa-Japanese": mkqa("ja"),
    "lmqg/qg_jaquad": Case(
        "validation",
        rows_of(
            "question sentence paragraph answer",
            ("何?", "これ", "これとそれ", "これ"),
            ("誰?", "私です", "私です", "私"),
            ("どこ?", "ここ", "ここ", "ここ"),
        ),  # fmt: skip
        asked(("何?", " これ", None), ("誰?", " 私です", None), ("どこ?", " ここ", None)),
    ),
    "lmqg/qag_jaquad": Case(
        "validation",
        rows_of(
            "questions answers paragraph",
            (["何?", "誰?"], ["これ", "私"], "これは私"),
            (["どこ?"], ["ここ"], "ここ"),
            ([], [], "空"),
        ),  # fmt: skip
        asked(("何?", " これは私", None), ("どこ?", " ここ", None), (None, " 空", None)),
    ),
}


def save(folder: Path, case: Case) -> str:
    """As `save_to_disk` writes it: the rows in every split."""
    splits = {"train": datasets.Dataset.from_list(case.rows)}
    if case.eval_split:
        splits[case.eval_split] = datasets.Dataset.from_list(case.rows[:1])
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return str(folder)


@pytest.fixture
def flags(tmp_path):
    def make(name: str, **given: Any) -> DataArguments:
        return data_flags(data_path=[name], data_output_path=str(tmp_path / "cache"), **given)

    return make


@pytest.mark.parametrize("name", CASES)
def test_the_texts_of_three_rows(tmp_path, flags, name):
    folder, case = save(tmp_path / name, CASES[name]), CASES[name]
    raw = raw_dataset_of(folder, flags(folder), seed=1)
    rows = raw.get_train_data()
    texts = [(raw.get_prompt(row), raw.get_chosen(row), raw.get_rejected(row)) for row in rows]
    assert texts == case.texts
    assert (raw.get_eval_data() is None) == (case.eval_split is None)
    assert raw.get_eval_data() is None or len(raw.get_eval_data()) == 1


def test_the_version_changes_with_the_rows(tmp_path, flags):
    """Where a digest changes, so must the `ROWS_VERSION` of its module, by which built data are found again."""
    found = [[name, *texts_of(raw_dataset_of(save(tmp_path / name, CASES[name]), flags(name), 1))] for name in CASES]
    assert (classes.ROWS_VERSION[:8], digest(found)) == ("58b9e6dc", "f14640796f0651fe")
    place = tmp_path / "local" / "jsonfile"
    place.mkdir(parents=True)
    for name in ("train.json", "eval.json"):
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in RECORDED), encoding="utf-8")
    found = texts_of(raw_dataset_of(str(place), data_flags(), 1))
    assert (jsonfile.ROWS_VERSION[:8], digest(found)) == ("ddf09ebb", "a79a049aa78f2f9d")


def test_json_files_that_are_not_there_or_have_a_wrong_row(tmp_path, flags):
    place = tmp_path / "local" / "jsonfile"
    place.mkdir(parents=True)
    with pytest.raises(ThreestepError, match="local/jsonfile: '.*data/train.json' does not exist; pass the folder"):
        raw_dataset_of(str(place), flags(str(place)), seed=1)
    (place / "train.json").write_text('[{"prompt": "a"},\n {"prompt": 1}]')
    raw = raw_dataset_of(str(place), flags(str(place)), seed=1)
    with pytest.raises(ThreestepError, match="train.json, line 2: column 'prompt': expected text, got a number"):
        raw.get_train_data()


def test_every_name_is_tried_and_the_plugin_adds_those_that_its_classes_have():
    homes = {name: registry._classes[name].__module__ for name in registry.registered_names()}
    own = {name for name, home in homes.items() if home.startswith(f"{hub_datasets.__name__}.")}
    assert own == {*CASES, "local/jsonfile"} == {*hub_datasets.PLUGIN.tables["data_sources"]}


@pytest.mark.parametrize("name", ["Hello-SimpleAI/HC3-Chinese", "stanfordnlp/SHP", "lmqg/qag_jaquad"])
def test_a_row_with_a_hole_is_counted(tmp_path, flags, tiny_tokenizer, name):
    folder = save(tmp_path / name, CASES[name])
    phase = 2 if CASES[name].texts[0][2] else 1
    data = flags(folder, data_split="1,0,0" if phase == 1 else "0,1,0", eval_fraction=0.0)
    train = build_phase(phase, data, tiny_tokenizer, seed=1).report.train
    assert train.rows == 2 and sum(train.dropped.values()) == 1


# --- local/jsonfile

PAIRS = [
    {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},
    {"prompt": "Bye", "chosen": "Bye", "rejected": "No"},
    {"prompt": "?", "chosen": "!", "rejected": None},
]


def test_json_files_as_deepspeed_chat_lays_them_out(tmp_path, flags, monkeypatch):
    folder = tmp_path / "local" / "jsonfile" / "data"
    folder.mkdir(parents=True)
    (folder / "train.json").write_text(json.dumps(PAIRS))
    (folder / "eval.json").write_text("".join(json.dumps(row) + "\n" for row in PAIRS[:1]))

    by_path = raw_dataset_of(str(folder.parent), flags(str(folder.parent)), seed=1)
    monkeypatch.chdir(folder.parent)
    by_place = raw_dataset_of("local/jsonfile", flags("local/jsonfile"), seed=1)
    for raw in (by_path, by_place):
        rows = raw.get_train_data()
        assert [raw.get_prompt_and_chosen(row) for row in rows] == [" Hi Hello", " Bye Bye", " ? !"]
        assert [raw.get_rejected(row) for row in rows] == [" Go", " No", None]
        assert len(raw.get_eval_data()) == 1
        assert raw.get_fingerprint() == by_path.get_fingerprint()

    before = by_path.get_fingerprint()
    (folder / "train.json").write_text(json.dumps(PAIRS[:2]))
    assert raw_dataset_of(str(folder.parent), flags("x"), seed=1).get_fingerprint() != before
    (folder / "eval.json").unlink()
    assert raw_dataset_of(str(folder.parent), flags("x"), seed=1).get_eval_data() is None
