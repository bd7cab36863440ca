"""Datasets by their hub names: a class for each shape of rows. A text is None where a row lacks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from training.utils.data.raw_dataset import PromptRawDataset, load_by_name
from training.utils.data.registry import register_dataset

# Another whenever the same sources make other rows (see `fingerprint`).
ROWS_VERSION = "58b9e6dc94cc15e7cd7b007362bdec10a5053be202f6239dcb180e6c9c464e91"
Text = Callable[[Any], "str | None"]

# In WebGPT's answers: [1, 2].
_CITATION = re.compile(r"\s*\[\d+(?:\s*,\s*\d+)*\]")


def asked(question: str | None) -> str | None:
    """DeepSpeed-Chat's prompt of one question; None for None."""
    return None if question is None else f" Human: {question} Assistant:"


def answered(answer: str | None) -> str | None:
    """A response as it follows such a prompt; None for None."""
    return None if answer is None else " " + answer


def _prompt(column: str) -> Text:
    return lambda row: asked(row[column])


def _response(column: str) -> Text:
    return lambda row: answered(row[column])


def _first_text(texts: Sequence[Any]) -> str | None:
    return answered(texts[0]["text"]) if texts else None


class HubDataset(PromptRawDataset):
    """Rows of the split "train", and of `eval_split` where the dataset has one.

    texts: the prompt, the chosen and the rejected response of a row; without the last, rows serve phases 1 and 3.
    """

    is_on_hub = True
    eval_split: str | None = None
    texts: tuple[Text, Text] | tuple[Text, Text, Text]

    def get_train_data(self) -> Sequence[Any]:
        return self.raw_datasets["train"]

    def get_eval_data(self) -> Sequence[Any] | None:
        return self.raw_datasets[self.eval_split] if self.eval_split else None

    def get_prompt(self, sample: Any) -> str | None:
        return self.texts[0](sample)

    def get_chosen(self, sample: Any) -> str | None:
        return self.texts[1](sample)

    def get_rejected(self, sample: Any) -> str | None:
        return self.texts[2](sample) if len(self.texts) == 3 else None


@register_dataset("Dahoas/rm-static", "Dahoas/full-hh-rlhf")
class DahoasConversations(HubDataset):
    """Whole conversations as text, stored as the model is to see them."""

    eval_split = "test"
    texts = (lambda row: row["prompt"], lambda row: row["chosen"], lambda row: row["rejected"])


@register_dataset("Dahoas/synthetic-instruct-gptj-pairwise")
class SyntheticInstruct(HubDataset):
    """One instruction and two answers."""

    texts = (_prompt("prompt"), _response("chosen"), _response("rejected"))


def _without_speaker(response: str | None) -> str | None:
    """The assistant's text, including any later "Assistant:" (DeepSpeed-Chat keeps what follows the last one)."""
    if response is None or not response.lstrip().startswith("Assistant:"):
        return response
    return response.partition("Assistant:")[2]


@register_dataset("yitingxie/rlhf-reward-datasets")
class RlhfRewardDatasets(HubDataset):
    """The responses are stored with "Assistant:" in front, which belongs to the prompt."""

    eval_split = "test"
    texts = (
        lambda row: None if row["prompt"] is None else row["prompt"] + "Assistant:",
        lambda row: _without_speaker(row["chosen"]),
        lambda row: _without_speaker(row["rejected"]),
    )


def _scored(row: Any, *, better: bool) -> str:
    first_is_better = float(row["score_0"]) >= float(row["score_1"])
    return " " + _CITATION.sub("", row["answer_0"] if first_is_better == better else row["answer_1"]).strip()


@register_dataset("openai/webgpt_comparisons")
class WebgptComparisons(HubDataset):
    """Two answers; the one with the higher score is chosen (of equal scores the first, as in DeepSpeed-Chat)."""

    texts = (
        lambda row: asked(row["question"]["full_text"]),
        lambda row: _scored(row, better=True),
        lambda row: _scored(row, better=False),
    )


@register_dataset("stanfordnlp/SHP")
class StanfordShp(HubDataset):
    """Two comments on a post; `labels` is 1 where the first was preferred."""

    eval_split = "validation"
    texts = (
        _prompt("history"),
        lambda row: answered(row["human_ref_A" if int(row["labels"]) == 1 else "human_ref_B"]),
        lambda row: answered(row["human_ref_B" if int(row["labels"]) == 1 else "human_ref_A"]),
    )


def _renamed_speakers(prompt: str | None) -> str | None:
    return None if prompt is None else prompt.replace("USER", "Human").replace("ASSISTANT", "Assistant")


@register_dataset("pvduy/sharegpt_alpaca_oa_vicuna_format")
class SharegptVicuna(HubDataset):
    """Conversations as text with the speakers USER and ASSISTANT."""

    eval_split = "test"
    texts = (lambda row: _renamed_speakers(row["prompt"]), _response("label"))


@register_dataset("Cohere/miracl-zh-queries-22-12", "Cohere/miracl-ja-queries-22-12")
class Miracl(HubDataset):
    """The first passage that answers the query, and the first that does not."""

    eval_split = "dev"
    texts = (
        _prompt("query"),
        lambda row: _first_text(row["positive_passages"]),
        lambda row: _first_text(row["negative_passages"]),
    )


class _Mkqa(HubDataset):
    """One language of the hub's mkqa, with the first of a question's answers."""

    def load_raw_datasets(self, dataset_name: str) -> Any:
        return load_by_name("mkqa" if dataset_name in ("mkqa-Chinese", "mkqa-Japanese") else dataset_name)


@register_dataset("mkqa-Chinese")
class MkqaChinese(_Mkqa):
    texts = (lambda row: asked(row["queries"]["zh_cn"]), lambda row: _first_text(row["answers"]["zh_cn"]))


@register_dataset("mkqa-Japanese")
class MkqaJapanese(_Mkqa):
    texts = (lambda row: asked(row["queries"]["ja"]), lambda row: _first_text(row["answers"]["ja"]))


@register_dataset("Hello-SimpleAI/HC3-Chinese")
class Hc3Chinese(HubDataset):
    """Chinese questions with answers by people, of which the first is taken."""

    texts = (_prompt("question"), lambda row: answered(row["human_answers"][0]) if row["human_answers"] else None)


@register_dataset("wangrui6/Zhihu-KOL")
class ZhihuKol(HubDataset):
    """Chinese questions with one answer each."""

    texts = (_prompt("INSTRUCTION"), _response("RESPONSE"))


@register_dataset("lmqg/qg_jaquad")
class QgJaquad(HubDataset):
    """Japanese questions with the sentence that answers them."""

    eval_split = "validation"
    texts = (_prompt("question"), _response("sentence"))


@register_dataset("lmqg/qag_jaquad")
class QagJaquad(HubDataset):
    """Japanese questions with the paragraph that answers them."""

    eval_split = "validation"
    texts = (lambda row: asked(row["questions"][0]) if row["questions"] else None, _response("paragraph"))
