"""What samples give a phase: responses, margins, references and columns; and the mistakes of a dataset class."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.data_flags import with_flags
from tests.support.pair_rows import PAIR, Own
from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.raw_dataset import PromptRawDataset
from training.utils.data.registry import register_dataset


def prompts_of(flags, tokenizer, rows, **given):
    return build_phase(3, flags(rows, data_split="0,0,1", eval_fraction=0.0, **given), tokenizer, seed=1)


def test_what_a_prompt_carries(flags, tiny_tokenizer):
    rows = [
        {"prompt": "a", "data_source": "sums", "ability": "math", "extra_info": {"index": 4}, "ground_truth": "5"},
        {"prompt": "b", "reward_model": {"style": "rule", "ground_truth": 7}, "level": None},
    ]
    built = prompts_of(flags, tiny_tokenizer, rows)
    first, second = built.train
    name = flags(rows).source.data_path[0]
    assert first.reference == "5" and second.reference == 7
    assert first.columns == {"data_source": "sums", "ability": "math", "extra_info": {"index": 4}, "index": 4}
    assert second.columns == {"data_source": name, "reward_model": {"style": "rule"}}
    counted = {"data_source": 2, "ability": 1, "extra_info": 1, "index": 1, "reward_model": 1}
    assert built.report.train.columns == counted and built.report.eval.columns == {}
    again = prompts_of(flags, tiny_tokenizer, rows)
    assert again.report.resumed and again.report.train.columns == counted
    assert [row.uid for row in again.train] == [row.uid for row in built.train]


def test_what_a_flag_names_is_the_reference_also_beside_a_ground_truth(flags, tiny_tokenizer):
    rows = [{"prompt": "a", "solution": "5", "ground_truth": "6"}]
    (row,) = prompts_of(flags, tiny_tokenizer, rows, reference_column="solution").train
    assert row.reference == "5" and "ground_truth" not in row.columns and "solution" not in row.columns


def test_a_column_that_has_the_name_of_a_rewards_argument(flags, tiny_tokenizer):
    with pytest.raises(ThreestepError, match="row 0: 'responses' cannot be the name of a column .*; rename the column"):
        prompts_of(flags, tiny_tokenizer, [{"prompt": "a", "responses": "b"}])


class Odd(PromptRawDataset):
    extra: object = None
    messages: object = None

    def load_raw_datasets(self, dataset_name):
        return {"train": ["a", "b"]}

    def get_train_data(self):
        return self.raw_datasets["train"]

    def get_prompt(self, sample):
        return sample

    def get_prompt_messages(self, sample):
        return self.messages

    def get_extra(self, sample):
        return self.extra


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("extra", ["x"], "row 0: Odd.get_extra: expected values by name in a dict, or None, got list"),
        ("extra", {"x": {1}}, "row 0: Odd.get_extra: expected a value that JSON can hold: .*set"),
        (
            "messages",
            [{"role": "user", "content": "a", "picture": {1}}],
            "row 0: Odd.get_prompt_messages: expected a value that JSON can hold: .*set",
        ),
    ],
)
def test_what_a_prompt_cannot_carry(flags, tiny_tokenizer, own_registry, monkeypatch, name, value, said):
    register_dataset("odd")(Odd)
    monkeypatch.setattr(Odd, name, value)
    data = flags(data_path=["odd"], data_split="0,0,1", eval_fraction=0.0, return_columns=["raw_prompt"])
    with pytest.raises(ThreestepError, match=said):
        build_phase(3, data, tiny_tokenizer, seed=1)


def test_a_class_may_use_its_objects_again(flags, tiny_tokenizer, own_registry):
    class Reused(Odd):
        said, carried, truth = [], {"notes": []}, {}

        def get_prompt_messages(self, sample):
            self.said[:] = [{"role": "user", "content": sample}]
            return self.said

        def get_extra(self, sample):
            self.carried["notes"][:] = [sample]
            return self.carried

        def get_reference(self, sample):
            self.truth["is"] = sample
            return self.truth

    register_dataset("reused")(Reused)
    chat = {"prompt_style": "chat_template", "chat_template": "examples/environments/template.jinja"}
    data = flags(data_path=["reused"], data_split="0,0,1", eval_fraction=0.0, return_columns=["raw_prompt"], **chat)
    rows = sorted(build_phase(3, data, tiny_tokenizer, seed=1).train, key=lambda row: row.row_id)
    assert [row.columns["notes"] for row in rows] == [["a"], ["b"]]
    assert [row.reference["is"] for row in rows] == ["a", "b"]
    assert [row.columns["raw_prompt"][0]["content"] for row in rows] == ["a", "b"]


def test_getters_may_change_the_sample(flags, tiny_tokenizer, own_registry):
    """Rows in memory are read once for each build: a getter that adds a message to its sample adds one."""

    class Briefed(Odd):
        rows = [{"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}]

        def get_train_data(self):
            return self.rows

        def get_prompt_messages(self, sample):
            sample["messages"].insert(0, {"role": "system", "content": "be brief"})
            return sample["messages"]

    register_dataset("briefed")(Briefed)
    chat = {"prompt_style": "chat_template", "chat_template": "examples/environments/template.jinja"}
    for _ in range(2):
        data = flags(
            data_path=["briefed"], data_split="0,0,1", eval_fraction=0.0, return_columns=["raw_prompt"], **chat
        )
        found = build_phase(3, with_flags(data, rebuild_cache=True), tiny_tokenizer, seed=1).train
        assert [len(row.columns["raw_prompt"]) for row in found] == [2, 2]


def test_ranked_responses(own, tiny_tokenizer):
    data = own(get_responses=lambda self, sample: [" best", " good", " bad"])
    row = build_phase(2, data, tiny_tokenizer, 1).train[0]
    assert [tiny_tokenizer.decode(ids[:-1]) for ids in row.response_ids] == [" best", " good", " bad"]


@pytest.mark.parametrize(
    ("given", "margins"), [(0.5, [0.5, 0.5]), ([1, 2.5], [1.0, 2.5]), (np.float32(3), [3.0, 3.0]), (None, None)]
)
def test_margins_between_ranked_responses(own, tiny_tokenizer, given, margins):
    responses = [" best", " good", " bad"]
    data = own(get_responses=lambda self, sample: responses, get_margin=lambda self, sample: given)
    for row in build_phase(2, with_flags(data, rebuild_cache=True), tiny_tokenizer, 1).train:
        assert (row.margins if margins is None else row.margins.tolist()) == margins


def test_margins_of_a_column(flags, tiny_tokenizer):
    """Each with its row, also where a row between is left out; a row without one has None; one more build."""
    rows = [{**PAIR, "prompt": f"Human: {i}? Assistant:", "sure": i / 4} for i in range(8)]
    rows[3]["sure"] = None
    rows[5]["rejected"] = None
    data = flags(rows, data_split="0,1,0", eval_fraction=0.0)
    assert all(row.margins is None for row in build_phase(2, data, tiny_tokenizer, 1).train)
    built = build_phase(2, with_flags(data, margin_column="sure"), tiny_tokenizer, 1)
    assert not built.report.resumed
    found = {row.row_id: None if row.margins is None else row.margins.tolist() for row in built.train}
    assert found == {i: None if i == 3 else [i / 4] for i in range(8) if i != 5}


def test_references_of_any_json_value(own, tiny_tokenizer):
    for reference in ("18", {"answers": [1, 2]}, 0):
        data = own(
            get_reference=lambda self, sample, value=reference: value,
            rows=[{**Own.rows[0], "k": str(reference)}] * 5,
        )
        assert build_phase(3, data, tiny_tokenizer, 1).train[0].reference == reference


def test_sentences_that_deepspeed_chat_asks_for_are_enough(own, tiny_tokenizer):
    """A subclass may know sentences only; where one does not begin with the prompt, get_chosen is asked."""
    data = own(
        get_chosen=lambda self, sample: None,
        get_prompt_and_chosen=lambda self, sample: sample["p"] + " whole",
        data_split="1,0,0",
    )
    row = build_phase(1, data, tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.input_ids[row.loss_mask][:-1]) == " whole"
    data = own(get_prompt_and_chosen=lambda self, sample: "another prompt" + sample["c"], data_split="1,0,0")
    row = build_phase(1, with_flags(data, rebuild_cache=True), tiny_tokenizer, 1).train[0]
    assert tiny_tokenizer.decode(row.input_ids) == "Human: a Assistant: b<|endoftext|>"


@pytest.mark.parametrize(
    ("members", "phase", "fragment"),
    [
        (
            {"get_prompt": lambda self, s: 5},
            1,
            "dataset 'own', row .*: Own.get_prompt: expected text or None, got int",
        ),
        (
            {"get_prompt_and_chosen": lambda self, s: ["a"]},
            1,
            "Own.get_prompt_and_chosen: expected text or None, got list",
        ),
        (
            {"get_responses": lambda self, s: [" a"]},
            2,
            r"get_responses: expected 2 or more texts, or None, got 1 responses \(str\)",
        ),
        ({"get_responses": lambda self, s: [" a", None]}, 2, r"got 2 responses \(str, NoneType\)"),
        (
            {"get_margin": lambda self, s: "0.5"},
            2,
            r"dataset 'own', row .*: Own.get_margin: expected a number from 0 up, 1 of them \(one between each two "
            r"neighbours of the 2 ranked responses\), or None, got '0.5'",
        ),
        ({"get_margin": lambda self, s: -1.0}, 2, "get_margin: expected a number from 0 up, .*, got -1.0"),
        ({"get_margin": lambda self, s: float("nan")}, 2, "get_margin: expected a number from 0 up, .*, got nan"),
        ({"get_margin": lambda self, s: float("inf")}, 2, "get_margin: expected a number from 0 up, .*, got inf"),
        ({"get_margin": lambda self, s: True}, 2, "get_margin: expected a number from 0 up, .*, got True"),
        ({"get_margin": lambda self, s: [1, 2]}, 2, r"get_margin: expected a number from 0 up, 1 of .*, got \[1, 2\]"),
        (
            {"get_chosen": lambda self, s: s["chosn"]},
            1,
            r"^dataset 'own', row \d+: .*<lambda> raised KeyError: 'chosn' \(test_samples.py, line \d+\); threestep ",
        ),
        ({"get_messages": lambda self, s: s["chat"]}, 1, r"^dataset 'own', row \d+: .* raised KeyError: 'chat' \("),
        ({"get_reference": lambda self, s: s["ref"]}, 3, r"^dataset 'own', row \d+: .* raised KeyError: 'ref' \("),
        ({"get_reference": lambda self, s: {1, 2}}, 3, "get_reference: expected a value that JSON can hold"),
        ({"rows": []}, 1, "dataset 'own' is empty: it has no training rows"),
        (
            {"get_rejected": lambda self, s: None},
            2,
            r"phase 2 .* has no training rows: all 7 rows of 'own' were dropped",
        ),
        ({"data_split": "1,0,1"}, 2, "data_split 1,0,1 gives it none of the rows of 'own'"),
    ],
)
def test_mistakes_of_a_class_are_named(own, tiny_tokenizer, members, phase, fragment):
    with pytest.raises(ThreestepError, match=fragment):
        build_phase(phase, own(**members), tiny_tokenizer, 1)
