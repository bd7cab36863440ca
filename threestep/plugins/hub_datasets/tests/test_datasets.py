"""Each built-in dataset against three rows with its columns, saved to disk under its name: made up for these tests,
the third with whatever the dataset is known to have holes in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest

from tests.support.data_flags import data_flags, raw_dataset_of
from threestep.plugins import hub_datasets
from training.utils.base.errors import ThreestepError
from training.utils.data import registry
from training.utils.data.arguments import DataArguments
from training.utils.data.build.build import build_phase


class Case(NamedTuple):
    """`texts`: prompt, chosen and rejected of each row."""

    eval_split: str | None
    rows: list[dict[str, Any]]
    texts: list[tuple[str | None, str | None, str | None]]


CONVERSATIONS = Case(
    "test",
    [
        {"prompt": "\n\nHuman: Hi\n\nAssistant:", "response": " Hello", "chosen": " Hello", "rejected": " Go"},
        {
            "prompt": "\n\nHuman: Tea?\n\nAssistant: Yes.\n\nHuman: Milk?\n\nAssistant:",
            "response": " A drop.",
            "chosen": " A drop.",
            "rejected": " Assistant: no",
        },
        {"prompt": "\n\nHuman: ?\n\nAssistant:", "response": "", "chosen": "", "rejected": " So"},
    ],
    [
        ("\n\nHuman: Hi\n\nAssistant:", " Hello", " Go"),
        ("\n\nHuman: Tea?\n\nAssistant: Yes.\n\nHuman: Milk?\n\nAssistant:", " A drop.", " Assistant: no"),
        ("\n\nHuman: ?\n\nAssistant:", "", " So"),
    ],
)
MIRACL = Case(
    "dev",
    [
        {
            "query_id": str(number),
            "query": query,
            "positive_passages": [{"docid": "1", "title": "t", "text": text} for text in good],
            "negative_passages": [{"docid": "2", "title": "t", "text": text} for text in bad],
        }
        for number, query, good, bad in [
            (1, "茶?", ["绿", "红"], ["水"]),
            (2, "山?", ["高"], ["低"]),
            (3, "河?", ["长"], []),
        ]
    ],
    [
        (" Human: 茶? Assistant:", " 绿", " 水"),
        (" Human: 山? Assistant:", " 高", " 低"),
        (" Human: 河? Assistant:", " 长", None),
    ],
)


def mkqa(language: str) -> Case:
    def row(query: str | None, answers: list[str | None]) -> dict[str, Any]:
        given = [{"type": "entity", "entity": "", "text": answer, "aliases": []} for answer in answers]
        other = [{"type": "entity", "entity": "", "text": "four", "aliases": []}]
        return {
            "query": "how many",
            "answers": {language: given, "en": other},
            "queries": {language: query, "en": "how many"},
            "example_id": 1,
        }

    return Case(
        None,
        [row("几?", ["四", "4"]), row("谁?", ["我"]), row("哪?", [None])],
        [
            (" Human: 几? Assistant:", " 四", None),
            (" Human: 谁? Assistant:", " 我", None),
            (" Human: 哪? Assistant:", None, None),
        ],
    )


CASES: dict[str, Case] = {
    "Dahoas/rm-static": CONVERSATIONS,
    "Dahoas/full-hh-rlhf": CONVERSATIONS,
    "Dahoas/synthetic-instruct-gptj-pairwise": Case(
        None,
        [
            {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},
            {"prompt": "Count.", "chosen": "1 2", "rejected": "2 1"},
            {"prompt": "?", "chosen": "!", "rejected": None},
        ],
        [
            (" Human: Hi Assistant:", " Hello", " Go"),
            (" Human: Count. Assistant:", " 1 2", " 2 1"),
            (" Human: ? Assistant:", " !", None),
        ],
    ),
    "yitingxie/rlhf-reward-datasets": Case(
        "test",
        [
            {"prompt": "\n\nHuman: Hi\n\n", "chosen": "Assistant: Hello", "rejected": "Assistant: Go"},
            {"prompt": "\n\nHuman: Say it\n\n", "chosen": "Assistant: I Assistant: so", "rejected": "Assistant: no"},
            {"prompt": "\n\nHuman: ?\n\n", "chosen": "\n\nAssistant: Ah", "rejected": " Oh"},
        ],
        [
            ("\n\nHuman: Hi\n\nAssistant:", " Hello", " Go"),
            ("\n\nHuman: Say it\n\nAssistant:", " I Assistant: so", " no"),
            ("\n\nHuman: ?\n\nAssistant:", " Ah", " Oh"),
        ],
    ),
    "openai/webgpt_comparisons": Case(
        None,
        [
            {"question": {"full_text": q}, "answer_0": a0, "answer_1": a1, "score_0": s0, "score_1": s1}
            for q, a0, a1, s0, s1 in [
                ("Why?", "So [1].", "Because [1, 2] of that [3].", "-0.5", "0.5"),
                ("How?", "Thus (see above).", "No.", "1.0", "-1.0"),
                ("When?", "Now.", "Then.", "0.0", "0.0"),
            ]
        ],
        [
            (" Human: Why? Assistant:", " Because of that.", " So."),
            (" Human: How? Assistant:", " Thus (see above).", " No."),
            (" Human: When? Assistant:", " Now.", " Then."),
        ],
    ),
    "stanfordnlp/SHP": Case(
        "validation",
        [
            {"history": "Why?", "human_ref_A": "a", "human_ref_B": "b", "labels": 0},
            {"history": "How?", "human_ref_A": "a", "human_ref_B": "b", "labels": 1},
            {"history": "Who?", "human_ref_A": "c", "human_ref_B": "", "labels": 1},
        ],
        [
            (" Human: Why? Assistant:", " b", " a"),
            (" Human: How? Assistant:", " a", " b"),
            (" Human: Who? Assistant:", " c", " "),
        ],
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": Case(
        "test",
        [
            {"prompt": "USER: Hi ASSISTANT:", "label": "Hello"},
            {"prompt": "USER: Hi ASSISTANT: Yes? USER: Bye ASSISTANT:", "label": "Bye"},
            {"prompt": "USER: ? ASSISTANT:", "label": None},
        ],
        [
            ("Human: Hi Assistant:", " Hello", None),
            ("Human: Hi Assistant: Yes? Human: Bye Assistant:", " Bye", None),
            ("Human: ? Assistant:", None, None),
        ],
    ),
    "wangrui6/Zhihu-KOL": Case(
        None,
        [
            {"INSTRUCTION": "为什么?", "RESPONSE": "因为", "SOURCE": "x", "METADATA": "{}"},
            {"INSTRUCTION": "怎么?", "RESPONSE": "这样", "SOURCE": "x", "METADATA": "{}"},
            {"INSTRUCTION": None, "RESPONSE": "好", "SOURCE": "x", "METADATA": "{}"},
        ],
        [
            (" Human: 为什么? Assistant:", " 因为", None),
            (" Human: 怎么? Assistant:", " 这样", None),
            (None, " 好", None),
        ],
    ),
    "Cohere/miracl-zh-queries-22-12": MIRACL,
    "Cohere/miracl-ja-queries-22-12": MIRACL,
    "Hello-SimpleAI/HC3-Chinese": Case(
        None,
        [
            {"id": "0", "question": "什么?", "human_answers": ["这个", "那个"], "chatgpt_answers": ["它"]},
            {"id": "1", "question": "谁?", "human_answers": ["他"], "chatgpt_answers": []},
            {"id": "2", "question": "哪里?", "human_answers": [], "chatgpt_answers": ["这里"]},
        ],
        [
            (" Human: 什么? Assistant:", " 这个", None),
            (" Human: 谁? Assistant:", " 他", None),
            (" Human: 哪里? Assistant:", None, None),
        ],
    ),
    "mkqa-Chinese": mkqa("zh_cn"),
    "mkqa-Japanese": mkqa("ja"),
    "lmqg/qg_jaquad": Case(
        "validation",
        [
            {"question": "何?", "sentence": "これ", "paragraph": "これとそれ", "answer": "これ"},
            {"question": "誰?", "sentence": "私です", "paragraph": "私です", "answer": "私"},
            {"question": "どこ?", "sentence": "ここ", "paragraph": "ここ", "answer": "ここ"},
        ],
        [
            (" Human: 何? Assistant:", " これ", None),
            (" Human: 誰? Assistant:", " 私です", None),
            (" Human: どこ? Assistant:", " ここ", None),
        ],
    ),
    "lmqg/qag_jaquad": Case(
        "validation",
        [
            {"questions": ["何?", "誰?"], "answers": ["これ", "私"], "paragraph": "これは私"},
            {"questions": ["どこ?"], "answers": ["ここ"], "paragraph": "ここ"},
            {"questions": [], "answers": [], "paragraph": "空"},
        ],
        [
            (" Human: 何? Assistant:", " これは私", None),
            (" Human: どこ? Assistant:", " ここ", None),
            (None, " 空", None),
        ],
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


def test_json_files_that_are_not_there(tmp_path, flags):
    place = tmp_path / "local" / "jsonfile"
    place.mkdir(parents=True)
    with pytest.raises(ThreestepError, match="local/jsonfile: there is no file '.*data/train.json'; give the folder"):
        raw_dataset_of(str(place), flags(str(place)), seed=1)


def test_a_wrong_row_of_a_json_file(tmp_path, flags):
    place = tmp_path / "local" / "jsonfile"
    place.mkdir(parents=True)
    (place / "train.json").write_text('[{"prompt": "a"},\n {"prompt": 1}]')
    raw = raw_dataset_of(str(place), flags(str(place)), seed=1)
    with pytest.raises(ThreestepError, match="train.json, line 2: column 'prompt': expected text, got a number"):
        raw.get_train_data()
