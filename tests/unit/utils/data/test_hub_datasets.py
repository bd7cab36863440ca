"""Each built-in class against rows shaped as its dataset publishes them, saved to disk by its name."""

from __future__ import annotations

import pytest

from training.utils.data.registry import create_raw_dataset, registered_names

# name, split to save, row, prompt, chosen, rejected
CASES = [
    (
        "Dahoas/rm-static",
        "test",
        {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": " Hello", "rejected": " Go"},
        ("\n\nHuman: Hi\n\nAssistant:", " Hello", " Go"),
    ),
    (
        "Dahoas/synthetic-instruct-gptj-pairwise",
        None,
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},
        (" Human: Hi Assistant:", " Hello", " Go"),
    ),
    (
        "yitingxie/rlhf-reward-datasets",
        "test",
        {"prompt": "\n\nHuman: Hi\n\n", "chosen": "Assistant: Hello", "rejected": "Assistant: Go"},
        ("\n\nHuman: Hi\n\nAssistant:", " Hello", " Go"),
    ),
    (
        "openai/webgpt_comparisons",
        None,
        {
            "question": {"full_text": "Why?"},
            "answer_0": "So [1].",
            "answer_1": "Because [1, 2] of that [3].",
            "score_0": "-0.5",
            "score_1": "0.5",
        },
        (" Human: Why? Assistant:", " Because of that.", " So."),
    ),
    (
        "stanfordnlp/SHP",
        "validation",
        {"history": "Why?", "human_ref_A": "a", "human_ref_B": "b", "labels": 0},
        (" Human: Why? Assistant:", " b", " a"),
    ),
    (
        "pvduy/sharegpt_alpaca_oa_vicuna_format",
        "test",
        {"prompt": "USER: Hi ASSISTANT:", "label": "Hello"},
        ("Human: Hi Assistant:", " Hello", None),
    ),
    (
        "wangrui6/Zhihu-KOL",
        None,
        {"INSTRUCTION": "为什么?", "RESPONSE": "因为"},
        (" Human: 为什么? Assistant:", " 因为", None),
    ),
    (
        "Cohere/miracl-ja-queries-22-12",
        "dev",
        {"query": "何?", "positive_passages": [{"text": "これ"}], "negative_passages": [{"text": "それ"}]},
        (" Human: 何? Assistant:", " これ", " それ"),
    ),
    (
        "Hello-SimpleAI/HC3-Chinese",
        None,
        {"question": "什么?", "human_answers": ["这个", "那个"]},
        (" Human: 什么? Assistant:", " 这个", None),
    ),
    (
        "mkqa-Japanese",
        None,
        {"queries": {"ja": "何?"}, "answers": {"ja": [{"text": "これ"}]}},
        (" Human: 何? Assistant:", " これ", None),
    ),
    (
        "lmqg/qg_jaquad",
        "validation",
        {"question": "何?", "sentence": "これ"},
        (" Human: 何? Assistant:", " これ", None),
    ),
    (
        "lmqg/qag_jaquad",
        "validation",
        {"questions": ["何?"], "paragraph": "これ"},
        (" Human: 何? Assistant:", " これ", None),
    ),
]


@pytest.mark.parametrize(("name", "eval_split", "row", "texts"), CASES, ids=[case[0] for case in CASES])
def test_texts_of_each_dataset(tmp_path, flags, name, eval_split, row, texts):
    import datasets

    splits = {"train": datasets.Dataset.from_list([row, row])}
    if eval_split:
        splits[eval_split] = datasets.Dataset.from_list([row])
    folder = tmp_path / name
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    raw = create_raw_dataset(str(folder), flags(data_path=[str(folder)]), seed=1)
    sample = raw.get_train_data()[0]
    assert (raw.get_prompt(sample), raw.get_chosen(sample), raw.get_rejected(sample)) == texts
    assert (raw.get_eval_data() is None) == (eval_split is None)


def test_every_built_in_class_is_tried():
    twins = {"Dahoas/full-hh-rlhf", "Cohere/miracl-zh-queries-22-12", "mkqa-Chinese"}
    built_in = {name for name in registered_names() if "/" in name or name.startswith("mkqa")}
    assert built_in - {"openai/gsm8k"} == {case[0] for case in CASES} | twins
