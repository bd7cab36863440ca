"""The open datasets that DeepSpeed-Chat's users know, by their hub names: one small class each.

A folder that `save_to_disk` wrote serves in the hub's place where its path ends in the name. A dataset
without an evaluation split gets one carved (see `build`); one without rejected responses serves phases 1
and 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from training.utils.data.raw_dataset import PromptRawDataset, load_by_name
from training.utils.data.registry import register_dataset


class _HubDataset(PromptRawDataset):
    train_split = "train"
    eval_split: str | None = None

    def get_train_data(self) -> Sequence[Any]:
        return self.raw_datasets[self.train_split]

    def get_eval_data(self) -> Sequence[Any] | None:
        return self.raw_datasets[self.eval_split] if self.eval_split else None


def _turn(question: str) -> str:
    return f" Human: {question} Assistant:"


@register_dataset("Dahoas/rm-static", "Dahoas/full-hh-rlhf")
class _DahoasPairs(_HubDataset):
    eval_split = "test"

    def get_prompt(self, sample):
        return sample["prompt"]

    def get_chosen(self, sample):
        return sample["chosen"]

    def get_rejected(self, sample):
        return sample["rejected"]


@register_dataset("Dahoas/synthetic-instruct-gptj-pairwise")
class _SyntheticInstruct(_HubDataset):
    def get_prompt(self, sample):
        return _turn(sample["prompt"])

    def get_chosen(self, sample):
        return " " + sample["chosen"]

    def get_rejected(self, sample):
        return " " + sample["rejected"]


@register_dataset("yitingxie/rlhf-reward-datasets")
class _RlhfRewardDatasets(_HubDataset):
    """The responses are stored with "Assistant:" in front, which belongs to the prompt."""

    eval_split = "test"

    def get_prompt(self, sample):
        return sample["prompt"] + "Assistant:"

    def get_chosen(self, sample):
        return sample["chosen"].split("Assistant:")[-1]

    def get_rejected(self, sample):
        return sample["rejected"].split("Assistant:")[-1]


@register_dataset("openai/webgpt_comparisons")
class _WebgptComparisons(_HubDataset):
    """The answer with the higher score is chosen; marks of citations such as [1, 2] are taken out."""

    def get_prompt(self, sample):
        return _turn(sample["question"]["full_text"])

    def _answer(self, sample, *, better: bool) -> str:
        first_is_better = float(sample["score_0"]) >= float(sample["score_1"])
        answer = sample["answer_0"] if first_is_better == better else sample["answer_1"]
        return " " + re.sub(r"\s*\[\d+(?:\s*,\s*\d+)*\]", "", answer).strip()

    def get_chosen(self, sample):
        return self._answer(sample, better=True)

    def get_rejected(self, sample):
        return self._answer(sample, better=False)


@register_dataset("stanfordnlp/SHP")
class _StanfordShp(_HubDataset):
    eval_split = "validation"

    def get_prompt(self, sample):
        return _turn(sample["history"])

    def get_chosen(self, sample):
        return " " + sample["human_ref_A" if int(sample["labels"]) == 1 else "human_ref_B"]

    def get_rejected(self, sample):
        return " " + sample["human_ref_B" if int(sample["labels"]) == 1 else "human_ref_A"]


@register_dataset("pvduy/sharegpt_alpaca_oa_vicuna_format")
class _SharegptVicuna(_HubDataset):
    eval_split = "test"

    def get_prompt(self, sample):
        return sample["prompt"].replace("USER", "Human").replace("ASSISTANT", "Assistant")

    def get_chosen(self, sample):
        return " " + sample["label"]


@register_dataset("wangrui6/Zhihu-KOL")
class _ZhihuKol(_HubDataset):
    def get_prompt(self, sample):
        return _turn(sample["INSTRUCTION"])

    def get_chosen(self, sample):
        return " " + sample["RESPONSE"]


@register_dataset("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12")
class _Miracl(_HubDataset):
    """A passage that answers the query against one that does not."""

    eval_split = "dev"

    def get_prompt(self, sample):
        return _turn(sample["query"])

    def get_chosen(self, sample):
        return _first_passage(sample["positive_passages"])

    def get_rejected(self, sample):
        return _first_passage(sample["negative_passages"])


def _first_passage(passages: Sequence[Any]) -> str | None:
    return " " + passages[0]["text"] if passages else None


@register_dataset("Hello-SimpleAI/HC3-Chinese")
class _Hc3Chinese(_HubDataset):
    def get_prompt(self, sample):
        return _turn(sample["question"]) if sample["question"] is not None else None

    def get_chosen(self, sample):
        return " " + sample["human_answers"][0] if sample["human_answers"] else None


class _Mkqa(_HubDataset):
    language = ""

    def load_raw_datasets(self, dataset_name):
        return load_by_name("mkqa" if dataset_name in ("mkqa-Chinese", "mkqa-Japanese") else dataset_name)

    def get_prompt(self, sample):
        question = sample["queries"][self.language]
        return _turn(question) if question is not None else None

    def get_chosen(self, sample):
        answers = sample["answers"][self.language]
        return " " + answers[0]["text"] if answers and answers[0]["text"] is not None else None


@register_dataset("mkqa-Chinese")
class _MkqaChinese(_Mkqa):
    language = "zh_cn"


@register_dataset("mkqa-Japanese")
class _MkqaJapanese(_Mkqa):
    language = "ja"


@register_dataset("lmqg/qg_jaquad")
class _QgJaquad(_HubDataset):
    eval_split = "validation"

    def get_prompt(self, sample):
        return _turn(sample["question"])

    def get_chosen(self, sample):
        return " " + sample["sentence"]


@register_dataset("lmqg/qag_jaquad")
class _QagJaquad(_HubDataset):
    eval_split = "validation"

    def get_prompt(self, sample):
        return _turn(sample["questions"][0])

    def get_chosen(self, sample):
        return " " + sample["paragraph"]
